"""The ledger for the page: what there is, and what changes, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from cloister.ledger import Entry, Ledger
from cloister.serving.http import sse, sse_comment

_SHOWN = 200  # entries a page gets at first; totals always count all
_HEARTBEAT = 10.0


class Feed:
    """Gives entries numbers, so that a page can tell a new one from one whose bytes still move."""

    def __init__(self, ledger: Ledger, *, interval: float = 0.25) -> None:
        self._ledger = ledger
        self._interval = interval
        self._numbers: dict[int, tuple[int, Entry]] = {}  # by identity; the entry is kept so that it stays unique
        self._next = 1

    def snapshot(self, most: int = _SHOWN) -> dict[str, Any]:
        """The latest entries and all totals."""
        return {"entries": [self._numbered(entry) for entry in list(self._ledger)[-most:]], "totals": self._totals()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """A snapshot, then every change. Looks at the ledger only while somebody listens."""
        seen: dict[int, tuple[Any, ...]] = {}
        quiet = 0.0
        while True:
            changed = []
            for entry in list(self._ledger)[-_SHOWN:]:
                state = (entry.bytes_sent, entry.bytes_received, entry.rounds, entry.seconds, entry.note)
                number = self._number(entry)
                if seen.get(number) != state:
                    seen[number] = state
                    changed.append(self._numbered(entry))
            if changed or quiet == 0.0:
                yield sse({"entries": changed, "totals": self._totals()})
                quiet = 0.0
            elif quiet >= _HEARTBEAT:
                yield sse_comment("nothing new")
                quiet = self._interval
            quiet += self._interval
            await asyncio.sleep(self._interval)

    def _number(self, entry: Entry) -> int:
        found = self._numbers.get(id(entry))
        if found is None:
            if len(self._numbers) > 4 * _SHOWN:
                alive = {id(known) for known in list(self._ledger)[-_SHOWN:]}
                self._numbers = {key: value for key, value in self._numbers.items() if key in alive}
            found = self._numbers[id(entry)] = (self._next, entry)
            self._next += 1
        return found[0]

    def _numbered(self, entry: Entry) -> dict[str, Any]:
        return {"number": self._number(entry), **entry.as_dict()}

    def _totals(self) -> dict[str, float]:
        return self._ledger.totals()
