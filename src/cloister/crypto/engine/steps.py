"""The steps of a session, each a call of the Rust core on this party's shares. `Computer` has checked the arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.crypto import checks, native
from cloister.crypto.ahead import ExpertLayer, Layer, LinearLayer
from cloister.crypto.computer import Computer, Role
from cloister.crypto.engine.shares import Bits, Shares
from cloister.crypto.fixed import PRIME, scaled


class Steps(Computer[Shares, Bits]):
    """What a party computes with its peer."""

    _numbers, _bits = Shares, Bits
    _native: Any
    role: Role

    # ---- values in and out ----------------------------------------------------------------------------------------

    def _scaled(self, values: Any, fraction: int) -> NDArray[np.int64]:
        return scaled(values, fraction)

    def _integers(self, values: Any, bound: int, what: str) -> NDArray[Any]:
        return checks.integers(values, bound, what)

    def _share(self, values: NDArray[Any] | None, owner: str, shape: tuple[int, ...], fraction: int) -> Shares:
        words = None if values is None else np.asarray(values, dtype=np.int64, order="C")
        out = _run(self._native.share, owner, words, math.prod(shape))
        return _shares(out, shape, fraction)

    def _reveal(self, x: Shares, to: str) -> NDArray[np.int64] | None:
        out = _run(self._native.reveal_to_both, x.data) if to == "both" else _run(self._native.reveal_to, to, x.data)
        return None if out is None else np.frombuffer(out, dtype=np.int64).reshape(x.shape)

    def _constant(self, values: NDArray[np.int64], like: Shares) -> Shares:
        """The client holds them, the server holds zeros."""
        words = np.zeros(like.shape, dtype=np.uint64)
        if self.role == "client":
            words[...] = values % PRIME
        return Shares(words, like.fraction)

    # ---- products -------------------------------------------------------------------------------------------------

    def _weights(self, weights: Any, columns: int, outputs: int, bits: int) -> NDArray[Any]:
        return super()._weights(weights, columns, outputs, bits).astype(np.int32, order="C", copy=False)

    def _expert_weights(self, weights: Any, experts: int, columns: int, outputs: Sequence[int]) -> list[NDArray[Any]]:
        found = super()._expert_weights(weights, experts, columns, outputs)
        return [array.astype(np.int16, order="C", copy=False) for array in found]

    def _matmul(
        self, x: Shares, weights: NDArray[Any] | None, outputs: int, weight_bits: int, prepared: str | None
    ) -> Shares:
        *batch, columns = x.shape
        rows = math.prod(batch)
        layer = None if prepared is None else LinearLayer(prepared, rows, columns, outputs, weight_bits)
        product = self._native.product
        with self._made_now_unless_prepared(layer):
            out = _run(product, x.data, rows, columns, outputs, weight_bits, weights, prepared)
        return _shares(out, (*batch, outputs), x.fraction + self.fraction)

    def _batched_matmul(
        self,
        x: Shares,
        weights: list[NDArray[Any]] | None,
        outputs: Sequence[int],
        most_bytes: int | None,
        prepared: str | None,
    ) -> list[Shares]:
        experts, tokens, columns = x.shape
        layer = None if prepared is None else ExpertLayer(prepared, experts, tokens, columns, outputs, most_bytes)
        product = self._native.batched_product
        with self._made_now_unless_prepared(layer):
            results = _run(product, x.data, experts, tokens, columns, outputs, weights, most_bytes, prepared)
        fraction = x.fraction + self.fraction
        return [_shares(raw, (experts, tokens, out), fraction) for raw, out in zip(results, outputs, strict=True)]

    @contextmanager
    def _made_now_unless_prepared(self, layer: Layer | None) -> Iterator[None]:
        """Count a product that asked for a preparation and found none under the step `made now`."""
        if layer is None or self.prepared(layer):
            yield
        else:
            with self.step("made now"):
                yield

    def _shared_matmul(self, x: Shares, y: Shares) -> Shares:
        *batch, rows, columns = x.shape
        outputs = y.shape[-1]
        out = _run(self._native.shared_products, x.data, y.data, math.prod(batch), rows, columns, outputs)
        return _shares(out, (*batch, rows, outputs), x.fraction + y.fraction)

    def _inner_products(self, x: Shares, y: Shares) -> Shares:
        out = _run(self._native.inner_products, x.data, y.data, x.shape[-1])
        return _shares(out, x.shape[:-1], x.fraction + y.fraction)

    # ---- arithmetic and functions ---------------------------------------------------------------------------------

    def _truncate(self, x: Shares, bits: int) -> Shares:
        return _shares(_run(self._native.truncate, x.data, bits), x.shape, x.fraction - bits)

    def _multiply(self, x: Shares, y: Shares) -> Shares:
        return _shares(_run(self._native.multiply, x.data, y.data), x.shape, x.fraction + y.fraction)

    def _square(self, x: Shares) -> Shares:
        return _shares(_run(self._native.square, x.data), x.shape, 2 * x.fraction)

    def _select(self, bits: Bits, x: Shares) -> Shares:
        return _shares(_run(self._native.select, bits.data, x.data), x.shape, x.fraction)

    def _relu(self, x: Shares) -> Shares:
        return _shares(_run(self._native.relu, x.data, x.fraction), x.shape, x.fraction)

    def _silu(self, x: Shares) -> Shares:
        return _shares(_run(self._native.silu, x.data, x.fraction), x.shape, x.fraction)

    def _gelu(self, x: Shares) -> Shares:
        return _shares(_run(self._native.gelu, x.data, x.fraction), x.shape, x.fraction)

    def _exp(self, x: Shares, octaves: int, fraction: int) -> Shares:
        return _shares(_run(self._native.exponential, x.data, x.fraction, octaves, fraction), x.shape, fraction)

    def _reciprocal(self, x: Shares, least: int, most: int, fraction: int) -> Shares:
        return _shares(_run(self._native.reciprocal, x.data, least, most, x.fraction + fraction), x.shape, fraction)

    def _rsqrt(self, x: Shares, least: int, most: int) -> Shares:
        total = x.fraction + x.fraction // 2
        return _shares(_run(self._native.rsqrt, x.data, least, most, 1 << 16, total), x.shape, x.fraction)

    def _softmax(self, x: Shares, allowed: NDArray[np.uint8] | None) -> Shares:
        return _shares(_run(self._native.softmax, x.data, x.shape[-1], allowed, x.fraction), x.shape, x.fraction)

    def _norm(self, x: Shares, epsilon: int, rms_bits: int, centred: bool) -> Shares:
        out = _run(self._native.norm, x.data, x.shape[-1], x.fraction, rms_bits, epsilon, centred)
        return _shares(out, x.shape, x.fraction)

    # ---- bits and order -------------------------------------------------------------------------------------------

    def _less_than(self, x: Shares, y: Shares, bits: int, drop_bits: int) -> Bits:
        return _flags(_run(self._native.less_than, x.data, y.data, bits, drop_bits), x.shape)

    def _is_negative(self, x: Shares, bits: int, drop_bits: int) -> Bits:
        return _flags(_run(self._native.is_negative, x.data, bits, drop_bits), x.shape)

    def _equal(self, x: Shares, y: Shares) -> Bits:
        return _flags(_run(self._native.equal, x.data, y.data), x.shape)

    def _and(self, a: Bits, b: Bits) -> Bits:
        return _flags(_run(self._native.bits_and, a.data, b.data), a.shape)

    def _or(self, a: Bits, b: Bits) -> Bits:
        return _flags(_run(self._native.bits_or, a.data, b.data), a.shape)

    def _not(self, a: Bits) -> Bits:
        return _flags(_run(self._native.bits_not, a.data), a.shape)

    def _bits_to_values(self, a: Bits) -> Shares:
        return _shares(_run(self._native.bits_to_field, a.data), a.shape, 0)

    def _one_hot(self, x: Shares, width: int) -> Bits:
        return _flags(_run(self._native.one_hot, x.data, width), (*x.shape, width))

    def _maximum(self, x: Shares, bits: int, drop_bits: int) -> Shares:
        out = _run(self._native.maximum, x.data, x.shape[-1], bits, drop_bits)
        return _shares(out, x.shape[:-1], x.fraction)

    def _rank(self, x: Shares, bits: int, drop_bits: int) -> Shares:
        return _shares(_run(self._native.rank, x.data, x.shape[-1], bits, drop_bits), x.shape, 0)

    def _top_k_mask(self, x: Shares, k: int, bits: int, drop_bits: int) -> Bits:
        return _flags(_run(self._native.top_k_mask, x.data, x.shape[-1], k, bits, drop_bits), x.shape)

    def _dispatch(self, x: Shares, slots: int, bits: int, drop_bits: int) -> Shares:
        *batch, length = x.shape
        out = _run(self._native.dispatch_ranks, x.data, length, slots, bits, drop_bits)
        return _shares(out, (*batch, slots, length), 0)


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the core; its errors become Cloister's."""
    # A single number has no axis, and the core takes vectors.
    vectors = [a.reshape(1) if isinstance(a, np.ndarray) and a.ndim == 0 else a for a in arguments]
    with native.translated():
        return function(*vectors)


def _shares(raw: Any, shape: Sequence[int], fraction: int) -> Shares:
    return Shares(np.frombuffer(raw, dtype=np.uint64).reshape(shape), fraction)


def _flags(raw: Any, shape: Sequence[int]) -> Bits:
    return Bits(np.frombuffer(raw, dtype=np.uint8).reshape(shape))
