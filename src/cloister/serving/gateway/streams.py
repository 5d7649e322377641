"""Answers that notice at once when their client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloister.serving import http
from cloister.serving.gateway.runs import Run


class EventStream(Response):
    """Server-sent events that notice at once when nobody listens any more."""

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], headers: dict[str, str], ended: Callable[[bool], None]
    ) -> None:
        super().__init__(headers={**headers, **http.SSE_HEADERS}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._chunks = chunks
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = False
        writing = asyncio.create_task(self._write(send))
        gone = asyncio.create_task(left_connection(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            whole = writing.done() and not writing.cancelled() and writing.exception() is None
        finally:
            for task in (writing, gone):
                task.cancel()
            await asyncio.gather(writing, gone, return_exceptions=True)
            await self._chunks.aclose()
            self._ended(whole)
        if writing.done() and not writing.cancelled() and (error := writing.exception()) is not None:
            raise error

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def left_connection(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def finished_before_leaving(run: Run, receive: Receive) -> bool:
    """Wait for the end of `run`; False if the client left before it."""
    finished = asyncio.create_task(run.finished())
    gone = asyncio.create_task(left_connection(receive))
    try:
        await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        return finished.done()
    finally:
        finished.cancel()
        gone.cancel()
