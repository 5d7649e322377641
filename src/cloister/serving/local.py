"""A server on this machine, started and stopped by the client: both parties without anything started by hand."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from cloister import manifest as manifests
from cloister.errors import PeerUnreachable

_START_SECONDS = 180.0
_STOP_SECONDS = 15.0


class LocalServer:
    """`python -m cloister.serving.server DIRECTORY` as a child process on a free loopback port."""

    def __init__(self, directory: str | Path, *, seconds: float = _START_SECONDS) -> None:
        manifests.read(directory, role="server")
        self._folder = tempfile.TemporaryDirectory(prefix="cloister-")
        folder = Path(self._folder.name)
        port_file, log = folder / "port", folder / "log"
        command = [sys.executable, "-m", "cloister.serving.server", str(directory)]
        command += ["--host", "127.0.0.1", "--port", "0", "--port-file", str(port_file)]
        with log.open("wb") as output:
            # A group of its own: Ctrl-C reaches only us, and we end the child in order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=os.environ
            )
        atexit.register(self.close)
        try:
            self.url = f"http://127.0.0.1:{self._wait(port_file, log, seconds)}"
        except BaseException:
            self.close()
            raise

    def _wait(self, port_file: Path, log: Path, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return int(port_file.read_text())
            if self._process.poll() is not None:
                said = log.read_text(errors="replace").strip().splitlines()
                raise PeerUnreachable(
                    f"The server did not start: {said[-1][:500] if said else 'it said nothing'}",
                    advice="Start it by hand with `cloister serve` to see more.",
                )
            time.sleep(0.05)
        raise PeerUnreachable(f"The server did not start within {seconds:g} s.", advice="Start it by hand.")

    def close(self) -> None:
        """End the child and wait for it."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
