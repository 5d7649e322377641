"""Both parties of a workload as processes over TLS on loopback, and what they measured.

A workload is a function `(party, quick) -> Outcome` that both processes run. It repeats its operation between two
meetings of the parties, so the seconds of a run are those of the slower party.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloister.crypto import native
from cloister.crypto.ahead import Layer
from cloister.crypto.engine import Costs, Identity, Listener, Party, Settings, Store
from cloister.errors import PeerDied, PeerTimeout

SECONDS = 900.0
MODEL = hashlib.sha256(b"the weights of the measurements").digest()  # always the same, and stores are not kept


@dataclass
class Outcome:
    """What one party saw: seconds of each run and the costs of the last, with nothing made ahead; the same with
    everything made ahead and stored, and what making it took; the largest error."""

    seconds: list[float]
    costs: Costs
    online_seconds: float
    online_costs: Costs
    ahead_seconds: float
    ahead_costs: Costs
    error: float | None = None

    @property
    def median(self) -> float:
        """The median run."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the range of the runs."""
        return (max(self.seconds) - min(self.seconds)) / 2

    @property
    def bytes(self) -> float:
        """Bytes in both directions."""
        return float(self.costs.total.bytes)

    @property
    def online_bytes(self) -> float:
        """Bytes in both directions that have to wait for the input."""
        return float(self.online_costs.online.bytes)

    @property
    def rounds(self) -> float:
        """Times that this party waited for the other."""
        return float(self.costs.total.rounds)


Workload = Callable[[Party, bool], Outcome]


@dataclass(frozen=True)
class Ahead:
    """The linear layers of an operation: what is prepared, and the operation that uses it."""

    layers: Sequence[Layer]
    weights: Sequence[Any] | None
    operation: Callable[[], Any]


def timed(
    party: Party, operation: Callable[[], Any], *, repeats: int, warm_up: int = 1, ahead: Ahead | None = None
) -> tuple[Outcome, Any]:
    """Run an operation several times as a whole, the result being that of the last run; then once more with everything
    that does not need its input made ahead and stored."""

    def once(operation: Callable[[], Any]) -> tuple[float, Any]:
        party.meet()
        party.reset_costs()
        started = time.perf_counter()
        result = operation()
        party.meet()
        return time.perf_counter() - started, result

    runs = [once(operation) for _ in range(warm_up + repeats)]
    costs, demand = party.costs(), party.demand()

    def prepare() -> None:
        party.preprocess(demand if ahead is None else type(demand)())
        if ahead is not None:
            party.prepare(ahead.layers, ahead.weights)

    ahead_seconds, _ = once(prepare)
    ahead_costs = party.costs()
    if ahead is None:
        party.reserve(demand)
    online_seconds, _ = once(operation if ahead is None else ahead.operation)
    seconds = [taken for taken, _ in runs[warm_up:]]
    outcome = Outcome(seconds, costs, online_seconds, party.costs(), ahead_seconds, ahead_costs)
    return outcome, runs[-1][1]


def measure(workload: Workload, *, quick: bool, **settings: Any) -> Outcome:
    """Run a workload between two new processes' worth of parties; this process is the client."""
    native.load()  # says what is missing, before anything is started
    with tempfile.TemporaryDirectory(prefix="cloister-bench-") as name:
        folder = Path(name)
        client, server = Identity.create(folder / "client"), Identity.create(folder / "server")
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        child = context.Process(
            target=_serve, args=(theirs, folder, client.fingerprint, workload, quick, settings), daemon=True
        )
        child.start()
        try:
            port = _told(mine, child)
            with Party.connect(
                "127.0.0.1",
                int(port),
                _settings(folder / "client", client, server.fingerprint, settings),
            ) as party:
                outcome = workload(party, quick)
            _told(mine, child)
            return outcome
        finally:
            child.join(10)
            if child.is_alive():
                child.kill()


def _settings(folder: Path, identity: Identity, peer: str, settings: dict[str, Any]) -> Settings:
    """One party's settings, with a store so that work done ahead is read from disk as it would be."""
    settings = {"model": MODEL, "store": Store(folder / "store"), **settings}
    return Settings(identity=identity, peer=peer, quiet_seconds=SECONDS, **settings)


def _told(pipe: Any, child: Any) -> Any:
    deadline = time.monotonic() + SECONDS
    while not pipe.poll(0.2):
        if not child.is_alive() and not pipe.poll(0):
            raise PeerDied("The server's process ended without a word.")
        if time.monotonic() > deadline:
            raise PeerTimeout(f"The server's process said nothing for {SECONDS:.0f} s.")
    told = pipe.recv()
    if isinstance(told, str):
        raise PeerDied(f"The server's process failed: {told.strip().splitlines()[-1]}")
    return told


def _serve(pipe: Any, folder: Path, peer: str, workload: Workload, quick: bool, settings: dict[str, Any]) -> None:
    try:
        listener = Listener()
        pipe.send(listener.port)
        own = _settings(folder / "server", Identity.load(folder / "server"), peer, settings)
        with listener.accept(own, 60) as party:
            workload(party, quick)
        pipe.send(True)
    except BaseException:
        pipe.send(traceback.format_exc())
