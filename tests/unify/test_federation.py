"""A round over Flower: every party a process of its own, with TLS and registered keys, on this machine.

The parties' work takes no time (`round_parties.StandIn`); what is tested is who is let in, what happens when somebody
dies, cheats or comes too late, and that the model is the same as without the bad ones, byte for byte.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from round_parties import Parties, StandIn, make_parties

from cloister.unify.rounds.coordinator import Coordinator
from cloister.unify.rounds.state import STATE, Book

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed: pip install 'cloister[federated]'"),
]
HERE = Path(__file__).parent
PATIENCE = 240  # seconds for anything; machines may be busy


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Proxy:
    """Where processes go that look for anything outside this machine. Nobody should come."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.asked: list[bytes] = []
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _listen(self) -> None:
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:
                return
            with line:
                self.asked.append(line.recv(200))

    def close(self) -> None:
        self._socket.close()


class Players:
    """Starts parties, waits for what they do, and ends them."""

    def __init__(self, folder: Path, names: list[str], quorum: int) -> None:
        self.parties = make_parties(folder, names)
        self.parties.begin(quorum=quorum)
        self.folder, self.port, self.proxy = folder, free_port(), Proxy()
        self._running: list[subprocess.Popen[bytes]] = []

    def _start(self, log: str, *arguments: object) -> subprocess.Popen[bytes]:
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy"), self.proxy.url)
        with (self.folder / f"{log}.log").open("ab") as out:
            self._running.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "federation_party.py"), *map(str, arguments)],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **proxies, "OMP_NUM_THREADS": "1"},
                )
            )
        return self._running[-1]

    def coordinate(self) -> subprocess.Popen[bytes]:
        return self._start("coordinator", "coordinate", self.folder, self.port, self.folder / "model")

    def join(self, name: str, how: str = "") -> subprocess.Popen[bytes]:
        return self._start(name, "join", self.folder, name, self.port, how)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def says(self, name: str) -> str:
        """Where the coordinator says that an owner stands."""
        return Book.load(self.parties.round_folder).entry(name).sentence()

    def strangers(self) -> str:
        return "\n".join(Book.load(self.parties.round_folder).state.strangers)

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"-- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
                pytest.fail(f"{what}: not after {PATIENCE} s.\n{logs}")
            time.sleep(0.1)

    def ends(self, party: subprocess.Popen[bytes], code: int) -> None:
        self.until(lambda: party.poll() is not None, "a party ends")
        assert party.returncode == code, [path.read_text() for path in self.folder.glob("*.log")]

    def deadlines_pass(self) -> None:
        (self.folder / "over").touch()

    def close(self) -> None:
        for party in self._running:
            if party.poll() is None:
                party.kill()
            party.wait()
        self.proxy.close()


@pytest.fixture
def players(tmp_path: Path) -> Iterator[Callable[[list[str], int], Players]]:
    made: list[Players] = []

    def make(names: list[str], quorum: int) -> Players:
        made.append(Players(tmp_path / "play", names, quorum))
        return made[-1]

    yield make
    for one in made:
        one.close()


def by_hand(players: Players, names: list[str], out: Path) -> dict[str, bytes]:
    """The model when only these were invited, and brought their folders themselves."""
    few = Parties(out / "few", names)
    shutil.copytree(players.folder / "seed", few.folder / "seed")
    shutil.copytree(players.folder / "keys", few.folder / "keys")
    for path in [players.folder / "public.jsonl", *(players.parties.private(name) for name in names)]:
        shutil.copy(path, few.folder)
    round_ = few.begin(quorum=len(names))
    for name in names:
        assert round_.receive(few.contribute(name))[1].stage == "received"
    round_.build(out / "model")
    return contents(out / "model")


@pytest.mark.timeout(600)
def test_five_owners_of_whom_two_are_bad_and_one_dies(
    players: Callable[[list[str], int], Players], tmp_path: Path
) -> None:
    play = players(["ada", "ben", "cyd", "dan", "eve"], 3)
    coordinator = play.coordinate()
    good = [play.join("ada"), play.join("ben", "upload")]
    dies, corrupt, stranger = play.join("cyd", "slow"), play.join("dan", "corrupt"), play.join("eve", "wrong-key")
    play.ends(stranger, 4)
    assert "wrong_key: The coordinator has invited nobody with this key" in play.log("eve")
    play.until((play.folder / "training").exists, "cyd trains")
    dies.send_signal(signal.SIGKILL)  # in the middle of its training
    again = play.join("cyd")
    play.ends(good[1], -signal.SIGKILL)  # in the middle of its upload
    good[1] = play.join("ben")
    play.ends(corrupt, 5)
    assert "refused the contribution" in play.log("dan") and "not finite" in play.log("dan")
    for party in (*good, again):
        play.ends(party, 0)
    assert coordinator.poll() is None, "it waits for dan, who may mend it, and for eve"
    play.deadlines_pass()
    play.ends(coordinator, 0)

    assert [play.says(name) for name in ("ada", "ben", "cyd")] == ["built"] * 3
    assert play.says("dan").startswith("refused: expert.safetensors: ") and "not finite" in play.says("dan")
    assert play.says("eve") == "late: nothing came"
    assert play.parties.key("stranger").fingerprint[:16] in play.strangers()
    assert contents(play.folder / "model") == by_hand(play, ["ada", "ben", "cyd"], tmp_path / "by-hand")
    assert play.proxy.asked == [], "Flower looked for somebody outside"


@pytest.mark.timeout(600)
def test_a_coordinator_that_dies_and_an_owner_who_is_late(
    players: Callable[[list[str], int], Players], tmp_path: Path
) -> None:
    play = players(["ada", "ben"], 1)
    first = play.coordinate()
    late = play.join("ben", "slow")
    play.until((play.folder / "training").exists, "ben trains")
    first.send_signal(signal.SIGKILL)
    ada = play.join("ada")  # while nobody is there
    play.until(lambda: "Trying again" in play.log("ada"), "ada finds nobody")
    second = play.coordinate()
    play.ends(ada, 0)
    play.until(lambda: play.says("ben") == "working" and play.log("ben").count("Connected") == 2, "ben is back")
    play.deadlines_pass()
    play.ends(second, 0)
    play.ends(late, 5)
    assert "peer_timeout: The contribution came after the deadline (it was working)" in play.log("ben")
    assert (play.says("ada"), play.says("ben")) == ("built", "late: it was working")
    assert contents(play.folder / "model") == by_hand(play, ["ada"], tmp_path / "by-hand")
    own = Book.load(play.folder / "owners" / "ben")
    assert own.entry("ben").stage == "late"


@pytest.mark.timeout(600)
def test_what_answers_at_the_port(players: Callable[[list[str], int], Players]) -> None:
    """Against the real SuperLink: no TLS, a stranger's requests, and the calls that would run code on all nodes."""
    play = players(["ada"], 1)
    play.coordinate()
    certificate = play.folder / "round" / "key" / "tls-certificate.pem"

    def listens() -> bool:
        try:
            socket.create_connection(("127.0.0.1", play.port), 1).close()
        except OSError:
            return False
        return certificate.exists()

    play.until(listens, "the coordinator listens")
    with socket.create_connection(("127.0.0.1", play.port)) as line:
        line.sendall(b"POST /v1/control/start-run HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        line.settimeout(20)
        assert line.recv(100) == b""
    import httpx

    from cloister.errors import TrustError
    from cloister.unify.federation import certificates, node
    from cloister.unify.keys import Key

    trusted = node.trusting(certificate)
    other = node.trusting(certificates.ensure(play.folder / "other", [])[0])
    address = f"localhost:{play.port}"
    with pytest.raises(TrustError, match="another certificate"):
        node.knock(address, play.parties.key("ada"), other)
    assert node.knock(address, play.parties.key("ada"), trusted) == "ada"
    with httpx.Client(verify=trusted, base_url=f"https://{address}", trust_env=False) as client:
        for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"):
            assert client.post(path, content=b"").status_code == 404
        for path in ("/v1/fleet/activate-node", "/v1/fleet/push-object"):
            assert client.post(path, content=b"0" * 1000).status_code == 401
    lines = [socket.create_connection(("127.0.0.1", play.port)) for _ in range(200)]
    assert node.knock(address, play.parties.key("ada"), trusted) == "ada"
    for line in lines:
        line.close()
    play.until(lambda: "sent something that no owner's node sends" in play.strangers(), "the stranger is written down")
    assert Key.at(play.folder / "keys" / "ada").fingerprint not in play.strangers()


def test_two_commands_in_one_folder(tmp_path: Path) -> None:
    from cloister.errors import TooBusy
    from cloister.unify.rounds.state import alone

    with alone(tmp_path), pytest.raises(TooBusy, match="Another command"), alone(tmp_path):
        pass
    with alone(tmp_path):
        pass


def test_without_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    from cloister.errors import NotAvailable
    from cloister.unify.federation import flower

    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(NotAvailable, match="not installed"):
        flower.require()


def test_state_is_read_while_a_coordinator_works(tmp_path: Path) -> None:
    """`status` looks only: it must not undo what the coordinator writes meanwhile."""
    from cloister.unify.rounds.coordinator import standing_of

    parties = make_parties(tmp_path, ["ada", "ben"])
    round_ = parties.begin()
    before = (parties.round_folder / STATE).read_bytes()
    standing = standing_of(round_.recipe, Book.load(parties.round_folder))
    assert standing.awaited == ("ada", "ben") and (parties.round_folder / STATE).read_bytes() == before
    assert json.loads(before)["owners"]["ada"]["stage"] == "invited"
    assert Coordinator(parties.round_folder, StandIn()).standing().awaited == ("ada", "ben")
