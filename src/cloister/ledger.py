"""The ledger: what left this machine, to whom, how much, and what it reveals.

The transport fills it (`cloister.serving.transport`), not the modes, so that nothing can leave without an entry.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Entry:
    """One exchange with one party. `bytes_*` count HTTP heads and bodies as they went over the wire."""

    step: str  # what it was for: "completion", "embedding", "handshake", ...
    party: str  # host:port of the other side
    reveals: str = ""  # one sentence: what the other side can read from it
    bytes_sent: int = 0
    bytes_received: int = 0
    rounds: int = 1
    seconds: float = 0.0
    request: str = ""  # id of the user's request that caused it
    note: str = ""  # "joined a running request", "cancelled", "failed: ..."
    started: float = field(default_factory=time.time)

    def as_dict(self) -> dict[str, Any]:
        """The entry as plain data, for JSON."""
        return asdict(self)


class Ledger:
    """A bounded, thread-safe list of entries with running totals that are never dropped."""

    def __init__(self, keep: int = 10_000) -> None:
        self._entries: list[Entry] = []
        self._keep = keep
        self._lock = threading.Lock()
        self._closed = {"bytes_sent": 0, "bytes_received": 0, "rounds": 0, "seconds": 0.0, "entries": 0}

    def open(self, step: str, party: str, reveals: str = "", request: str = "") -> Entry:
        """Add an entry that the transport goes on updating while bytes move."""
        entry = Entry(step=step, party=party, reveals=reveals, request=request)
        with self._lock:
            self._entries.append(entry)
            if len(self._entries) > self._keep:
                self._retire(self._entries.pop(0))
        return entry

    def _retire(self, entry: Entry) -> None:
        for name in ("bytes_sent", "bytes_received", "rounds", "seconds"):
            self._closed[name] += getattr(entry, name)
        self._closed["entries"] += 1

    def __iter__(self) -> Iterator[Entry]:
        with self._lock:
            return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def totals(self) -> dict[str, float]:
        """Bytes, rounds, seconds and entries since the ledger began."""
        with self._lock:
            totals = dict(self._closed)
            for entry in self._entries:
                for name in ("bytes_sent", "bytes_received", "rounds", "seconds"):
                    totals[name] += getattr(entry, name)
                totals["entries"] += 1
        return totals

    def __str__(self) -> str:
        totals = self.totals()
        lines = [
            f"{entry.step:<12} to {entry.party:<22} {entry.bytes_sent:>9} B out {entry.bytes_received:>9} B in "
            f"{entry.rounds:>3} rounds {entry.seconds:8.3f} s  {entry.reveals}"
            + (f" ({entry.note})" if entry.note else "")
            for entry in self
        ]
        lines.append(
            f"{'total':<12}    {'':<22} {totals['bytes_sent']:>9} B out {totals['bytes_received']:>9} B in "
            f"{totals['rounds']:>3} rounds {totals['seconds']:8.3f} s"
        )
        return "\n".join(lines)
