"""Prometheus metrics of one server; a registry of its own, so that several apps can live in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ROUTES = (
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/cloister/v1/forward",
    "/cloister/v1/attestation",
    "/health",
    "/version",
    "/metrics",
)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """What an operator watches. No label carries anything a client sent but the route."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("cloister_requests", "Requests answered.", ["route", "status"], registry=self.registry)
        self.seconds = Histogram(
            "cloister_request_seconds",
            "Time to the end of an answer.",
            ["route"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.first_token = Histogram(
            "cloister_first_token_seconds",
            "Time to the first token of a completion.",
            ["model"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.tokens = Counter(
            "cloister_tokens", "Tokens, in prompts and answers.", ["model", "kind"], registry=self.registry
        )
        self._load = {
            "waiting": Gauge("cloister_waiting", "Requests waiting for a place.", ["model"], registry=self.registry),
            "running": Gauge("cloister_running", "Requests being computed.", ["model"], registry=self.registry),
            "slots": Gauge("cloister_slots", "Places for requests.", ["model"], registry=self.registry),
            "sessions": Gauge("cloister_sessions", "Open sessions.", ["model"], registry=self.registry),
            "session_rows": Gauge("cloister_session_places", "Places for sessions.", ["model"], registry=self.registry),
        }

    def watch(self, model: str, load: Callable[[], Mapping[str, int]]) -> None:
        """Read the gauges of `model` from `load` when somebody asks."""
        for name, gauge in self._load.items():
            gauge.labels(model).set_function(lambda name=name: load().get(name, 0))  # type: ignore[misc]

    def render(self) -> bytes:
        """The page of /metrics."""
        return generate_latest(self.registry)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Count and time every request that passes through."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            route = next((known for known in _ROUTES if scope["path"].startswith(known)), "other")
            began, status = time.monotonic(), "none"

            async def noted(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = str(message["status"])
                await send(message)

            try:
                await app(scope, receive, noted)
            finally:
                self.requests.labels(route, status).inc()
                self.seconds.labels(route).observe(time.monotonic() - began)

        return counted
