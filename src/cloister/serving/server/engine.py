"""Generation for many requests at once: they join and leave between two steps of one worker thread.

transformers' own continuous batching takes neither embeddings nor a seed, bias or penalty per request (docs/serving.md
has the comparison), so this module drives the model's plain `forward` itself. Each loop of the worker

    1. drops what was cancelled or is over time, and lets waiting requests into free rows,
    2. computes a bounded piece of the prompts that are not in the cache yet,
    3. computes one token for every running request in one batch,
    4. runs one waiting side job (a single forward pass for /v1/embeddings and the like).

All memory that requests can take is allocated at start: (max_slots + max_sessions) rows of max_model_len positions.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from cloister.errors import (
    BadTensor,
    CloisterError,
    InvalidParameter,
    NotFound,
    PeerTimeout,
    TooBusy,
    TooLarge,
)
from cloister.serving.server.loading import ServedModel
from cloister.serving.server.masks import Masks
from cloister.serving.server.memory import allocate
from cloister.serving.server.requests import CompletionRequest
from cloister.serving.server.sampling import Choice, Sampler
from cloister.serving.server.settings import ServerSettings

log = logging.getLogger("cloister.server")
T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """What a request hears from the engine: a token, or the error that ended it."""

    choice: Choice | None = None
    finish: str | None = None  # "stop" or "length" with the last token
    stop_id: int | None = None  # the stop_token_ids entry that ended it
    error: CloisterError | None = None

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.error is not None


Sink = Callable[[Event], None]


@dataclass
class _Session:
    id: str
    owner: str
    row: int
    length: int = 0
    used: float = 0.0
    busy: bool = True
    counts: Counter[int] = field(default_factory=Counter)
    seed: int | None = None
    generator: torch.Generator | None = None


@dataclass(eq=False)
class Generation:
    """One request inside the engine. `cancel` may be called from any thread, at any time, more than once."""

    request: CompletionRequest
    sampler: Sampler
    sink: Sink
    owner: str
    deadline: float
    session: _Session | None = None
    session_id: str = ""  # also set while the session is still waiting for its row
    row: int = -1
    length: int = 0  # positions of this row that are in the cache
    ids: list[int] = field(default_factory=list)  # inputs that are not in the cache yet, as ids ...
    vectors: torch.Tensor | None = None  # ... or as vectors
    produced: int = 0
    cancelled: bool = False
    wake: Callable[[], None] = lambda: None

    @property
    def pending(self) -> int:
        """Inputs that are not in the cache yet."""
        return len(self.ids) if self.vectors is None else int(self.vectors.shape[0])

    def cancel(self) -> None:
        """Stop the work; the row is free again before the next step."""
        self.cancelled = True
        self.wake()


class Engine:
    """The worker of one causal language model."""

    def __init__(self, served: ServedModel, settings: ServerSettings) -> None:
        self.served = served
        self.settings = settings
        self.max_len = served.shape.max_model_len
        self.dispatch: Callable[[list[tuple[Sink, Event]]], None] = _call_each
        self._embedding = served.model.get_input_embeddings()
        self._mask = Masks(served.model.config, served.dtype)
        self.slots, self.session_rows, self._cache = allocate(served, settings)
        self._free_slots = set(range(self.slots))
        self._free_session_rows = set(range(self.slots, self.slots + self.session_rows))
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._sessions: dict[str, _Session] = {}
        self._dead_rows: list[_Session] = []  # closed from another thread; the worker wipes and frees them
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._events: list[tuple[Sink, Event]] = []
        self._wakeup = threading.Condition()
        self._stopping = False
        self.steps = 0
        self._thread = threading.Thread(target=self._work, name=f"engine {served.name}", daemon=True)

    # Called from other threads ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    def stop(self) -> None:
        """End every request with an error and the worker after the step it is in."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=self.settings.shutdown_seconds)

    def submit(self, request: CompletionRequest, sink: Sink, *, owner: str = "") -> Generation:
        """Take a request in. `sink` then gets its events, the last of which has `last` set."""
        s = request.sampling
        wish = request.session
        end_ids = self.served.end_ids | frozenset(s.stop_token_ids)
        generation = Generation(
            request=request,
            sampler=Sampler(s, end_ids, frozenset(request.ids or ())),
            sink=sink,
            owner=owner,
            deadline=time.monotonic() + self.settings.request_seconds,
            ids=list(request.ids or ()),
            vectors=None if request.rows is None else torch.tensor(request.rows, dtype=self.served.dtype),
            wake=self._wake,
        )
        if self.served.loop == "token" and s.max_tokens > 1:
            raise InvalidParameter(
                "This model's embedding table is with its clients, so an answer has one token.",
                advice="Ask for max_tokens 1 and send the token's row in the next message.",
                param="max_tokens",
            )
        with self._wakeup:
            if self._stopping:
                raise TooBusy("The server is going down.", advice="Try again when it is back.")
            # Ownership first: the length of somebody else's session is nobody's business.
            session = self._owned(wish.id, owner) if wish is not None and wish.id != "new" else None
            self._check_length(request, session)
            if len(self._waiting) >= self.settings.max_waiting:
                raise TooBusy(f"{len(self._waiting)} requests are waiting.", advice="Try again soon.")
            if wish is not None and wish.id == "new":
                generation.session_id = secrets.token_urlsafe(24)
            elif session is not None:
                session.busy = True
                generation.session, generation.session_id = session, session.id
            self._waiting.append(generation)
            self._wakeup.notify()
        return generation

    def _check_length(self, request: CompletionRequest, session: _Session | None) -> None:
        before = session.length if session else 0
        total = before + request.length + request.sampling.max_tokens
        if before + request.length >= self.max_len:
            raise TooLarge(
                f"The prompt has {before + request.length} positions, the limit is {self.max_len - 1}.",
                advice="Send a shorter prompt.",
                param="prompt",
            )
        if total > self.max_len:
            raise InvalidParameter(
                f"Prompt and max_tokens together make {total} positions, the limit is {self.max_len}.",
                advice=f"Ask for at most {self.max_len - before - request.length} tokens.",
                param="max_tokens",
            )

    def _owned(self, identity: str, owner: str) -> _Session:
        session = self._sessions.get(identity)
        if session is None or not secrets.compare_digest(session.owner, owner):
            raise NotFound(
                "There is no such session, or it has expired.",
                advice="Open a new one with the whole prompt.",
                param="cloister.session",
            )
        if session.busy:
            raise InvalidParameter(
                "The session is still computing an answer.", advice="Wait for it.", param="cloister.session"
            )
        return session

    def close_session(self, identity: str, owner: str) -> None:
        """End a session and forget its cache."""
        with self._wakeup:
            session = self._owned(identity, owner)
            del self._sessions[identity]
            self._dead_rows.append(session)
            self._wakeup.notify()

    def run(self, job: Callable[[], T]) -> Future[T]:
        """Run a single forward pass between two steps."""
        future: Future[T] = Future()
        with self._wakeup:
            if self._stopping or len(self._jobs) >= self.settings.max_waiting:
                raise TooBusy("Too many requests are waiting.", advice="Try again soon.")
            self._jobs.append((job, future))
            self._wakeup.notify()
        return future

    def load(self) -> dict[str, int]:
        """How full it is."""
        return {
            "waiting": len(self._waiting) + len(self._jobs),
            "running": len(self._running),
            "slots": self.slots,
            "sessions": len(self._sessions),
            "session_rows": self.session_rows,
        }

    def _wake(self) -> None:
        with self._wakeup:
            self._wakeup.notify()

    # The worker -------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with torch.inference_mode():
            while True:
                with self._wakeup:
                    if not (self._waiting or self._running or self._jobs or self._dead_rows or self._stopping):
                        self._wakeup.wait(timeout=1.0)
                    stopping = self._stopping
                if stopping:
                    break
                try:
                    self._tend()
                    self._prefill()
                    self._decode()
                    self._side_job()
                except Exception as exc:  # a fault in this module must not leave clients waiting for ever
                    log.error("the engine failed on a step", exc_info=exc)
                    for generation in list(self._running):
                        self._leave(generation, CloisterError("The server failed on this request."))
                self._flush()
            self._end_all()

    def _end_all(self) -> None:
        gone = TooBusy("The server is going down.", advice="Try again when it is back.")
        for generation in list(self._running):
            self._leave(generation, gone)
        with self._wakeup:
            waiting, self._waiting = list(self._waiting), deque()
            jobs, self._jobs = list(self._jobs), deque()
        for generation in waiting:
            self._events.append((generation.sink, Event(error=gone)))
        for _, future in jobs:
            if future.set_running_or_notify_cancel():  # its request may have been cancelled meanwhile
                future.set_exception(gone)
        with contextlib.suppress(RuntimeError):  # the event loop may be closed already
            self._flush()

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self.dispatch(events)

    def _tend(self) -> None:
        """Drop what is over, admit what waits."""
        now = time.monotonic()
        late = PeerTimeout(f"The answer took longer than {self.settings.request_seconds:g} s.")
        for generation in list(self._running):
            if generation.cancelled:
                self._leave(generation, None)
            elif now > generation.deadline:
                self._leave(generation, late)
        with self._wakeup:
            idle = now - self.settings.session_idle_seconds
            for session in [one for one in self._sessions.values() if not one.busy and one.used < idle]:
                del self._sessions[session.id]
                self._dead_rows.append(session)
            while self._dead_rows:
                dead = self._dead_rows.pop()
                self._cache.clear(dead.row, dead.length)
                self._free_session_rows.add(dead.row)
            kept: deque[Generation] = deque()
            while self._waiting:
                generation = self._waiting.popleft()
                if generation.cancelled or now > generation.deadline:
                    if generation.session is not None:
                        self._end_session(generation.session)
                    self._events.append((generation.sink, Event(error=late)))
                elif not self._admit(generation, now):
                    kept.append(generation)
            self._waiting = kept

    def _admit(self, generation: Generation, now: float) -> bool:
        session = generation.session
        if generation.session_id and session is None:
            if not self._free_session_rows:
                self._events.append(
                    (generation.sink, Event(error=TooBusy("All sessions are taken.", advice="Try again soon.")))
                )
                return True
            session = _Session(generation.session_id, generation.owner, min(self._free_session_rows), used=now)
            self._free_session_rows.remove(session.row)
            self._sessions[session.id] = session
            generation.session = session
        if session is not None:
            generation.row, generation.length = session.row, session.length
            generation.sampler.counts = session.counts
            if session.generator is not None and session.seed == generation.request.sampling.seed:
                generation.sampler.generator = session.generator  # one stream of random numbers for the whole answer
            session.generator, session.seed = generation.sampler.generator, generation.request.sampling.seed
        elif self._free_slots:
            generation.row = min(self._free_slots)
            self._free_slots.remove(generation.row)
        else:
            return False
        self._running.append(generation)
        return True

    def _leave(self, generation: Generation, error: CloisterError | None) -> None:
        """Take a request out of the batch. `error` is told to it; None after its last token or when nobody listens."""
        self._running.remove(generation)
        session = generation.session
        if session is None:
            self._cache.clear(generation.row, generation.length)
            self._free_slots.add(generation.row)
        elif error is not None or generation.cancelled:
            with self._wakeup:
                session.length = generation.length
                self._end_session(session)
        else:
            with self._wakeup:
                session.length, session.used, session.busy = generation.length, time.monotonic(), False
        if error is not None:
            self._events.append((generation.sink, Event(error=error)))

    def _end_session(self, session: _Session) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self._dead_rows.append(session)

    def _prefill(self) -> None:
        """Compute prompts in one padded batch of at most `prefill_chunk` positions; the oldest request comes first."""
        budget = self.settings.prefill_chunk
        batch: list[Generation] = []
        widest = 0
        for generation in [one for one in self._running if one.pending > 1]:
            widest_now = max(widest, min(generation.pending, budget))
            if batch and (len(batch) + 1) * widest_now > budget:
                break
            batch.append(generation)
            widest = widest_now
        if batch:
            batch.sort(key=lambda generation: generation.row)
            self._advance(batch, [min(generation.pending, budget) for generation in batch])

    def _decode(self) -> None:
        ready = [generation for generation in self._running if generation.pending == 1]
        if ready:
            self._close_gaps()
            self._advance(sorted(ready, key=lambda generation: generation.row), [1] * len(ready))

    def _close_gaps(self) -> None:
        """Move one request down into a free row, so that the batch tends to be one block, which needs no copying."""
        lowest = min(self._free_slots, default=self.slots)
        movable = [generation for generation in self._running if generation.session is None]
        last = max(movable, key=lambda generation: generation.row, default=None)
        if last is not None and lowest < last.row:
            self._cache.move(last.row, lowest, last.length)
            self._free_slots.remove(lowest)
            self._free_slots.add(last.row)
            last.row = lowest

    def _side_job(self) -> None:
        with self._wakeup:
            job, future = self._jobs.popleft() if self._jobs else (None, None)
        if job is None or future is None or not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job())
        except Exception as exc:
            future.set_exception(exc)

    # One forward pass -------------------------------------------------------------------------------------------------

    def _advance(self, batch: list[Generation], counts: list[int]) -> None:
        """Put so many inputs of each request through the model; those with no input left get their next token."""
        try:
            logits = self._forward(batch, counts)
        except Exception as exc:
            log.error("a forward pass failed", exc_info=exc)
            for generation in batch:
                self._leave(generation, CloisterError("The model failed on this request.", advice="See the log."))
            return
        self.steps += 1
        for generation, count in zip(batch, counts, strict=True):
            generation.length += count
            if generation.vectors is None:
                generation.ids = generation.ids[count:]
            else:
                generation.vectors = generation.vectors[count:]
        done = [index for index, generation in enumerate(batch) if generation.pending == 0]
        if not done:
            return
        best, ids = logits.max(dim=-1)
        broken = best.isnan().tolist()
        greedy = ids.tolist()
        for index in done:
            generation = batch[index]
            if broken[index]:
                self._leave(generation, BadTensor("The model's answer to this input is not finite."))
                continue
            sampler = generation.sampler
            if sampler.plain_greedy:
                choice = Choice(greedy[index])
                sampler.counts[choice.id] += 1
            else:
                choice = sampler.choose(logits[index].float().cpu(), generation.produced)
            self._produce(generation, choice)

    def _produce(self, generation: Generation, choice: Choice) -> None:
        sampling = generation.request.sampling
        generation.produced += 1
        finish, stop_id = None, None
        if choice.id in self.served.end_ids and not sampling.ignore_eos:
            finish = "stop"
        elif choice.id in sampling.stop_token_ids:
            finish, stop_id = "stop", choice.id
        elif generation.produced >= sampling.max_tokens:
            finish = "length"
        self._events.append((generation.sink, Event(choice=choice, finish=finish, stop_id=stop_id)))
        if finish is not None:
            self._leave(generation, None)
        else:
            generation.ids, generation.vectors = [choice.id], None

    def _forward(self, batch: list[Generation], counts: list[int]) -> torch.Tensor:
        """Logits of each request's last input; inputs are padded on the left, so that it is last in every row."""
        device = self.served.device
        plan = self._cache.next([one.row for one in batch], [one.length for one in batch], counts)
        queries = plan.queries
        if all(one.vectors is None for one in batch):
            ids = [[0] * (queries - count) + one.ids[:count] for one, count in zip(batch, counts, strict=True)]
            inputs = self._embedding(torch.tensor(ids, dtype=torch.long, device=device))
        else:
            inputs = torch.stack([self._inputs(one, count, queries) for one, count in zip(batch, counts, strict=True)])
        first = plan.starts + torch.tensor(counts, device=device) - queries
        positions = (first[:, None] + torch.arange(queries, device=device)).clamp_(min=0)
        output = self.served.model(
            inputs_embeds=inputs,
            attention_mask=self._mask(positions, plan.width),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _inputs(self, generation: Generation, count: int, queries: int) -> torch.Tensor:
        device = self.served.device
        if generation.vectors is not None:
            vectors = generation.vectors[:count].to(device)
        else:
            vectors = self._embedding(torch.tensor(generation.ids[:count], dtype=torch.long, device=device))
        return torch.nn.functional.pad(vectors, (0, 0, queries - count, 0))


def _call_each(events: list[tuple[Sink, Event]]) -> None:
    for sink, event in events:
        sink(event)
