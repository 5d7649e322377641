"""A server without a model: it answers a fixed reply in the permuted vocabulary, and misbehaves on demand.

    python standin.py SETTINGS.json PORT_FILE

SETTINGS.json is read again for every request, so a test can change it while the server runs. Every request body is
appended to SETTINGS.json.log, so a test can say exactly what arrived.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

SETTINGS, PORT_FILE = Path(sys.argv[1]), Path(sys.argv[2])


def settings() -> dict[str, Any]:
    return json.loads(SETTINGS.read_text())


def note(what: str, body: Any = None) -> None:
    with SETTINGS.with_name(SETTINGS.name + ".log").open("a") as file:
        file.write(json.dumps({"what": what, "body": body}) + "\n")


async def models(request: Request) -> Response:
    note("models")
    if settings().get("down"):
        return JSONResponse({"error": {"message": "starting", "code": "too_busy"}}, status_code=503)
    return JSONResponse({"object": "list", "data": settings()["models"]})


async def completions(request: Request) -> Response:
    body = json.loads(await request.body())
    now = settings()
    note("completion", body)
    if now.get("status"):
        message = {"message": now.get("message", "no"), "type": "x", "param": None, "code": now.get("code")}
        return JSONResponse({"error": message}, status_code=now["status"])
    if not body.get("stream"):
        return one_token(body, now)
    return StreamingResponse(stream(body, now), media_type="text/event-stream")


def chosen(body: dict[str, Any], now: dict[str, Any]) -> list[int]:
    reply = list(now["reply"])
    if body["temperature"] > 0:  # a sample: the letters of the reply in an order that the seed decides
        end = reply.pop()
        random.Random(body.get("seed")).shuffle(reply)
        reply.append(end)
    return reply


async def stream(body: dict[str, Any], now: dict[str, Any]):
    try:
        stops = set(body["stop_token_ids"])
        await asyncio.sleep(now.get("first_delay", 0))
        for count, token in enumerate(chosen(body, now), 1):
            if count > now.get("die_after", 10**9):
                note("died")
                os._exit(1)
            if count > now.get("hang_after", 10**9):
                await asyncio.sleep(3600)
            if count > now.get("cut_after", 10**9):
                return
            if count > now.get("error_after", 10**9):
                yield event({"error": {"message": "out of memory", "type": "server_error", "code": "peer_refused"}})
                return
            finish = "stop" if token in stops else "length" if count == body["max_tokens"] else None
            yield event(chunk(body, token, finish, vllm=now.get("vllm", False)))
            if finish:
                break
            await asyncio.sleep(now.get("delay", 0))
        yield b"data: [DONE]\n\n"
        note("finished")
    except asyncio.CancelledError:
        note("cancelled")
        raise


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chunk(body: dict[str, Any], token: int, finish: str | None, *, vllm: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": finish, "token_ids": [token]}
    if body.get("logprobs") is not None:
        others = {f"token_id:{(token + k) % 256}": -1.0 - k for k in range(1, body["logprobs"])}
        choice["logprobs"] = {
            "text_offset": [0],
            "token_logprobs": [-0.5],
            "tokens": [f"token_id:{token}"],
            "top_logprobs": [{f"token_id:{token}": -0.5, **others}],
        }
    if vllm:  # the other fields that its documentation lists
        choice |= {
            "stop_reason": token if finish == "stop" else None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": body["model"],
        "choices": [choice],
        "usage": None,
    }


def one_token(body: dict[str, Any], now: dict[str, Any]) -> Response:
    """Loop token. The number of the next token comes from the session, or from the length of the prefix."""
    wish = body.get("cloister") or {}
    if wish.get("close"):
        note("closed")
        return JSONResponse({"choices": [], "cloister": {"session": wish["session"]}})
    if wish:
        identity = "s-0" if wish["session"] == "new" else wish["session"]
        step = int(identity[2:])
        answer: dict[str, Any] = {"cloister": {"session": f"s-{step + 1}"}}
    else:
        step = body["rows"] = rows(body["prompt_embeds"], now["hidden"]) - now["prompt_rows"]
        answer = {}
    token = chosen(body | {"temperature": 0}, now)[step]
    return JSONResponse(answer | chunk(body, token, "length", vllm=now.get("vllm", False)))


def rows(text: str, hidden: int) -> int:
    from cloister.serving.wire import decode_tensor

    return len(decode_tensor(text, expected_columns=hidden, max_rows=4096))


async def embeddings(request: Request) -> Response:
    body = json.loads(await request.body())
    note("embeddings", body)
    await asyncio.sleep(settings().get("delay", 0))
    width = settings()["hidden"]
    data = []
    for index, ids in enumerate(body["input"]):
        vector = np.arange(width, dtype="<f4") + len(ids) / 8
        data.append({"object": "embedding", "index": index, "embedding": base64.b64encode(vector.tobytes()).decode()})
    return JSONResponse({"object": "list", "data": data, "model": "m", "usage": {}})


def main() -> None:
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
        ]
    )
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(sys.argv[3]) if len(sys.argv) > 3 else 0))
    PORT_FILE.with_suffix(".new").write_text(str(listener.getsockname()[1]))
    PORT_FILE.with_suffix(".new").replace(PORT_FILE)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main()
