"""Start a server and keep it until it is interrupted."""

from __future__ import annotations

import dataclasses
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import uvicorn

from cloister.errors import UsageError
from cloister.serving.http import BoundedProtocol, LogFormatter, listen
from cloister.serving.server import tls
from cloister.serving.server.app import create_app
from cloister.serving.server.settings import ServerSettings

log = logging.getLogger("cloister.server")
_LEVELS = ("debug", "info", "warning", "error")


def run_server(
    directory: Path | str,
    *,
    host: str = "127.0.0.1",
    port: int = 8420,
    announce: Callable[[str, str], None] | None = None,
    **options: Any,
) -> None:
    """Serve `directory` until SIGINT or SIGTERM. `options` are the fields of `ServerSettings`.

    `announce` is called once, when requests can come, with the URL and the certificate's fingerprint ("" without TLS).
    """
    known = {field.name for field in dataclasses.fields(ServerSettings)}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise UsageError(f"Unknown server option {', '.join(unknown)}.", advice=f"Known: {', '.join(sorted(known))}.")
    serve(ServerSettings(directory=Path(directory), host=host, port=port, **options), announce=announce)


def serve(settings: ServerSettings, *, announce: Callable[[str, str], None] | None = None) -> None:
    """Serve with the given settings until SIGINT or SIGTERM."""
    _set_up_logging(settings)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # The engine's Python would otherwise hold the interpreter for 5 ms at a time while tokens wait to be sent.
    sys.setswitchinterval(0.0005)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    certificate, key = _tls_files(settings)
    if bool(certificate) != bool(key):
        raise UsageError("TLS needs both a certificate and a key.", advice="Give --ssl-certfile and --ssl-keyfile.")
    app = create_app(settings)
    listener = listen(settings.host, settings.port)
    actual = listener.getsockname()[1]
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"{'https' if certificate else 'http'}://{shown}:{actual}"
    mark = tls.fingerprint(certificate) if certificate else ""

    def ready() -> None:
        if settings.port_file is not None:
            settings.port_file.write_text(f"{actual}\n")
        log.info("serving %s at %s%s", settings.directory, url, f", certificate SHA-256 {mark}" if mark else "")
        if announce is not None:
            announce(url, mark)

    protocol = type(
        "Protocol",
        (BoundedProtocol,),
        {"head_seconds": settings.head_seconds, "stalled_seconds": settings.stalled_reader_seconds},
    )
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=65,
        timeout_graceful_shutdown=int(settings.shutdown_seconds),
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    try:
        _Announcing(config, ready).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()


class _Announcing(uvicorn.Server):
    """uvicorn's server, which says when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def _tls_files(settings: ServerSettings) -> tuple[Path | None, Path | None]:
    if settings.tls_self_signed is not None:
        return tls.self_signed(settings.tls_self_signed, settings.host)
    return settings.ssl_certfile, settings.ssl_keyfile


def _set_up_logging(settings: ServerSettings) -> None:
    if settings.log_level not in _LEVELS:
        raise UsageError(f"log level {settings.log_level!r} is not one of {', '.join(_LEVELS)}.")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(as_json=settings.log_json))
    logging.captureWarnings(True)
    for name in ("cloister", "uvicorn", "asyncio", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(settings.log_level.upper() if name == "cloister" else "WARNING")
