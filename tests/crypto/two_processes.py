"""Runs one function as client and as server, in two real processes over a real socket with TLS."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cloister.crypto.engine import Identity, Listener, Party, Settings

SECONDS = 120


def run(program: Callable[..., Any], folder: Path, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """(what the client's process returned, what the server's did); a process's error is raised here."""
    client, server = Identity.create(folder / "client"), Identity.create(folder / "server")
    context = multiprocessing.get_context("spawn")
    mine, ours = context.Pipe()
    child = context.Process(target=_serve, args=(ours, folder, client.fingerprint, program, arguments, options))
    child.start()
    try:
        assert mine.poll(SECONDS), "the server's process did not start"
        port = mine.recv()
        settings = Settings(identity=client, peer=server.fingerprint, threads=1, quiet_seconds=60, **options)
        with Party.connect("127.0.0.1", port, settings) as party:
            result = program(party, *arguments)
        assert mine.poll(SECONDS), "the server's process did not end"
        told = mine.recv()
        if isinstance(told, str):
            raise AssertionError(f"the server failed:\n{told}")
        return result, told[0]
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()


def _serve(pipe: Any, folder: Path, peer: str, program: Any, arguments: Any, options: Any) -> None:
    try:
        listener = Listener()
        pipe.send(listener.port)
        settings = Settings(
            identity=Identity.load(folder / "server"), peer=peer, threads=1, quiet_seconds=60, **options
        )
        with listener.accept(settings, SECONDS) as party:
            pipe.send((program(party, *arguments),))
    except BaseException:
        pipe.send(traceback.format_exc())


def fixed(seed: int, shape: tuple[int, ...], size: float) -> np.ndarray:
    """The same numbers in both processes."""
    return np.random.default_rng(seed).uniform(-size, size, shape)


__all__ = ["fixed", "replace", "run"]
