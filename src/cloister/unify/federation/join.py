"""An owner on the network: a SuperNode, the owner's work beside it, and answers to what the coordinator asks."""

from __future__ import annotations

import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cloister import storage
from cloister.errors import (
    BrokenManifest,
    CloisterError,
    PeerDied,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    TrustError,
    UsageError,
)
from cloister.progress import SILENT, Progress
from cloister.unify.artefacts import Refused, shown
from cloister.unify.keys import Key
from cloister.unify.rounds import invitation, owner
from cloister.unify.rounds.state import STATE, Book, alone
from cloister.unify.rounds.steps import Steps

from . import flower
from .node import Node, knock, trusting
from .protocol import MOST_REASONS, OwnerSide

PAUSE, IDLE_PAUSE = 0.25, 1.0  # between two looks; the second when nothing has been asked for a while
IDLE_SECONDS = 15.0
AGAIN_SECONDS = 15.0  # the longest pause before the coordinator is tried again
LAST_SECONDS = 5.0  # for the last answer to be fetched
GRACE = timedelta(minutes=10)  # after the deadline, and without a coordinator, to hear how it ended


def join(
    address: str,
    private: Path,
    folder: Path,
    *,
    key: Key,
    certificate: Path,
    steps: Steps,
    coordinator: str = "",
    reconsider: bool = False,
    progress: Progress = SILENT,
) -> None:
    """Take part in a round until the coordinator has our contribution. Run again after an interruption, it goes on."""
    flower.require()
    if not private.exists():
        raise UsageError(f"There is no {private}.", advice="Name the file that holds your examples.")
    context = trusting(certificate)
    with alone(folder):
        side = OwnerSide(folder)
        work = _Work(side, private, folder, key, steps, coordinator, reconsider, progress)
        talk = _Talk(address, key, certificate, folder, side, progress)
        try:
            talk.connect(context)
            work.start()
            talk.go(context)
        finally:
            talk.close()
        _end(side, folder)


class _Work(threading.Thread):
    """The owner's work, once the invitation is here."""

    def __init__(
        self,
        side: OwnerSide,
        private: Path,
        folder: Path,
        key: Key,
        steps: Steps,
        coordinator: str,
        reconsider: bool,
        progress: Progress,
    ) -> None:
        super().__init__(daemon=True, name="owner's work")
        self._side, self._private, self._folder, self._key, self._steps = side, private, folder, key, steps
        self._coordinator, self._reconsider, self._progress = coordinator, reconsider, progress

    def run(self) -> None:
        """What is wrong is kept for the main thread; the coordinator hears only of what kind it is."""
        side = self._side
        try:
            while not side.invited:
                time.sleep(PAUSE)
            self._check()
            while not side.awaited and _over(side, self._key, timedelta()):
                time.sleep(PAUSE)  # only the coordinator knows whether it has moved our deadline
            owner.contribute(
                side.invitation,
                self._private,
                self._folder,
                key=self._key,
                steps=self._steps,
                coordinator=self._coordinator,
                progress=self._progress,
                reconsider=self._reconsider,
                deadline=False,
            )
            side.ready = True
        except CloisterError as error:
            side.problem, side.failed = error, error.code
        except Exception as error:
            side.problem = CloisterError(
                f"The work failed: {type(error).__name__}: {error}", advice="Run the same command again; it goes on."
            )
            side.failed = type(error).__name__

    def _check(self) -> None:
        """An invitation that is refused is not kept: the next run asks for it again."""
        try:
            invitation.read(self._side.invitation, coordinator=self._coordinator)
        except (Refused, TrustError, BrokenManifest):
            storage.remove(self._side.invitation)
            raise
        self._progress.note("The invitation is here and was checked; working.")


class _Talk:
    """The connection, made again whenever it is lost."""

    def __init__(
        self, address: str, key: Key, certificate: Path, folder: Path, side: OwnerSide, progress: Progress
    ) -> None:
        self._address, self._key, self._certificate = address, key, certificate
        self._folder, self._side, self._progress = folder, side, progress
        self._node: Node | None = None
        self._tries, self._next, self._alone = 0, 0.0, time.monotonic()

    def connect(self, context: ssl.SSLContext) -> None:
        """Knock and start a SuperNode, unless nobody is there; what is wrong for good is raised."""
        if time.monotonic() < self._next:
            return
        try:
            name = knock(self._address, self._key, context)
        except PeerUnreachable as error:
            if not self._tries:
                self._progress.note(f"{error.message} Trying again until the coordinator is there.")
            self._tries += 1
            self._next = time.monotonic() + min(2.0**self._tries / 2, AGAIN_SECONDS)
            return
        self._node = Node(self._address, self._folder / "flower", self._key, self._certificate)
        self._tries = 0
        self._progress.note(f"Connected to {self._address} as {name}.")

    def go(self, context: ssl.SSLContext) -> None:
        """Answer until it is over for us."""
        end, asked = 0.0, time.monotonic()
        while True:
            self._give_up_after_the_deadline()
            served = False
            if self._node is None:
                self.connect(context)
            else:
                try:
                    served = self._node.serve(self._side)
                except PeerDied as error:
                    self._progress.note(f"{error.message} Connecting again.")
                    self.close()
                    self._alone = time.monotonic()
            side = self._side
            if side.verdict is not None or side.failed:
                end = end or time.monotonic() + LAST_SECONDS
                if time.monotonic() > end:
                    return
            if served:
                asked = time.monotonic()
            else:
                time.sleep(PAUSE if time.monotonic() < asked + IDLE_SECONDS else IDLE_PAUSE)

    def _give_up_after_the_deadline(self) -> None:
        if self._node is not None or time.monotonic() < self._alone + GRACE.total_seconds():
            return
        if self._side.invited and _over(self._side, self._key, GRACE):
            raise PeerTimeout(
                "The deadline is over and the coordinator is not there.",
                advice="Ask the coordinator how the round ended, or for another deadline and to be there.",
            )

    def close(self) -> None:
        """End the SuperNode."""
        if self._node is not None:
            self._node.close()
            self._node = None


def _over(side: OwnerSide, key: Key, grace: timedelta) -> bool:
    """Whether the deadline is over, as far as our invitation says."""
    given = invitation.read(side.invitation, whole=False)
    return datetime.now(UTC) > given.recipe.deadline_of(owner.who(given, key)) + grace


def _end(side: OwnerSide, folder: Path) -> None:
    """Return if the coordinator has our contribution; raise with the reason if not."""
    if side.problem is not None:
        raise side.problem
    told = side.verdict.what if side.verdict is not None else {}
    stage, given = str(told.get("stage", "")), told.get("reasons")
    reasons = tuple(shown(reason, 300) for reason in given[:MOST_REASONS]) if isinstance(given, list) else ()
    own = "received" if stage == "built" else stage
    if own in ("received", "refused", "late") and (folder / STATE).exists():
        book = Book.load(folder)
        book.move(book.state.name, own, reasons=reasons)  # type: ignore[arg-type]
    if stage in ("received", "built"):
        return
    if stage == "refused":
        storage.remove(side.made)
        raise PeerRefused(
            "\n  - ".join(["The coordinator refused the contribution:", *reasons]),
            advice="Run the same command again before the deadline: the contribution is made anew from what is there.",
        )
    if stage == "late":
        raise PeerTimeout(
            f"The contribution came after the deadline ({'; '.join(reasons) or 'the coordinator does not say more'}).",
            advice="Ask the coordinator for another deadline: `cloister unify add` gives one. Then run the same again.",
        )
    raise PeerRefused("The round is over without us.", advice="Ask the coordinator: `cloister unify status` says why.")
