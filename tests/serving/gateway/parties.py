"""The processes of the gateway's tests: a gateway, and a stand-in for the server."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

HERE = Path(__file__).parent
REPLY = "Hello wörld, 😀 said the cat. END of it"


@dataclass
class Process:
    """A child that listens on `port`."""

    process: subprocess.Popen[bytes]
    port: int
    output: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@dataclass
class StandIn(Process):
    """The stand-in server. `set` changes its behaviour; `seen` says what arrived."""

    settings: Path = field(default_factory=Path)
    first: str = ""

    def reset(self) -> None:
        """As it was at the start, with nothing seen."""
        self.first = self.first or self.settings.read_text()
        self.settings.write_text(self.first)
        self.settings.with_name(self.settings.name + ".log").unlink(missing_ok=True)

    def set(self, **changes: Any) -> None:
        new = json.loads(self.settings.read_text()) | changes
        partial = self.settings.with_suffix(".new")
        partial.write_text(json.dumps(new))
        partial.replace(self.settings)

    def seen(self, what: str = "completion") -> list[Any]:
        log = self.settings.with_name(self.settings.name + ".log")
        lines = log.read_text().splitlines() if log.exists() else []
        return [entry["body"] for entry in map(json.loads, lines) if entry["what"] == what]


@dataclass
class Gateway(Process):
    """A gateway process. Its ledger begins at the last `forget`."""

    known: int = 0
    clients: list[openai.OpenAI] = field(default_factory=list)

    def stop(self) -> None:
        self.close_clients()
        super().stop()

    def close_clients(self) -> None:
        while self.clients:
            self.clients.pop().close()

    def forget(self) -> None:
        self.close_clients()
        self.known = int(httpx.get(f"{self.url}/ledger").json()["totals"]["entries"])

    def client(self, **options: Any) -> openai.OpenAI:
        self.clients.append(openai.OpenAI(base_url=f"{self.url}/v1", api_key="local", **options))
        return self.clients[-1]

    def ledger(self, step: str | None = None) -> list[dict[str, Any]]:
        entries = httpx.get(f"{self.url}/ledger").json()["entries"][self.known :]
        return [entry for entry in entries if step is None or entry["step"] == step]


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait for something that another process does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def start(command: Sequence[str], folder: Path) -> tuple[subprocess.Popen[bytes], int, Path]:
    """Start a child that writes its port to `folder`/port."""
    folder.mkdir(parents=True, exist_ok=True)
    port_file, output = folder / "port", folder / "output"
    port_file.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment)

    def port() -> int | None:
        if process.poll() is not None:
            raise AssertionError(f"the process ended: {output.read_text()}")
        return int(port_file.read_text() or 0) if port_file.exists() else None

    return process, until(port, 120), output
