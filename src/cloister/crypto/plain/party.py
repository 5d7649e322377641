"""The engine's party without a peer and without privacy: the same programs on the same integers, in the open."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloister.crypto import checks
from cloister.crypto.ahead import Cost, Costs, Demand, ExpertLayer, Layer, Weights, demanded, layer_said, layers_said
from cloister.crypto.checks import ROLES, whole
from cloister.crypto.computer import Computer, Role
from cloister.crypto.fixed import FRACTION_BITS, MOST_FRACTION, scaled
from cloister.crypto.plain import arithmetic, functions, rows
from cloister.crypto.plain.numbers import OutOfRange, Rounding, SharesRounding, check, encode, truncate
from cloister.crypto.plain.values import Bits, Values
from cloister.errors import InvalidParameter
from cloister.progress import SILENT, Progress

# Strict comparisons of more bits than this see every value.
_ALL_BITS = 40


class Party(Computer[Values, Bits]):
    """Both parties of a computation in one, without privacy: the oracle of the engine, and its simulator for accuracy
    on whole data sets, whose rows are leading axes.

    Steps that the engine computes exactly are equal integer for integer; a truncation rounds to nearest, where the
    engine's shares decide between down and up. With `truncation="shares"` every truncation, those inside SiLU, softmax
    and their like included, draws random shares and takes the very integer that they would give; `insecure_seed` makes
    that repeatable. (What else the engine's shares decide, a last place of `matmul` and the last bits of `exp`, is not
    imitated.) A value that shares could not hold, or that a step's comparison could not see, raises `OutOfRange`,
    which names the step; the engine cannot notice it.

    Values live on `device`. `share` and the weights take NumPy arrays or tensors; what is revealed is NumPy's.
    """

    _numbers, _bits = Values, Bits

    def __init__(
        self,
        fraction: int = FRACTION_BITS,
        *,
        device: torch.device | str = "cpu",
        truncation: Literal["nearest", "shares"] = "nearest",
        insecure_seed: int | None = None,
    ) -> None:
        self.fraction = whole(fraction, "fraction", 0, MOST_FRACTION)
        self.device = torch.device(device)
        checks.one_of(truncation, "truncation", ("nearest", "shares"))
        if insecure_seed is not None:
            whole(insecure_seed, "insecure_seed", 0, (1 << 63) - 1)
            if truncation != "shares":
                raise InvalidParameter('A seed belongs to truncation="shares".', param="insecure_seed")
        self._rounding: Rounding = truncate if truncation == "nearest" else SharesRounding(insecure_seed)
        self._seconds: dict[str, float] = {}
        self._step = ""
        self._since = 0.0

    def __repr__(self) -> str:
        return f"Party(device={str(self.device)!r}, fraction={self.fraction})"

    # ---- the session ----------------------------------------------------------------------------------------------

    def plays(self, role: Role) -> bool:
        """Always: both roles are played here, so the values of either owner must be passed."""
        checks.one_of(role, "role", ROLES)
        return True

    def close(self) -> None:
        """Nothing: there is no session to end."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under `name`, and let an `OutOfRange` inside say the name."""
        checks.text(name, "name")
        outer, inner = self._step, f"{self._step}/{name}" if self._step else name
        self._passed(outer, inner)
        try:
            yield
        except OutOfRange as error:
            raise OutOfRange(f"{name}/{error.message}", advice=error.advice) from error
        finally:
            self._passed(inner, outer)

    def _passed(self, done: str, begun: str) -> None:
        """Put the time since the last call down to the step that ends, or pauses, now."""
        now = time.perf_counter()
        if done:
            self._seconds[done] = self._seconds.get(done, 0.0) + now - self._since
        self._step, self._since = begun, now

    def costs(self) -> Costs:
        """The seconds of each named step, those of steps within it apart. Nothing is sent, so bytes and rounds are
        zero."""
        return Costs(Cost(name, 0, 0, 0, 0, seconds) for name, seconds in self._seconds.items())

    def reset_costs(self) -> None:
        """Forget the seconds counted so far."""
        self._seconds.clear()

    def meet(self) -> None:
        """Nothing: there is nobody to wait for."""

    def demand(self) -> Demand:
        """Nothing is taken."""
        return Demand()

    def stored(self) -> Demand:
        """Nothing is kept."""
        return Demand()

    @property
    def started_over(self) -> str | None:
        """Never: there is no store."""
        return None

    def preprocess(self, demand: Demand, *, progress: Progress = SILENT) -> None:
        """Nothing: no step needs correlations."""
        demanded(demand)

    def reserve(self, demand: Demand) -> None:
        """Nothing: there is no store."""
        demanded(demand)

    def prepare(
        self, layers: Sequence[Layer], weights: Weights = None, *, passes: int = 1, progress: Progress = SILENT
    ) -> None:
        """Nothing but the checks of the layers: products with `prepared` are computed like any other."""
        layers_said(layers, weights, passes)
        if weights is None:
            raise InvalidParameter("The server prepares layers with its weights.", param="weights")
        if not callable(weights):
            for layer, given_weights in zip(layers, weights, strict=True):
                if isinstance(layer, ExpertLayer):
                    self._expert_weights(given_weights, layer.experts, layer.columns, layer.outputs)
                else:
                    self._weights(given_weights, layer.columns, layer.outputs, layer.weight_bits)

    def prepared(self, layer: Layer) -> int:
        """None."""
        layer_said(layer)
        return 0

    # ---- values in and out ----------------------------------------------------------------------------------------

    def _scaled(self, values: Any, fraction: int) -> Tensor:
        if isinstance(values, Tensor):
            return encode(values.detach().to(self.device), fraction)
        return torch.from_numpy(np.asarray(scaled(values, fraction))).to(self.device)

    def _integers(self, values: Any, bound: int, what: str) -> Tensor:
        if not isinstance(values, Tensor):
            array = np.array(checks.integers(values, bound, what), dtype=np.int64)
            return torch.from_numpy(array).to(self.device)
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise InvalidParameter(f"{what} must be integers, not {values.dtype}.")
        integers = values.to(self.device, torch.int64)
        if integers.numel() and not (int(integers.min()) >= -bound and int(integers.max()) < bound):
            raise checks.outside(what, bound)
        return integers

    def _share(self, values: Tensor | None, owner: str, shape: tuple[int, ...], fraction: int) -> Values:
        return Values(check(_known(values, f"values of the {owner}"), "share"), fraction)

    def _reveal(self, x: Values, to: str) -> NDArray[np.int64]:
        return np.array(x.data.cpu().numpy(), dtype=np.int64)

    def _constant(self, values: Tensor, like: Values) -> Values:
        return Values(values.broadcast_to(like.shape).clone(), like.fraction)

    # ---- products -------------------------------------------------------------------------------------------------

    def _matmul(
        self, x: Values, weights: Tensor | None, outputs: int, weight_bits: int, prepared: str | None
    ) -> Values:
        return Values(arithmetic.matmul(x.data, _known(weights, "weights")), x.fraction + self.fraction)

    def _batched_matmul(
        self,
        x: Values,
        weights: list[Tensor] | None,
        outputs: Sequence[int],
        most_bytes: int | None,
        prepared: str | None,
    ) -> list[Values]:
        products = (arithmetic.matmul(x.data, w.transpose(1, 2), "batched_matmul") for w in _known(weights, "weights"))
        return [Values(product, x.fraction + self.fraction) for product in products]

    def _shared_matmul(self, x: Values, y: Values) -> Values:
        return Values(arithmetic.matmul(x.data, y.data, "shared_matmul"), x.fraction + y.fraction)

    def _inner_products(self, x: Values, y: Values) -> Values:
        return Values(arithmetic.inner_products(x.data, y.data), x.fraction + y.fraction)

    # ---- arithmetic and functions ---------------------------------------------------------------------------------

    def _truncate(self, x: Values, bits: int) -> Values:
        return Values(self._rounding(x.data, bits, "truncate"), x.fraction - bits)

    def _multiply(self, x: Values, y: Values) -> Values:
        return Values(arithmetic.multiply(x.data, y.data), x.fraction + y.fraction)

    def _square(self, x: Values) -> Values:
        return Values(arithmetic.square(x.data), 2 * x.fraction)

    def _select(self, bits: Bits, x: Values) -> Values:
        return Values(arithmetic.select(bits.data, x.data), x.fraction)

    def _relu(self, x: Values) -> Values:
        return Values(functions.relu(x.data, x.fraction), x.fraction)

    def _silu(self, x: Values) -> Values:
        return Values(functions.silu(x.data, x.fraction, self._rounding), x.fraction)

    def _gelu(self, x: Values) -> Values:
        return Values(functions.gelu(x.data, x.fraction, self._rounding), x.fraction)

    def _exp(self, x: Values, octaves: int, fraction: int) -> Values:
        return Values(functions.exp(x.data, x.fraction, octaves, fraction, self._rounding), fraction)

    def _reciprocal(self, x: Values, least: int, most: int, fraction: int) -> Values:
        inside = check(x.data, "reciprocal", 1 << least, 1 << most)
        return Values(functions.reciprocal(inside, least, most, x.fraction + fraction, self._rounding), fraction)

    def _rsqrt(self, x: Values, least: int, most: int) -> Values:
        inside = check(x.data, "rsqrt", 1 << least, 1 << most)
        total = x.fraction + x.fraction // 2
        return Values(functions.rsqrt(inside, least, most, total, rounding=self._rounding), x.fraction)

    def _softmax(self, x: Values, allowed: NDArray[np.uint8] | None) -> Values:
        flags = None if allowed is None else torch.from_numpy(allowed.astype(bool)).to(self.device)
        return Values(rows.softmax(x.data, flags, x.fraction, self._rounding), x.fraction)

    def _norm(self, x: Values, epsilon: int, rms_bits: int, centred: bool) -> Values:
        plan = rows.NormPlan(x.shape[-1], rms_bits, epsilon, x.fraction)
        norm = rows.layer_norm if centred else rows.rms_norm
        return Values(norm(x.data, plan, self._rounding), x.fraction)

    # ---- bits and order -------------------------------------------------------------------------------------------

    def _less_than(self, x: Values, y: Values, bits: int, drop_bits: int) -> Bits:
        _seen(x.data - y.data, bits, drop_bits, "less_than")
        return Bits(arithmetic.less_than(x.data, y.data))

    def _is_negative(self, x: Values, bits: int, drop_bits: int) -> Bits:
        return Bits((_seen(x.data, bits, drop_bits, "is_negative") < 0).to(torch.int64))

    def _equal(self, x: Values, y: Values) -> Bits:
        return Bits(arithmetic.equal(x.data, y.data))

    def _and(self, a: Bits, b: Bits) -> Bits:
        return Bits(a.data & b.data)

    def _or(self, a: Bits, b: Bits) -> Bits:
        return Bits(a.data | b.data)

    def _not(self, a: Bits) -> Bits:
        return Bits(1 - a.data)

    def _bits_to_values(self, a: Bits) -> Values:
        return Values(a.data, 0)

    def _one_hot(self, x: Values, width: int) -> Bits:
        return Bits(arithmetic.one_hot(check(x.data, "one_hot", 0, width - 1), width))

    def _maximum(self, x: Values, bits: int, drop_bits: int) -> Values:
        _seen(_spread(x.data), bits, drop_bits, "maximum")
        return Values(arithmetic.maximum(x.data), x.fraction)

    def _rank(self, x: Values, bits: int, drop_bits: int) -> Values:
        return Values(arithmetic.rank(_ordered(x.data, bits, drop_bits, "rank")), 0)

    def _top_k_mask(self, x: Values, k: int, bits: int, drop_bits: int) -> Bits:
        return Bits(arithmetic.top_k_mask(_ordered(x.data, bits, drop_bits, "top_k_mask"), k))

    def _dispatch(self, x: Values, slots: int, bits: int, drop_bits: int) -> Values:
        return Values(arithmetic.dispatch(_ordered(x.data, bits, drop_bits, "dispatch"), slots), 0)


def _known(values: Any | None, what: str) -> Any:
    """What either party would pass: here both do."""
    if values is None:
        raise InvalidParameter(
            f"The plain party plays both roles, so it needs the {what}, not None.",
            advice='Write `x if party.plays("client") else None`, which fits both backends.',
        )
    return values


def _spread(x: Tensor) -> Tensor:
    """How far the values of each row lie apart."""
    return x.amax(-1) - x.amin(-1) if x.numel() else x


def _seen(x: Tensor, bits: int, drop_bits: int, where: str) -> Tensor:
    """Refuses signs that a comparison of these bits would get wrong."""
    if bits + drop_bits >= _ALL_BITS:
        return x
    most = (((1 << bits - 1) - 1) << drop_bits) - (1 if drop_bits else 0)
    return check(x, f"{where} with {bits} bits", -most, most)


def _ordered(x: Tensor, bits: int, drop_bits: int, where: str) -> Tensor:
    """Refuses rows whose order keys of these bits would get wrong."""
    if bits < _ALL_BITS or drop_bits:
        most = ((1 << bits - 1) - (2 if drop_bits else 0)) << drop_bits
        check(_spread(x), f"{where} with {bits} bits", 0, most - 1)
    return x
