"""Start a gateway: sessions, checks, what is printed, the socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from cloister import manifest as manifests
from cloister import modes
from cloister.errors import CloisterError, UsageError
from cloister.ledger import Ledger
from cloister.manifest import OBFUSCATION
from cloister.serving.gateway.app import GatewaySettings, create_gateway
from cloister.serving.gateway.hosted import Hosted, trust_sentence
from cloister.serving.gateway.safety import read_keys
from cloister.serving.http import BoundedProtocol, listen
from cloister.serving.local import LocalServer
from cloister.serving.transport import is_loopback

DEFAULT_PORT = 8421


def run_gateway(
    clients: Sequence[str | Path],
    servers: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    port_file: str | Path | None = None,
    lazy: bool = False,
    allow_remote: bool = False,
    allow_origins: Sequence[str] = (),
    api_keys_file: str | Path | None = None,
    say: Callable[[str], None] | None = None,
    heartbeat: float = 5.0,
    retry_grace: float = 2.0,
    **connect: Any,
) -> None:
    """Serve until interrupted.

    `servers`: one URL (or local OUT/server directory) for each of `clients`, or one for all. `lazy`: do not reach the
    servers before the first question. `connect`: options of the mode's `connect`, for example `token`.
    """
    if not clients:
        raise UsageError("A gateway needs at least one client directory.", advice="Give OUT/client.")
    if len(servers) not in (1, len(clients)):
        raise UsageError(
            f"{len(clients)} client directories need 1 or {len(clients)} servers.", advice="Repeat --server."
        )
    keys = read_keys(Path(api_keys_file)) if api_keys_file else frozenset[str]()
    if not is_loopback(host) and not (allow_remote and keys):
        raise UsageError(
            f"Listening on {host} would let other machines ask, and read, in clear.",
            advice="Stay on 127.0.0.1, or give both --allow-remote and --api-keys FILE.",
        )
    hosts = () if is_loopback(host) else (host, socket.gethostname())
    settings = GatewaySettings(
        heartbeat=heartbeat,
        retry_grace=retry_grace,
        allow_hosts=hosts,
        allow_origins=tuple(allow_origins),
        api_keys=keys,
    )
    pairs = list(zip(clients, servers if len(servers) > 1 else list(servers) * len(clients), strict=True))
    with contextlib.ExitStack() as children:
        urls: dict[str, str] = {}  # two clients may name the same local directory: one child serves both
        for _, server in pairs:
            if server not in urls:
                local = "//" not in server and Path(server).is_dir()
                urls[server] = children.enter_context(LocalServer(server)).url if local else server
        ledger = Ledger()
        hosted = []
        for client, server in pairs:
            mode = modes.get(manifests.read(client, role="client").mode)
            hosted.append(Hosted.load(client, mode.connect(client, urls[server], ledger=ledger, **connect)))
        with contextlib.suppress(KeyboardInterrupt), _orderly_end():
            asyncio.run(_serve(settings, hosted, ledger, host, port, port_file, lazy, say or _to_stderr))


async def _serve(
    settings: GatewaySettings,
    hosted: Sequence[Hosted],
    ledger: Ledger,
    host: str,
    port: int,
    port_file: str | Path | None,
    lazy: bool,
    say: Callable[[str], None],
) -> None:
    app = create_gateway(settings, hosted, ledger)
    if not lazy:
        for model in hosted:
            try:
                await model.session.open()
            except CloisterError as error:
                error.advice = f"{error.advice} To start without a server, add --lazy.".strip()
                raise
    listener = listen(host, port)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=65,  # longer than clients keep idle connections, or both would end one at the same moment
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        name, actual = listener.getsockname()[:2]
        if port_file is not None:
            path = Path(port_file)
            path.with_name(path.name + ".new").write_text(str(actual))
            path.with_name(path.name + ".new").replace(path)  # whoever waits for it never reads half a number
        for line in greeting(hosted, f"http://{f'[{name}]' if ':' in name else name}:{actual}"):
            say(line)
    await serving


def greeting(hosted: Sequence[Hosted], url: str) -> list[str]:
    """What is printed at the start: what each model is worth, and the lines that make any application use it."""
    lines = [f"Cloister gateway at {url}  (chat page: {url}/)", ""]
    for model in hosted:
        mark = "!" if model.manifest.protection.label == OBFUSCATION else "-"
        lines.append(f"  {mark} {model.name} (mode {model.manifest.mode}): {trust_sentence(model.manifest)}")
    first = hosted[0]
    lines += ["", f"export OPENAI_BASE_URL={url}/v1", "export OPENAI_API_KEY=local", ""]
    body: dict[str, Any] = {"model": first.name}
    if first.manifest.model.task == "embed":
        route, body = "embeddings", body | {"input": "Hello"}
    elif first.codec.has_chat_template:
        route, body = "chat/completions", body | {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    else:
        route, body = "completions", body | {"prompt": "Hello", "max_tokens": 32}
    data = json.dumps(body).replace("'", "'\\''")
    lines.append(
        f"curl {url}/v1/{route} -H 'Content-Type: application/json' -H 'Authorization: Bearer local' -d '{data}'"
    )
    return lines


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that a local server is stopped too: uvicorn raises it again when it is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
