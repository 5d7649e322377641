"""Running requests: who waits for which, when an identical request joins, and when work is cancelled.

The stock OpenAI client sends a request up to three times by itself, without an idempotency key. A private answer must
not be computed, paid and shown to the server three times, so a repeated request joins the run of the first one:

* a run that nobody waits for any more (its client timed out) is joined by any identical request: this is the retry;
* a request that says it is a retry (`x-stainless-retry-count` above 0) joins an identical run that is under way, or
  that ended within the last `grace` seconds;
* a request whose answer is determined (temperature 0, or a seed) joins an identical run that is under way.

So two users who ask the same with random sampling still get two samples. When the last listener leaves, a stream that
has begun is cancelled at once (a client never retries those); anything else is kept for `grace` seconds, because the
client's own retry comes 0.4 to 1 s after it gave up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from cloister.errors import CloisterError, TooBusy
from cloister.ledger import Ledger
from cloister.serving.generation import Piece

log = logging.getLogger("cloister.gateway")


@dataclass(frozen=True)
class Event:
    """A piece of the answer with index `choice`."""

    choice: int
    piece: Piece


class Run:
    """One computation. Its events are kept until it is forgotten, so that a later listener gets all of them."""

    def __init__(self, key: str, request: str, deterministic: bool) -> None:
        self.key = key
        self.request = request
        self.deterministic = deterministic
        self.events: list[Event] = []
        self.result: Any = None  # of work that has no events
        self.done = False
        self.error: CloisterError | None = None
        self.listeners = 0
        self.answered = False  # somebody was given the whole answer
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def publish(self, event: Event) -> None:
        """Add an event and wake all listeners."""
        self.events.append(event)
        self._wake()

    def finish(self, error: CloisterError | None = None) -> None:
        """No further event will come."""
        self.error = error
        self.done = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, seen: int) -> None:
        """Return once there is more than `seen` events, or the end."""
        while len(self.events) <= seen and not self.done:
            await self._changed.wait()

    async def finished(self) -> None:
        """Return once the run is over."""
        while not self.done:
            await self._changed.wait()

    async def watch(self, heartbeat: float) -> AsyncIterator[Event | None]:
        """All events from the first; None whenever `heartbeat` seconds pass without one."""
        seen = 0
        while True:
            try:
                await asyncio.wait_for(self.changed(seen), heartbeat)
            except TimeoutError:
                yield None
                continue
            while seen < len(self.events):
                yield self.events[seen]
                seen += 1
            if self.done and seen == len(self.events):
                return


class Runs:
    """All runs of a gateway."""

    def __init__(self, ledger: Ledger, *, grace: float, most: int) -> None:
        self._ledger = ledger
        self._grace = grace
        self._most = most
        self._runs: dict[str, list[Run]] = {}
        self.joined = 0

    @property
    def running(self) -> int:
        """How many are under way."""
        return sum(not run.done for runs in self._runs.values() for run in runs)

    def enter(
        self,
        key: str,
        request: str,
        *,
        retry: bool,
        deterministic: bool,
        work: Callable[[Run], Awaitable[None]],
    ) -> Run:
        """The run that answers this request: one that exists, or a new one. Call `leave` afterwards."""
        run = self._find(key, retry, deterministic)
        if run is not None:
            run.listeners += 1
            self.joined += 1
            entry = self._ledger.open("joined", "this machine", "nothing was sent", request)
            entry.rounds, entry.note = 0, f"joined a running request ({run.request})"
            return run
        if self.running >= self._most:
            raise TooBusy(f"{self._most} requests are being answered.", advice="Try again in a while.")
        run = Run(key, request, deterministic)
        run.listeners = 1
        run.task = asyncio.create_task(self._work(run, work))
        self._runs.setdefault(key, []).append(run)
        return run

    def leave(self, run: Run, *, answered: bool, at_once: bool = False) -> None:
        """One listener less. `at_once`: its stream had begun, so no retry can come."""
        run.listeners -= 1
        run.answered |= answered
        if run.listeners:
            return
        if at_once and not run.done:
            self._cancel(run)
        else:
            asyncio.get_running_loop().call_later(self._grace, self._grace_is_over, run)

    async def close(self) -> None:
        """Cancel everything."""
        tasks = [run.task for runs in self._runs.values() for run in runs if run.task and not run.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, key: str, retry: bool, deterministic: bool) -> Run | None:
        runs = self._runs.get(key, [])
        for run in runs:
            if not run.listeners and not run.answered:
                return run
        for run in runs:
            if retry or (deterministic and not run.done):
                return run
        return None

    async def _work(self, run: Run, work: Callable[[Run], Awaitable[None]]) -> None:
        error: CloisterError | None = None
        try:
            await work(run)
        except asyncio.CancelledError:
            error = CloisterError("The request was cancelled.")
            raise
        except BaseException as exc:
            error = _ours(exc)
        finally:
            run.finish(error)
            if error is not None and not left_machine(self._ledger, run.request):
                self._forget(run)  # a retry may try again: the server has seen nothing

    def _grace_is_over(self, run: Run) -> None:
        if run.listeners:
            return
        if not run.done:
            self._cancel(run)
        self._forget(run)

    def _cancel(self, run: Run) -> None:
        self._forget(run)
        if run.task is not None:
            run.task.cancel()

    def _forget(self, run: Run) -> None:
        runs = self._runs.get(run.key, [])
        if run in runs:
            runs.remove(run)
        if not runs:
            self._runs.pop(run.key, None)


def left_machine(ledger: Ledger, request: str) -> bool:
    """Whether anything of this request was sent, as the ledger saw it."""
    return any(entry.bytes_sent for entry in ledger if entry.request == request)


def _ours(exc: BaseException) -> CloisterError:
    """The error to tell; of several choices that failed together, the first."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    if isinstance(exc, CloisterError):
        return exc
    # Only its type: the message of a foreign exception may quote the prompt.
    log.error("a request failed: %s", type(exc).__name__)
    return CloisterError("The gateway failed on this request.", advice="Please report it with the steps that led here.")
