"""The one small interface that every mode implements, and the register of modes.

Gateway, audit, bench and demo hold a `Mode` and a `Session`; none of them knows a mode by name. A mode that this
release does not have says so when it is asked for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cloister.errors import NotAvailable, UsageError

if TYPE_CHECKING:
    import numpy as np

    from cloister.ledger import Ledger
    from cloister.manifest import Manifest


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Ids are those of the user's vocabulary; the session translates them."""

    max_tokens: int = 16
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # how many alternatives to report per token; None: no log probabilities
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end-of-sequence ids
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True)
class Token:
    """One generated token in the user's vocabulary. `finish` is set on the last one: "stop" or "length".

    A stop token is reported with `finish="stop"` like any other token; callers leave its text out.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: str | None = None


class Session(Protocol):
    """An open connection to a protected model. All ids and vectors are the plain model's: the transform is inside."""

    manifest: Manifest
    ledger: Ledger

    async def open(self) -> None:
        """Reach the server once: key, format, expiry and attestation are checked here and nothing else is sent."""

    def generate(self, prompt: Sequence[int], sampling: Sampling, *, request: str = "") -> AsyncIterator[Token]:
        """Generate after `prompt`. Closing the iterator cancels the work on both sides."""

    async def logits(self, prompt: Sequence[int], *, request: str = "") -> np.ndarray:
        """Plain logits [positions, vocabulary] (or [classes]) of one forward pass."""

    async def embed(self, batch: Sequence[Sequence[int]], *, request: str = "") -> np.ndarray:
        """Pooled vectors [batch, hidden] of an embedding model."""

    async def classify(self, inputs: Any, *, request: str = "") -> np.ndarray:
        """Class scores [batch, classes] for token ids or for images, as the model takes them."""

    async def close(self) -> None:
        """Release the connection."""


class Mode(Protocol):
    """protect / serve / connect."""

    name: str
    summary: str

    def protect(self, source: str | Path, out: str | Path, **options: Any) -> Manifest:
        """Turn the checkpoint `source` into OUT/developer, OUT/server and OUT/client."""

    def serve(self, directory: str | Path, **options: Any) -> None:
        """Serve OUT/server until interrupted."""

    def connect(self, client: str | Path, server: str, **options: Any) -> Session:
        """A session with the server at URL `server`."""


_MODES: dict[str, tuple[str, str]] = {
    "permute": ("cloister.serving.permute_mode", "PermuteMode"),
}
_ANNOUNCED = {
    "crypto": "two-party inference with homomorphic encryption",
    "split": "sensitive tokens stay on local experts",
}


def get(name: str) -> Mode:
    """The mode called `name`; `NotAvailable` if this release does not have it."""
    if name in _MODES:
        module, attribute = _MODES[name]
        factory: Callable[[], Mode] = getattr(import_module(module), attribute)
        return factory()
    if name in _ANNOUNCED:
        raise NotAvailable(
            f"Mode {name!r} ({_ANNOUNCED[name]}) is not part of this release.",
            advice=f"Available: {', '.join(_MODES)}.",
        )
    raise UsageError(f"There is no mode {name!r}.", advice=f"Available: {', '.join(_MODES)}.")


def names() -> list[str]:
    """The modes of this release."""
    return list(_MODES)


def announced() -> dict[str, str]:
    """Modes that a later release will have, and what each is."""
    return dict(_ANNOUNCED)
