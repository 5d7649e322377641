"""The gateway on the user's machine: the OpenAI API and a chat page in front of protected models.

| module | holds |
|---|---|
| `app` | the routes |
| `params` | the one table of request parameters |
| `runs` | running requests: joining retries, cancelling |
| `streams` | answers that notice when their client has gone |
| `answers` | the shapes of answers and stream chunks |
| `hosted` | the models, and what each is worth |
| `safety` | who may call |
| `feed` | the ledger for the page |
| `running` | starting all of it |
| `page/` | the chat page |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloister.serving.gateway.app import GatewaySettings, create_gateway
    from cloister.serving.gateway.hosted import Hosted
    from cloister.serving.gateway.running import run_gateway

__all__ = ["GatewaySettings", "Hosted", "create_gateway", "run_gateway"]

_HOMES = {"GatewaySettings": "app", "create_gateway": "app", "Hosted": "hosted", "run_gateway": "running"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
