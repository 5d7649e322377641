"""The coordinator's SuperLink, and our place behind it: owners' keys registered, questions in, answers out."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloister import storage
from cloister.errors import CloisterError, PeerDied, PeerTimeout

from . import flower
from .guard import Door, read_log
from .protocol import Said

HEARTBEAT_SECONDS = 20.0  # Flower forgets a run that is silent for a minute
MESSAGE_SECONDS = 7 * 24 * 3600.0  # a question waits for its node; when it is asked again is ours to say


class Link:
    """A SuperLink as a child process, and a run on it that only we take part in."""

    def __init__(
        self,
        home: Path,
        *,
        host: str,
        port: int,
        certificate: Path,
        key: Path,
        owners: Mapping[str, str],
        most_bytes: Mapping[str, int],
    ) -> None:
        self.port = port or flower.free_port(host)
        self._log = home / "door.json"
        storage.remove(self._log)
        secret_file, door_file = home / "secret", home / "door-settings.json"
        self._secret, inner = flower.fresh_secret(secret_file), flower.free_port()
        Door(self._secret, host, self.port, inner, dict(owners), dict(most_bytes)).write(door_file)
        self._address, self._trusted = f"127.0.0.1:{inner}", certificate.read_bytes()
        self._over = threading.Event()
        self._lost = ""
        self.nodes: dict[str, int] = {}
        self._child = flower.Child(
            "superlink",
            [
                *("--host", "127.0.0.1", "--port", str(inner)),
                *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--ssl-ca-certfile", str(certificate)),
                *("--isolation", "process", "--superexec-auth-secret-file", str(secret_file)),
                *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            ],
            home,
            **{flower.DOOR_FILE: str(door_file), flower.LOG_FILE: str(self._log)},
        )
        try:
            self._child.wait_for_port(inner)
            self._child.wait_for_port(self.port, "127.0.0.1" if host in ("0.0.0.0", "::", "") else host)
            self._begin(owners)
        except BaseException:
            self.close()
            raise

    def _begin(self, owners: Mapping[str, str]) -> None:
        control = flower.control(self._address, self._trusted, self._secret)
        for name, key in owners.items():
            self.nodes[name] = flower.register(control, name, key)
        flower.start_run(control)
        waiting = flower.runtime(self._address, self._trusted, self._secret)
        deadline = time.monotonic() + flower.START_SECONDS
        while not (token := flower.acquire(waiting, "flwr-serverapp")):
            if time.monotonic() > deadline:
                raise PeerTimeout("Flower did not give us the run that we began.", advice="Try again.")
            time.sleep(0.1)
        waiting.close()
        self._grid = self._make_grid(token)
        threading.Thread(target=self._beat, args=(token,), daemon=True, name="heartbeat").start()

    def _make_grid(self, token: str) -> Any:
        from flwr.common.serde import run_from_proto
        from flwr.proto.runtime_pb2 import PullTaskInputRequest
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.grid import HttpGrid

        grid: Any = HttpGrid(self._address, False, self._trusted, token=token)
        grid._client = flower.runtime(self._address, self._trusted, self._secret, token)
        given = grid._client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        return grid

    def _beat(self, token: str) -> None:
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        client = flower.runtime(self._address, self._trusted, self._secret, token)
        while not self._over.wait(HEARTBEAT_SECONDS):
            try:
                if not client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success:
                    self._lost = "Flower has ended the run, because this process did not get to run for a minute."
                    return
            except Exception as error:  # whatever it is, the main thread finds it out too
                self._lost = f"The SuperLink does not answer ({type(error).__name__})."
                return

    def door(self) -> tuple[dict[str, int], list[str]]:
        """How often each owner has connected, and who was sent away."""
        return read_log(self._log)

    def online(self) -> set[str]:
        """Owners whose node is connected, as far as Flower knows: it notices after a minute that one is gone."""
        there = {int(node.node_id) for node in self._call(self._grid.get_nodes)}
        return {name for name, node in self.nodes.items() if node in there}

    def ask(self, name: str, question: Said) -> str:
        """Send a question; the number by which its answer is known."""
        from flwr.app import Message

        message = Message(flower.content(question), self.nodes[name], flower.KIND, ttl=MESSAGE_SECONDS)
        numbers = list(self._call(self._grid.push_messages, [message]))
        if not numbers or not numbers[0]:
            raise PeerDied(f"Flower did not take a message to {name}.")
        return str(numbers[0])

    def answer(self, number: str) -> Said | None:
        """The answer to a question, if it has come. What is wrong with it is its sender's fault: `CloisterError`."""
        import httpx

        try:
            found = list(self._grid.pull_messages([number]))
            return flower.said(found[0]) if found else None
        except CloisterError:
            raise
        except httpx.HTTPError as error:
            raise PeerDied(f"The SuperLink does not answer ({error}).") from None
        except Exception as error:  # Flower unpacks what an owner sent, which may be anything
            raise CloisterError(f"it sent what Flower cannot unpack ({type(error).__name__})") from None

    def _call(self, function: Any, *arguments: Any) -> Any:
        import httpx

        try:
            return function(*arguments)
        except httpx.HTTPError as error:
            raise PeerDied(f"The SuperLink does not answer ({error}).") from None

    def check(self) -> None:
        """Raise `PeerDied` if the SuperLink or our run on it has ended."""
        self._child.check()
        if self._lost:
            raise PeerDied(self._lost)

    def close(self) -> None:
        """End everything that was started."""
        self._over.set()
        self._child.close()
