"""Runs one function as client and as server, in two real processes over a real socket with TLS."""

from __future__ import annotations

import hashlib
import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cloister.crypto.engine import Identity, Listener, Party, Settings, Store
from cloister.errors import CloisterError

SECONDS = 120


def run(program: Callable[..., Any], folder: Path, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """(what the client's process returned, what the server's did); a process's error is raised here.

    `options` are settings of both; `store` is a dictionary of a `Store` without its folder, which is each party's own
    below `folder` and lasts from run to run, like its identity."""
    ours, theirs = sessions(program, folder, *arguments, **options)
    if isinstance(theirs, str):
        raise AssertionError(f"the server failed:\n{theirs}") from (ours if isinstance(ours, Exception) else None)
    if isinstance(ours, CloisterError):
        raise ours
    return ours, theirs[0]


def refusal(program: Callable[..., Any], folder: Path, *arguments: Any, **options: Any) -> tuple[CloisterError, str]:
    """(the client's error, the server's as text) of a session that both must refuse."""
    ours, theirs = sessions(program, folder, *arguments, **options)
    assert isinstance(ours, CloisterError) and isinstance(theirs, str), (ours, theirs)
    return ours, theirs


def sessions(program: Callable[..., Any], folder: Path, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """The client's result or error; the server's result in a tuple, or its error as text."""
    client, server = _identity(folder / "client"), _identity(folder / "server")
    context = multiprocessing.get_context("spawn")
    mine, ours = context.Pipe()
    child = context.Process(target=_serve, args=(ours, folder, client.fingerprint, program, arguments, options))
    child.start()
    try:
        assert mine.poll(SECONDS), "the server's process did not start"
        port = mine.recv()
        result: Any
        try:
            with Party.connect("127.0.0.1", port, _settings(folder / "client", server.fingerprint, options)) as party:
                result = program(party, *arguments)
        except CloisterError as error:
            result = error
        assert mine.poll(SECONDS), "the server's process did not end"
        return result, mine.recv()
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()


def _identity(folder: Path) -> Identity:
    return Identity.load(folder) if folder.exists() else Identity.create(folder)


def _settings(folder: Path, peer: str, options: dict[str, Any]) -> Settings:
    options = {"threads": 1, "quiet_seconds": 60, **options}
    if (store := options.pop("store", None)) is not None:
        options = {"model": hashlib.sha256(b"the weights of these tests").digest(), **options}
        options["store"] = Store(folder / "store", **store)
    return Settings(identity=Identity.load(folder), peer=peer, **options)


def _serve(pipe: Any, folder: Path, peer: str, program: Any, arguments: Any, options: Any) -> None:
    try:
        listener = Listener()
        pipe.send(listener.port)
        with listener.accept(_settings(folder / "server", peer, options), SECONDS) as party:
            result = program(party, *arguments)
        pipe.send((result,))
    except BaseException:
        pipe.send(traceback.format_exc())


def fixed(seed: int, shape: tuple[int, ...], size: float) -> np.ndarray:
    """The same numbers in both processes."""
    return np.random.default_rng(seed).uniform(-size, size, shape)


__all__ = ["fixed", "refusal", "replace", "run"]
