"""The model hub: checkpoints by name, and pushing results. Directories with keys are never pushed.

`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and the like mean here what they mean everywhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloister import manifest as manifests
from cloister.errors import BrokenManifest, NotAvailable, PeerUnreachable, UsageError, WouldRevealSecret

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.md", "LICENSE*", "NOTICE*", "1_Pooling/*"]


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """A local directory as it is; `org/name` downloaded (or taken from the cache) without any pickled weights."""
    path = Path(source)
    if path.is_dir():
        return path
    name = str(source)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UsageError(
            f"{source} is neither a directory nor the name of a model.",
            advice="Give a checkpoint directory, or ORGANISATION/NAME for a model on the hub.",
        )
    hub = _library()
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=_WANTED))
    except Exception as error:
        raise PeerUnreachable(
            f"{name} could not be had from the hub: {type(error).__name__}.",
            advice="Check the name, the network, HF_TOKEN for gated models and HF_HUB_OFFLINE; or give a directory.",
        ) from error


def push(directory: str | Path, repository: str, *, private: bool = True) -> str:
    """Upload a protected server checkpoint; returns its address. Directories with keys are refused."""
    directory = Path(directory)
    try:
        role = manifests.read(directory).role
    except BrokenManifest:
        secrets = [
            path for path in directory.rglob("*") if path.name in ("client.safetensors", "key", "unfinished.json")
        ]
        if secrets or any((directory / child).is_dir() for child in ("client", "developer")):
            role = "client or developer"
        else:
            raise
    if role != "server":
        raise WouldRevealSecret(
            f"{directory} is a {role} directory; its keys would open what users send.",
            advice="Push OUT/server only.",
        )
    api = _library().HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repository, folder_path=str(directory)))


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise NotAvailable("The hub's library is not installed.", advice="pip install 'cloister[server]'.") from None
    return huggingface_hub
