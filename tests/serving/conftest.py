"""Tiny random models, and servers as real processes on ports that the system chooses.

def test_something(start_server, tiny_llama_dir):
    url = start_server(tiny_llama_dir, max_slots=4)      # "http://127.0.0.1:PORT"; ends with the test session
    url.process.kill()                                   # it is a str that knows its process
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class RunningServer(str):
    """A base URL, and the process behind it."""

    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> int:
        """Ask it to end, as an operator would, and wait."""
        self.process.terminate()
        return self.process.wait(timeout=30)


StartServer = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """`start_server(directory, **flags)` runs `python -m cloister.serving.server` and waits until it answers."""
    pytest.importorskip("transformers")
    started: list[RunningServer] = []

    def start(directory: Path, **flags: Any) -> RunningServer:
        folder = tmp_path_factory.mktemp("server")
        command = [sys.executable, "-m", "cloister.serving.server", str(directory), "--port", "0"]
        command += ["--port-file", str(folder / "port"), "--threads", "1"]
        for name, value in flags.items():
            command.append("--" + name.replace("_", "-"))
            if value is not True:
                command.append(str(value))
        log = folder / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 120
        while not (folder / "port").exists() or not (folder / "port").read_text().endswith("\n"):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.05)
        scheme = "https" if {"ssl_certfile", "tls_self_signed"} & flags.keys() else "http"
        server = RunningServer(f"{scheme}://127.0.0.1:{(folder / 'port').read_text().strip()}")
        server.process, server.log = process, log
        started.append(server)
        return server

    yield start
    for server in started:
        server.process.terminate()
    for server in started:
        try:
            server.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary checkpoint of a random LLaMA, 101 tokens, hidden size 32, 128 positions, without tokenizer."""
    pytest.importorskip("transformers")
    from tiny_models import tiny_causal_lm

    path = tmp_path_factory.mktemp("tiny-llama")
    tiny_causal_lm("Llama").save_pretrained(path)
    return path
