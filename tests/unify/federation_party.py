"""One party of a round over Flower as a process of its own, with steps that take no time.

    python federation_party.py coordinate FOLDER PORT OUT
    python federation_party.py join FOLDER NAME PORT [slow|corrupt|wrong-key|upload]

The deadlines of the round are over once FOLDER/over is there. `slow` waits in its training until FOLDER/go is there,
`corrupt` sends an expert with values that are not finite (and has no check of its own that would tell it so),
`wrong-key` has the key of nobody who is invited, `upload` dies in the middle of its upload.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from round_parties import Parties, StandIn

from cloister.errors import CloisterError
from cloister.progress import Progress
from cloister.unify.keys import Key
from cloister.unify.rounds.coordinator import Coordinator


class Odd(StandIn):
    """Steps that go wrong in the way that a test asks for."""

    def __init__(self, how: str, folder: Path) -> None:
        super().__init__()
        self.how, self.folder = how, folder

    def train(self, *arguments: Any, **named: Any) -> Mapping[str, Any]:
        found = dict(super().train(*arguments, **named))
        if self.how == "slow":
            (self.folder / "training").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.05)
        if self.how == "corrupt":
            next(iter(found.values()))[0, 0] = float("nan")
        return found


def coordinate(folder: Path, port: int, out: Path) -> None:
    from cloister.unify.federation.coordinate import coordinate
    from cloister.unify.rounds import coordinator

    ordinary = coordinator.now
    coordinator.now = lambda: ordinary() + (timedelta(days=99) if (folder / "over").exists() else timedelta())
    round_ = Coordinator(folder / "round", StandIn())
    coordinate(round_, progress=Progress(), port=port)
    round_.build(out, wait=False)


def join(folder: Path, name: str, port: int, how: str) -> None:
    from cloister.unify.federation.join import join

    parties = Parties(folder, [name])
    certificate = folder / "round" / "key" / "tls-certificate.pem"
    while not certificate.exists():
        time.sleep(0.1)
    if how == "upload":
        die_while_sending(folder)
    if how == "corrupt":
        from cloister.unify.rounds import owner

        owner._wrong = lambda made, *_: [] if made.is_dir() else ["it is not there"]
        owner._kept = lambda *_: None
    join(
        f"127.0.0.1:{port}",
        parties.private(name),
        folder / "owners" / name,
        key=Key.at(folder / "keys" / "stranger") if how == "wrong-key" else parties.key(name),
        certificate=certificate,
        steps=Odd(how, folder),
        progress=Progress(),
    )
    print("received", flush=True)


def die_while_sending(folder: Path) -> None:
    """As from a power cut: after the second of the chunks that the coordinator asks for."""
    from cloister.unify.chunks import Place, Sender

    ordinary, sent = Sender.get, []

    def get(self: Sender, place: Place) -> bytes:
        if len(sent) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        sent.append(place)
        return ordinary(self, place)

    Sender.get = get  # type: ignore[method-assign]


if __name__ == "__main__":
    role, where, *rest = sys.argv[1:]
    try:
        if role == "coordinate":
            coordinate(Path(where), int(rest[0]), Path(rest[1]))
        else:
            join(Path(where), rest[0], int(rest[1]), rest[2] if len(rest) > 2 else "")
        assert "ray" not in sys.modules, "Flower's simulation has no place here"
    except CloisterError as error:
        print(f"{error.code}: {error}", flush=True)
        sys.exit(error.exit_code)
