"""The same from folder to folder: tensors are read one at a time and written file by file.

A folder is safetensors and config.json; nothing is unpickled. What lies beside the weights (tokenizer, image processor,
licence) is copied. Architectures that keep other names on disk than in memory (ViT) go through memory as a whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cloister import storage
from cloister.errors import BrokenCheckpoint

from . import architecture, blocks, checks, routing

SHARD_BYTES = 2 << 30
_LEFT = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".index.json", ".pkl", ".ckpt")
_BUFFERS = ("position_ids", "rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class StateFile(Mapping[str, Tensor]):
    """The tensors of one safetensors file, read when asked for."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            opened: Any = safe_open(str(path), framework="pt")
            self._file = opened
            self._names = tuple(opened.keys())
        except (OSError, SafetensorError) as error:
            raise BrokenCheckpoint(f"{path} cannot be read: {error}.", advice="Ask for the file again.") from None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Folder(Mapping[str, Tensor]):
    """The tensors of a checkpoint, read when asked for."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoConfig

        self.path = path
        try:
            self.config: Any = AutoConfig.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise BrokenCheckpoint(f"{path / 'config.json'} cannot be read: {str(error).splitlines()[0]}") from None
        self.architecture = (self.config.architectures or [""])[0]
        files = self._files()
        opened = {name: StateFile(path / name) for name in files}
        self._owner = {tensor: file for file in opened.values() for tensor in file if not tensor.endswith(_BUFFERS)}

    def _files(self) -> list[str]:
        index = self.path / "model.safetensors.index.json"
        try:
            if not index.exists():
                return ["model.safetensors"]
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise BrokenCheckpoint(f"{index} cannot be read.") from None
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise BrokenCheckpoint(f"{index} names files outside of its folder.")
        return sorted(names)

    def __getitem__(self, name: str) -> Tensor:
        return self._owner[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)

    def model_class(self) -> type[Any]:
        """The class that its configuration names."""
        import transformers

        if self.architecture.startswith(architecture.CLASS_PREFIX):
            return architecture.find(self.architecture)
        found: Any = getattr(transformers, self.architecture, None)
        if not isinstance(found, type):
            raise BrokenCheckpoint(f"{self.path / 'config.json'} names no class of transformers: {self.architecture!r}")
        return found

    def model(self) -> Any:
        """The whole model, in memory."""
        return self.model_class().from_pretrained(
            str(self.path), local_files_only=True, use_safetensors=True, dtype="auto"
        )

    def renamed(self) -> bool:
        """Whether transformers renames its tensors when it reads them."""
        from transformers import conversion_mapping

        with torch.device("meta"):
            made = self.model_class()(self.config)
        if conversion_mapping.get_model_conversion_mapping(made, add_legacy=False):
            return True
        names = set(made.state_dict())
        return not set(self) <= names


def unify(
    seed: Path, owners: Mapping[str, Any], out: Path, *, top_k: int, context: Any, fallback: bool
) -> Path:  # fmt: skip
    """`build.unify` from a folder to a folder."""
    from . import build

    source = Folder(seed)
    if source.renamed():
        made = build.unify(source.model(), owners, top_k=top_k, context=context, fallback=fallback)
        return _save(made, source, out)
    config = build.configuration(
        source.config, source.model_class(), list(owners), top_k=top_k, context=context, fallback=fallback
    )
    with torch.device("meta"):
        names = blocks.parameters(source.model_class()(source.config))
    given = {name: build._state(state) for name, state in owners.items()}
    missing = [name for name in names if name not in source]
    if missing:
        raise BrokenCheckpoint("\n  - ".join([f"{seed} lacks feed-forward parameters:", *missing[:40]]))
    for owner, state in given.items():  # the seed's tensors are read for their shapes, one at a time
        checks.states({owner: state}, _Expected(source, names))
    config.architectures = [architecture.CLASS_PREFIX + source.architecture]
    paths = dict.fromkeys(path for path, _ in names.values())

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in source:
            if name not in names:
                yield name, source[name]
                continue
            path, inner = names[name]
            for index, expert in enumerate([source] * fallback + list(given.values())):
                yield blocks.expert_name(path, index, inner), expert[name]
        for path in paths:
            yield f"{path}.router.vectors", torch.zeros(config.experts, config.hidden_size)
            if config.context != "none":
                yield f"{path}.router.blend", torch.full((1,), routing.START)

    return _write(out, tensors(), config, source)


def add_owner(folder: Path, name: str, state: Any, vectors: Sequence[Tensor] | None, out: Path) -> Path:
    """`build.add_owner` from a folder to a folder."""
    from . import build

    source = Folder(folder)
    if source.renamed():
        return _save(build.add_owner(source.model(), name, state, vectors), source, out)
    checks.names([*build.owners(source), name])
    given, config = build._state(state), source.config
    names, paths = _routed_names(source)
    checks.states({name: given}, _Expected(source, {seed: (path, inner) for seed, (path, inner) in names.items()}))
    rows = None
    if vectors is not None:
        rows = dict(zip(paths, (vector.reshape(1, -1) for vector in vectors), strict=False))
        checks.vectors(
            [vector.reshape(1, -1) for vector in vectors], len(paths), (1,), config.hidden_size
        )  # fmt: skip
    count = config.experts

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for key in source:
            tensor = source[key]
            if key.endswith(".router.vectors"):
                new = torch.zeros(1, tensor.shape[1]) if rows is None else rows[key.removesuffix(".router.vectors")]
                tensor = torch.cat([tensor, new.detach().to(tensor)])
            yield key, tensor
        for seed, (path, inner) in names.items():
            yield blocks.expert_name(path, count, inner), given[seed]

    config.owners, config.experts = [*config.owners, name], count + 1
    return _write(out, tensors(), config, source)


def remove_owner(folder: Path, name: str, out: Path) -> Path:
    """`build.remove_owner` from a folder to a folder."""
    from . import build

    source = Folder(folder)
    if source.renamed():
        return _save(build.remove_owner(source.model(), name), source, out)
    config = source.config
    left = build.without(build.owners(source), name)
    gone = config.owners.index(name) + int(config.fallback)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for key in source:
            found = blocks.EXPERT.match(key)
            index = int(found["index"]) if found else -1
            if index == gone:
                continue
            tensor = source[key]
            if key.endswith(".router.vectors"):
                tensor = tensor[[row for row in range(len(tensor)) if row != gone]]
            if found and index > gone:
                key = blocks.expert_name(found["path"], index - 1, found["inner"])
            yield key, tensor

    config.owners, config.experts = left, config.experts - 1
    config.experts_per_token = min(config.experts_per_token, config.experts)
    return _write(out, tensors(), config, source)


class _Expected(Mapping[str, checks.Wanted]):
    """Shapes of the first expert, or of the seed, read when asked for."""

    def __init__(self, source: Folder, names: Mapping[str, tuple[str, str]]) -> None:
        self._source, self._names = source, names

    def __getitem__(self, name: str) -> checks.Wanted:
        key = name if name in self._source else blocks.expert_name(self._names[name][0], 0, self._names[name][1])
        tensor = self._source[key]
        return checks.Wanted(tuple(tensor.shape), tensor.dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _routed_names(source: Folder) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """The seed's names of the feed-forward parameters, and the routed blocks in the order of their layers."""
    with torch.device("meta"):
        names = blocks.parameters(source.model_class()(source.config))
    return names, list(dict.fromkeys(path for path, _ in names.values()))


def _save(model: Any, source: Folder, out: Path) -> Path:
    with storage.fresh_directory(out) as partial:
        copy_rest(source.path, partial)
        model.save_pretrained(partial)
    return out


def _write(out: Path, tensors: Iterable[tuple[str, Tensor]], config: Any, source: Folder) -> Path:
    with storage.fresh_directory(out) as partial:
        copy_rest(source.path, partial)
        write_shards(partial, tensors)
        config.save_pretrained(str(partial))
        architecture.write_card(partial, config, config.architectures[0])
    return out


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int | None = None) -> None:
    """Write safetensors files of about `shard_bytes`, and their index if there are several."""
    from safetensors.torch import save_file

    limit = shard_bytes or SHARD_BYTES
    places: dict[str, int] = {}
    waiting: dict[str, Tensor] = {}
    held = total = written = 0

    def flush() -> None:
        nonlocal waiting, held, written
        with storage.disk_errors(folder):
            save_file(waiting, str(folder / f"{written:05}.part"), metadata={"format": "pt"})
        places.update(dict.fromkeys(waiting, written))
        waiting, held, written = {}, 0, written + 1

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if waiting and held + size > limit:
            flush()
        waiting[name] = tensor.detach().cpu().contiguous().clone()
        held, total = held + size, total + size
    if waiting:
        flush()
    files = [
        "model.safetensors" if written == 1 else f"model-{number + 1:05}-of-{written:05}.safetensors"
        for number in range(written)
    ]
    for number, name in enumerate(files):
        (folder / f"{number:05}.part").rename(folder / name)
    if written > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {n: files[p] for n, p in sorted(places.items())}}
        storage.write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2))


def copy_rest(source: Path, target: Path) -> None:
    """Everything of the source but weights, its configuration and its card."""
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if not path.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        if path.name in ("config.json", "README.md") or path.name.endswith(_LEFT):
            continue
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        with storage.disk_errors(target):
            shutil.copyfile(path, target / relative)
