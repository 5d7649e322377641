"""Everything that can be set about a server, in one place, with its default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ServerSettings:
    """How one directory is served. Sizes are bytes, times are seconds."""

    directory: Path
    host: str = "127.0.0.1"
    port: int = 8420  # 0: the system chooses
    served_model_name: str = ""  # empty: the manifest's name, or the directory's

    # the engine
    dtype: str = "auto"  # "auto": as the checkpoint says; "float32", "bfloat16", "float16"
    device: str = "auto"  # "auto": cuda if there is one
    threads: int = 0  # of torch; 0: its default
    max_model_len: int = 0  # 0: what the model was made for
    max_slots: int = 64  # requests that are computed together
    max_sessions: int = 64  # open sessions with a KV cache
    max_waiting: int = 256  # requests that wait for a slot; one more gets a 503
    kv_cache_bytes: int = 0  # 0: a quarter of the free memory
    prefill_chunk: int = 512  # prompt tokens computed between two steps of the running requests

    # limits
    max_body_bytes: int = 64 * 2**20
    max_requests: int = 1024  # open HTTP requests
    request_seconds: float = 600.0
    session_idle_seconds: float = 600.0
    body_idle_seconds: float = 30.0
    head_seconds: float = 15.0
    stalled_reader_seconds: float = 30.0
    shutdown_seconds: float = 10.0

    # who may come in
    tokens: Path | None = None  # named bearer tokens, see tokens.py
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    tls_self_signed: Path | None = None  # a folder; a key pair is made there at first start

    # what is told
    port_file: Path | None = None
    log_level: str = "info"
    log_json: bool = False
    attest: Callable[[bytes], dict[str, Any]] | None = None  # nonce -> evidence
