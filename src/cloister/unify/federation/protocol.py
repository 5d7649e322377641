"""What coordinator and owner say to each other, whatever carries it: a question with a few bytes, an answer with a few.

The coordinator asks, because an owner need not be reachable; an owner works at its own pace and says how far it is when
asked. Both keep everything on disk, so either may die and go on.

    hello                     -> where are you?                       "empty", "inviting", "working", "ready", "failed"
                                 (and whether the owner is awaited, which it waits for if its own deadline is over)
    offer   + index           -> the invitation's chunks that you lack
    take    + chunks          -> those that you still lack
    index                     -> the chunks of your contribution
    give                      + these chunks
    verdict                   -> received, late, or refused with every reason; after it there is nothing to ask

How many steps an owner has taken is never said: it would tell the size of its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from cloister.errors import CloisterError, DiskFull, ProtocolViolation
from cloister.unify.artefacts import Refused, parse_json, shown
from cloister.unify.chunks import BadChunk, Index, Place, Receiver, Sender, load_index, most_index, read_chunk
from cloister.unify.rounds.coordinator import INBOX, INVITATION, Coordinator, standing_of
from cloister.unify.rounds.invitation import MOST_PUBLIC, MOST_SEED

CHUNKS_AT_ONCE = 4  # 32 MB: well below what any transport refuses
MOST_SAID = 1 << 20
MOST_REASONS = 100
OVER = ("received", "built", "late", "left")  # stages after which nothing is asked of an owner


@dataclass(frozen=True)
class Said:
    """One question or answer: a small JSON object, and bytes."""

    what: dict[str, Any]
    data: tuple[bytes, ...] = field(default=(), repr=False)

    def text(self) -> str:
        """The object as it travels."""
        return json.dumps(self.what, sort_keys=True)

    @classmethod
    def parse(cls, text: str, data: Iterable[bytes] = ()) -> Said:
        """From the other side."""
        try:
            what = parse_json(text.encode(), MOST_SAID)
        except ValueError as error:
            raise ProtocolViolation(f"A message cannot be read: {error}.") from None
        if not isinstance(what, dict):
            raise ProtocolViolation("A message is not an object.")
        return cls(what, tuple(data))


def plain(places: Iterable[Place], most: int = CHUNKS_AT_ONCE) -> list[list[Any]]:
    """Some places as JSON."""
    return [[place.name, place.number] for place in islice(places, most)]


def places(raw: Any) -> list[Place]:
    """Places from the other side."""
    if not isinstance(raw, list) or len(raw) > CHUNKS_AT_ONCE:
        raise ProtocolViolation("A list of chunks is none, or too long.")
    found = []
    for item in raw:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and type(item[1]) is int):
            raise ProtocolViolation("A list of chunks has something else in it.")
        found.append(Place(item[0], item[1]))
    return found


def put(receiver: Receiver, said: Said) -> None:
    """Keep the chunks of an answer. A damaged one is left out, and so is asked for again."""
    for place, chunk in zip(places(said.what.get("places")), said.data, strict=False):
        try:
            receiver.put(place, chunk)
        except BadChunk:
            continue


class OwnerSide:
    """Answers the coordinator from the owner's folder. `ready` and `failed` are set by whoever does the work."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.invitation, self.made = folder, folder / "invitation", folder / "contribution"
        self.failed = ""  # the code of an error; what it says may be about private examples
        self.problem: CloisterError | None = None
        self.ready = False
        self.awaited = False  # as the coordinator said last
        self.verdict: Said | None = None
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None

    @property
    def invited(self) -> bool:
        """The invitation is here, whole."""
        return self.invitation.is_dir()

    def answer(self, said: Said) -> Said:
        """The answer to a question; nothing that is asked makes an owner give more than its contribution.

        A question that does not fit, or of another kind, is answered with where the owner stands.
        """
        if said.what.get("do") == "hello":
            self.awaited = said.what.get("awaited") is not False  # an older coordinator does not say
        match said.what.get("do"):
            case "offer" if not self.invited and len(said.data) == 1:
                index = load_index(said.data[0])
                self._receiver = Receiver(self.folder / "inbox", index, MOST_SEED + MOST_PUBLIC)
                return self._lacking()
            case "take" if self._receiver is not None:
                put(self._receiver, said)
                return self._lacking()
            case "index" if self.ready:
                return Said({"is": "ready"}, (json.dumps(self._outgoing().index.plain()).encode(),))
            case "give" if self.ready:
                wanted = places(said.what.get("places"))
                chunks = tuple(self._outgoing().get(place) for place in wanted)
                return Said({"is": "ready", "places": plain(wanted)}, chunks)
            case "verdict":
                self.verdict = said
        if self.failed:
            return Said({"is": "failed", "why": self.failed})
        return self._lacking()

    def _stage(self) -> str:
        if self.ready:
            return "ready"
        if self.invited:
            return "working"
        return "inviting" if self._receiver is not None else "empty"

    def _lacking(self) -> Said:
        receiver = self._receiver
        if receiver is None or self.invited:
            return Said({"is": self._stage()})
        lacking = plain(receiver.missing())
        if not lacking:
            try:
                receiver.finish(self.invitation)
                self._receiver = None
            except BadChunk:
                lacking = plain(receiver.missing())
        return Said({"is": self._stage(), "missing": lacking})

    def _outgoing(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(self.made)
        return self._sender


class CoordinatorSide:
    """The questions to one owner, one after the other, and what its answers mean for the round."""

    def __init__(self, round_: Coordinator, name: str) -> None:
        owner = round_.recipe.owner(name)
        assert owner is not None, "only invited owners are asked"
        self.round, self.name, self._owner = round_, name, owner
        self.inbox = round_.folder / INBOX / name
        self.at_once = 1  # chunks in one message; whoever carries them finds out how many are good
        self.told = self._stage == "refused"  # an owner that mends its contribution need not hear of the old one
        self._resting = False  # what was refused is not asked for again, before the owner has come anew
        self._offered = False
        self._receiver: Receiver | None = None

    @property
    def _stage(self) -> str:
        return self.round.book.entry(self.name).stage

    @property
    def done(self) -> bool:
        """There is nothing more to ask this owner, unless it comes anew."""
        return self.told and (self._resting or self._stage in OVER)

    def forget(self) -> None:
        """The owner has come anew: what it was told before, it may not have heard."""
        self._resting, self._offered, self._receiver = False, False, None
        self.told = self.told and self._stage not in OVER

    def question(self, index: Index, last: Said | None) -> Said:
        """What to ask next, after the answer `last`."""
        if last is None:
            return self._hello()
        if (self._stage in OVER or self._stage == "refused") and not self.told:
            self.told = True
            return Said(
                {
                    "do": "verdict",
                    "stage": self._stage,
                    "reasons": list(self.round.book.entry(self.name).reasons[:MOST_REASONS]),
                }
            )
        where = last.what.get("is")
        if where in ("empty", "inviting") and not self._offered:
            self._offered = True
            return Said({"do": "offer"}, (json.dumps(index.plain()).encode(),))
        if missing := last.what.get("missing"):
            wanted = places(missing)[: self.at_once]
            chunks = tuple(read_chunk(self.round.folder / INVITATION, index, place) for place in wanted)
            return Said({"do": "take", "places": plain(wanted)}, chunks)
        if where == "ready" and self._stage not in OVER and not self._resting:
            if self._receiver is None:
                return Said({"do": "index"})
            return Said({"do": "give", "places": plain(self._receiver.missing(), self.at_once)})
        return self._hello()

    def _hello(self) -> Said:
        return Said({"do": "hello", "awaited": self.name in standing_of(self.round.recipe, self.round.book).awaited})

    def heard(self, said: Said) -> None:
        """An answer came. What is wrong with it is held against this owner alone."""
        if self._stage in OVER or self._resting:
            return
        where = said.what.get("is")
        try:
            if where == "ready" and self._receiver is None and len(said.data) == 1 and "places" not in said.what:
                most = self.round.most_bytes(self._owner)
                self._receiver = Receiver(self.inbox / "chunks", load_index(said.data[0], most_index(most)), most)
                self.told = False
            elif where == "ready" and self._receiver is not None and "places" in said.what:
                put(self._receiver, said)
            if self._receiver is not None:
                self._progress(self._receiver)
            elif where in ("working", "inviting", "failed"):
                self.told = False
                why = said.what.get("why", "")
                step = f"stopped at the owner's: {shown(why, 40)}" if where == "failed" else ""
                self.round.book.move(self.name, "working", step=step)
        except DiskFull:
            raise  # ours, not the owner's
        except Refused as error:
            self.refuse(error.reasons)
        except CloisterError as error:
            self.refuse([error.message])

    def _progress(self, receiver: Receiver) -> None:
        self.round.book.move(self.name, "uploading", done=receiver.received, total=receiver.index.count)
        if receiver.received < receiver.index.count:
            return
        whole = self.inbox / "contribution"
        try:
            receiver.finish(whole)
        except BadChunk:
            return  # what was damaged is asked for again
        self._receiver = None
        self.round.receive(whole, sender=self.name)
        self._resting = self._stage == "refused"

    def refuse(self, reasons: list[str]) -> None:
        """What came is not what was agreed; the owner is told why, and may come again."""
        if self._stage in OVER:
            return
        self._receiver, self.told, self._resting = None, False, True
        told = [shown(reason, 300) for reason in reasons[:MOST_REASONS]]
        self.round.book.move(self.name, "refused", reasons=tuple(told))
