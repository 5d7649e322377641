"""The KV cache of all running requests: one row per request, each row with its own length.

transformers asks a `Cache` for one thing per layer: take these new keys and values, give back all keys and values to
attend to. `Rows` answers it for any set of rows at once. Rows that lie side by side are handed out as views without a
copy. Layers may have keys and values of different sizes (latent attention caches two different things).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from cloister.errors import UnsupportedModel


@dataclass
class Plan:
    """Which rows the next forward pass is for, and where their new entries go."""

    rows: list[int]
    lengths: list[int]  # of each row before the pass
    counts: list[int]  # new entries of each row; they are the last ones of its queries, before them is padding
    starts: torch.Tensor  # `lengths` as a tensor
    queries: int  # the largest count
    width: int  # positions to attend over: the longest row after the pass


class Rows(Cache):  # type: ignore[misc]
    """A transformers cache whose batch dimension is chosen anew for every forward pass."""

    def __init__(self, shapes: Sequence[LayerShape], rows: int, length: int, device: torch.device) -> None:
        self.plan: Plan | None = None
        super().__init__(layers=[_RowLayer(self, shape, rows, length, device) for shape in shapes])
        self.device = device

    def next(self, rows: list[int], lengths: list[int], counts: list[int]) -> Plan:
        """Announce the coming forward pass: so many new entries for each of `rows`."""
        starts = torch.tensor(lengths, dtype=torch.long, device=self.device)
        width = max(length + count for length, count in zip(lengths, counts, strict=True))
        self.plan = Plan(rows, lengths, counts, starts, max(counts), width)
        return self.plan

    def real_tokens(self) -> torch.Tensor:
        """Which positions of the coming pass are inputs and which are padding before them: [rows, queries]."""
        assert self.plan is not None
        padding = self.plan.queries - torch.tensor(self.plan.counts, device=self.device)
        return torch.arange(self.plan.queries, device=self.device) >= padding[:, None]

    def clear(self, row: int, length: int) -> None:
        """Wipe a row: its next user shall not be able to notice anything of the last one, not even through a NaN."""
        for layer in self.layers:
            layer.keys[row, :, :length].zero_()
            layer.values[row, :, :length].zero_()

    def move(self, source: int, target: int, length: int) -> None:
        """Move a row's entries; `target` must be free."""
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]
        self.clear(source, length)


@dataclass(frozen=True)
class LayerShape:
    """Heads and sizes of one layer's entries."""

    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    dtype: torch.dtype

    @property
    def bytes_per_position(self) -> int:
        """What one token takes in this layer."""
        return (self.key_heads * self.key_size + self.value_heads * self.value_size) * self.dtype.itemsize


def shapes_from(cache: DynamicCache) -> list[LayerShape]:
    """The shapes that a model wrote into an ordinary cache; refuses caches that are not keys and values."""
    shapes = []
    for layer in cache.layers:
        if (
            not isinstance(layer, DynamicLayer)
            or layer.keys is None
            or getattr(layer, "indexer_keys", None) is not None
        ):
            raise UnsupportedModel(
                f"This model keeps its past in a {type(layer).__name__}, which cannot be shared by requests.",
                advice="Serve it with vLLM; see docs/serving-vllm.md.",
            )
        keys, values = layer.keys, layer.values
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype))
    return shapes


class _RowLayer(CacheLayerMixin):  # type: ignore[misc]
    is_sliding = False

    def __init__(self, owner: Rows, shape: LayerShape, rows: int, length: int, device: torch.device) -> None:
        super().__init__()
        self.owner = owner
        # zeros, not empty: masked positions get weight 0, and 0 times a stray NaN would still be NaN
        self.keys = torch.zeros(rows, shape.key_heads, length, shape.key_size, dtype=shape.dtype, device=device)
        self.values = torch.zeros(rows, shape.value_heads, length, shape.value_size, dtype=shape.dtype, device=device)
        self.dtype, self.device = shape.dtype, device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the room was taken at start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self.owner.plan
        assert plan is not None
        return self._store(self.keys, key_states, plan), self._store(self.values, value_states, plan)

    def _store(self, kept: torch.Tensor, new: torch.Tensor, plan: Plan) -> torch.Tensor:
        rows, first = plan.rows, plan.rows[0]
        if plan.queries == 1 and len(rows) > 1:
            kept[torch.tensor(rows, device=kept.device), :, plan.starts] = new[:, :, 0]
        else:
            for at, (row, start, count) in enumerate(zip(rows, plan.lengths, plan.counts, strict=True)):
                kept[row, :, start : start + count] = new[at, :, plan.queries - count :]
        if rows == list(range(first, first + len(rows))):
            return kept[first : first + len(rows), :, : plan.width]
        return kept[:, :, : plan.width].index_select(0, torch.tensor(rows, device=kept.device))

    def last_entry(self) -> torch.Tensor:
        """The newest key of the first head in each row [rows, 1, size], zero where a row is empty. The routers of
        unified models keep running sums there."""
        plan = self.owner.plan
        assert plan is not None
        rows = torch.tensor(plan.rows, device=self.keys.device)
        newest = self.keys[rows, 0, (plan.starts - 1).clamp(min=0)]
        return newest.masked_fill(plan.starts[:, None] == 0, 0.0).unsqueeze(1)

    def get_seq_length(self) -> int:
        plan = self.owner.plan
        return 0 if plan is None else plan.width - plan.queries

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])
