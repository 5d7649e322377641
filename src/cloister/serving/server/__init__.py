"""The server: OpenAI-style routes over plain transformers models, with batching, sessions and limits.

Importing this package does not import torch; `run_server`, `serve` and `create_app` do when they are first touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cloister.serving.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app", "create_token", "run_server", "serve"]
_HOMES = {"create_app": "app", "create_token": "tokens", "run_server": "main", "serve": "main"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(name)
