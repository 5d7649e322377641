"""Both parties of a workload as processes over TLS on loopback, and what they measured.

A workload is a function `(party, quick) -> Outcome` that both processes run. It repeats its operation between two
meetings of the parties, so the seconds of a run are those of the slower party.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloister.crypto import native
from cloister.crypto.engine import Cost, Identity, Listener, Party, Settings
from cloister.errors import PeerDied, PeerTimeout

SECONDS = 900.0
AHEAD = ("transfers", "triples", "base", "extension")  # words in the names of steps that can be made ahead


@dataclass
class Outcome:
    """What one party saw: seconds of each run, the costs of the last, the largest error, and whatever else counts."""

    seconds: list[float]
    costs: list[Cost]
    error: float | None = None
    extra: dict[str, float] = field(default_factory=dict)

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
        return float(sum(c.bytes_sent + c.bytes_received for c in self.costs))

    @property
    def rounds(self) -> float:
        """Times that this party waited for the other."""
        return float(sum(c.rounds for c in self.costs))

    @property
    def ahead_seconds(self) -> float:
        """Seconds in steps that do not depend on the input."""
        return sum(c.seconds for c in self.costs if any(word in c.step for word in AHEAD))

    @property
    def ahead_bytes(self) -> float:
        """Bytes in steps that do not depend on the input."""
        steps = [c for c in self.costs if any(word in c.step for word in AHEAD)]
        return float(sum(c.bytes_sent + c.bytes_received for c in steps))


Workload = Callable[[Party, bool], Outcome]


def timed(party: Party, operation: Callable[[], Any], *, repeats: int, warm_up: int = 1) -> tuple[Outcome, Any]:
    """Run an operation several times; the result is that of the last run."""
    seconds, result = [], None
    for run in range(warm_up + repeats):
        party.meet()
        party.reset_costs()
        started = time.perf_counter()
        result = operation()
        party.meet()
        if run >= warm_up:
            seconds.append(time.perf_counter() - started)
    return Outcome(seconds, party.costs()), result


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
                Settings(identity=client, peer=server.fingerprint, quiet_seconds=SECONDS, **settings),
            ) as party:
                outcome = workload(party, quick)
            _told(mine, child)
            return outcome
        finally:
            child.join(10)
            if child.is_alive():
                child.kill()


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
        identity = Identity.load(folder / "server")
        with listener.accept(Settings(identity=identity, peer=peer, quiet_seconds=SECONDS, **settings), 60) as party:
            workload(party, quick)
        pipe.send(True)
    except BaseException:
        pipe.send(traceback.format_exc())
