"""Cloister: private Mixture-of-Experts language models.

    import cloister
    cloister.protect("checkpoint", "out", mode="permute", base="secret")
    with cloister.connect("out/client", "out/server") as model:
        print(model.generate("To be, or not to be", max_new_tokens=32))
        print(model.ledger)

Nothing heavy is imported until it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["CloisterError", "__version__", "aconnect", "connect", "protect"]

if TYPE_CHECKING:
    from cloister.api import aconnect, connect, protect
    from cloister.errors import CloisterError

_HOMES = {
    "protect": "cloister.api",
    "connect": "cloister.api",
    "aconnect": "cloister.api",
    "CloisterError": "cloister.errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cloister' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
