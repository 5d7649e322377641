"""`protect`: a checkpoint in, OUT/developer, OUT/server and OUT/client out.

Works file by file with memory for about one tensor, survives interruption (run it again and it goes on where it
stopped) and puts OUT
in place only when everything is complete. numpy only: no torch is needed to protect a checkpoint.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.poly1305 import Poly1305

from cloister import hub, storage
from cloister import manifest as manifests
from cloister.errors import UsageError
from cloister.manifest import Identity, Manifest, Model, Protection
from cloister.permute import client_files, plan, server_files
from cloister.permute.checkpoint import Checkpoint, write_index, write_shard
from cloister.permute.draw import Draws
from cloister.permute.entropy import MasterKey
from cloister.permute.maps import Permutation
from cloister.permute.numbers import TORCH_NAMES
from cloister.permute.rewrite import Rewriter
from cloister.progress import SILENT, Progress

STATE = "unfinished.json"
KEY_FILE = "key"


@dataclass(frozen=True)
class Options:
    """Everything that decides what is written; a resumed run must have the same."""

    transform: str
    base: str
    loop: str
    contexts: int
    name: str
    not_after: str


def protect(
    source: str | Path,
    out: str | Path,
    *,
    base: str,
    transform: str = "permutation",
    loop: str = "server",
    contexts: int = 1,
    name: str | None = None,
    expires_days: float | None = None,
    resume: bool = True,
    rotate: bool = False,
    measure: bool = True,
    base_checkpoint: str | Path | None = None,
    sample_text: str | Path | None = None,
    revision: str | None = None,
    insecure_seed: int | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Protect the checkpoint `source` (a directory or a name on the hub) into `out`; returns the developer manifest.

    base: "secret", or "public:NAME" when others have (a relative of) this model or its embedding table.
    base_checkpoint: a local copy of the public base, against which the attacks are measured; without it they are
    measured against the source itself, the worst case.
    sample_text: a file of lines to measure with, typical of what users will send; else built-in sentences.
    rotate: `out` exists already; draw new keys and replace it in one step.
    """
    _check_options(base, loop, contexts)
    out = Path(out)
    source = hub.resolve(source, revision)
    checkpoint = Checkpoint(source)
    layout = plan.inspect(checkpoint)
    plan.check_transform(layout, transform)
    not_after = (datetime.now(UTC) + timedelta(days=expires_days)).isoformat(timespec="seconds") if expires_days else ""
    options = Options(transform, base, loop, contexts, name or Path(source).resolve().name, not_after)
    if rotate and not (out / "developer").is_dir():
        raise UsageError(
            f"{out} holds nothing to rotate.", advice="Leave --rotate away to protect it for the first time."
        )
    users = (out / "developer" / "users.toml").read_bytes() if (out / "developer" / "users.toml").exists() else None
    nbytes = sum(stored.nbytes for stored in checkpoint.tensors.values())
    if not storage.partial_path(out).exists():
        storage.require_space(out, contexts * nbytes)
    from cloister.permute.measuring import measure_context  # brings scipy, if there is one

    with storage.fresh_directory(out, replace=rotate, resume=resume, keep_partial=True) as partial:
        state = _State(partial, checkpoint, options)
        first: Manifest | None = None
        with progress.task("Protecting", total=round(contexts * nbytes / 1e6), unit="MB") as task:
            for index in range(contexts):
                key = state.key(index, insecure_seed)
                writer = _ContextWriter(checkpoint, layout, options, key, partial, state, index)
                written = writer.run(lambda count: task.advance(count / 1e6))
                first = first or written
        if users is not None:
            storage.write_bytes(partial / "developer" / "users.toml", users)
        assert first is not None
        if measure:
            draws = Draws(layout, state.key(0, insecure_seed), transform)
            with progress.task("Attacking the result"):
                folders = partial / "server" / context_name(0), partial / "client" / context_name(0)
                measured = measure_context(
                    checkpoint, layout, draws, *folders, base, loop, base_checkpoint, sample_text
                )
            first = _record(partial, contexts, first, measured)
        server_files.write_cards(partial, checkpoint, first, contexts)
        state.finish()
    return first


def _check_options(base: str, loop: str, contexts: int) -> None:
    if base != "secret" and not (base.startswith("public:") and len(base) > len("public:")):
        raise UsageError(
            f"base must be 'secret' or 'public:NAME', not {base!r}.",
            advice="Say 'public:NAME' if anybody else may have this model, a relative of it, or its embedding table; "
            "a fine-tune of an open model is public:NAME-OF-THAT-MODEL.",
        )
    if loop not in plan.LOOPS:
        raise UsageError(f"loop must be one of {', '.join(plan.LOOPS)}, not {loop!r}.")
    if not 1 <= contexts <= 1000:
        raise UsageError(f"contexts must lie between 1 and 1000, not {contexts}.")


class _State:
    """What an interrupted run left: which files are complete, and the keys they were made with."""

    def __init__(self, partial: Path, checkpoint: Checkpoint, options: Options) -> None:
        self._path, self._partial = partial / STATE, partial
        described = json.dumps({**options.__dict__, "not_after": bool(options.not_after)}, sort_keys=True)
        identity = hashlib.sha256((checkpoint.fingerprint() + described).encode()).hexdigest()
        try:
            self._data: dict[str, Any] = json.loads(self._path.read_text())
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            self._data = {}
        for torn in [path for path in partial.rglob(".*") if path.is_file()]:
            torn.unlink()  # what a killed run was in the middle of
        if self._data.get("identity") != identity:
            for child in partial.iterdir():
                storage.remove(child) if child.is_dir() else child.unlink()
            self._data = {"identity": identity, "done": {}}
            self._save()

    def key(self, index: int, insecure_seed: int | None) -> MasterKey:
        """The key of context `index`: the one of the interrupted run, or a new one, on disk before it is used."""
        path = self._partial / "developer" / context_name(index) / KEY_FILE
        if path.exists():
            return MasterKey(path.read_bytes())
        key = MasterKey.fresh() if insecure_seed is None else MasterKey.from_insecure_seed(insecure_seed + index)
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_secret(path, key.expose_secret())
        return key

    def digest(self, file: str) -> str | None:
        """The digest of a file that is complete."""
        found = self._data["done"].get(file)
        return found if found and (self._partial / file).exists() else None

    def done(self, file: str, digest: str) -> None:
        """Note that `file` is complete."""
        self._data["done"][file] = digest
        self._save()

    def finish(self) -> None:
        """Nothing is unfinished any more; a single context needs no folder of its own."""
        self._path.unlink()
        for role in ("developer", "server", "client"):
            folders = sorted((self._partial / role).glob("context-*"))
            if len(folders) == 1:
                for child in folders[0].iterdir():
                    shutil.move(str(child), str(self._partial / role / child.name))
                folders[0].rmdir()

    def _save(self) -> None:
        storage.write_text(self._path, json.dumps(self._data))


def context_name(index: int) -> str:
    """The folder of a context."""
    return f"context-{index}"


class _ContextWriter:
    """Writes the three directories of one context."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: Any,
        options: Options,
        key: MasterKey,
        partial: Path,
        state: _State,
        index: int,
    ) -> None:
        self._checkpoint, self._layout, self._options, self._key = checkpoint, layout, options, key
        self._state, self._index, self._partial = state, index, partial
        self._draws = Draws(layout, key, options.transform)
        self._rewriter = Rewriter(layout, self._draws, self._read)

    def _read(self, name: str) -> tuple[np.ndarray, str]:
        if name not in self._checkpoint.tensors and name == self._layout.head:
            name = self._layout.embedding
        return self._checkpoint.read(name), self._checkpoint.tensors[name].dtype

    def _folder(self, role: str) -> Path:
        folder = self._partial / role / context_name(self._index)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def run(self, advance: Any) -> Manifest:
        vocab_to_server = self._vocab_to_server()
        digest = self._write_weights(vocab_to_server, advance)
        client_files.write(self._folder("client"), self._checkpoint, self._layout, self._draws, self._key,
                           vocab_to_server, self._options.loop)  # fmt: skip
        server_files.write(self._folder("server"), self._checkpoint, self._layout, vocab_to_server)
        base = self._manifest(digest)
        for role in ("developer", "server", "client"):
            replace(base, role=role).write(self._folder(role))
        return base

    def _vocab_to_server(self) -> np.ndarray | None:
        if "vocabulary" not in self._layout.spaces:
            return None
        drawn = self._draws.map("vocabulary")
        assert isinstance(drawn, Permutation)
        return drawn.inverse_index().astype(np.int32)

    def _write_weights(self, vocab_to_server: np.ndarray | None, advance: Any) -> str:
        kept = self._kept_rows(vocab_to_server)
        placed: dict[str, str] = {}
        total, tags = 0, {}
        for shard in plan.shards(self._checkpoint, self._layout, self._draws, self._options.loop):
            relative = f"server/{context_name(self._index)}/{shard.file}"
            planned = [job.planned for job in shard.jobs]
            digest = self._state.digest(relative)
            if digest is None:
                source = plan.pieces(shard, self._checkpoint, self._rewriter, kept)
                digest = write_shard(
                    self._folder("server") / shard.file,
                    planned,
                    _counted(source, advance),
                    tag_key=self._key.tag_key(shard.file),
                )
                self._state.done(relative, digest)
            else:
                advance(sum(item.nbytes for item in planned))
            placed.update({item.name: shard.file for item in planned})
            total += sum(item.nbytes for item in planned)
            tags[shard.file] = digest
        if len(self._checkpoint.shards) > 1:
            write_index(self._folder("server"), placed, total)
        return _digest(tags)

    def _kept_rows(self, vocab_to_server: np.ndarray | None) -> tuple[int, ...]:
        """The image placeholder of a vision-language model is recognised by its row on the server."""
        image = self._checkpoint.config.get("image_token_id", self._checkpoint.config.get("image_token_index"))
        return () if image is None or vocab_to_server is None else (int(vocab_to_server[image]),)

    def _manifest(self, digest: str) -> Manifest:
        config, options = self._checkpoint.config, self._options
        size = plan.sizes(config)
        weights = self._checkpoint.tensors[next(iter(self._checkpoint.tensors))]
        label = manifests.SUBSTITUTION if options.base == "secret" else manifests.OBFUSCATION
        return Manifest(
            mode="permute",
            role="developer",
            model=Model(
                name=options.name,
                family=self._layout.family,
                architecture=config["architectures"][0],
                task=self._layout.task,
                hidden_size=size["hidden"],
                vocab_size=size["vocabulary"],
                max_positions=self._layout.max_positions,
                dtype=TORCH_NAMES.get(weights.dtype, weights.dtype),
            ),
            protection=Protection(
                transform=options.transform,
                base=options.base,
                label=label,
                loop=options.loop,
                context=context_name(self._index),
                key_id=self._key.public_id(),
            ),
            identity=Identity(weights_digest=digest),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            not_after=options.not_after,
        )


def _counted(source: Any, advance: Any) -> Any:
    for piece in source:
        advance(piece.nbytes)
        yield piece


def check_server(directory: Path | str, key: MasterKey) -> bool:
    """Whether the weight files of a server directory are, bit for bit, those that were written with `key`."""
    directory = Path(directory)
    tags = {}
    for path in directory.glob("*.safetensors"):
        tagger = Poly1305(key.tag_key(path.name))
        with path.open("rb") as file:
            while piece := file.read(1 << 24):
                tagger.update(piece)
        tags[path.name] = tagger.finalize().hex()
    return hmac.compare_digest(_digest(tags), manifests.read(directory).identity.weights_digest)


def _digest(tags: dict[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{file}:{tag}" for file, tag in sorted(tags.items())).encode()).hexdigest()


def _record(partial: Path, contexts: int, first: Manifest, measured: dict[str, Any]) -> Manifest:
    """Put what the attacks recovered into every manifest."""
    for index in range(contexts):
        for role in ("developer", "server", "client"):
            directory = partial / role / context_name(index)
            replace(manifests.read(directory), measured=measured).write(directory)
    return replace(first, measured=measured)
