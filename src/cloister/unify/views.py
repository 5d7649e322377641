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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.progress import SILENT, Progress
from cloister.unify.examples import Examples
from cloister.unify.seeds import Seed, batches_by_length, pooled
from cloister.unify.selection.looks import BY_KIND, Look

Vectors = NDArray[np.float32]
SMALLEST = 1e-6  # a spread below this is of a number that is the same for all
ROWS = 4096  # of a table, at a time: nothing of its size is made beside it


@dataclass(frozen=True)
class View:
    """How examples are compared: a function of the seed and the public examples alone."""

    seed: Seed
    look: Look
    mean: Vectors  # (layers, hidden), of the public examples
    spread: Vectors

    def vectors(self, examples: Examples, *, batch: int = 64, progress: Progress = SILENT) -> Vectors:
        """A row of length one for each example; with a batch of 1 it depends on nothing but that example."""
        if self.look == "last":
            return self.seed.vectors(examples, batch=batch, progress=progress)
        table = _table(self.seed, examples, self.look, batch, progress)
        self._compare(table)
        return table.reshape(len(table), -1)

    def _compare(self, table: Vectors) -> None:
        """In place: the early parts in deviations of the public examples, all parts of equal weight."""
        layers = len(self.mean)
        parts = 1 + (table.shape[1] > layers)
        for start in range(0, len(table), ROWS):
            block = table[start : start + ROWS]
            early = block[:, :layers]
            early -= self.mean
            early /= self.spread
            early /= np.maximum(np.sqrt(np.einsum("nlh,nlh->n", early, early)), SMALLEST)[:, None, None]
            block /= np.float32(parts**0.5)


def view(
    seed: Seed, public: Examples, look: Look | None = None, *, batch: int = 64, progress: Progress = SILENT
) -> tuple[View, Vectors]:
    """How this seed's examples are compared, and the public ones' vectors. `look`: `BY_KIND`'s, unless given."""
    look = look or BY_KIND[seed.kind]
    if look == "last":
        none = np.zeros((0, seed.hidden), dtype=np.float32)
        return View(seed, look, none, none), seed.vectors(public, batch=batch, progress=progress)
    table = _table(seed, public, look, batch, progress)
    here = View(seed, look, *_spread(table[:, : len(_early(seed))]))
    here._compare(table)
    return here, table.reshape(len(table), -1)


def _table(seed: Seed, examples: Examples, look: Look, batch: int, progress: Progress) -> Vectors:
    """(examples, parts, hidden): the early block inputs, and for "both" the last states' vectors behind them."""
    layers = _early(seed)
    table = np.empty((len(examples), len(layers) + (look == "both"), seed.hidden), dtype=np.float32)
    last = table[:, -1] if look == "both" else None
    block_inputs(seed, examples, layers=layers, batch=batch, progress=progress, out=table[:, : len(layers)], last=last)
    return table


def _spread(table: Vectors) -> tuple[Vectors, Vectors]:
    """Mean and standard deviation over the rows, in doubles."""
    blocks = range(0, len(table), ROWS)
    mean = sum(table[i : i + ROWS].sum(0, dtype=np.float64) for i in blocks) / len(table)
    square = sum(((table[i : i + ROWS] - mean) ** 2).sum(0) for i in blocks) / len(table)
    return mean.astype(np.float32), np.maximum(np.sqrt(square), SMALLEST).astype(np.float32)


def _early(seed: Seed) -> tuple[int, ...]:
    """The first feed-forward block and the last of the first half: two of them, whatever the depth."""
    from cloister.unify.moe.blocks import find

    return tuple(sorted({0, (len(find(seed.model)) - 1) // 2}))


class _Enough(Exception):
    """The last block that is wanted has been reached."""


def block_inputs(
    seed: Seed,
    examples: Examples,
    *,
    layers: Sequence[int] | None = None,
    batch: int = 64,
    progress: Progress = SILENT,
    out: Vectors | None = None,
    last: Vectors | None = None,
) -> Vectors:
    """(examples, layers, hidden): for feed-forward blocks of the *seed* the mean of their inputs over real tokens.

    `out`: where to put it, if there is a place already. `last`: where to put the examples' vectors too; without it
    nothing is computed behind the last of these blocks.
    """
    import torch

    from cloister.unify.moe.blocks import find

    blocks = find(seed.model)
    wanted = range(len(blocks)) if layers is None else layers
    found = np.empty((len(examples), len(wanted), seed.hidden), dtype=np.float32) if out is None else out
    now: dict[str, Any] = {}
    final = max(range(len(wanted)), key=wanted.__getitem__)  # the place of the last block

    def keep(place: int) -> Any:
        def hook(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            z, real = args[0], now["real"]
            mean = z.mean(1) if real is None else (z * real).sum(1) / real.sum(1).clamp(min=1)
            found[now["rows"], place] = mean.float().numpy()
            if last is None and place == final:
                raise _Enough

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
                with suppress(_Enough):
                    vectors = pooled(seed.model, given, seed.kind)
                    if last is not None:
                        last[rows] = vectors.numpy()
                task.advance(len(rows))
    finally:
        for handle in handles:
            handle.remove()
    return found
