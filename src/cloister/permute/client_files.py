"""Everything in OUT/client: the keys that a user's device needs (0600), the tokenizer, the chat template."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cloister.errors import BrokenCheckpoint
from cloister.families.layout import Layout
from cloister.permute.checkpoint import Checkpoint, Planned, write_shard
from cloister.permute.draw import Draws
from cloister.permute.entropy import MasterKey
from cloister.permute.maps import Map, Permutation
from cloister.permute.numbers import narrow, widen
from cloister.storage import SECRET_MODE

FILE = "client.safetensors"
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "sentence_bert_config.json", "modules.json", "1_Pooling/config.json", "label_vectors.safetensors",
)  # fmt: skip


def write(
    directory: Path, checkpoint: Checkpoint, layout: Layout, draws: Draws, key: MasterKey,
    vocab_to_server: np.ndarray | None, loop: str,
) -> None:  # fmt: skip
    """Write the client's tensors and copy what the device needs to turn text into ids and back."""
    planned: list[Planned] = []
    sources: list[Iterator[np.ndarray]] = []

    def add(name: str, dtype: str, shape: tuple[int, ...], pieces: Iterator[np.ndarray]) -> None:
        planned.append(Planned(name, dtype, shape))
        sources.append(pieces)

    if vocab_to_server is not None:
        add("vocab_to_server", "I32", vocab_to_server.shape, iter([vocab_to_server]))
    if layout.embedding and loop == "token":
        stored = checkpoint.tensors[layout.embedding]
        add("embedding", stored.dtype, stored.shape, _embedding_rows(checkpoint, layout, draws))
    if layout.output in layout.spaces and layout.output != "vocabulary":
        order = _undo(draws.map(layout.output))
        name = "class_order" if layout.output == "labels" else "output_order"
        add(name, "I32", order.shape, iter([order]))
    if layout.patch and layout.vision_residual:
        _add_patches(add, checkpoint, layout, draws.map(layout.vision_residual))
    if not planned:
        raise BrokenCheckpoint("This family leaves nothing for the client to do.")
    pieces = (piece for source in sources for piece in source)
    write_shard(directory / FILE, planned, pieces, tag_key=key.tag_key(FILE), mode=SECRET_MODE)
    for file in _COPIED:
        if (checkpoint.directory / file).exists():
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.directory / file, directory / file)
    if vocab_to_server is not None and not (directory / "tokenizer.json").exists():
        _convert_tokenizer(checkpoint.directory, directory)


def _embedding_rows(checkpoint: Checkpoint, layout: Layout, draws: Draws) -> Iterator[np.ndarray]:
    """Transformed rows in the plain order of ids."""
    assert layout.embedding is not None
    stored, stream = checkpoint.tensors[layout.embedding], draws.map(layout.residual)
    step = max(1, (16 << 20) // max(1, stored.nbytes // stored.shape[0]))
    for start in range(0, stored.shape[0], step):
        raw = checkpoint.rows(layout.embedding, start, min(start + step, stored.shape[0]))
        yield stream.columns(raw) if stream.exact else narrow(stream.columns(widen(raw, stored.dtype)), stored.dtype)


def _undo(drawn: Map) -> np.ndarray:
    if not isinstance(drawn, Permutation):
        raise AssertionError("families block rotations of a stream that the client has to undo")
    return drawn.inverse_index().astype(np.int32)


def _add_patches(add, checkpoint: Checkpoint, layout: Layout, stream: Map) -> None:  # type: ignore[no-untyped-def]
    """The patch projection with its output already in secret coordinates: [channels * p * p, hidden]."""
    weight_name, bias_name = f"{layout.patch}.weight", f"{layout.patch}.bias"
    stored = checkpoint.tensors[weight_name]
    flat = widen(checkpoint.read(weight_name), stored.dtype).reshape(stored.shape[0], -1)
    projected = np.ascontiguousarray(stream.columns(flat.T))
    add("patch_weight", "F32", projected.shape, iter([projected.astype(np.float32)]))
    bias = np.zeros(stored.shape[0], dtype=np.float32)
    if bias_name in checkpoint.tensors:
        bias = widen(checkpoint.read(bias_name), checkpoint.tensors[bias_name].dtype)
    moved = stream.columns(bias[None])[0].astype(np.float32)
    add("patch_bias", "F32", moved.shape, iter([moved]))


def _convert_tokenizer(source: Path, directory: Path) -> None:
    """Older tokenizers (sentencepiece, vocab.txt) are converted once, here, so that the gateway needs no
    transformers."""
    if not any((source / name).exists() for name in ("tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")):
        return  # a checkpoint without a tokenizer: its users send ids
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise BrokenCheckpoint(
            f"{source} has an old-style tokenizer and no tokenizer.json.",
            advice="Install cloister[server], which converts it, or add a tokenizer.json.",
        ) from None
    AutoTokenizer.from_pretrained(str(source)).save_pretrained(str(directory))
