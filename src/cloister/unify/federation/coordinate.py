"""The coordinator on the network: one question after the other to each owner, until nobody is awaited any more."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cloister.errors import CloisterError, DiskFull, PeerDied, UsageError
from cloister.progress import SILENT, Progress
from cloister.unify.chunks import Sender
from cloister.unify.rounds.coordinator import INVITATION, CheckFailed, Coordinator
from cloister.unify.rounds.provenance import is_made_of

from . import certificates, flower
from .link import Link
from .protocol import CHUNKS_AT_ONCE, CoordinatorSide, Said

PAUSE, IDLE_PAUSE = 0.25, 1.0  # between two looks; the second when nothing has happened for a while
IDLE_SECONDS = 15.0
QUIET_SECONDS = 30.0  # the longest pause between two questions to an owner who is at work
ANSWER_SECONDS = 120.0  # after which a small question is asked again
DATA_SECONDS = 3600.0  # and one that moves chunks; an owner who connects again is asked at once
QUICK_SECONDS, SLOW_SECONDS = 20.0, 60.0  # for chunks: more of them at once, or fewer
LAST_SECONDS = 60.0  # for owners who are there to hear how it ended
RECENT_SECONDS = 30.0  # an owner who was connected so lately is waited for at the end
TRIES = 3  # to start a SuperLink again that has died


def is_built(round_: Coordinator, out: Path) -> bool:
    """Whether `out` is the model of this round, made by an earlier run; then nothing is left but to tell the owners.

    `UsageError` if `out` is something else: better than after days of waiting.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    standing = round_.standing()
    taken = {name: round_.book.entry(name).digest for name in standing.taken}
    if standing.awaited or not is_made_of(out, round_.recipe.terms, taken):
        more = f"; {', '.join(standing.awaited)} may still come" if standing.awaited else ""
        raise UsageError(
            f"{out} exists and is not the model of the owners whose contributions are here{more}.",
            advice="Name another folder for the model, or remove this one first.",
        )
    for name in taken:  # the run that built it may have been killed before it noted that
        round_.book.move(name, "built")
    return True


@dataclass
class _Peer:
    """What goes on with one owner."""

    side: CoordinatorSide
    number: str = ""  # of the question that is under way
    moves_chunks: bool = False
    asked: float = 0.0
    last: Said | None = None  # its last answer
    same: int = 0  # how often it has said the same
    due: float = 0.0  # when to ask next
    arrivals: int = 0
    shown: str = ""


def coordinate(
    round_: Coordinator,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    names: list[str] | None = None,
    progress: Progress = SILENT,
    announce: Callable[[int, Path], None] = lambda port, certificate: None,
) -> None:
    """Connect with the owners until nobody is awaited any more. Run again after an interruption, it goes on.

    `announce` is told the port and the certificate that owners need, once they can connect.
    """
    flower.require()
    certificate, key = certificates.ensure(round_.folder / "key", [host, *(names or [])])
    owners = {owner.name: owner.key for owner in round_.recipe.owners if round_.book.entry(owner.name).stage != "left"}
    limits = {o.name: 8 * round_.most_bytes(o) + 64_000_000 for o in round_.recipe.owners if o.name in owners}
    talk = _Talk(round_, sorted(owners), progress)
    failures = 0
    while True:
        began = time.monotonic()
        link = Link(
            round_.folder / "flower",
            host=host,
            port=port,
            certificate=certificate,
            key=key,
            owners=owners,
            most_bytes=limits,
        )
        port = link.port
        try:
            announce(port, certificate)
            talk.go(link)
            return
        except PeerDied as error:
            failures = failures + 1 if time.monotonic() - began < 60 else 1
            if failures >= TRIES:
                raise
            progress.note(f"{error.message} Starting it again.")
        finally:
            link.close()


class _Talk:
    def __init__(self, round_: Coordinator, names: list[str], progress: Progress) -> None:
        self.round, self.progress = round_, progress
        self.index = Sender(round_.folder / INVITATION).index
        self.peers = {name: _Peer(CoordinatorSide(round_, name)) for name in names}
        self.seen: dict[str, float] = {}  # when each was connected last
        self.moved = time.monotonic()

    def go(self, link: Link) -> None:
        """Until nobody is awaited, and everybody who is there was told how it ended."""
        for peer in self.peers.values():
            peer.number, peer.last, peer.arrivals, peer.due = "", None, 0, 0.0
            peer.side.forget()
        over = 0.0
        while True:
            link.check()
            self._look_at_the_door(link)
            self._listen(link)
            standing = self.round.standing()
            self._tell()
            online = link.online()
            self.seen |= dict.fromkeys(online, time.monotonic())
            if not standing.awaited:
                over = over or time.monotonic()
                untold = [name for name in self.peers if self._should_hear(name)]
                if not untold or time.monotonic() > over + LAST_SECONDS:
                    return
            self._speak(link, online)
            time.sleep(PAUSE if time.monotonic() < self.moved + IDLE_SECONDS else IDLE_PAUSE)

    def _should_hear(self, name: str) -> bool:
        """An owner who is there or was a moment ago (busy machines connect anew), or whose contribution was taken by an
        earlier run, which may not have told it."""
        stage = self.round.book.entry(name).stage
        peer = self.peers[name]
        unheard = not peer.side.told or bool(peer.number)  # being asked is not having heard
        return unheard and (self._was_here(name) or stage in ("received", "built"))

    def _was_here(self, name: str) -> bool:
        return time.monotonic() < self.seen.get(name, float("-inf")) + RECENT_SECONDS

    def _look_at_the_door(self, link: Link) -> None:
        """An owner that has connected anew has not heard what was asked before; strangers are written down."""
        arrivals, strangers = link.door()
        for name, count in arrivals.items():
            peer = self.peers[name]
            if count != peer.arrivals:
                peer.arrivals, peer.number, peer.last, peer.due = count, "", None, 0.0
                peer.side.forget()
        for text in strangers:
            if text not in self.round.book.state.strangers:
                self.progress.note(f"sent away: {text}")
                self.round.book.stranger(text)

    def _listen(self, link: Link) -> None:
        """Take the answers that have come; questions that get none are asked again."""
        for name, peer in self.peers.items():
            if not peer.number:
                continue
            waited = time.monotonic() - peer.asked
            try:
                said = link.answer(peer.number)
                if said is not None:
                    self._heard(peer, said, waited)
                elif waited > (DATA_SECONDS if peer.moves_chunks else ANSWER_SECONDS):
                    peer.number, peer.last = "", None
            except PeerDied:
                raise
            except flower.NodeGone:
                self._ask_later(peer)
            except (DiskFull, OSError) as error:  # our own trouble, for which no owner is refused
                self.progress.note(f"{name}: what it sent cannot be kept: {error}")
                self._ask_later(peer)
            except (CheckFailed, MemoryError) as error:  # so is this; what it sent comes once more, so not too soon
                self.progress.note(f"{name}: what it sent cannot be checked now: {str(error) or 'no memory is left'}")
                self._ask_later(peer, QUIET_SECONDS)
            except CloisterError as error:
                self._against(peer, error.message)
            except Exception as error:  # whatever an owner finds to send, the round of the others goes on
                self._against(peer, f"it sent what nothing here expects ({type(error).__name__})")

    def _against(self, peer: _Peer, reason: str) -> None:
        self.progress.note(f"{peer.side.name}: {reason}")
        peer.side.refuse([reason])
        self._ask_later(peer)

    def _ask_later(self, peer: _Peer, seconds: float = 0.0) -> None:
        peer.number, peer.last = "", None
        self._wait_longer(peer)
        peer.due = max(peer.due, time.monotonic() + seconds)

    def _heard(self, peer: _Peer, said: Said, waited: float) -> None:
        before = self.round.book.entry(peer.side.name)
        peer.number = ""
        peer.side.heard(said)
        if peer.moves_chunks:
            at_once = peer.side.at_once
            more = at_once * 2 if waited < QUICK_SECONDS else at_once // 2 if waited > SLOW_SECONDS else at_once
            peer.side.at_once = min(max(more, 1), CHUNKS_AT_ONCE)
        if peer.moves_chunks or self.round.book.entry(peer.side.name) != before or said != peer.last:
            peer.same, peer.due, self.moved = 0, 0.0, time.monotonic()
        else:
            self._wait_longer(peer)
        peer.last = said

    def _wait_longer(self, peer: _Peer) -> None:
        peer.same += 1
        peer.due = time.monotonic() + min(float(peer.same), QUIET_SECONDS)

    def _speak(self, link: Link, online: set[str]) -> None:
        """One question to every owner who is there and has none."""
        now = time.monotonic()
        for name in sorted(online):
            peer = self.peers[name]
            if peer.number or now < peer.due or peer.side.done:
                continue
            try:
                question = peer.side.question(self.index, peer.last)
            except CloisterError as error:  # it asked for what there is not
                peer.side.refuse([error.message])
                peer.last = None
                self._wait_longer(peer)
                continue
            peer.moves_chunks = question.what["do"] in ("take", "give")
            peer.number, peer.asked = link.ask(name, question), now

    def _tell(self) -> None:
        """A line for every owner that has come further."""
        for name, peer in self.peers.items():
            says = self.round.book.entry(name).sentence()
            if peer.shown != says:
                peer.shown, self.moved = says, time.monotonic()
                self.progress.note(f"{name}: {says}")
