"""Server and gateway as real processes on loopback, for benchmarks and the demo. They end with the block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from cloister.errors import PeerDied, PeerTimeout

START_SECONDS = 180.0


class Parties:
    """Starts `cloister serve` and `cloister gateway` on ports that the system chooses; logs go to files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def serve(self, directory: Path, *options: str) -> str:
        """Start a server on `directory` and return its URL."""
        return self._start("serve", str(directory), *options)

    def gateway(self, client: Path, server: str, *options: str) -> str:
        """Start a gateway for `client` in front of `server` and return its URL."""
        return self._start("gateway", str(client), "--server", server, *options)

    def _start(self, *arguments: str) -> str:
        number = len(self._running)
        port_file, log = self._folder / f"{arguments[0]}-{number}.port", self._folder / f"{arguments[0]}-{number}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CLOISTER_")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "cloister", *arguments, "--port", "0", "--port-file", str(port_file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C comes to us first, and we end them
            )
        self._running.append(process)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if port_file.exists() and (told := port_file.read_text().strip()):
                return told if "://" in told else f"http://127.0.0.1:{told}"
            if process.poll() is not None:
                raise PeerDied(f"`cloister {arguments[0]}` ended at once: {_last_line(log)}")
            time.sleep(0.05)
        raise PeerTimeout(f"`cloister {arguments[0]}` was not ready after {START_SECONDS:.0f} s: {_last_line(log)}")

    def log(self, index: int) -> str:
        """What the process started as number `index` wrote."""
        found = sorted(self._folder.glob(f"*-{index}.log"))
        return found[0].read_text(errors="replace") if found else ""

    def close(self) -> None:
        """End every process: politely, then not."""
        for process in reversed(self._running):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:]) if lines else "it wrote nothing"
