"""Ctrl-C ends whatever the core is doing, and what a store cannot be made in is refused without harm."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloister.crypto import native
from cloister.crypto.engine import Listener, Party, Settings, Store
from cloister.errors import InvalidParameter, PeerError, SessionOver, TooBusy, UnusableFolder

pytestmark = pytest.mark.skipif(not native.available(), reason="the Rust core is not installed here")
PLAIN = Settings(insecure_loopback=True, threads=1)


@contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C after a while; the block must end with it soon."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, send)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        timer.cancel()
    assert time.monotonic() - sent[0] < 5


def test_ctrl_c_ends_a_wait_for_clients_and_the_next_one_is_served() -> None:
    listener = Listener()
    with interrupted():
        listener.accept(PLAIN, 30)
    client, server = pair(listener, PLAIN, PLAIN)
    client._native.abandon()
    server._native.abandon()


def pair(listener: Listener, ours: Settings, theirs: Settings) -> tuple[Party, Party]:
    made: list[Party] = []
    thread = threading.Thread(target=lambda: made.append(listener.accept(theirs, 30)))
    thread.start()
    client = Party.connect("127.0.0.1", listener.port, ours)
    thread.join()
    return client, made[0]


def test_ctrl_c_ends_a_step_that_waits_for_the_peer_and_the_session() -> None:
    client, server = pair(Listener(), PLAIN, PLAIN)
    with interrupted():
        client.meet()
    with pytest.raises(SessionOver):
        client.meet()
    with pytest.raises(PeerError):
        server.meet()
        server.meet()


@pytest.mark.parametrize("name", ["threads", "cores"])
@pytest.mark.parametrize("number", [0, 1025, 10**9])
def test_a_senseless_number_of_threads_is_refused(name: str, number: int) -> None:
    with pytest.raises(InvalidParameter):
        Listener().accept(Settings(insecure_loopback=True, **{name: number}), 0.1)  # type: ignore[arg-type]


def test_a_port_in_use_and_a_foreign_address_are_the_callers_mistake() -> None:
    first = Listener()
    with pytest.raises(InvalidParameter, match="annot listen"):
        Listener("127.0.0.1", first.port)
    with pytest.raises(InvalidParameter, match="annot listen"):
        Listener("192.0.2.1", 0)


def refusal(folder: Path) -> Exception:
    """What the client says of a store in this folder."""
    listener = Listener()

    def serve() -> None:
        with pytest.raises(PeerError):
            listener.accept(PLAIN, 30)

    thread = threading.Thread(target=serve)
    thread.start()
    settings = Settings(insecure_loopback=True, threads=1, model=bytes([1]) * 32, store=Store(folder))
    with pytest.raises(Exception) as caught:
        Party.connect("127.0.0.1", listener.port, settings)
    thread.join()
    return caught.value


def test_a_store_is_made_only_in_a_private_folder_of_its_own(tmp_path: Path) -> None:
    wide, used = tmp_path / "wide", tmp_path / "used"
    wide.mkdir()
    wide.chmod(0o777)
    used.mkdir(0o700)
    (used / "letter").write_text("mine")
    for folder, words in ((wide, "others can reach"), (used, "other files")):
        error = refusal(folder)
        assert isinstance(error, UnusableFolder) and words in str(error), error
        assert "Delete" not in str(error) and "chmod 700" in error.advice
    assert not list(wide.iterdir()) and [path.name for path in used.iterdir()] == ["letter"]


def test_a_store_in_use_is_not_called_broken(tmp_path: Path) -> None:
    listener, folder = Listener(), tmp_path / "store"
    ours, theirs = (
        Settings(insecure_loopback=True, threads=1, model=bytes([1]) * 32, store=Store(place))
        for place in (folder, tmp_path / "other")
    )
    client, server = pair(listener, ours, theirs)
    error = refusal(folder)
    assert isinstance(error, TooBusy) and "Delete" not in str(error), error
    client._native.abandon()
    server._native.abandon()
