"""One party of a session. The work is done in the Rust core; here shapes are checked and errors are translated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from cloister.crypto import native
from cloister.crypto.engine import checks
from cloister.crypto.engine.ahead import Cost, Costs, Demand, ExpertLayer, Layer, LinearLayer, demanded
from cloister.crypto.engine.checks import last, same_shape, whole
from cloister.crypto.engine.settings import Settings
from cloister.crypto.engine.shares import PRIME, VALUE_BOUND, Bits, Shares, encode
from cloister.errors import InvalidParameter, SessionOver
from cloister.progress import SILENT, Progress

Role = Literal["client", "server"]
ROLES = ("client", "server")
EXACT_BITS = 40  # compares every number inside the bound exactly
SCORE_BITS = 20  # enough for probabilities and gate scores


class Listener:
    """Waits for clients at an address; port 0 lets the system choose, `port` tells."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        checks.text(host, "host")
        whole(port, "port", 0, 65535)
        with native.translated():
            self._native = native.load().Listener(host, port)

    @property
    def port(self) -> int:
        """The port it listens at."""
        return int(self._native.port)

    def accept(self, settings: Settings, seconds: float = 60.0) -> Party:
        """The session with the next client, as its server. A stranger who cannot prove the key in `settings` ends the
        call with `Unauthorised`, or with a time-out if it says nothing: a server calls this in a loop."""
        checks.real(seconds, "seconds", 0, math.inf)
        with native.translated():
            return Party(self._native.accept(float(seconds), settings.as_native()), "server", settings)


class Party:
    """One party of a session."""

    def __init__(self, inner: Any, role: Role, settings: Settings) -> None:
        self._native = inner
        self.role: Role = role
        self.fraction = settings.fraction

    @classmethod
    def connect(cls, host: str, port: int, settings: Settings) -> Self:
        """A session with the server at `host:port`, as its client."""
        checks.text(host, "host")
        whole(port, "port", 1, 65535)
        with native.translated(connecting=True):
            return cls(native.load().Party.connect(host, port, settings.as_native()), "client", settings)

    def __repr__(self) -> str:
        return f"Party(role={self.role!r})"

    # ---- the session ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye. What follows fails with `SessionOver`; closing what is over already does nothing."""
        with suppress(SessionOver), native.translated():
            self._native.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._native.abandon()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count every byte, round and second of the block under `name`."""
        checks.text(name, "name")
        with native.translated():
            self._native.enter(name)
        try:
            yield
        finally:
            self._native.leave_if_open()

    def costs(self) -> Costs:
        """What every step cost so far, and the sums `online`, `preprocess`, `set_up` and `total`."""
        with native.translated():
            return Costs(Cost(*row) for row in self._native.costs())

    def reset_costs(self) -> None:
        """Forget the costs and the demand counted so far."""
        with native.translated():
            self._native.reset_costs()

    def meet(self) -> None:
        """Wait until the peer stands at the same point."""
        with native.translated():
            self._native.meet()

    # ---- work done ahead ------------------------------------------------------------------------------------------

    def demand(self) -> Demand:
        """The correlations that steps took since the costs were reset, the same at both parties."""
        with native.translated():
            return Demand(*self._native.demand())

    def stored(self) -> Demand:
        """The correlations that are there for steps to take."""
        with native.translated():
            return Demand(*self._native.stored())

    @property
    def started_over(self) -> str | None:
        """Why both parties threw away what their stores held when they met, if they did."""
        with native.translated():
            reason: str | None = self._native.started_over()
        return reason

    def preprocess(self, demand: Demand, *, progress: Progress = SILENT) -> None:
        """Make correlations until `demand` is there; steps then need not wait for them. With a store they last."""
        row = demanded(demand)
        with progress.task("Making correlations", total=demand.total, unit="items") as task:
            done: dict[str, int] = {}

            def tell(kind: str, there: int, wanted: int) -> None:
                now = min(there, wanted)
                task.advance(now - done.get(kind, 0))
                done[kind] = now

            with native.translated():
                self._native.preprocess(row, tell)

    def reserve(self, demand: Demand) -> None:
        """Burn in the store what a computation of this demand will take, in one round, so that its steps need not stop
        for the disk one by one. What they do not use is lost at the end of the session."""
        row = demanded(demand)
        with native.translated():
            self._native.reserve(row)

    def prepare(
        self,
        layers: Sequence[Layer],
        weights: Sequence[Any] | Callable[[int], Any] | None = None,
        *,
        passes: int = 1,
        progress: Progress = SILENT,
    ) -> None:
        """Make linear layers ahead, `passes` of each, so that `matmul` and `batched_matmul` with `prepared=name` cost
        one message and a product in the clear. Say them in the order of use: with a store a layer that is used out of
        its order burns those before it. The server passes the weights as those methods take them, one for each layer,
        or a function that fetches them by number; the client None. What is there already is not made again."""

        def fetch(number: int) -> Any:
            given = weights(number) if callable(weights) else weights[number]  # type: ignore[index]
            layer = layers[number]
            if isinstance(layer, ExpertLayer):
                return checks.expert_weights(given, layer.experts, layer.columns, layer.outputs)
            return checks.matrix(given, layer.columns, layer.outputs, layer.weight_bits)

        whole(passes, "passes")
        said = [_layer(layer) for layer in layers]
        if weights is not None and not callable(weights) and len(weights) != len(layers):
            raise InvalidParameter(f"Weights of {len(weights)} layers for {len(layers)} layers.")
        with progress.task("Preparing linear layers", total=passes * len(layers), unit="layers") as task:

            def tell(_: str, there: int, wanted: int) -> None:
                task.advance(min(there, wanted) - task.done)

            with native.translated():
                self._native.prepare(said, passes, None if weights is None else fetch, tell)

    def prepared(self, layer: Layer) -> int:
        """How many preparations of a layer are left."""
        said = _layer(layer)
        with native.translated():
            return int(self._native.prepared(said))

    @contextmanager
    def _made_now_unless_prepared(self, layer: Layer | None) -> Iterator[None]:
        """Count a product that asked for a preparation and found none under the step `made now`."""
        if layer is None or self.prepared(layer):
            yield
        else:
            with self.step("made now"):
                yield

    # ---- values in and out ----------------------------------------------------------------------------------------

    def share(self, values: NDArray[np.float64] | None, *, owner: Role, shape: Sequence[int] | None = None) -> Shares:
        """The owner's numbers as shares. The other party passes None and the shape."""
        words: NDArray[np.int64] | None = None
        if values is not None:
            words = _signed(encode(values, self.fraction))
            shape = words.shape
        return self._share(words, owner, shape)

    def share_integers(
        self, values: NDArray[np.int64] | None, *, owner: Role, shape: Sequence[int] | None = None, fraction: int = 0
    ) -> Shares:
        """The owner's integers as shares with `fraction` fraction bits."""
        whole(fraction, "fraction", 0, 39)
        if values is not None:
            values = checks.integers(values, VALUE_BOUND, "The values")
            shape = values.shape
        return self._share(values, owner, shape, fraction)

    def _share(
        self, values: NDArray[np.int64] | None, owner: Role, shape: Sequence[int] | None, fraction: int | None = None
    ) -> Shares:
        if shape is None:
            raise InvalidParameter("The party that does not own the values must say their shape.")
        shape = checks.shape_of(shape)
        checks.one_of(owner, "owner", ROLES)
        with native.translated():
            out = self._native.share(owner, values, math.prod(shape))
        return Shares(_words(out).reshape(shape), self.fraction if fraction is None else fraction)

    def reveal(self, x: Shares, *, to: Role | Literal["both"]) -> NDArray[np.float64] | None:
        """Open values: this reveals them. The party that is not to see them gets None."""
        integers = self.reveal_integers(x, to=to)
        return None if integers is None else integers / float(1 << x.fraction)

    def reveal_integers(self, x: Shares, *, to: Role | Literal["both"]) -> NDArray[np.int64] | None:
        """Open values as the integers they are, the fraction bits included."""
        checks.one_of(to, "to", (*ROLES, "both"))
        with native.translated():
            out = self._native.reveal_to_both(x.data) if to == "both" else self._native.reveal_to(to, x.data)
        return None if out is None else np.frombuffer(out, dtype=np.int64).reshape(x.shape)

    def constant(self, values: NDArray[np.float64] | float, like: Shares) -> Shares:
        """Public numbers as shares of the shape and scale of `like`: the client holds them, the server holds zeros."""
        words = encode(values, like.fraction)
        try:
            words = np.broadcast_to(words, like.shape).copy()
        except ValueError:
            raise InvalidParameter(f"Numbers of shape {words.shape} do not fill {like!r}.", param="values") from None
        return Shares(words if self.role == "client" else np.zeros_like(words), like.fraction)

    # ---- products -------------------------------------------------------------------------------------------------

    def matmul(
        self,
        x: Shares,
        weights: NDArray[np.integer[Any]] | None,
        *,
        outputs: int,
        weight_bits: int = 16,
        prepared: str | None = None,
    ) -> Shares:
        """`x` (rows, columns) times the server's integer weights (columns, outputs), which add FRACTION_BITS to the
        scale. Off by at most one last place before truncation. `prepared` names the layer that `prepare` made. If none
        of this name and shape is left, or ever was, the product is computed as a whole and its cost stands under
        `made now`; a store with `when_empty="refuse"` refuses it."""
        rows, columns = checks.two(x)
        whole(outputs, "outputs", 1)
        whole(weight_bits, "weight_bits", 1, 24)
        given = None if weights is None else checks.matrix(weights, columns, outputs, weight_bits)
        layer = None if prepared is None else LinearLayer(prepared, rows, columns, outputs, weight_bits)
        with native.translated(), self._made_now_unless_prepared(layer):
            out = self._native.product(x.data, rows, columns, outputs, weight_bits, given, prepared)
        return Shares(_words(out).reshape(rows, outputs), x.fraction + self.fraction)

    def batched_matmul(
        self,
        x: Shares,
        weights: Sequence[NDArray[np.int16]] | None,
        *,
        outputs: Sequence[int],
        most_bytes: int | None = None,
        prepared: str | None = None,
    ) -> list[Shares]:
        """`x` (experts, tokens, columns) times each of the server's 16-bit weight arrays (experts, outputs, columns).
        Exact. Several arrays share one request. `most_bytes` bounds what travels, at the price of work at the server;
        both parties say the same. `prepared` as for `matmul`."""
        if len(x.shape) != 3:
            raise InvalidParameter(f"Shares of shape {x.shape} where (experts, tokens, columns) was expected.")
        experts, tokens, columns = x.shape
        outputs = checks.outputs_of(outputs)
        if most_bytes is not None:
            whole(most_bytes, "most_bytes", 1)
        given = None if weights is None else checks.expert_weights(weights, experts, columns, outputs)
        layer = None if prepared is None else ExpertLayer(prepared, experts, tokens, columns, outputs, most_bytes)
        with native.translated(), self._made_now_unless_prepared(layer):
            results = self._native.batched_product(
                x.data, experts, tokens, columns, outputs, given, most_bytes, prepared
            )
        return [
            Shares(_words(share).reshape(experts, tokens, out), x.fraction + self.fraction)
            for share, out in zip(results, outputs, strict=True)
        ]

    def shared_matmul(self, x: Shares, y: Shares) -> Shares:
        """Products of pairs of shared matrices, (..., rows, columns) times (..., columns, outputs), in one round. Off
        by at most two last places before truncation."""
        if len(x.shape) < 2 or len(y.shape) < 2:
            raise InvalidParameter(f"Shapes {x.shape} and {y.shape} are not matrices.", advice="Reshape them first.")
        *batch, rows, columns = x.shape
        *other, inner, outputs = y.shape
        if batch != other or inner != columns:
            raise InvalidParameter(f"Shapes {x.shape} and {y.shape} cannot be multiplied.")
        count = math.prod(batch)
        with native.translated():
            out = self._native.shared_products(x.data, y.data, count, rows, columns, outputs)
        return Shares(_words(out).reshape(*batch, rows, outputs), x.fraction + y.fraction)

    # ---- arithmetic -----------------------------------------------------------------------------------------------

    def truncate(self, x: Shares, bits: int | None = None) -> Shares:
        """Drop fraction bits (down to the session's scale unless said otherwise), off by at most one last place."""
        bits = whole(x.fraction - self.fraction if bits is None else bits, "bits", 0, 40)
        with native.translated():
            return Shares(_words(self._native.truncate(x.data, bits)).reshape(x.shape), x.fraction - bits)

    def multiply(self, x: Shares, y: Shares) -> Shares:
        """Element by element; the scales add up."""
        same_shape(x, y)
        with native.translated():
            return Shares(_words(self._native.multiply(x.data, y.data)).reshape(x.shape), x.fraction + y.fraction)

    def square(self, x: Shares) -> Shares:
        """Element by element, at twice the scale."""
        with native.translated():
            return Shares(_words(self._native.square(x.data)).reshape(x.shape), 2 * x.fraction)

    def select(self, bits: Bits, x: Shares) -> Shares:
        """x where the bit is 1, else 0."""
        same_shape(bits, x)
        with native.translated():
            return Shares(_words(self._native.select(bits.data, x.data)).reshape(x.shape), x.fraction)

    # ---- functions ------------------------------------------------------------------------------------------------

    def relu(self, x: Shares) -> Shares:
        """max(x, 0)."""
        with native.translated():
            return Shares(_words(self._native.relu(x.data, x.fraction)).reshape(x.shape), x.fraction)

    def silu(self, x: Shares) -> Shares:
        """x / (1 + e^-x)."""
        with native.translated():
            return Shares(_words(self._native.silu(x.data, x.fraction)).reshape(x.shape), x.fraction)

    def gelu(self, x: Shares) -> Shares:
        """x times the normal distribution function of x."""
        with native.translated():
            return Shares(_words(self._native.gelu(x.data, x.fraction)).reshape(x.shape), x.fraction)

    def exp(self, x: Shares, *, octaves: int = 0, fraction: int | None = None) -> Shares:
        """e^x for x up to `octaves` * ln 2; what is 27 octaves below that becomes zero."""
        fraction = whole(x.fraction if fraction is None else fraction, "fraction", 0, 39)
        whole(octaves, "octaves", 0, 39)
        with native.translated():
            out = self._native.exponential(x.data, x.fraction, octaves, fraction)
        return Shares(_words(out).reshape(x.shape), fraction)

    def reciprocal(self, x: Shares, *, least: float, most: float, fraction: int | None = None) -> Shares:
        """1 / x for numbers known to lie between two positive powers of two."""
        low, high = checks.octaves(least, most, x.fraction)
        fraction = whole(x.fraction if fraction is None else fraction, "fraction", 0, 39)
        with native.translated():
            out = self._native.reciprocal(x.data, low, high, x.fraction + fraction)
        return Shares(_words(out).reshape(x.shape), fraction)

    def rsqrt(self, x: Shares, *, least: float, most: float) -> Shares:
        """1 / sqrt(x) for numbers known to lie between two positive powers of two."""
        if x.fraction % 2:
            raise InvalidParameter("A reciprocal square root needs an even number of fraction bits.")
        low, high = checks.octaves(least, most, x.fraction)
        with native.translated():
            out = self._native.rsqrt(x.data, low - low % 2, high, 1 << 16, x.fraction + x.fraction // 2)
        return Shares(_words(out).reshape(x.shape), x.fraction)

    def softmax(self, x: Shares, *, allowed: NDArray[np.bool_] | None = None) -> Shares:
        """Along the last axis. `allowed` is public: what it forbids gets zero."""
        flags: NDArray[np.uint8] | None = None
        if allowed is not None:
            mask = checks.array_of(allowed, "The flags in `allowed`", "b")
            try:
                flags = np.ascontiguousarray(np.broadcast_to(mask, x.shape), dtype=np.uint8)
            except ValueError:
                raise InvalidParameter(f"`allowed` of shape {mask.shape} for {x!r}.", param="allowed") from None
        length = last(x)
        with native.translated():
            out = self._native.softmax(x.data, length, flags, x.fraction)
        return Shares(_words(out).reshape(x.shape), x.fraction)

    def rms_norm(self, x: Shares, *, epsilon: float = 1e-5, rms_below: float = 16.0) -> Shares:
        """x / sqrt(mean(x^2) + epsilon) along the last axis. Every row's root mean square must be below `rms_below`."""
        return self._norm(x, epsilon, rms_below, False)

    def layer_norm(self, x: Shares, *, epsilon: float = 1e-5, rms_below: float = 16.0) -> Shares:
        """The same after the mean is taken off."""
        return self._norm(x, epsilon, rms_below, True)

    def _norm(self, x: Shares, epsilon: float, rms_below: float, centred: bool) -> Shares:
        checks.real(rms_below, "rms_below", 0, 128, open_below=True)
        checks.real(epsilon, "epsilon", 0, 2**-8)
        bits, units = max(0, math.ceil(math.log2(rms_below))), max(1, round(epsilon * 2**24))
        length = last(x)
        with native.translated():
            out = self._native.norm(x.data, length, x.fraction, bits, units, centred)
        return Shares(_words(out).reshape(x.shape), x.fraction)

    # ---- bits and order -------------------------------------------------------------------------------------------

    def less_than(self, x: Shares, y: Shares, *, bits: int = EXACT_BITS, drop_bits: int = 0) -> Bits:
        """[x < y]. With fewer `bits` it is cheaper: then |x - y| must be below 2^drop_bits * (2^(bits - 1) - 1) last
        places. `drop_bits` of the last bits are not compared: differences below 2^drop_bits may come out either way."""
        same_shape(x, y)
        _compared(bits, drop_bits)
        with native.translated():
            return _bits(self._native.less_than(x.data, y.data, bits, drop_bits), x.shape)

    def is_negative(self, x: Shares, *, bits: int = EXACT_BITS, drop_bits: int = 0) -> Bits:
        """[x < 0]."""
        _compared(bits, drop_bits)
        with native.translated():
            return _bits(self._native.is_negative(x.data, bits, drop_bits), x.shape)

    def equal(self, x: Shares, y: Shares) -> Bits:
        """[x = y], exactly."""
        same_shape(x, y)
        with native.translated():
            return _bits(self._native.equal(x.data, y.data), x.shape)

    def logical_and(self, a: Bits, b: Bits) -> Bits:
        """a and b."""
        same_shape(a, b)
        with native.translated():
            return _bits(self._native.bits_and(a.data, b.data), a.shape)

    def logical_or(self, a: Bits, b: Bits) -> Bits:
        """a or b."""
        same_shape(a, b)
        with native.translated():
            return _bits(self._native.bits_or(a.data, b.data), a.shape)

    def logical_not(self, a: Bits) -> Bits:
        """not a."""
        with native.translated():
            return _bits(self._native.bits_not(a.data), a.shape)

    def bits_to_values(self, a: Bits) -> Shares:
        """Bits as the integers 0 and 1 (no fraction bits)."""
        with native.translated():
            return Shares(_words(self._native.bits_to_field(a.data)).reshape(a.shape), 0)

    def maximum(self, x: Shares, *, bits: int = EXACT_BITS, drop_bits: int = 0) -> Shares:
        """The largest along the last axis."""
        _compared(bits, drop_bits)
        length = last(x)
        with native.translated():
            out = self._native.maximum(x.data, length, bits, drop_bits)
        return Shares(_words(out).reshape(x.shape[:-1]), x.fraction)

    def top_k_mask(self, x: Shares, k: int, *, bits: int = SCORE_BITS, drop_bits: int = 0) -> Bits:
        """[among the k largest along the last axis]; exactly k are chosen, among equals the earlier. Values of a row
        must differ by less than 2^drop_bits * (2^(bits - 1) - 1) last places: 128 at the defaults."""
        _compared(bits, drop_bits)
        length = last(x)
        whole(k, "k", 1, length)
        with native.translated():
            return _bits(self._native.top_k_mask(x.data, length, k, bits, drop_bits), x.shape)

    def dispatch(self, x: Shares, slots: int, *, bits: int = SCORE_BITS, drop_bits: int = 0) -> Shares:
        """For each row the 0/1 matrix (slots, length) whose i-th line picks the i-th largest value (no fraction
        bits): what sends a token to a slot of an expert."""
        _compared(bits, drop_bits)
        length = last(x)
        whole(slots, "slots", 1, length)
        with native.translated():
            out = self._native.dispatch_ranks(x.data, length, slots, bits, drop_bits)
        return Shares(_words(out).reshape(*x.shape[:-1], slots, x.shape[-1]), 0)


def _words(raw: Any) -> NDArray[np.uint64]:
    return np.frombuffer(raw, dtype=np.uint64)


def _bits(raw: Any, shape: tuple[int, ...]) -> Bits:
    return Bits(np.frombuffer(raw, dtype=np.uint8).reshape(shape))


def _signed(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    integers = words.astype(np.int64)
    return np.ascontiguousarray(np.where(integers > PRIME // 2, integers - PRIME, integers))


def _compared(bits: int, drop_bits: int) -> None:
    whole(bits, "bits", 1, EXACT_BITS + 1)
    whole(drop_bits, "drop_bits", 0, EXACT_BITS)


def _layer(layer: Layer) -> tuple[Any, ...]:
    if not isinstance(layer, LinearLayer | ExpertLayer):
        raise InvalidParameter(f"Layers are LinearLayer or ExpertLayer, not {checks.kind_of(layer)}.", param="layers")
    return layer.as_native()
