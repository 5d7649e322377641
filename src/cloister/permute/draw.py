"""Which changes of coordinates each space admits, and drawing one of them.

The paper draws a free permutation of the whole feature axis for queries and keys; softmax is taken per head and
rotary positions turn pairs of coordinates, so that breaks the model. What is allowed (docs/permute.md derives it):

    heads           key/value heads in any order; query heads in any order inside their group
    q against k     no rotary positions: any order ("permutation") or any invertible matrix ("orthogonal") per key head;
                    rotary: nothing ("permutation"), or per pair a rotation and a scale ("orthogonal");
                    with norms on queries and keys: nothing
    v against o     any order, or any invertible matrix, per value head
    neurons         any order; of a gated block, the ungated half may also be scaled
    experts         any order inside their routing group; the inside of each like neurons
    residual        any order; in pre-norm models a rotation (LayerNorm: one that keeps the ones vector)
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cloister.families.layout import (
    Elementwise,
    Experts,
    Heads,
    Latent,
    LatentHeads,
    Layout,
    Neurons,
    Residual,
    Space,
    Vocabulary,
)
from cloister.permute.entropy import MasterKey, Stream
from cloister.permute.maps import Blocks, Dense, Identity, Map, Permutation, ScaledPermutation

PERMUTATION, ORTHOGONAL = "permutation", "orthogonal"


class Draws:
    """All maps of one context, drawn from its master key when they are needed. Large ones are not kept."""

    def __init__(self, layout: Layout, key: MasterKey, transform: str) -> None:
        self._layout, self._key, self.transform = layout, key, transform
        self._owners = {part: space for space in layout.spaces.values() for part in _parts(space)}
        self._rotated = transform == ORTHOGONAL
        self._cached = lru_cache(maxsize=64)(self._draw)
        self._stream_cache: dict[str, Map] = {}

    def map(self, part: str) -> Map:
        """The change of coordinates of `part`, e.g. "residual" or "layer3.attention.v"."""
        space = self._owners[part]
        if isinstance(space, Residual | Vocabulary):  # used by nearly every tensor: keep
            if part not in self._stream_cache:
                self._stream_cache[part] = self._draw(part)
            return self._stream_cache[part]
        return self._cached(part)

    def expert_order(self, space: str) -> np.ndarray:
        """order[i] = the original number of the expert that is number i on the server."""
        drawn = self.map(space)
        assert isinstance(drawn, Permutation)
        return drawn.index

    def rotates(self, part: str) -> bool:
        """Whether norms on this stream must be folded away."""
        return isinstance(self.map(part), Dense)

    def _draw(self, part: str) -> Map:
        space = self._owners[part]
        stream = self._key.stream(f"{self.transform}:{space.name}")
        match space:
            case Residual():
                return self._residual(space, stream)
            case Latent():
                return (
                    Dense(stream.orthogonal(space.size))
                    if self._rotated
                    else Permutation(stream.permutation(space.size))
                )
            case Vocabulary() | Elementwise():
                return Permutation(stream.permutation(space.size))
            case Neurons():
                order = stream.permutation(space.size)
                if self._rotated and space.gated and part.endswith(".up"):
                    return ScaledPermutation(order, stream.scales(space.size) * stream.signs(space.size))
                return Permutation(order)
            case Experts():
                return Permutation(_grouped_order(stream, space.groups, space.count // space.groups))
            case Heads():
                return self._heads(space, stream, part)
            case LatentHeads():
                return self._latent_heads(space, stream, part)

    def _residual(self, space: Residual, stream: Stream) -> Map:
        if not (self._rotated and space.rotatable):
            return Permutation(stream.permutation(space.size))
        return Dense(
            stream.orthogonal(space.size) if space.norm == "rms" else stream.orthogonal_keeping_ones(space.size)
        )

    def _heads(self, space: Heads, stream: Stream, part: str) -> Map:
        group = space.heads // space.kv_heads
        kv_order = stream.permutation(space.kv_heads)
        q_order = np.concatenate([kv * group + stream.permutation(group) for kv in kv_order])
        q_owner = q_order // group  # the original key/value head that serves each query head, in the new order
        letter = part.rsplit(".", 1)[1]
        order, owner = (q_order, q_owner) if letter in "qo" else (kv_order, kv_order)
        if letter in "qk":
            return _per_head(order, owner, self._query_key_matrices(space, stream), contragredient=letter == "q")
        exact = not self._rotated or space.clipped
        draw = _permutation_matrix if exact else Stream.invertible
        values = self._key.stream(f"{self.transform}:{space.name}:values")
        return _per_head(order, owner, [draw(values, space.v_dim) for _ in range(space.kv_heads)], contragredient=False)

    def _query_key_matrices(self, space: Heads, stream: Stream) -> list[np.ndarray] | int:
        if space.qk_norm != "none" or space.rope == "fixed" or (space.rope == "half" and not self._rotated):
            return space.qk_dim
        if space.rope == "half":
            half = space.qk_dim // 2
            pairs = [(j, j + half) for j in range(half)]
            return [_pair_rotations(stream, space.qk_dim, pairs) for _ in range(space.kv_heads)]
        draw = Stream.invertible if self._rotated else _permutation_matrix
        return [draw(stream, space.qk_dim) for _ in range(space.kv_heads)]

    def _latent_heads(self, space: LatentHeads, stream: Stream, part: str) -> Map:
        order = stream.permutation(space.heads)
        draw = Stream.invertible if self._rotated else _permutation_matrix
        shared = np.eye(space.rope_dim)
        if self._rotated:
            pairs = [(2 * j, 2 * j + 1) for j in range(space.rope_dim // 2)]
            shared = _pair_rotations(stream, space.rope_dim, pairs)
        letter = part.rsplit(".", 1)[1]
        if letter == "k_rope":
            return Blocks(np.array([0]), shared[None]) if self._rotated else Identity(space.rope_dim)
        keys = [draw(stream, space.nope_dim) for _ in range(space.heads)]
        values = [draw(stream, space.v_dim) for _ in range(space.heads)]
        if letter == "o":
            return _per_head(order, order, values, contragredient=False)
        if letter == "q":
            tail = np.linalg.inv(shared).T
            return _per_head(order, order, [_diagonal(np.linalg.inv(k).T, tail) for k in keys], contragredient=False)
        return _per_head(
            order, order, [_diagonal(k, v) for k, v in zip(keys, values, strict=True)], contragredient=False
        )


def _parts(space: Space) -> list[str]:
    match space:
        case Heads():
            return [f"{space.name}.{part}" for part in ("q", "k", "v", "o")]
        case LatentHeads():
            return [f"{space.name}.{part}" for part in ("q", "kv", "k_rope", "o")]
        case Neurons(gated=True):
            return [space.name, f"{space.name}.up"]
        case _:
            return [space.name]


def _grouped_order(stream: Stream, groups: int, size: int) -> np.ndarray:
    return np.concatenate([group * size + stream.permutation(size) for group in stream.permutation(groups)])


def _permutation_matrix(stream: Stream, size: int) -> np.ndarray:
    return np.eye(size)[stream.permutation(size)]


def _pair_rotations(stream: Stream, size: int, pairs: list[tuple[int, int]]) -> np.ndarray:
    matrix = np.zeros((size, size))
    angles, scales = 2.0 * np.pi * stream.uniform(len(pairs)), stream.scales(len(pairs))
    for (i, j), angle, scale in zip(pairs, angles, scales, strict=True):
        matrix[i, i] = matrix[j, j] = scale * np.cos(angle)
        matrix[i, j], matrix[j, i] = -scale * np.sin(angle), scale * np.sin(angle)
    return matrix


def _diagonal(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    matrix = np.zeros((len(first) + len(second),) * 2)
    matrix[: len(first), : len(first)], matrix[len(first) :, len(first) :] = first, second
    return matrix


def _per_head(order: np.ndarray, owner: np.ndarray, matrices: list[np.ndarray] | int, *, contragredient: bool) -> Map:
    """Heads in `order`, head i with the matrix of its owner; an int means identity blocks of that size.

    Blocks that only move numbers become one permutation, so that every number format keeps its bits."""
    if isinstance(matrices, int):
        return Permutation((order[:, None] * matrices + np.arange(matrices)).ravel())
    size = len(matrices[0])
    if all(np.count_nonzero(m) == size and m.max() == 1.0 == m.sum(axis=1).min() for m in matrices):
        within = np.array([matrices[o].argmax(axis=1) for o in owner])
        return Permutation((order[:, None] * size + within).ravel())
    stacked = np.array([np.linalg.inv(matrices[o]).T if contragredient else matrices[o] for o in owner])
    return Blocks(order, stacked)
