"""What private programs are written against: `Computer`, the one interface of both backends.

    def scores(party: Computer[N, B], question: NDArray | None, weights: NDArray | None) -> N:
        x = party.share(question, owner="client", shape=(24, 2048))
        return party.softmax(party.truncate(party.matmul(x, weights, outputs=64)))

`cloister.crypto.engine.Party` runs such a program with a peer, in private; `cloister.crypto.plain.Party` alone, without
privacy, on the same integers. Who passes what is asked with `plays`:

    scores(party, question if party.plays("client") else None, weights if party.plays("server") else None)

Arguments are checked here, once for both, before anything is sent.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from cloister.crypto import checks
from cloister.crypto.ahead import Costs, Demand, Layer, Weights
from cloister.crypto.checks import ROLES, given, last, same_scale, same_shape, whole
from cloister.crypto.fixed import VALUE_BOUND
from cloister.crypto.primitives import B, BitsLike, N, NumbersLike, Primitives
from cloister.errors import InvalidParameter
from cloister.progress import SILENT, Progress

Role = Literal["client", "server"]
EXACT_BITS = 40  # compares every number inside the bound exactly
SCORE_BITS = 20  # enough for probabilities and gate scores

__all__ = ["EXACT_BITS", "SCORE_BITS", "B", "BitsLike", "Computer", "N", "NumbersLike", "Role"]


class Session(Primitives[N, B]):
    """What surrounds the steps: who is who, what it costs, what is made ahead."""

    @abstractmethod
    def plays(self, role: Role) -> bool:
        """Whether this program holds what that role knows: its inputs, its weights."""

    @abstractmethod
    def close(self) -> None:
        """End the session in order. Closing what is over already does nothing."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def step(self, name: str) -> AbstractContextManager[None]:
        """Count every byte, round and second of the block under `name`."""

    @abstractmethod
    def costs(self) -> Costs:
        """What every step cost so far, and the sums `online`, `preprocess`, `set_up` and `total`."""

    @abstractmethod
    def reset_costs(self) -> None:
        """Forget the costs and the demand counted so far."""

    @abstractmethod
    def meet(self) -> None:
        """Wait until the peer stands at the same point."""

    @abstractmethod
    def demand(self) -> Demand:
        """The correlations that steps took since the costs were reset, the same at both parties."""

    @abstractmethod
    def stored(self) -> Demand:
        """The correlations that are there for steps to take."""

    @property
    @abstractmethod
    def started_over(self) -> str | None:
        """Why both parties threw away what their stores held when they met, if they did."""

    @abstractmethod
    def preprocess(self, demand: Demand, *, progress: Progress = SILENT) -> None:
        """Make correlations until `demand` is there; steps then need not wait for them. With a store they last."""

    @abstractmethod
    def reserve(self, demand: Demand) -> None:
        """Burn in the store what a computation of this demand will take, in one round, so that its steps need not stop
        for the disk one by one. What they do not use is lost at the end of the session."""

    @abstractmethod
    def prepare(
        self, layers: Sequence[Layer], weights: Weights = None, *, passes: int = 1, progress: Progress = SILENT
    ) -> None:
        """Make linear layers ahead, `passes` of each, so that `matmul` and `batched_matmul` with `prepared=name` cost
        one message and a product in the clear. Say them in the order of use: with a store a layer that is used out of
        its order burns those before it. The server passes the weights as those methods take them, one for each layer,
        or a function that fetches them by number; the client None. What is there already is not made again."""

    @abstractmethod
    def prepared(self, layer: Layer) -> int:
        """How many preparations of a layer are left."""


class Computer(Session[N, B]):
    """A session of either backend. Leading axes are free everywhere: rows, experts or whole data sets in one call.

    Error bounds are the engine's, in last places of the result unless something else is said."""

    # ---- values in and out ----------------------------------------------------------------------------------------

    def share(self, values: Any | None, *, owner: Role, shape: Sequence[int] | None = None) -> N:
        """The owner's real numbers as shares, rounded to nearest. The other party passes None and the shape."""
        integers = None if values is None else self._scaled(values, self.fraction)
        return self._entered(integers, owner, shape, self.fraction)

    def share_integers(
        self, values: Any | None, *, owner: Role, shape: Sequence[int] | None = None, fraction: int = 0
    ) -> N:
        """The owner's integers as shares with `fraction` fraction bits."""
        whole(fraction, "fraction", 0, 39)
        integers = None if values is None else self._integers(values, VALUE_BOUND, "The values")
        return self._entered(integers, owner, shape, fraction)

    def _entered(self, values: Any | None, owner: Role, shape: Sequence[int] | None, fraction: int) -> N:
        if values is not None:
            if shape is not None and checks.shape_of(shape) != tuple(values.shape):
                raise InvalidParameter(
                    f"Values of shape {tuple(values.shape)} where {tuple(shape)} was announced to the peer.",
                    param="shape",
                )
            shape = tuple(values.shape)
        if shape is None:
            raise InvalidParameter("The party that does not own the values must say their shape.")
        shape = checks.shape_of(shape)
        checks.one_of(owner, "owner", ROLES)
        return self._share(values, owner, shape, fraction)

    def reveal(self, x: N, *, to: Role | Literal["both"]) -> NDArray[np.float64] | None:
        """Open values: this reveals them. The party that is not to see them gets None."""
        integers = self.reveal_integers(x, to=to)
        return None if integers is None else integers / 2.0**x.fraction

    def reveal_integers(self, x: N, *, to: Role | Literal["both"]) -> NDArray[np.int64] | None:
        """Open values as the integers they are, the fraction bits included."""
        given(x, self._numbers, "x")
        checks.one_of(to, "to", (*ROLES, "both"))
        opened: NDArray[np.int64] | None = self._reveal(x, to)
        return opened

    def constant(self, values: Any, like: N) -> N:
        """Public numbers as shares of the shape and scale of `like`."""
        given(like, self._numbers, "like")
        integers = self._scaled(values, like.fraction)
        checks.fills(integers.shape, like)
        return self._constant(integers, like)

    # ---- products -------------------------------------------------------------------------------------------------

    def matmul(
        self,
        x: N,
        weights: Any | None,
        *,
        outputs: int,
        weight_bits: int = 16,
        prepared: str | None = None,
    ) -> N:
        """`x` (..., columns) times the server's integer weights (columns, outputs), which add FRACTION_BITS to the
        scale. Off by at most one before truncation. `prepared` names the layer that `prepare` made, in whose
        `rows` all leading axes count. If none of this name and shape is left, or ever was, the product is computed as a
        whole and its cost stands under `made now`; a store with `when_empty="refuse"` refuses it."""
        given(x, self._numbers, "x")
        columns = last(x)
        checks.not_empty(x)
        whole(outputs, "outputs", 1)
        whole(weight_bits, "weight_bits", 1, 24)
        found = None if weights is None else self._weights(weights, columns, outputs, weight_bits)
        return self._matmul(x, found, outputs, weight_bits, prepared)

    def _weights(self, weights: Any, columns: int, outputs: int, bits: int) -> Any:
        """The weights of `matmul`, checked."""
        found = self._integers(weights, 1 << (bits - 1), "The weights")
        checks.matrix(found, columns, outputs)
        return found

    def batched_matmul(
        self,
        x: N,
        weights: Sequence[Any] | None,
        *,
        outputs: Sequence[int],
        most_bytes: int | None = None,
        prepared: str | None = None,
    ) -> list[N]:
        """`x` (..., experts, tokens, columns) times each of the server's 16-bit weight arrays (experts, outputs,
        columns). Exact. Several arrays share one request. Leading axes count as tokens. `most_bytes` bounds what
        travels, at the price of work at the server; both parties say the same. `prepared` as for `matmul`."""
        given(x, self._numbers, "x")
        if len(x.shape) < 3:
            raise InvalidParameter(f"Values of shape {x.shape} where (experts, tokens, columns) was expected.")
        checks.not_empty(x)
        *batch, experts, tokens, columns = x.shape
        outputs = checks.outputs_of(outputs)
        if most_bytes is not None:
            whole(most_bytes, "most_bytes", 1)
        found = None if weights is None else self._expert_weights(weights, experts, columns, outputs)
        count = math.prod(batch)
        if batch:
            x = x.reshape(count, experts, tokens, columns).transpose(1, 0, 2, 3).reshape(experts, -1, columns)
        results = self._batched_matmul(x, found, outputs, most_bytes, prepared)
        if not batch:
            return results
        return [
            y.reshape(experts, count, tokens, out).transpose(1, 0, 2, 3).reshape(*batch, experts, tokens, out)
            for y, out in zip(results, outputs, strict=True)
        ]

    def _expert_weights(self, weights: Any, experts: int, columns: int, outputs: Sequence[int]) -> list[Any]:
        """The weights of `batched_matmul`, checked."""
        checks.listed(weights, outputs)
        found = [self._integers(array, 1 << 15, "The weights") for array in weights]
        checks.expert_weights(found, experts, columns, outputs)
        return found

    def shared_matmul(self, x: N, y: N) -> N:
        """Products of pairs of shared matrices, (..., rows, columns) times (..., columns, outputs), in one round. Off
        by at most two before truncation."""
        given(x, self._numbers, "x")
        given(y, self._numbers, "y")
        if len(x.shape) < 2 or len(y.shape) < 2:
            raise InvalidParameter(f"Shapes {x.shape} and {y.shape} are not matrices.", advice="Reshape them first.")
        if x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-2]:
            raise InvalidParameter(f"Shapes {x.shape} and {y.shape} cannot be multiplied.")
        checks.not_empty(x)
        checks.not_empty(y)
        return self._shared_matmul(x, y)

    def inner_products(self, x: N, y: N) -> N:
        """The sums of x * y along the last axis; the scales add up. Exact. Costs what `multiply` does: 164 bits and a
        triple for each product, one round. (A `shared_matmul` is cheaper where rows meet several columns.)"""
        given(x, self._numbers, "x")
        given(y, self._numbers, "y")
        same_shape(x, y)
        whole(last(x), "the length of the last axis", 1)
        return self._inner_products(x, y)

    # ---- arithmetic -----------------------------------------------------------------------------------------------

    def truncate(self, x: N, bits: int | None = None) -> N:
        """Drop fraction bits (down to the session's scale unless said otherwise), rounding down or up; above 16 bits
        the result may be one further down."""
        given(x, self._numbers, "x")
        bits = whole(x.fraction - self.fraction if bits is None else bits, "bits", 0, 32)
        return self._truncate(x, bits)

    def multiply(self, x: N, y: N) -> N:
        """Element by element; the scales add up. Exact."""
        given(x, self._numbers, "x")
        given(y, self._numbers, "y")
        same_shape(x, y)
        return self._multiply(x, y)

    def square(self, x: N) -> N:
        """Element by element, at twice the scale. Exact."""
        given(x, self._numbers, "x")
        return self._square(x)

    def select(self, bits: B, x: N) -> N:
        """x where the bit is 1, else 0. Exact."""
        given(bits, self._bits, "bits")
        given(x, self._numbers, "x")
        same_shape(bits, x)
        return self._select(bits, x)

    # ---- functions ------------------------------------------------------------------------------------------------

    def relu(self, x: N) -> N:
        """max(x, 0), |x| < 1024. What is above -2^-6 may come out as it is."""
        given(x, self._numbers, "x")
        return self._relu(x)

    def silu(self, x: N) -> N:
        """x / (1 + e^-x), |x| < 1024. Error below 2^-9.7 at 12 fraction bits."""
        given(x, self._numbers, "x")
        return self._silu(x)

    def gelu(self, x: N) -> N:
        """x times the normal distribution function of x, |x| < 1024. Error below 2^-9.8 at 12 fraction bits."""
        given(x, self._numbers, "x")
        return self._gelu(x)

    def exp(self, x: N, *, octaves: int = 0, fraction: int | None = None) -> N:
        """e^x for x up to `octaves` * ln 2; what is 27 octaves below that becomes zero. Error: relative 2^-14.5 +
        |x| 2^-17.6, absolute 2^(octaves - 18), and two last places."""
        given(x, self._numbers, "x")
        fraction = whole(x.fraction if fraction is None else fraction, "fraction", 0, 39)
        whole(octaves, "octaves", 0, 39)
        return self._exp(x, octaves, fraction)

    def reciprocal(self, x: N, *, least: float, most: float, fraction: int | None = None) -> N:
        """1 / x for numbers known to lie between two positive powers of two. Error: relative 2^-14, two last places."""
        given(x, self._numbers, "x")
        low, high = checks.octaves(least, most, x.fraction)
        fraction = whole(x.fraction if fraction is None else fraction, "fraction", 0, 39)
        return self._reciprocal(x, low, high, fraction)

    def rsqrt(self, x: N, *, least: float, most: float) -> N:
        """1 / sqrt(x) for numbers known to lie between two positive powers of two. Error: relative 2^-13.5, two last
        places."""
        given(x, self._numbers, "x")
        if x.fraction % 2:
            raise InvalidParameter("A reciprocal square root needs an even number of fraction bits.")
        low, high = checks.octaves(least, most, x.fraction)
        return self._rsqrt(x, low - low % 2, high)

    def softmax(self, x: N, *, allowed: NDArray[np.bool_] | None = None) -> N:
        """Along the last axis, |x| < 511. `allowed` is public: what it forbids gets zero. Error: relative 2^-13, one
        last place, and 2^-19 for each entry of a row at the very worst."""
        given(x, self._numbers, "x")
        flags: NDArray[np.uint8] | None = None
        if allowed is not None:
            mask = checks.array_of(allowed, "The flags in `allowed`", "b")
            try:
                flags = np.ascontiguousarray(np.broadcast_to(mask, x.shape), dtype=np.uint8)
            except ValueError:
                raise InvalidParameter(f"`allowed` of shape {mask.shape} for {x!r}.", param="allowed") from None
        last(x)
        return self._softmax(x, flags)

    def rms_norm(self, x: N, *, epsilon: float = 1e-5, rms_below: float = 16.0) -> N:
        """x / sqrt(mean(x^2) + epsilon) along the last axis. Every row's root mean square must be below `rms_below`.
        Error: relative 2^-13 and one last place; and where s = log2(rms_below) + 12 - (36 - log2(columns)) / 2 is
        positive, a relative 2^(s - 13) / rms, because entries lose s bits before they are squared."""
        return self._normalised(x, epsilon, rms_below, False)

    def layer_norm(self, x: N, *, epsilon: float = 1e-5, rms_below: float = 16.0) -> N:
        """The same after the mean is taken off, for one more last place."""
        return self._normalised(x, epsilon, rms_below, True)

    def _normalised(self, x: N, epsilon: float, rms_below: float, centred: bool) -> N:
        given(x, self._numbers, "x")
        checks.real(rms_below, "rms_below", 0, 128, open_below=True)
        checks.real(epsilon, "epsilon", 0, 2**-8)
        last(x)
        bits, units = max(0, math.ceil(math.log2(rms_below))), max(1, round(epsilon * 2**24))
        return self._norm(x, units, bits, centred)

    # ---- bits and order -------------------------------------------------------------------------------------------

    def less_than(self, x: N, y: N, *, bits: int = EXACT_BITS, drop_bits: int = 0) -> B:
        """[x < y]. With fewer `bits` it is cheaper: then |x - y| must be below 2^drop_bits * (2^(bits - 1) - 1) last
        places. `drop_bits` of the last bits are not compared: differences below 2^drop_bits may come out either way."""
        given(x, self._numbers, "x")
        given(y, self._numbers, "y")
        same_shape(x, y)
        same_scale(x, y)
        checks.compared(bits, drop_bits)
        return self._less_than(x, y, bits, drop_bits)

    def is_negative(self, x: N, *, bits: int = EXACT_BITS, drop_bits: int = 0) -> B:
        """[x < 0]; `bits` and `drop_bits` say of x what they say of x - y in `less_than`."""
        given(x, self._numbers, "x")
        checks.compared(bits, drop_bits)
        return self._is_negative(x, bits, drop_bits)

    def equal(self, x: N, y: N) -> B:
        """[x = y], exactly."""
        given(x, self._numbers, "x")
        given(y, self._numbers, "y")
        same_shape(x, y)
        same_scale(x, y)
        return self._equal(x, y)

    def logical_and(self, a: B, b: B) -> B:
        """a and b."""
        given(a, self._bits, "a")
        given(b, self._bits, "b")
        same_shape(a, b)
        return self._and(a, b)

    def logical_or(self, a: B, b: B) -> B:
        """a or b."""
        given(a, self._bits, "a")
        given(b, self._bits, "b")
        same_shape(a, b)
        return self._or(a, b)

    def logical_not(self, a: B) -> B:
        """not a."""
        given(a, self._bits, "a")
        return self._not(a)

    def bits_to_values(self, a: B) -> N:
        """Bits as the integers 0 and 1 (no fraction bits). Exact."""
        given(a, self._bits, "a")
        return self._bits_to_values(a)

    def one_hot(self, x: N, width: int) -> B:
        """([x = 0], ..., [x = width - 1]) along a new last axis, for integers 0 <= x < width (no fraction bits); width
        at most 2^20. Exact; an x outside gives bits without meaning. Costs with b = log2(width), rounded up to at least
        1: up to b = 8 two rounds and 1 + 2 b + (2^b - 1) width bits a value, above 1 + b rounds and 1 + b + b (2^b + 1)
        bits; 1 + b transfers."""
        given(x, self._numbers, "x")
        if x.fraction:
            raise InvalidParameter(
                f"A place is an integer, and these numbers have {x.fraction} fraction bits.",
                advice="Truncate them all, or share them with share_integers.",
                param="x",
            )
        whole(width, "width", 1, checks.MOST_PLACES)
        return self._one_hot(x, width)

    def maximum(self, x: N, *, bits: int = EXACT_BITS, drop_bits: int = 0) -> N:
        """The largest along the last axis; with `drop_bits` perhaps one that is below it by at most 2^drop_bits for
        each halving of the row. Exact otherwise. Values of a row may differ as in `less_than`."""
        given(x, self._numbers, "x")
        checks.compared(bits, drop_bits)
        whole(last(x), "the length of the last axis", 1)
        return self._maximum(x, bits, drop_bits)

    def rank(self, x: N, *, bits: int = SCORE_BITS, drop_bits: int = 0) -> N:
        """The rank of each value along the last axis (no fraction bits): 0 is the largest, and of equal values the
        earlier ranks first. Exact on what `drop_bits` leave; rows of at most 4096 values, which may differ as in
        `top_k_mask`. Costs for each pair of a row a comparison, 2 + r bits and one transfer, r = log2(length) rounded
        up, and for each value 43 + `bits` bits and two transfers; three rounds more than the comparison."""
        given(x, self._numbers, "x")
        checks.compared(bits, drop_bits)
        whole(last(x), "the length of the last axis", 1, checks.MOST_RANKED)
        return self._rank(x, bits, drop_bits)

    def top_k_mask(self, x: N, k: int, *, bits: int = SCORE_BITS, drop_bits: int = 0) -> B:
        """[among the k largest along the last axis]; exactly k are chosen, among equals the earlier. Values of a row
        must differ by less than 2^drop_bits * (2^(bits - 1) - 2) last places: 128 at the defaults."""
        given(x, self._numbers, "x")
        checks.compared(bits, drop_bits)
        whole(k, "k", 1, last(x))
        return self._top_k_mask(x, k, bits, drop_bits)

    def dispatch(self, x: N, slots: int, *, bits: int = SCORE_BITS, drop_bits: int = 0) -> N:
        """For each row the 0/1 matrix (slots, length) whose i-th line picks the i-th largest value (no fraction
        bits): what sends a token to a slot of an expert. Rows as in `top_k_mask`."""
        given(x, self._numbers, "x")
        checks.compared(bits, drop_bits)
        whole(slots, "slots", 1, last(x))
        return self._dispatch(x, slots, bits, drop_bits)
