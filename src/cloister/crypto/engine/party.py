"""The session of one party: how it begins and ends, what it costs, what is made ahead. Its steps lie in `steps`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from cloister.crypto import checks, native
from cloister.crypto.ahead import Cost, Costs, Demand, ExpertLayer, Layer, Weights, demanded, layer_said, layers_said
from cloister.crypto.checks import ROLES, whole
from cloister.crypto.computer import Role
from cloister.crypto.engine.settings import Settings
from cloister.crypto.engine.steps import Steps
from cloister.errors import InvalidParameter, SessionOver
from cloister.progress import SILENT, Progress


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


class Party(Steps):
    """One party of a session. Everything it computes is described at `cloister.crypto.computer.Computer`."""

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

    def plays(self, role: Role) -> bool:
        """Whether this is that party."""
        checks.one_of(role, "role", ROLES)
        return role == self.role

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
        checks.text(name, "name")
        with native.translated():
            self._native.enter(name)
        try:
            yield
        finally:
            self._native.leave_if_open()

    def costs(self) -> Costs:
        with native.translated():
            return Costs(Cost(*row) for row in self._native.costs())

    def reset_costs(self) -> None:
        with native.translated():
            self._native.reset_costs()

    def meet(self) -> None:
        with native.translated():
            self._native.meet()

    # ---- work done ahead ------------------------------------------------------------------------------------------

    def demand(self) -> Demand:
        with native.translated():
            return Demand(*self._native.demand())

    def stored(self) -> Demand:
        with native.translated():
            return Demand(*self._native.stored())

    @property
    def started_over(self) -> str | None:
        with native.translated():
            reason: str | None = self._native.started_over()
        return reason

    def preprocess(self, demand: Demand, *, progress: Progress = SILENT) -> None:
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
        row = demanded(demand)
        with native.translated():
            self._native.reserve(row)

    def prepare(
        self, layers: Sequence[Layer], weights: Weights = None, *, passes: int = 1, progress: Progress = SILENT
    ) -> None:
        def fetch(number: int) -> Any:
            found = weights(number) if callable(weights) else weights[number]  # type: ignore[index]
            layer = layers[number]
            if isinstance(layer, ExpertLayer):
                return self._expert_weights(found, layer.experts, layer.columns, layer.outputs)
            return self._weights(found, layer.columns, layer.outputs, layer.weight_bits)

        said = layers_said(layers, weights, passes)
        if weights is None and self.role == "server":
            raise InvalidParameter("The server prepares layers with its weights.", param="weights")
        bring: Callable[[int], Any] | None = None if weights is None else fetch
        if weights is not None and not callable(weights):
            # All of them, before anything is sent. What a function brings is checked when it comes, and then an error
            # ends the session.
            bring = dict(enumerate(fetch(number) for number in range(len(layers)))).__getitem__
        with progress.task("Preparing linear layers", total=passes * len(layers), unit="layers") as task:

            def tell(_: str, there: int, wanted: int) -> None:
                task.advance(min(there, wanted) - task.done)

            with native.translated():
                self._native.prepare(said, passes, bring, tell)

    def prepared(self, layer: Layer) -> int:
        said = layer_said(layer)
        with native.translated():
            return int(self._native.prepared(said))
