"""What was done to each part of a contribution, and the page about it that leaves.

    Done("proxy ids", "noise", epsilon=1.0, delta=1e-5, noise=9.3).keep(work)     # by the step that did it
    done = [kept(work, part) for part in PARTS]
    alone(done[1], done)    # of the weights by themselves: of the choice they were trained with, and of the training
    together(done)          # one (epsilon, delta) for everything, or why there is none
    public(done)        # the report that leaves

The expert is trained on the chosen examples too, and the choice is a function of the private ones. The noise of the
training bounds what the weights tell for *given* proxies only: the bound of the weights is that of both steps together,
and there is none where the choice had no noise. The same holds for routing vectors.

Each step writes down what it *did*, and the report is made from that and not from what was asked for: a step that an
earlier run has finished keeps its claim.

A report about private data is a function of them like everything else: an exact AUC, or the width of its interval,
tells how many examples there are, and no bound covers it. So what leaves is made of fixed sentences and of the epsilons
that the owner set. `public` is given nothing else. Measured figures are in `report`, which stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from cloister import storage
from cloister.errors import BrokenManifest, UsageError
from cloister.unify.disclosure import accounting
from cloister.unify.disclosure.accounting import Bound, Gaussian, NotDependent, NotPrivate, Release, Stated

SCHEMA = "cloister.unify.report/1"
FOLDER = "privacy"

Part = Literal["proxy ids", "expert weights", "routing vectors"]
How = Literal["plain", "noise", "stated", "independent", "absent"]
PARTS: tuple[Part, ...] = get_args(Part)

THROUGH: Mapping[Part, str] = {
    "proxy ids": "the relevance classifier, which is trained on the owner's examples",
    "expert weights": "training on the owner's examples, and on the proxies that were chosen by them",
    "routing vectors": "the mean over the owner's examples, and the proxies that were chosen by them",
}
REVEALS: Mapping[Part, str] = {
    "proxy ids": "what kinds of examples the owner holds, and whether public examples are also its own",
    "expert weights": "which examples it was trained on, and perhaps what they say",
    "routing vectors": "the mean of the owner's examples, exactly in direction",
}
PLAIN: Mapping[Part, str] = {
    "proxy ids": "the proxies were chosen without differential privacy",
    "expert weights": "the expert was trained without differential privacy",
    "routing vectors": "the routing vectors are a mean over private examples without noise",
}
INDEPENDENT: Mapping[Part, str] = {
    "proxy ids": "drawn at random, without a look at any private example",
    "expert weights": "no private example was trained on",
    "routing vectors": "the coordinator makes them from the proxies and the seed",
}
OPTIONS: Mapping[Part, str] = {
    "proxy ids": "Choose with differential privacy (--dp-selection-epsilon): it hides each record, not the subjects "
    "and labels that many records share. Against that only a random choice helps (--selection random, for all owners).",
    "expert weights": "Train with differential privacy (--dp-epsilon) on a choice that was made with it too "
    "(--dp-selection-epsilon) or at random. It costs accuracy; nothing else bounds this.",
    "routing vectors": "Leave them to the coordinator (the default), or add noise (--dp-routing-epsilon) to means that "
    "are made with a choice of that kind (--dp-selection-epsilon) or a random one.",
}
FOR_GIVEN_PROXIES = (
    "between two sets of examples for which the same proxies would have been chosen; it bounds nothing about the rest"
)
NOT_COVERED = (
    "what many examples have in common: which subjects and labels an owner holds remains visible in what it sends",
    "how many examples an owner has: how far its weights have moved tells it roughly, less so if all owners train for "
    "the same number of steps (--steps); differential privacy hides one example more or less, not the number",
    "several examples of one person: a bound is for one example, and k of them are protected k times less",
    "other contributions from the same examples, this one sent again with other noise too: each adds its own bound",
    "settings that were tuned on the private examples, as a learning rate (--learning-rate) may be: what they tell of "
    "those examples is in no epsilon",
    "how exactly noise is drawn for training: floating point and an ordinary generator, seeded by the system",
    "time, sizes and the fact of taking part",
    "what several owners' parts, or the unified model trained on them, reveal together",
    "that an owner did what this page says: nobody can check it from outside",
)


@dataclass(frozen=True)
class Done:
    """How one part was made.

    `noise`: one Gaussian release of this standard deviation (over the sensitivity), which gives (epsilon, delta).
    `stated`: (epsilon, delta) as a whole. `independent`: no function of private examples. `absent`: it does not leave.
    """

    part: Part
    how: How
    epsilon: float = 0.0
    delta: float = 0.0
    noise: float = 0.0

    @property
    def private(self) -> bool:
        """Whether differential privacy bounds it."""
        return self.how in ("noise", "stated")

    def release(self) -> Release:
        """For the accountant."""
        if self.how == "noise":
            return Release(self.part, Gaussian(self.noise))
        if self.how == "stated":
            return Release(self.part, Stated(self.epsilon, self.delta))
        if self.how == "plain":
            return Release(self.part, NotPrivate(PLAIN[self.part]))
        return Release(self.part, NotDependent(INDEPENDENT[self.part]))

    def keep(self, work: Path) -> None:
        """Write down what was done; readable by the owner alone."""
        (work / FOLDER).mkdir(parents=True, exist_ok=True, mode=0o700)
        storage.write_secret(_path(work, self.part), json.dumps(asdict(self)).encode())


def kept(work: Path, part: Part) -> Done:
    """What the step that made `part` wrote down."""
    path = _path(work, part)
    try:
        found = Done(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise UsageError(
            f"Nothing says how the {part} were made: {path} is not there.", advice="Begin anew with --reconsider."
        ) from None
    except (ValueError, TypeError) as error:
        raise BrokenManifest(f"{path} is damaged: {error}.", advice="Begin anew with --reconsider.") from None
    if found.part != part or found.how not in get_args(How):
        raise BrokenManifest(f"{path} is not about the {part}.", advice="Begin anew with --reconsider.")
    return found


def _path(work: Path, part: Part) -> Path:
    return work / FOLDER / f"{part.replace(' ', '-')}.json"


def alone(one: Done, done: Sequence[Done]) -> Bound:
    """The bound of one part if nothing else is seen. Of what is made with the chosen ids, theirs is a part of it."""
    if one.how == "absent":
        return Bound(0.0)
    return together([other for other in done if other.part == "proxy ids" and other != one] + [one])


def sentence(one: Done, done: Sequence[Done]) -> str:
    """What bounds a part, in words."""
    if one.how in ("independent", "absent"):
        return INDEPENDENT[one.part]
    bound = alone(one, done)
    if not bound.holds:
        return "nothing"
    made = ", of the choice of proxies and of this together" if _with_noisy_ids(one, done) else ""
    return f"({bound.epsilon:g}, {bound.delta:g})-differential privacy{made}"


def warning(one: Done, done: Sequence[Done]) -> str:
    """What an epsilon is worth that was spent on a part whose proxies were chosen without one. Empty if there is none
    such."""
    if not one.private or alone(one, done).holds:
        return ""
    return (
        f"It was made with ({one.epsilon:g}, {one.delta:g})-differential privacy for given proxies, which bounds "
        "nothing here: the proxies were chosen by the same examples without it. Choose with it too "
        "(--dp-selection-epsilon), or at random."
    )


def _with_noisy_ids(one: Done, done: Sequence[Done]) -> bool:
    return one.part != "proxy ids" and any(other.part == "proxy ids" and other.private for other in done)


def together(done: Sequence[Done]) -> Bound:
    """The bound of everything that leaves. Its delta is the sum of the deltas that the parts were made with; parts made
    of Gaussian noise are composed at the largest of theirs."""
    noisy = [one for one in done if one.how == "noise"]
    if len(noisy) == 1:  # nothing to compose: it has the bound that it was made with
        done = [replace(one, how="stated") if one.how == "noise" else one for one in done]
        noisy = []
    stated = sum(one.delta for one in done if one.how == "stated")
    delta = stated + max((one.delta for one in noisy), default=0.0)
    return accounting.total([one.release() for one in done], delta or 1e-9)


def public(done: Sequence[Done]) -> dict[str, Any]:
    """The report that leaves, without its schema. The same options always give the same page."""
    bound = together(done)
    return {
        "artefacts": [_about(one, done) for one in done],
        "together": {
            "epsilon": bound.epsilon,
            "delta": bound.delta,
            "with_respect_to": f"one example {bound.neighbours}",
            "composition": "noise by Renyi divergence (dp-accounting), parts with a total of their own by addition",
        }
        if bound.holds
        else {"none": list(bound.reasons)},
        "figures": "The owner has measured, or could have measured, what each part reveals. Such figures are functions "
        "of its examples that no bound covers, so they stay with it.",
        "not_covered": list(NOT_COVERED),
    }


def _about(one: Done, done: Sequence[Done]) -> dict[str, Any]:
    depends = one.how not in ("independent", "absent")
    bound = alone(one, done)
    about: dict[str, Any] = {
        "artefact": one.part,
        "leaves": one.how != "absent",
        "function_of_private_data_through": THROUGH[one.part] if depends else "nothing: " + INDEPENDENT[one.part],
        "reveals": REVEALS[one.part] if depends else "nothing beside the other parts",
        "differential_privacy": {"epsilon": bound.epsilon, "delta": bound.delta} if depends and bound.holds else "none",
        "option": OPTIONS[one.part],
    }
    if one.private and one.part != "proxy ids":
        about["for_given_proxies"] = {"epsilon": one.epsilon, "delta": one.delta, "means": FOR_GIVEN_PROXIES}
    return about
