"""What we need of Flower, in one file: its programs as child processes, its connections, its messages.

The design, and why. Flower runs apps: code that whoever controls the SuperLink hands to every node, which installs and
runs it. That is the wrong way round here: an owner must not run what a coordinator sends. So the SuperLink and the
SuperNodes are Flower's own programs (TLS, registered keys, messages that wait for a node, its heartbeats), in
Flower's mode for apps that run in a process of their own (`--isolation process`); and at both ends that process is
ours. It takes messages from Flower's Runtime API and answers them with the code that is installed here. The app that
Flower insists on is empty, and nobody looks at it.

The Runtime and Control APIs are not promised to stay as they are: hence `flwr>=1.41,<1.42`, and every call of them is
in this file, in `link.py` and in `node.py`. `guard.py` and `gate.py` say what stands before the SuperLink.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cloister import storage
from cloister.errors import NotAvailable, PeerDied, PeerError, PeerTimeout, ProtocolViolation, UsageError
from cloister.unify.artefacts import shown
from cloister.unify.keys import PublicKey

from .guard import SECRET_HEADER
from .protocol import Said

DOOR_FILE, LOG_FILE = "CLOISTER_DOOR_FILE", "CLOISTER_DOOR_LOG"
KIND = "query.cloister"
START_SECONDS = 120.0
VERSION = "1.41."
_QUIET = {  # no telemetry, no look for updates, no line for every message
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_LOG_LEVEL": "WARNING",
}
_HERE = ("127.0.0.1", "localhost")
_APP = b"""[project]
name = "cloister-unify"
version = "1.0.0"
description = "Empty: both sides run what is installed there"
license = { file = "LICENSE" }
dependencies = []

[tool.flwr.app]
publisher = "cloister"

[tool.flwr.app.components]
serverapp = "empty:app"
clientapp = "empty:app"
"""


def require() -> None:
    """Raise `NotAvailable` with what to install, if Flower is not here."""
    os.environ.update(_QUIET)  # Flower reads them when it is imported
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = _without_proxy()
    try:
        import flwr
    except ImportError:
        raise NotAvailable(
            "Flower is not installed; it carries rounds over the network.",
            advice="pip install 'cloister[federated]', or exchange folders by hand: invite, contribute, build.",
        ) from None
    if not flwr.__version__.startswith(VERSION):
        raise NotAvailable(
            f"Flower {flwr.__version__} is installed; this Cloister works with {VERSION}*.",
            advice="pip install 'cloister[federated]'",
        )


def _without_proxy() -> str:
    """A proxy may stand between the parties, but not between processes of this machine."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return ",".join(dict.fromkeys([*(name.strip() for name in given.split(",") if name.strip()), *_HERE]))


def fresh_secret(path: Path) -> str:
    """A secret for this run, which only this user can read."""
    storage.private_directory(path.parent)
    value = secrets.token_hex(32)
    storage.write_secret(path, value.encode())
    return value


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class NodeGone(PeerError):
    """A node that does not answer a message any more. Nothing that its owner has to answer for."""


class Child:
    """One of Flower's programs, with its log in a file. It ends with us."""

    def __init__(self, program: str, arguments: list[str], home: Path, **variables: str) -> None:
        self.log, self.program = home / f"{program}.log", program
        storage.private_directory(home)
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __package__, program, str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_QUIET, "FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1", **variables},
                start_new_session=True,  # Ctrl-C comes to us first
            )

    def wait_for_port(self, port: int, host: str = "127.0.0.1") -> None:
        """Until it listens."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            with suppress(OSError), socket.create_connection((host, port), 1):
                return
            time.sleep(0.1)
        raise PeerTimeout(f"Flower's {self.program} was not ready after {START_SECONDS:.0f} s.", advice=self._where())

    def check(self) -> None:
        """Raise `PeerDied` with its last words if it has ended."""
        if self._process.poll() is not None:
            raise PeerDied(f"Flower's {self.program} ended: {self.last_words()}", advice=self._where())

    def _where(self) -> str:
        return f"Its log is {self.log}."

    def last_words(self) -> str:
        """The last lines of its log."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-3:])[-600:] or "it wrote nothing."

    def close(self) -> None:
        """End it: politely, then not."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Pass:
    """Shows the coordinator's own secret to its own guard."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def intercept(self, context: Any, call_next: Any) -> Any:
        """Add the header to a request."""
        context.request.headers[SECRET_HEADER] = self._secret
        return call_next(context)


def runtime(address: str, certificate: bytes | None, secret: str, token: str = "") -> Any:
    """A connection to the Runtime API of our SuperLink or SuperNode. `token` belongs to one task.

    It does not try again by itself: Flower's own way of doing that never ends, or ends the process.
    """
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.interceptors.http import SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    acquiring = {"/flwr.proto.Runtime/AcquireTask"}
    who: Any = (
        RuntimeTokenHttpInterceptor(token)
        if token
        else SuperExecAuthHttpInterceptor(master_secret=secret.encode(), protected_methods=acquiring)
    )
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=certificate is None,
        root_certificates=certificate,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), who, Pass(secret)],
    )


def control(address: str, certificate: bytes, secret: str) -> Any:
    """A connection to the Control API of our SuperLink."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    return ControlHttpClient.from_server_address(
        address,
        False,
        certificate,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI"), Pass(secret)],
    )


def acquire(client: Any, kind: str) -> str:
    """The token of a waiting task; empty if none waits."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest

    found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
    return str(found.token) if found.HasField("task") else ""


def register(client: Any, name: str, key: str) -> int:
    """Register a node's public key; the node's number."""
    from flwr.proto.control_pb2 import RegisterNodeRequest

    found = client.RegisterNode(RegisterNodeRequest(public_key=PublicKey(key).pem, name=name))
    return int(found.node_id)


def start_run(client: Any) -> int:
    """Begin a run with the empty app; its number."""
    import hashlib

    from flwr.cli.build import build_fab_from_files
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    app = build_fab_from_files({"pyproject.toml": _APP, "empty.py": b"app = None\n", "LICENSE": b"Apache-2.0\n"})[0]
    started = client.StartRun(StartRunRequest(fab=Fab(hash_str=hashlib.sha256(app).hexdigest(), content=app)))
    if not started.run_id:
        raise UsageError("Flower did not begin the run.", advice="The log of the SuperLink says why.")
    return int(started.run_id)


def content(said: Said) -> Any:
    """As the content of a Flower message. Each piece of data is an object of its own to Flower."""
    from flwr.app import ConfigRecord, RecordDict

    records = {"say": ConfigRecord({"say": said.text()})}
    records |= {f"data {place}": ConfigRecord({"data": piece}) for place, piece in enumerate(said.data)}
    return RecordDict(records)


def said(message: Any) -> Said:
    """What a Flower message says; `NodeGone` if it says that Flower could not reach the node."""
    if message.has_error():
        raise NodeGone(f"Its node did not answer: {shown(message.error.reason, 200)}")
    try:
        records = message.content
        text = records["say"]["say"]
        data = [records[f"data {place}"]["data"] for place in range(len(records) - 1)]
    except (KeyError, TypeError, AttributeError):
        raise ProtocolViolation("A message has other parts than it should have.") from None
    if not isinstance(text, str) or not all(isinstance(piece, bytes) for piece in data):
        raise ProtocolViolation("A message has parts of another kind than it should have.")
    return Said.parse(text, data)
