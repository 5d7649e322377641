"""The routes: OpenAI's shape where it fits, /cloister/v1/ for the rest. docs/architecture.md has the contract."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import cloister
from cloister.errors import CloisterError, InvalidParameter, NotAvailable, NotFound, UnsupportedParameter
from cloister.serving.http import (
    SSE_DONE,
    SSE_HEADERS,
    install_error_handlers,
    limit_body,
    read_json,
    request_boundary,
    sse,
    sse_comment,
    sse_error,
)
from cloister.serving.server.encoders import Runner, by_length, parse_embeddings, parse_forward, pooled
from cloister.serving.server.engine import Engine, Event, Generation, Sink
from cloister.serving.server.loading import ServedModel, load_all
from cloister.serving.server.metrics import CONTENT_TYPE, Metrics
from cloister.serving.server.requests import CompletionRequest, parse_completion
from cloister.serving.server.settings import ServerSettings
from cloister.serving.server.tokens import read_tokens, require_token
from cloister.serving.wire import encode_tensor

log = logging.getLogger("cloister.server")
_QUIET_SECONDS = 8.0  # a comment goes into a stream that has been silent for so long
_PATIENCE_SECONDS = 5.0  # how long an error may still become a status instead of an event in a stream


@dataclass
class _Place:
    """A model and the worker that computes it."""

    served: ServedModel
    worker: Engine | Runner


class Server:
    """The models of one process and the routes to them."""

    def __init__(self, settings: ServerSettings, models: Sequence[ServedModel]) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.started = int(time.time())
        self.places: dict[str, _Place] = {}
        for served in models:
            worker = Engine(served, settings) if served.task == "generate" else Runner(settings)
            self.places[served.name] = _Place(served, worker)
            self.metrics.watch(served.name, worker.load)

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/cloister/v1/forward", self.forward, methods=["POST"]),
            Route("/cloister/v1/attestation", self.attestation),
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/metrics", self.show_metrics),
        ]

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Start the workers, and stop them when the server goes down."""
        loop = asyncio.get_running_loop()

        def dispatch(events: list[tuple[Sink, Event]]) -> None:
            loop.call_soon_threadsafe(_deliver, events)

        for place in self.places.values():
            if isinstance(place.worker, Engine):
                place.worker.dispatch = dispatch
            place.worker.start()
        try:
            yield
        finally:
            for place in self.places.values():
                await asyncio.to_thread(place.worker.stop)

    def _place(self, name: Any) -> _Place:
        if name in (None, "") and len(self.places) == 1:
            return next(iter(self.places.values()))
        if not isinstance(name, str) or not name:
            raise InvalidParameter("model must name one of the served models.", advice="See /v1/models.", param="model")
        if name not in self.places:
            raise NotFound(f"There is no model {name[:200]!r} here.", advice="See /v1/models.", param="model")
        place = self.places[name]
        if place.served.manifest is not None:
            place.served.manifest.check_expiry()
        return place

    # Completions ------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body = await read_json(request)
        place = self._place(body.get("model"))
        if not isinstance(place.worker, Engine):
            raise UnsupportedParameter(
                f"{place.served.name} does not generate.",
                advice="Use /v1/embeddings or /cloister/v1/forward.",
                param="model",
            )
        wanted = parse_completion(body, place.served.shape)
        owner = request.scope.get("cloister.owner", "")
        if wanted.session is not None and wanted.session.close:
            place.worker.close_session(wanted.session.id, owner)
            return JSONResponse(
                {"object": "cloister.session", "cloister": {"session": wanted.session.id, "closed": True}}
            )
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        began = time.monotonic()
        generation = place.worker.submit(wanted, inbox.put_nowait, owner=owner)
        answer = _Answer(place.served.name, wanted, generation, self._meter(place.served.name, wanted, began))
        try:
            if wanted.stream:
                return await _stream(request, answer, inbox)
            return await _whole(request, answer, inbox)
        except BaseException:
            generation.cancel()
            raise

    def _meter(self, model: str, wanted: CompletionRequest, began: float) -> Callable[[int], None]:
        self.metrics.tokens.labels(model, "prompt").inc(wanted.length)

        def meter(total: int) -> None:
            if total == 1:
                self.metrics.first_token.labels(model).observe(time.monotonic() - began)
            self.metrics.tokens.labels(model, "answer").inc()

        return meter

    # Single passes ----------------------------------------------------------------------------------------------------

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings"""
        body = await read_json(request)
        place = self._place(body.get("model"))
        served = place.served
        inputs = parse_embeddings(body, served)
        groups = by_length(inputs)
        vectors: list[Any] = [None] * len(inputs)
        for group in groups:
            job = place.worker.run(partial(pooled, served, [inputs[index] for index in group]))
            computed: NDArray[np.float32] = await asyncio.wrap_future(job)
            for index, vector in zip(group, computed, strict=True):
                vectors[index] = vector
        as_base64 = body.get("encoding_format") == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
                if as_base64
                else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ]
        count = sum(len(one) for one in inputs)
        self.metrics.tokens.labels(served.name, "prompt").inc(count)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "data": data, "model": served.name, "usage": usage})

    async def forward(self, request: Request) -> Response:
        """POST /cloister/v1/forward"""
        body = await read_json(request)
        place = self._place(body.get("model"))
        job = place.worker.run(parse_forward(body, place.served, 4 * self.settings.max_body_bytes))
        output, kind = await asyncio.wrap_future(job)
        return JSONResponse({"model": place.served.name, "kind": kind, "output": encode_tensor(np.asarray(output))})

    # About the server -------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return JSONResponse({"object": "list", "data": [self._about(place.served) for place in self.places.values()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}"""
        return JSONResponse(self._about(self._place(request.path_params["model"]).served))

    def _about(self, served: ServedModel) -> dict[str, Any]:
        created = self.started
        if served.manifest is not None and served.manifest.created:
            with contextlib.suppress(ValueError):
                created = int(datetime.fromisoformat(served.manifest.created).timestamp())
        return {
            "id": served.name,
            "object": "model",
            "created": created,
            "owned_by": "cloister",
            "max_model_len": served.shape.max_model_len,
            "cloister": served.about(),
        }

    async def attestation(self, request: Request) -> Response:
        """GET /cloister/v1/attestation?nonce=HEX"""
        try:
            nonce = bytes.fromhex(request.query_params.get("nonce", ""))
        except ValueError:
            nonce = b""
        if not 16 <= len(nonce) <= 64:
            raise InvalidParameter("nonce must be 16 to 64 bytes in hex.", param="nonce")
        if self.settings.attest is None:
            missing = NotAvailable(
                "This server does not attest itself.", advice="Start it with an attestation provider."
            )
            missing.status = 404
            raise missing
        return JSONResponse(await asyncio.to_thread(self.settings.attest, nonce))

    async def health(self, request: Request) -> Response:
        """GET /health"""
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return JSONResponse({"version": cloister.__version__, "server": "cloister"})

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics"""
        return Response(self.metrics.render(), media_type=CONTENT_TYPE)


def create_app(settings: ServerSettings, models: Sequence[ServedModel] | None = None) -> ASGIApp:
    """The whole application; loads the models of `settings.directory` unless they are given."""
    tokens = None if settings.tokens is None else read_tokens(settings.tokens)  # before the long step
    server = Server(settings, load_all(settings) if models is None else models)
    inner = Starlette(routes=server.routes(), lifespan=server.lifespan)
    install_error_handlers(inner)
    app: ASGIApp = inner
    if tokens is not None:
        app = require_token(app, tokens)
    app = limit_body(
        app,
        settings.max_body_bytes,
        idle_seconds=settings.body_idle_seconds,
        total_seconds=settings.request_seconds,
        max_requests=settings.max_requests,
    )
    return request_boundary(server.metrics.around(app))


def _deliver(events: list[tuple[Sink, Event]]) -> None:
    for sink, event in events:
        sink(event)


# Answers --------------------------------------------------------------------------------------------------------------


class _Answer:
    """The JSON of one completion, whole or in chunks."""

    def __init__(
        self, model: str, wanted: CompletionRequest, generation: Generation, meter: Callable[[int], None]
    ) -> None:
        self.wanted, self.generation, self._meter = wanted, generation, meter
        self._head = {
            "id": "cmpl-" + secrets.token_hex(12),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.total = 0

    def chunk(self, events: Sequence[Event]) -> dict[str, Any]:
        """The tokens of `events` as one answer, or as one chunk of it."""
        for _ in events:
            self.total += 1
            self._meter(self.total)
        last = events[-1]
        choice = {
            "index": 0,
            "text": "",
            "token_ids": [event.choice.id for event in events if event.choice is not None],
            "logprobs": None if self.wanted.sampling.logprobs is None else _logprobs(events),
            "finish_reason": last.finish,
            "stop_reason": last.stop_id,
        }
        extra = {"cloister": {"session": self.generation.session_id}} if self.generation.session_id else {}
        return {**self._head, "choices": [choice], **extra}

    def usage(self) -> dict[str, int]:
        """Counts of what was sent and made in this request."""
        prompt = self.wanted.length
        return {"prompt_tokens": prompt, "completion_tokens": self.total, "total_tokens": prompt + self.total}

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk after the last, with usage alone."""
        return {**self._head, "choices": [], "usage": self.usage()}


def _logprobs(events: Sequence[Event]) -> dict[str, Any]:
    choices = [event.choice for event in events if event.choice is not None]
    return {
        "text_offset": [0] * len(choices),
        "tokens": [f"token_id:{choice.id}" for choice in choices],
        "token_logprobs": [choice.logprob for choice in choices],
        "top_logprobs": [
            {f"token_id:{choice.id}": choice.logprob, **{f"token_id:{other}": value for other, value in choice.top}}
            for choice in choices
        ],
    }


async def _whole(request: Request, answer: _Answer, inbox: asyncio.Queue[Event]) -> Response:
    events: list[Event] = []
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        while not (events and events[-1].last):
            event = await _next(inbox, gone)
            if event.error is not None:
                raise event.error
            events.append(event)
    finally:
        gone.cancel()
    return JSONResponse({**answer.chunk(events), "usage": answer.usage()})


class _ClientLeft(CloisterError):
    """Nobody is there to read the answer any more."""

    code = "client_left"
    status = 499


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _next(inbox: asyncio.Queue[Event], gone: asyncio.Future[None]) -> Event:
    getting = asyncio.ensure_future(inbox.get())
    either: set[asyncio.Future[Any]] = {getting, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
    finally:
        getting.cancel()  # also when this is cancelled: left alone it would take the next event and lose it
    raise _ClientLeft("The client left.")


async def _stream(request: Request, answer: _Answer, inbox: asyncio.Queue[Event]) -> Response:
    # An error that comes early can still be an HTTP status, which clients handle better than an event.
    first: Event | None = None
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        first = await asyncio.wait_for(_next(inbox, gone), _PATIENCE_SECONDS)
    except TimeoutError:
        pass
    finally:
        gone.cancel()
    if first is not None and first.error is not None:
        raise first.error
    return _EventStream(_chunks(answer, inbox, first), answer.generation)


async def _chunks(answer: _Answer, inbox: asyncio.Queue[Event], first: Event | None) -> AsyncIterator[bytes]:
    usage: Mapping[str, Any] = {"usage": None} if answer.wanted.include_usage else {}
    while True:
        if first is None:
            try:
                event = await asyncio.wait_for(inbox.get(), _QUIET_SECONDS)
            except TimeoutError:
                yield sse_comment("working")
                continue
        else:
            event, first = first, None
        events = [event]
        while not events[-1].last and not inbox.empty():  # a slow reader gets several tokens in one chunk
            events.append(inbox.get_nowait())
        failed = events[-1].error
        if failed is not None:
            events.pop()
        if events:
            yield sse({**answer.chunk(events), **usage})
        if failed is not None:
            yield sse_error(failed)
            return
        if events[-1].last:
            break
    if answer.wanted.include_usage:
        yield sse(answer.usage_chunk())
    yield SSE_DONE


class _EventStream(StreamingResponse):
    """A stream that frees its place in the engine however it ends."""

    def __init__(self, content: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(content, media_type="text/event-stream", headers=SSE_HEADERS)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()
