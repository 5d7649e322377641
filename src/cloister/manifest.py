"""The manifest `cloister.toml`: what a protected directory is, which key it belongs to and until when.

The same schema is written into OUT/developer, OUT/server and OUT/client; it holds no secret. The secrets lie
beside it in files of their own, mode 0600. `read` refuses damaged manifests and other format versions with
an error that says what to do.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloister.errors import BrokenManifest, ExpiredKey, FormatVersion

FORMAT = 1
FILE_NAME = "cloister.toml"
OBFUSCATION = "obfuscation, not privacy"
SUBSTITUTION = "substitution cipher under a secret base"


@dataclass(frozen=True)
class Model:
    """The model as its users know it."""

    name: str
    family: str
    architecture: str
    task: str  # "generate", "embed", "classify", "fill" or "vision"
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str = "float32"


@dataclass(frozen=True)
class Protection:
    """What was done to the checkpoint, and what that is worth."""

    transform: str  # "permutation" or "orthogonal"
    base: str  # "public:NAME" or "secret"
    label: str  # OBFUSCATION or SUBSTITUTION; shown wherever the mode is shown
    loop: str  # "server": the protected embedding table is on the server; "token": only on the client
    context: str  # the name of this context (one independent draw of all keys)
    key_id: str  # public fingerprint of the key; equal on client and server


@dataclass(frozen=True)
class Identity:
    """Which server a client expects."""

    weights_digest: str = ""  # over the tags of the server's weight files; the developer's key can recompute it
    tls_fingerprint: str = ""  # SHA-256 of the server's certificate, hex; empty: the system's trust store
    measurement: str = ""  # expected attestation measurement, hex; empty: none demanded


@dataclass(frozen=True)
class Manifest:
    """Everything in `cloister.toml`."""

    mode: str
    role: str  # "developer", "server" or "client"
    model: Model
    protection: Protection
    identity: Identity = field(default_factory=Identity)
    created: str = ""  # ISO 8601, UTC
    not_after: str = ""  # ISO 8601, UTC; empty: no expiry
    measured: dict[str, Any] = field(default_factory=dict)  # recovery figures; see permute/recovery.py
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        """Write `cloister.toml` into `directory`."""
        import tomli_w

        (directory / FILE_NAME).write_text(tomli_w.dumps(_without_none(asdict(self))))

    def check_expiry(self, now: datetime | None = None) -> None:
        """Raise `ExpiredKey` once `not_after` has passed."""
        if self.not_after and (now or datetime.now(UTC)) > datetime.fromisoformat(self.not_after):
            raise ExpiredKey(
                f"The key of context {self.protection.context} expired on {self.not_after}.",
                advice="Ask the model developer to run `cloister protect --rotate` and to send you the new directory.",
            )


def read(directory: Path | str, *, role: str | None = None) -> Manifest:
    """Read `cloister.toml` from `directory`; with `role`, refuse a directory made for somebody else."""
    path = Path(directory) / FILE_NAME
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise BrokenManifest(
            f"{directory} has no {FILE_NAME}.", advice="Point at a directory that `cloister protect` wrote."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BrokenManifest(f"{path} cannot be read: {error}.", advice="Copy the directory again.") from None
    found = raw.get("format")
    if found != FORMAT:
        raise FormatVersion(
            f"{path} has format version {found!r}; this Cloister reads version {FORMAT}.",
            advice="Install the Cloister version that wrote it, or protect the checkpoint again.",
        )
    try:
        manifest = Manifest(
            model=_build(Model, raw.pop("model")),
            protection=_build(Protection, raw.pop("protection")),
            identity=_build(Identity, raw.pop("identity", {})),
            **{key: value for key, value in raw.items() if key in {f.name for f in fields(Manifest)}},
        )
        if manifest.not_after:
            datetime.fromisoformat(manifest.not_after)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenManifest(f"{path} is incomplete: {error}.", advice="Copy the directory again.") from None
    if role is not None and manifest.role != role:
        raise BrokenManifest(
            f"{directory} is a {manifest.role} directory, a {role} directory is needed here.",
            advice=f"Use the `{role}` directory of the same `cloister protect` output.",
        )
    return manifest


def _build(kind: type[Any], raw: dict[str, Any]) -> Any:
    names = {f.name for f in fields(kind)}
    return kind(**{key: value for key, value in raw.items() if key in names})


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
