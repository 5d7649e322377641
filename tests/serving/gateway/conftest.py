"""Real processes for the gateway's tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_dirs import END, byte_tokenizer, listing, write_client
from parties import HERE, REPLY, Gateway, StandIn, start
from safetensors.numpy import load_file


@pytest.fixture(scope="session")
def codec_ids() -> Callable[[str], list[int]]:
    tokenizer = byte_tokenizer()
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="session")
def start_standin(
    tmp_path_factory: pytest.TempPathFactory, codec_ids: Callable[[str], list[int]]
) -> Iterator[Callable[..., StandIn]]:
    children: list[StandIn] = []

    def make(order: Any, *, reply: str = REPLY, port: int = 0, **settings: Any) -> StandIn:
        folder = tmp_path_factory.mktemp("standin")
        path = folder / "settings.json"
        ids = [int(order[token]) for token in [*codec_ids(reply), END]]
        path.write_text(json.dumps({"models": listing(), "reply": ids, "hidden": 16, **settings}))
        command = [sys.executable, str(HERE / "standin.py"), str(path), str(folder / "port"), str(port)]
        process, port, output = start(command, folder)
        children.append(StandIn(process, port, output, path))
        return children[-1]

    yield make
    for child in children:
        child.process.terminate()
    for child in children:
        child.stop()


@pytest.fixture(scope="session")
def start_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Gateway]]:
    children: list[Gateway] = []

    def make(clients: Path | list[Path], server: str, *options: str) -> Gateway:
        folder = tmp_path_factory.mktemp("gateway")
        clients = clients if isinstance(clients, list) else [clients]
        command = [sys.executable, "-m", "cloister.serving.gateway", *map(str, clients), "--server", server]
        command += ["--port", "0", "--port-file", str(folder / "port"), *options]
        children.append(Gateway(*start(command, folder)))
        return children[-1]

    yield make
    for child in children:
        child.process.terminate()
    for child in children:
        child.stop()


@pytest.fixture(scope="session")
def tiny_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A client directory with the key `key-0001`."""
    directory = tmp_path_factory.mktemp("tiny") / "client"
    write_client(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_order(tiny_client: Path) -> Any:
    """Plain id -> server id of `tiny_client`."""
    return load_file(tiny_client / "client.safetensors")["vocab_to_server"]


@pytest.fixture(scope="session")
def shared_pair(
    tiny_client: Path, tiny_order: Any, start_standin: Callable[..., StandIn], start_gateway: Callable[..., Gateway]
) -> tuple[Gateway, StandIn]:
    standin = start_standin(tiny_order)
    return start_gateway(tiny_client, standin.url, "--heartbeat", "0.5", "--retry-grace", "2.5"), standin


@pytest.fixture
def pair(shared_pair: tuple[Gateway, StandIn]) -> tuple[Gateway, StandIn]:
    """A gateway in front of a stand-in, with short times; nothing seen, nothing in the ledger."""
    gateway, standin = shared_pair
    standin.reset()
    gateway.forget()
    return gateway, standin
