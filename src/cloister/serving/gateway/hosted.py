"""The models of a gateway, and how honestly each is described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cloister.errors import InvalidParameter, NotFound, UsageError
from cloister.manifest import OBFUSCATION, Manifest
from cloister.modes import Session
from cloister.serving.text import TextCodec

_TASKS = {"generate": "generates text", "embed": "makes embeddings", "classify": "classifies", "fill": "fills gaps"}


@dataclass(frozen=True)
class Hosted:
    """One client directory: its session and its text codec."""

    session: Session
    codec: TextCodec

    @classmethod
    def load(cls, directory: str | Path, session: Session) -> Hosted:
        """Read the tokenizer and the templates beside the manifest."""
        return cls(session, TextCodec(directory))

    @property
    def manifest(self) -> Manifest:
        """What the directory says about itself."""
        return self.session.manifest

    @property
    def name(self) -> str:
        """The name that applications use."""
        return self.manifest.model.name

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and answer may have together."""
        length: int = getattr(self.session, "max_model_len", self.manifest.model.max_positions)
        return length

    def require(self, task: str) -> None:
        """Refuse a route that this model was not made for."""
        found = self.manifest.model.task
        if found != task:
            raise InvalidParameter(
                f"The model {self.name} {_TASKS.get(found, 'does something else')}; "
                f"this route needs one that {_TASKS[task]}.",
                advice="GET /v1/models lists every model with its task.",
                param="model",
            )

    def describe(self) -> dict[str, Any]:
        """The entry in /v1/models."""
        manifest = self.manifest
        return {
            "id": self.name,
            "object": "model",
            "created": _timestamp(manifest.created),
            "owned_by": "cloister",
            "max_model_len": self.max_model_len,
            "cloister": {
                "mode": manifest.mode,
                "task": manifest.model.task,
                "chat": self.codec.has_chat_template,
                "label": manifest.protection.label,
                "warning": manifest.protection.label == OBFUSCATION,
                "trust": trust_sentence(manifest),
                "measured": manifest.measured,
                "transform": manifest.protection.transform,
                "base": manifest.protection.base,
                "loop": manifest.protection.loop,
                "context": manifest.protection.context,
                "not_after": manifest.not_after,
            },
        }


class Catalogue:
    """The models by name."""

    def __init__(self, models: Sequence[Hosted]) -> None:
        self._models: dict[str, Hosted] = {}
        for model in models:
            if model.name in self._models:
                raise UsageError(
                    f"Two client directories hold a model named {model.name!r}.",
                    advice="Start one gateway for each, or protect one of them under another --name.",
                )
            self._models[model.name] = model

    def __iter__(self) -> Any:
        return iter(self._models.values())

    def find(self, name: str | None) -> Hosted:
        """The model called `name`; the only one if no name is given."""
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        if name is None:
            raise InvalidParameter("model is missing.", advice="GET /v1/models lists the names.", param="model")
        if name not in self._models:
            error = NotFound(
                f"The model {name[:100]!r} does not exist here.",
                advice=f"Available: {', '.join(self._models)}.",
                param="model",
            )
            error.code = "model_not_found"  # the name that OpenAI's clients know
            raise error
        return self._models[name]


def trust_sentence(manifest: Manifest) -> str:
    """What the protection is worth, with the figure measured on this very checkpoint."""
    said = manifest.measured.get("sentence")
    measured = said if isinstance(said, str) else "Its recovery was not measured."
    return f"{manifest.protection.label[:1].upper()}{manifest.protection.label[1:]}. {measured}"


def _timestamp(text: str) -> int:
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except ValueError:
        return 0
