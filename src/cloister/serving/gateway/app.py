"""The gateway: the OpenAI API on the user's machine, in front of protected models somewhere else.

    app = create_gateway(GatewaySettings(), [Hosted.load("out/client", session)], ledger)

Text becomes token ids here and token ids become text here; only what the mode's session sends leaves the machine, and
the ledger has an entry for it. `runs.py` has the rules for retries, `params.py` the table of parameters.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import cloister
from cloister.errors import CloisterError, InvalidParameter, NotFound, PeerUnreachable, TooBusy
from cloister.ledger import Ledger
from cloister.modes import Sampling
from cloister.serving import http
from cloister.serving.gateway import params
from cloister.serving.gateway.answers import Choice, Shapes
from cloister.serving.gateway.feed import Feed
from cloister.serving.gateway.hosted import Catalogue, Hosted
from cloister.serving.gateway.runs import Event, Run, Runs, left_machine
from cloister.serving.gateway.safety import guard
from cloister.serving.gateway.streams import EventStream, finished_before_leaving, left_connection
from cloister.serving.generation import write

_CHOICES_AT_ONCE = 16
_MOST_CHOICES = 128


@dataclass(frozen=True)
class GatewaySettings:
    """What can be set about a gateway. Times are seconds."""

    heartbeat: float = 5.0  # an SSE comment whenever nothing came for so long
    retry_grace: float = 2.0  # how long work is kept for a retry after its client went away; see runs.py
    max_running: int = 64
    max_body: int = 32 * 2**20
    allow_hosts: tuple[str, ...] = ()  # names besides loopback; only with api_keys
    allow_origins: tuple[str, ...] = ()
    api_keys: frozenset[str] = frozenset()  # hex SHA-256 of accepted keys; empty: any key


@dataclass(frozen=True)
class _Job:
    """A parsed generation request."""

    model: Hosted
    prompts: list[list[int]]
    echoes: list[str]
    samplings: list[Sampling]  # one for each of the n choices of a prompt
    stops: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.prompts) * len(self.samplings)

    @property
    def deterministic(self) -> bool:
        return all(sampling.temperature == 0 or sampling.seed is not None for sampling in self.samplings)


def create_gateway(settings: GatewaySettings, models: Sequence[Hosted], ledger: Ledger) -> ASGIApp:
    """The ASGI application."""
    gateway = _Gateway(settings, Catalogue(models), ledger)
    routes = [
        Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
        Route("/v1/completions", gateway.completions, methods=["POST"]),
        Route("/v1/embeddings", gateway.embeddings, methods=["POST"]),
        Route("/v1/models", gateway.list_models),
        Route("/v1/models/{name:path}", gateway.one_model),
        Route("/v1/responses", _responses, methods=["GET", "POST"]),
        Route("/v1/responses/{rest:path}", _responses, methods=["GET", "POST", "DELETE"]),
        *(Route(path, _without_v1, methods=["GET", "POST"]) for path in _WITHOUT_V1),
        Route("/ledger", gateway.ledger),
        Route("/ledger/events", gateway.ledger_events),
        Route("/health", _health),
        Route("/version", _version),
        Route("/metrics", gateway.metrics),
        Route("/", _asset("index.html", "text/html; charset=utf-8")),
        Route("/page.css", _asset("page.css", "text/css; charset=utf-8")),
        Route("/page.js", _asset("page.js", "text/javascript; charset=utf-8")),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await gateway.close()

    app = Starlette(routes=routes, lifespan=lifespan)
    http.install_error_handlers(app)
    # Raised in a route: whether a client may retry depends on what has left this machine.
    app.add_exception_handler(CloisterError, gateway.refused)
    app.add_exception_handler(Exception, gateway.failed)
    outer: ASGIApp = gateway.counted(app, routes)
    outer = guard(outer, hosts=settings.allow_hosts, origins=settings.allow_origins, keys=settings.api_keys)
    return _no_retries(http.request_boundary(http.limit_body(outer, settings.max_body)))


class _Gateway:
    def __init__(self, settings: GatewaySettings, models: Catalogue, ledger: Ledger) -> None:
        self._settings = settings
        self._models = models
        self._ledger = ledger
        self._feed = Feed(ledger)
        self._runs = Runs(ledger, grace=settings.retry_grace, most=settings.max_running)
        self._answers: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[str] = Counter()

    async def close(self) -> None:
        await self._runs.close()
        for model in self._models:
            await model.session.close()

    # Generating -------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        parsed = params.parse("chat", await http.read_json(request))
        model = self._models.find(parsed.get("model"))
        model.require("generate")
        prompt = model.codec.encode_chat(parsed.get("messages"))
        wanted = parsed.get("max_completion_tokens", parsed.get("max_tokens"))
        logprobs = parsed.get("top_logprobs", 0) if parsed.get("logprobs") else None
        return await self._generate(request, parsed, model, [prompt], [""], wanted, logprobs, chat=True)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        parsed = params.parse("completions", await http.read_json(request))
        model = self._models.find(parsed.get("model"))
        model.require("generate")
        prompts = [_tokens(model, prompt, "prompt") for prompt in parsed.get("prompt")]
        echoes = [""] * len(prompts)
        if parsed.get("echo"):
            given = parsed.get("prompt")
            echoes = [item if isinstance(item, str) else model.codec.decode(item) for item in given]
        wanted, logprobs = parsed.get("max_tokens", 16), parsed.get("logprobs")
        return await self._generate(request, parsed, model, prompts, echoes, wanted, logprobs, chat=False)

    async def _generate(
        self,
        request: Request,
        parsed: params.Parsed,
        model: Hosted,
        prompts: list[list[int]],
        echoes: list[str],
        wanted: int | None,
        logprobs: int | None,
        *,
        chat: bool,
    ) -> Response:
        n = parsed.get("n", 1)
        if n * len(prompts) > _MOST_CHOICES:
            raise InvalidParameter(f"One request can have at most {_MOST_CHOICES} answers.", param="n")
        first = _sampling(model, parsed, prompts, wanted, logprobs)
        samplings = [replace(first, seed=_derived(first.seed, index)) for index in range(n)]
        job = _Job(model, prompts, echoes, samplings, parsed.get("stop", ()))
        shapes = Shapes(
            model.codec,
            parsed.get("model", model.name),
            chat=chat,
            logprobs=logprobs,
            prompt_tokens=sum(map(len, prompts)),
        )
        run = self._runs.enter(
            _key(request, await request.body()),
            http.request_id(request),
            retry=_is_retry(request),
            deterministic=job.deterministic,
            work=lambda run: self._work(run, job),
        )
        headers = _ignored(parsed)
        if parsed.get("stream"):
            return await self._stream(request, run, job, shapes, bool(parsed.get("stream_options")), headers)
        if not await finished_before_leaving(run, request.receive):
            self._runs.leave(run, answered=False)
            return Response(status_code=499)
        self._runs.leave(run, answered=True)
        if run.error is not None:
            raise _Failed(run.error, run.request)
        choices = _empty_choices(job)
        for event in run.events:
            choices[event.choice].add(event.piece)
        return JSONResponse(shapes.answer(choices), headers=headers)

    async def _work(self, run: Run, job: _Job) -> None:
        """Compute all choices, some at a time."""
        places = asyncio.Semaphore(_CHOICES_AT_ONCE)

        async def one(index: int) -> None:
            prompt, sampling = job.prompts[index // len(job.samplings)], job.samplings[index % len(job.samplings)]
            async with (
                places,
                contextlib.aclosing(
                    write(job.model.session, job.model.codec, prompt, sampling, job.stops, request=run.request)
                ) as pieces,
            ):
                async for piece in pieces:
                    self._tokens[job.model.name] += piece.counted
                    run.publish(Event(index, piece))

        async with asyncio.TaskGroup() as group:
            for index in range(job.count):
                group.create_task(one(index))

    async def _stream(
        self, request: Request, run: Run, job: _Job, shapes: Shapes, include_usage: bool, headers: dict[str, str]
    ) -> Response:
        # The status is decided by the first event, so that a server that refuses or is down gives a proper error.
        begun = asyncio.create_task(run.changed(0))
        gone = asyncio.create_task(left_connection(request.receive))
        try:
            await asyncio.wait({begun, gone}, timeout=self._settings.heartbeat, return_when=asyncio.FIRST_COMPLETED)
        finally:
            begun.cancel()
            left = gone.done()
            gone.cancel()
        if left:
            self._runs.leave(run, answered=False)
            return Response(status_code=499)
        if run.error is not None and not run.events:
            self._runs.leave(run, answered=True)
            raise _Failed(run.error, run.request)
        chunks = self._chunks(run, job, shapes, include_usage)
        return EventStream(chunks, headers, lambda whole: self._runs.leave(run, answered=whole, at_once=True))

    async def _chunks(self, run: Run, job: _Job, shapes: Shapes, include_usage: bool) -> AsyncGenerator[bytes, None]:
        began = time.monotonic()
        choices = _empty_choices(job)
        usage: dict[str, Any] = {"usage": None} if include_usage else {}
        opened: set[int] = set()
        async for event in run.watch(self._settings.heartbeat):
            if event is None:
                tokens = sum(choice.counted for choice in choices)
                yield http.sse_comment(f"working, {tokens} tokens after {time.monotonic() - began:.0f} s")
                continue
            index, piece, choice = event.choice, event.piece, choices[event.choice]
            if index not in opened:
                opened.add(index)
                if shapes.id.startswith("chatcmpl"):
                    yield http.sse(shapes.opening(index) | usage)
                if choice.prefix:
                    yield http.sse(shapes.piece(index, choice.prefix, ()) | usage)
            choice.add(piece)
            if piece.text or (piece.tokens and shapes.logprobs(()) is not None):
                yield http.sse(shapes.piece(index, piece.text, piece.tokens) | usage)
            if piece.finish:
                yield http.sse(shapes.closing(index, piece.finish) | usage)
        if run.error is not None:
            yield http.sse_error(run.error)
            return
        if include_usage:
            yield http.sse(shapes.usage_chunk(choices))
        yield http.SSE_DONE

    # The rest of the API ----------------------------------------------------------------------------------------------

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        parsed = params.parse("embeddings", await http.read_json(request))
        model = self._models.find(parsed.get("model"))
        model.require("embed")
        inputs = [_tokens(model, item, "input") for item in parsed.get("input")]

        async def work(run: Run) -> None:
            run.result = await model.session.embed(inputs, request=run.request)

        identity = http.request_id(request)
        key = _key(request, await request.body())
        run = self._runs.enter(key, identity, retry=_is_retry(request), deterministic=True, work=work)
        if not await finished_before_leaving(run, request.receive):
            self._runs.leave(run, answered=False)
            return Response(status_code=499)
        self._runs.leave(run, answered=True)
        if run.error is not None:
            raise _Failed(run.error, run.request)
        plain = parsed.get("encoding_format", "float") == "float"
        data = [
            {"object": "embedding", "index": index, "embedding": row.tolist() if plain else _base64(row)}
            for index, row in enumerate(run.result)
        ]
        count = sum(map(len, inputs))
        body = {
            "object": "list",
            "data": data,
            "model": parsed.get("model", model.name),
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
        return JSONResponse(body, headers=_ignored(parsed))

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [model.describe() for model in self._models]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        return JSONResponse(self._models.find(request.path_params["name"]).describe())

    async def ledger(self, request: Request) -> Response:
        """GET /ledger."""
        return JSONResponse(self._feed.snapshot(10_000))

    async def ledger_events(self, request: Request) -> Response:
        """GET /ledger/events."""
        return EventStream(self._feed.events(), {}, lambda whole: None)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, in Prometheus' text format."""
        totals = self._ledger.totals()
        lines = ["# TYPE cloister_gateway_requests_total counter"]
        lines += [
            f'cloister_gateway_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._answers.items())
        ]
        lines.append("# TYPE cloister_gateway_tokens_total counter")
        lines += [f'cloister_gateway_tokens_total{{model="{_quoted(name)}"}} {n}' for name, n in self._tokens.items()]
        for name, kind, value in (
            ("running", "gauge", self._runs.running),
            ("joined_total", "counter", self._runs.joined),
            ("bytes_sent_total", "counter", int(totals["bytes_sent"])),
            ("bytes_received_total", "counter", int(totals["bytes_received"])),
            ("rounds_total", "counter", int(totals["rounds"])),
        ):
            lines += [f"# TYPE cloister_gateway_{name} {kind}", f"cloister_gateway_{name} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    # Around every request ---------------------------------------------------------------------------------------------

    def refused(self, request: Request, exc: Exception) -> Response:
        """An error raised in a route, with the one header that stops the stock client from sending everything again."""
        cause = exc.error if isinstance(exc, _Failed) else exc
        identity = exc.request if isinstance(exc, _Failed) else http.request_id(request)
        busy = isinstance(cause, PeerUnreachable | TooBusy)
        if busy and not left_machine(self._ledger, identity):
            return http.error_response(cause, headers={"retry-after": "1", "x-should-retry": "true"})
        response = http.error_response(cause, headers={"x-should-retry": "false"})
        if "retry-after" in response.headers:
            del response.headers["retry-after"]
        return response

    def failed(self, request: Request, exc: Exception) -> Response:
        """Something that nobody foresaw; the boundary logs it."""
        return http.error_response(exc)

    def counted(self, app: ASGIApp, routes: Sequence[Route]) -> ASGIApp:
        """Count answers by route and status. Only newer Starlettes leave the route in the scope, so it is looked up."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    path = next((r.path for r in routes if r.matches(scope)[0] != Match.NONE), "other")
                    self._answers[(path, message["status"])] += 1
                await send(message)

            await app(scope, receive, noted if scope["type"] == "http" else send)

        return counted


class _Failed(CloisterError):
    """An error of a run, with the id under which the ledger has what the run sent."""

    def __init__(self, error: CloisterError, request: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.request = request


def _no_retries(app: ASGIApp) -> ASGIApp:
    """Errors that do not invite a retry say `x-should-retry: false`: the stock client sends things three times."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        async def mark(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                headers = list(message.get("headers", []))
                if not any(name.lower() in (b"x-should-retry", b"retry-after") for name, _ in headers):
                    headers.append((b"x-should-retry", b"false"))
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, mark)

    return marked


# Pieces ---------------------------------------------------------------------------------------------------------------


def _sampling(
    model: Hosted, parsed: params.Parsed, prompts: Sequence[Sequence[int]], wanted: int | None, logprobs: int | None
) -> Sampling:
    longest, room = max(map(len, prompts)), model.max_model_len
    if longest + (wanted or 1) > room:
        error = InvalidParameter(
            f"This model holds {room} tokens; the prompt has {longest}"
            + (f" and {wanted} more were asked for." if wanted else " and an answer needs room too."),
            advice="Send a shorter prompt, or ask for fewer tokens.",
            param="messages" if parsed.get("messages") else "prompt",
        )
        error.code = "context_length_exceeded"  # the name that OpenAI's clients know
        raise error
    same = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "ignore_eos")
    names = (*same, "min_tokens", "stop_token_ids", "logit_bias")
    given = {name: parsed.get(name) for name in names if name in parsed.values}
    for name in ("logit_bias", "stop_token_ids"):
        if any(token >= model.manifest.model.vocab_size for token in given.get(name, ())):
            raise InvalidParameter(f"{name} has ids that are not below {model.manifest.model.vocab_size}.", param=name)
    return Sampling(
        max_tokens=wanted or room - longest,
        temperature=parsed.get("temperature", 1.0),
        top_k=max(parsed.get("top_k", 0), 0),
        logprobs=logprobs,
        **given,
    )


def _tokens(model: Hosted, given: str | list[int], name: str) -> list[int]:
    ids = model.codec.encode(given) if isinstance(given, str) else given
    size = model.manifest.model.vocab_size
    if not ids or min(ids) < 0 or max(ids) >= size:
        raise InvalidParameter(f"{name} must give at least one token, with ids below {size}.", param=name)
    if len(ids) > model.max_model_len:
        error = InvalidParameter(f"{name} has {len(ids)} tokens; this model holds {model.max_model_len}.", param=name)
        error.code = "context_length_exceeded"
        raise error
    return ids


def _derived(seed: int | None, index: int) -> int | None:
    """The seed of choice `index`; the first is the seed itself, so that n=2 begins with the answer of n=1."""
    if seed is None or index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") >> 1


def _empty_choices(job: _Job) -> list[Choice]:
    return [Choice(prefix=job.echoes[index // len(job.samplings)]) for index in range(job.count)]


_SALT = secrets.token_bytes(16)


def _key(request: Request, body: bytes) -> str:
    """What makes two requests identical: route, caller and every byte of the body."""
    parts = (request.url.path.encode(), request.headers.get("authorization", "").encode(), body)
    return hashlib.blake2b(b"\0".join(parts), key=_SALT).hexdigest()


def _is_retry(request: Request) -> bool:
    return request.headers.get("x-stainless-retry-count", "0").lstrip("0") != ""


def _ignored(parsed: params.Parsed) -> dict[str, str]:
    if not parsed.ignored:
        return {}
    names = [name for name in parsed.ignored[:20] if name.isascii() and name.isidentifier() and len(name) <= 60]
    return {"x-cloister-ignored": ", ".join(names)}


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(row, dtype="<f4").tobytes()).decode()


def _quoted(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


_WITHOUT_V1 = ("/chat/completions", "/completions", "/embeddings", "/models")


async def _without_v1(request: Request) -> Response:
    right = f"{request.url.scheme}://{request.url.netloc}/v1"
    raise NotFound(f"There is no {request.url.path} here.", advice=f"Use {right} as the base URL.")


async def _responses(request: Request) -> Response:
    raise NotFound("The Responses API is not available here.", advice="Use POST /v1/chat/completions.")


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _version(request: Request) -> Response:
    return JSONResponse({"version": cloister.__version__})


def _asset(name: str, kind: str) -> Callable[[Request], Any]:
    content = files("cloister.serving.gateway").joinpath("page", name).read_bytes()

    async def asset(request: Request) -> Response:
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    return asset
