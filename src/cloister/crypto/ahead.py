"""What a computation costs and what it needs made ahead: costs by step and phase, correlations, linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Literal

from cloister.crypto.checks import kind_of, outputs_of, text, whole
from cloister.errors import InvalidParameter

Phase = Literal["set up", "preprocess", "online"]


@dataclass(frozen=True)
class Cost:
    """What one named step cost this party, and when: once a session, ahead, or while the input waited."""

    step: str
    bytes_sent: int
    bytes_received: int
    messages_sent: int
    rounds: int
    seconds: float
    phase: Phase | Literal["total"] = "online"

    @property
    def bytes(self) -> int:
        """In both directions."""
        return self.bytes_sent + self.bytes_received


class Costs(tuple[Cost, ...]):
    """The costs of every step, with their sums: `set_up`, `preprocess` and `online` make the `total`."""

    __slots__ = ()

    @property
    def set_up(self) -> Cost:
        """The hello, the keys, base transfers: once a session."""
        return self._sum("set up")

    @property
    def preprocess(self) -> Cost:
        """What was made ahead."""
        return self._sum("preprocess")

    @property
    def online(self) -> Cost:
        """What had to wait for the input, with what a step had to make because nothing was there."""
        return self._sum("online")

    @property
    def total(self) -> Cost:
        """Everything."""
        return self._sum("total")

    def _sum(self, phase: Phase | Literal["total"]) -> Cost:
        steps = [c for c in self if phase in (c.phase, "total")]
        return Cost(
            phase,
            sum(c.bytes_sent for c in steps),
            sum(c.bytes_received for c in steps),
            sum(c.messages_sent for c in steps),
            sum(c.rounds for c in steps),
            sum(c.seconds for c in steps),
            phase,
        )


@dataclass(frozen=True)
class Demand:
    """How many correlations a computation takes. Run it once and ask `Party.demand`; `demand * 9` serves nine."""

    pads_from_client: int = 0  # random 1-of-2 transfers that the client sends
    pads_from_server: int = 0
    pads16_from_client: int = 0  # random 1-of-16 transfers that the client sends
    pads16_from_server: int = 0
    triples: int = 0  # for products of shares

    def __post_init__(self) -> None:
        for field in fields(self):
            whole(getattr(self, field.name), field.name, 0, (1 << 63) - 1)

    def __add__(self, other: Any) -> Demand:
        demanded(other)
        return Demand(*(a + b for a, b in zip(self.row(), other.row(), strict=True)))

    def __mul__(self, times: int) -> Demand:
        times = whole(times, "times")
        return Demand(*(n * times for n in self.row()))

    __rmul__ = __mul__

    def row(self) -> list[int]:
        """The counts in the order of the core."""
        return [int(n) for n in astuple(self)]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.row())


def demanded(demand: Any) -> list[int]:
    """The counts of a demand, in the order of the core."""
    if not isinstance(demand, Demand):
        raise InvalidParameter(
            f"`demand` must be a Demand, not {kind_of(demand)}.",
            advice="Run the computation once and ask Party.demand(), or name the counts: Demand(triples=1000).",
            param="demand",
        )
    return demand.row()


@dataclass(frozen=True)
class LinearLayer:
    """A product with one matrix of the server's, (rows, columns) times (columns, outputs), with
    weights (columns, outputs), to be prepared. The name tells it from others of its shape; both parties say the
    same."""

    name: str
    rows: int
    columns: int
    outputs: int
    weight_bits: int = 16

    def as_native(self) -> tuple[Any, ...]:
        """The tuple that the Rust core reads."""
        rows, columns, outputs = (
            whole(value, name, 1)
            for value, name in ((self.rows, "rows"), (self.columns, "columns"), (self.outputs, "outputs"))
        )
        bits = whole(self.weight_bits, "weight_bits", 1, 24)
        return text(self.name, "name"), rows, columns, [outputs], bits, None, None


@dataclass(frozen=True)
class ExpertLayer:
    """A product with experts' own matrices, (experts, tokens, columns) times one (experts, outputs, columns) for each
    of `outputs`, to be prepared. `most_bytes` bounds what the preparation moves."""

    name: str
    experts: int
    tokens: int
    columns: int
    outputs: Sequence[int]
    most_bytes: int | None = None

    def as_native(self) -> tuple[Any, ...]:
        """The tuple that the Rust core reads."""
        experts, tokens, columns = (
            whole(value, name, 1)
            for value, name in ((self.experts, "experts"), (self.tokens, "tokens"), (self.columns, "columns"))
        )
        most = None if self.most_bytes is None else whole(self.most_bytes, "most_bytes", 1)
        return text(self.name, "name"), tokens, columns, outputs_of(self.outputs), 16, experts, most


Layer = LinearLayer | ExpertLayer
Weights = Sequence[Any] | Callable[[int], Any] | None  # of layers: one for each, or who fetches them by number


def layer_said(layer: Any) -> tuple[Any, ...]:
    """The tuple that the Rust core reads, of a layer."""
    if not isinstance(layer, LinearLayer | ExpertLayer):
        raise InvalidParameter(f"Layers are LinearLayer or ExpertLayer, not {kind_of(layer)}.", param="layers")
    return layer.as_native()


def layers_said(layers: Sequence[Layer], weights: Weights, passes: int) -> list[tuple[Any, ...]]:
    """The tuples of layers to be prepared."""
    whole(passes, "passes")
    said = [layer_said(layer) for layer in layers]
    if weights is not None and not callable(weights) and len(weights) != len(layers):
        raise InvalidParameter(f"Weights of {len(weights)} layers for {len(layers)} layers.")
    return said
