"""What examples look like to a seed: its vectors of whole examples, and what its router will see of them.

    here, public_vectors = view(seed, public)        # the seed's own way
    private_vectors = here.vectors(private)          # (n, width), length one: `selection.choose` takes both

A choice of proxies compares private examples with public ones, and the router is then taught on the proxies. With
encoders of texts an owner is told by its subjects, which the seed's last states hold ("last"). Images are told by how
they look, which the first layers hold and the last have forgotten: there the means of the inputs of two early
feed-forward blocks are compared, exactly what routers there multiply ("early"). Decoders take "both".

Measured by the figures of `cloister bench unify`: docs/unify-selection.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cloister.progress import SILENT, Progress
from cloister.unify.examples import Examples
from cloister.unify.seeds import Seed, SeedKind, batches_by_length, pooled

Look = Literal["last", "early", "both"]
Vectors = NDArray[np.float32]
BY_KIND: dict[SeedKind, Look] = {"encoder": "last", "vision": "early", "decoder": "both"}
SMALLEST = 1e-6  # a spread below this is of a number that is the same for all


@dataclass(frozen=True)
class View:
    """How examples are compared: a function of the seed and the public examples alone."""

    seed: Seed
    look: Look
    mean: Vectors  # (layers, hidden), of the public examples
    spread: Vectors

    def vectors(self, examples: Examples, *, batch: int = 64, progress: Progress = SILENT) -> Vectors:
        """A row of length one for each example; with a batch of 1 it depends on nothing but that example."""
        early = None
        if self.look != "last":
            early = block_inputs(self.seed, examples, layers=_early(self.seed), batch=batch, progress=progress)
        return self._rows(examples, early, batch, progress)

    def _rows(self, examples: Examples, early: Vectors | None, batch: int, progress: Progress) -> Vectors:
        parts = []
        if self.look != "early":
            parts.append(self.seed.vectors(examples, batch=batch, progress=progress))
        if early is not None:
            early -= self.mean
            early /= self.spread
            flat = early.reshape(len(early), -1)
            parts.append(flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), SMALLEST))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1) / np.float32(len(parts) ** 0.5)


def view(
    seed: Seed, public: Examples, look: Look | None = None, *, batch: int = 64, progress: Progress = SILENT
) -> tuple[View, Vectors]:
    """How this seed's examples are compared, and the public ones' vectors. `look`: `BY_KIND`'s, unless given."""
    look = look or BY_KIND[seed.kind]
    if look == "last":
        none = np.zeros((0, seed.hidden), dtype=np.float32)
        return View(seed, look, none, none), seed.vectors(public, batch=batch, progress=progress)
    early = block_inputs(seed, public, layers=_early(seed), batch=batch, progress=progress)
    mean = early.mean(0, dtype=np.float64).astype(np.float32)
    spread = np.maximum(early.std(0, dtype=np.float64), SMALLEST).astype(np.float32)
    here = View(seed, look, mean, spread)
    return here, here._rows(public, early, batch, progress)


def _early(seed: Seed) -> tuple[int, ...]:
    """The first feed-forward block and the last of the first half: two of them, whatever the depth."""
    from cloister.unify.moe.blocks import find

    return tuple(sorted({0, (len(find(seed.model)) - 1) // 2}))


def block_inputs(
    seed: Seed,
    examples: Examples,
    *,
    layers: Sequence[int] | None = None,
    batch: int = 64,
    progress: Progress = SILENT,
) -> Vectors:
    """(examples, layers, hidden): for feed-forward blocks of the *seed* the mean of their inputs over real tokens."""
    import torch

    from cloister.unify.moe.blocks import find

    blocks = find(seed.model)
    wanted = range(len(blocks)) if layers is None else layers
    out = np.empty((len(examples), len(wanted), seed.hidden), dtype=np.float32)
    now: dict[str, Any] = {}

    def keep(place: int) -> Any:
        def hook(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            z, real = args[0], now["real"]
            mean = z.mean(1) if real is None else (z * real).sum(1) / real.sum(1).clamp(min=1)
            out[now["rows"], place] = mean.float().numpy()

        return hook

    handles = [
        getattr(blocks[layer].owner, blocks[layer].name).register_forward_pre_hook(keep(place))
        for place, layer in enumerate(wanted)
    ]
    try:
        with torch.inference_mode(), progress.task("Block inputs", total=len(examples), unit="examples") as task:
            for rows in batches_by_length(examples.inputs, batch):
                given = seed.batch(examples.some(rows))
                mask = given.get("attention_mask")
                now.update(rows=rows, real=None if mask is None else mask[..., None].float())
                pooled(seed.model, given, seed.kind)
                task.advance(len(rows))
    finally:
        for handle in handles:
            handle.remove()
    return out
