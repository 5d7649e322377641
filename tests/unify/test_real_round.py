"""Whole rounds by folders with real steps: tiny seed, three owners, everything that a round is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny import TOPICS, encoder, sentences

import cloister.unify.moe as moe
from cloister.errors import InvalidParameter, NotAvailable, UsageError, WouldRevealSecret
from cloister.unify import evaluation, labels
from cloister.unify import examples as tables
from cloister.unify.disclosure import accounting, claims, report
from cloister.unify.disclosure.contribution import BETTER_WAY
from cloister.unify.examples import concat
from cloister.unify.keys import Key
from cloister.unify.moe.folders import Folder
from cloister.unify.rounds import contribution, disclose
from cloister.unify.rounds import owner as owners
from cloister.unify.rounds import recipe as recipes
from cloister.unify.rounds.begin import begin
from cloister.unify.rounds.coordinator import INVITATION, Coordinator
from cloister.unify.rounds.real import DISCLOSURE, Privacy, RealSteps
from cloister.unify.seeds import Seed
from cloister.unify.tasks import Classify

LABELS = tuple(word for words in TOPICS.values() for word in words)
OPTIONS: dict[str, Any] = {
    "selection": {"count": 24, "pool": 60, "folds": 2},
    "expert": {"epochs": 4, "rank": 4, "lr": 5e-3, "batch": 16, "proxy_batch": 4},
    "router": {"epochs": 4, "batch": 12},
}


@dataclass
class World:
    """A seed, public examples, keys and three owners' files below one folder."""

    folder: Path

    @staticmethod
    def make(folder: Path) -> World:
        seed = encoder()
        seed.model.save_pretrained(folder / "seed")
        seed.tokenizer.save_pretrained(folder / "seed")
        public = concat([sentences(topic, 50, seed=7) for topic in TOPICS])
        lines = [json.dumps({"id": f"p{i}", "text": text}) for i, text in enumerate(public.texts())]
        (folder / "public.jsonl").write_text("\n".join(lines) + "\n")
        for topic in TOPICS:
            tables.write(folder / f"{topic}.jsonl", sentences(topic, 48, seed=1))
        return World(folder)

    def key(self, name: str) -> Key:
        return Key.at(self.folder / "keys" / name)

    def owner(self, name: str) -> recipes.Owner:
        return recipes.Owner(name=name, key=self.key(name).public.text)

    def begin(self, place: str, names: Sequence[str], terms: dict[str, Any] = OPTIONS) -> Coordinator:
        return begin(
            self.folder / place,
            self.folder / "seed",
            self.folder / "public.jsonl",
            [self.owner(name) for name in names],
            key=self.key("coordinator"),
            steps=RealSteps(),
            task=recipes.Task(kind="classify", labels=LABELS),
            terms=terms,
            quorum=len(names),
        )

    def private(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def contribute(self, round_: Coordinator, name: str, steps: RealSteps, *, place: str = "", **more: Any) -> Path:
        mine = self.folder / "owners" / (place or name)
        given = round_.folder / INVITATION
        return owners.contribute(given, self.private(name), mine, key=self.key(name), steps=steps, **more)


@pytest.fixture
def world(tmp_path: Path) -> World:
    pytest.importorskip("peft", reason="PEFT is not installed")
    return World.make(tmp_path)


def accuracy(model: Any, seed: Seed, topic: str) -> float:
    return Classify(LABELS).evaluate(model, seed, sentences(topic, 60, seed=99)).value


def routed_to(model: Any, seed: Seed, texts: Sequence[str]) -> np.ndarray:
    """For each expert the share of tokens, over all layers, that goes to it."""
    with torch.inference_mode(), moe.record() as routes:
        model(**seed.tokens(list(texts)))
    counts = sum(
        torch.bincount(w.argmax(-1)[real.bool()], minlength=w.shape[-1])
        for w, real in zip(routes.weights, routes.real, strict=True)
        if real is not None
    )
    assert isinstance(counts, torch.Tensor)
    return (counts / counts.sum()).numpy()


def test_a_whole_round(world: World, tmp_path: Path) -> None:
    round_ = world.begin("round", ["bank", "travel"])
    measured = RealSteps(references=2)
    for name in ("bank", "travel"):
        assert round_.receive(world.contribute(round_, name, measured))[1].stage == "received"
    round_.build(tmp_path / "two", wait=False)

    # A newcomer: the others' contributions stay good, their experts are not trained again.
    round_.add(world.owner("kitchen"), world.key("coordinator"))
    assert round_.receive(world.contribute(round_, "kitchen", RealSteps(measure=False)))[1].stage == "received"
    round_.build(tmp_path / "three", onto=tmp_path / "two", wait=False)

    seed, model = encoder(), Folder(tmp_path / "three").model().eval()
    names = moe.owners(model)
    assert sorted(names) == ["bank", "kitchen", "travel"]
    ids = {name: round_.folder / "received" / name / contribution.PROXIES for name in names}
    texts = dict(zip((f"p{i}" for i in range(150)), _public_texts(world), strict=True))
    for place, name in enumerate(names):
        chosen = [texts[one] for one in json.loads(ids[name].read_text())["ids"]]
        share = routed_to(model, seed, chosen)
        assert share.argmax() == place and share[place] > 0.5, (name, share)
    scores = {topic: (accuracy(model, seed, topic), accuracy(seed.model, seed, topic)) for topic in TOPICS}
    assert all(unified > alone for unified, alone in scores.values()), scores

    # The model knows its labels, and says how good it is where.
    told = evaluation.evaluate(
        tmp_path / "three",
        {topic: _written(tmp_path / f"{topic}.jsonl", sentences(topic, 60, seed=99)) for topic in TOPICS},
    )
    assert {topic: found.score.value for topic, found in told.items()} == pytest.approx(
        {topic: pair[0] for topic, pair in scores.items()}, abs=0.02
    )
    assert all(max(found.routes, key=lambda name: found.routes[name]) == topic for topic, found in told.items())

    # One leaves.
    measured.remove(tmp_path / "three", "travel", _empty(tmp_path / "left"))
    assert labels.read(tmp_path / "left").names == LABELS
    assert moe.owners(Folder(tmp_path / "left").model()) == [name for name in names if name != "travel"]
    round_.remove("travel")
    assert not (round_.folder / "received" / "travel").exists()

    # What the owner was shown stays, what leaves says nothing that was measured.
    work = world.folder / "owners" / "bank" / owners.WORK
    home = report.read(work / DISCLOSURE)
    assert home["asked"] == 2 and report.value(home, "membership, likelihood ratio") is not None
    assert report.value(home, "labels betrayed") is not None and report.value(home, "direction of the mean") is not None
    assert (work / DISCLOSURE / report.PAGE).is_file() and "No bound: " in home["together"]
    assert f"SHA-256 {round_.recipe.terms.public}" in (work / DISCLOSURE / report.PAGE).read_text()
    assert (work / DISCLOSURE).stat().st_mode & 0o077 == 0
    left = [(world.folder / "owners" / name / owners.CONTRIBUTION / contribution.REPORT) for name in TOPICS]
    assert left[0].read_bytes() == left[1].read_bytes() == left[2].read_bytes()


def test_owners_with_a_task_and_labels_of_their_own(world: World, tmp_path: Path) -> None:
    """One owner chooses among answers, one has labels that are not the round's; the model knows all labels."""
    lines = [
        {"id": f"q{i}", "question": text, "choices": [TOPICS["travel"][0], TOPICS["kitchen"][0]], "answer": i % 2}
        for i, text in enumerate(sentences("travel", 40, seed=3).texts())
    ]
    world.private("travel").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    apart = tuple(TOPICS["kitchen"])
    own = {"travel": recipes.Task(kind="choose"), "kitchen": recipes.Task(kind="classify", labels=apart)}
    names = ["bank", "kitchen", "travel"]
    round_ = begin(
        world.folder / "round",
        world.folder / "seed",
        world.folder / "public.jsonl",
        [world.owner(name).model_copy(update={"task": own.get(name)}) for name in names],
        key=world.key("coordinator"),
        steps=RealSteps(),
        task=recipes.Task(kind="classify", labels=tuple(TOPICS["bank"])),
        terms=OPTIONS,
        quorum=3,
    )
    for name in names:
        assert round_.receive(world.contribute(round_, name, RealSteps(measure=False)))[1].stage == "received"
    round_.add(world.owner("travel"), world.key("coordinator"))  # another deadline, say
    assert round_.recipe.owner("travel") == world.owner("travel").model_copy(update={"task": own["travel"]})
    round_.build(tmp_path / "model", wait=False)
    assert moe.owners(Folder(tmp_path / "model").model()) == names
    assert labels.read(tmp_path / "model").names == (*TOPICS["bank"], *apart)
    found = evaluation.evaluate(tmp_path / "model", {"travel": world.private("travel")}, seed=world.folder / "seed")[
        "travel"
    ]
    assert found.score.n == 40
    with pytest.raises(UsageError, match="compared under the seed"):
        evaluation.evaluate(tmp_path / "model", {"travel": world.private("travel")})
    with pytest.raises(InvalidParameter, match="another kind of seed"):
        begin(
            world.folder / "other", world.folder / "seed", world.folder / "public.jsonl",
            [world.owner("bank").model_copy(update={"task": recipes.Task(kind="language")})],
            key=world.key("coordinator"), steps=RealSteps(),
            task=recipes.Task(kind="choose"), terms=OPTIONS, quorum=1,
        )  # fmt: skip


def test_an_owner_that_is_not_in_the_model_leaves_no_labels_in_it(world: World, tmp_path: Path) -> None:
    """It never came, or was taken out: the model is what it would be without it, its labels too."""
    apart = recipes.Task(kind="classify", labels=tuple(TOPICS["kitchen"]))
    quick: dict[str, Any] = {**OPTIONS, "expert": {"epochs": 1, "rank": 2}, "router": {"epochs": 0}}
    steps = RealSteps(measure=False)
    built = {}
    for place, names in (("with", ["bank", "kitchen"]), ("without", ["bank"])):
        round_ = begin(
            world.folder / place, world.folder / "seed", world.folder / "public.jsonl",
            [world.owner(name).model_copy(update={"task": apart if name == "kitchen" else None}) for name in names],
            key=world.key("coordinator"), steps=steps,
            task=recipes.Task(kind="classify", labels=tuple(TOPICS["bank"])), terms=quick, quorum=1,
        )  # fmt: skip
        assert round_.receive(world.contribute(round_, "bank", steps, place=f"bank {place}"))[1].stage == "received"
        built[place] = round_.build(tmp_path / f"model {place}", wait=False)
        if place == "with":
            assert round_.receive(world.contribute(round_, "kitchen", steps))[1].stage == "received"
            round_.build(tmp_path / "both", wait=False)
            assert labels.read(tmp_path / "both").names == (*TOPICS["bank"], *TOPICS["kitchen"])
            round_.remove("kitchen")
            built["removed"] = round_.build(tmp_path / "removed", wait=False)
    found = {place: (model / labels.FILE).read_bytes() for place, model in built.items()}
    assert found["with"] == found["removed"] == found["without"]
    assert labels.read(built["with"]).names == tuple(TOPICS["bank"])


def test_what_is_measured_later_is_the_owner_s_own_task(world: World) -> None:
    """Its labels are not the round's: under the round's task nothing could be measured, or something else would be."""
    apart = recipes.Task(kind="classify", labels=tuple(TOPICS["kitchen"]))
    round_ = begin(
        world.folder / "round", world.folder / "seed", world.folder / "public.jsonl",
        [world.owner("kitchen").model_copy(update={"task": apart})],
        key=world.key("coordinator"), steps=RealSteps(),
        task=recipes.Task(kind="classify", labels=tuple(TOPICS["bank"])),
        terms={"selection": {**OPTIONS["selection"], "look": "both"}, "expert": {"epochs": 2, "rank": 2}}, quorum=1,
    )  # fmt: skip
    world.contribute(round_, "kitchen", RealSteps(references=2))
    mine = world.folder / "owners" / "kitchen"
    first = report.read(mine / owners.WORK / DISCLOSURE)
    given = round_.folder / INVITATION
    later = disclose.measured(given, world.private("kitchen"), mine, steps=RealSteps(references=3))
    assert later["asked"] == 3 and report.value(first, "membership, likelihood ratio") is not None
    assert report.value(later, "membership, likelihood ratio") is not None
    assert later["not_measured"] == first["not_measured"]
    # The attacks look where this round's choices did.
    assert BETTER_WAY in later["artefacts"][0]["notes"] and BETTER_WAY in first["artefacts"][0]["notes"]
    other = world.begin("other", ["bank"])
    with pytest.raises(UsageError, match="not invited"):
        disclose.measured(other.folder / INVITATION, world.private("kitchen"), mine, steps=RealSteps(references=3))


def _public_texts(world: World) -> list[str]:
    return [json.loads(line)["text"] for line in (world.folder / "public.jsonl").read_text().splitlines()]


def _written(path: Path, held: tables.Examples) -> Path:
    tables.write(path, held)
    return path


def _empty(path: Path) -> Path:
    path.mkdir()
    return path


def test_with_all_epsilons_the_claims_are_what_was_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dp_accounting", reason="the optional extra `dp` is not installed")
    pytest.importorskip("opacus", reason="the optional extra `dp` is not installed")
    from cloister.unify.disclosure import routing_vectors
    from cloister.unify.selection import private as selection

    sums: list[int] = []
    noisy_sum = selection.noisy_sum
    monkeypatch.setattr(
        selection, "noisy_sum", lambda total, variance, **more: sums.append(variance) or noisy_sum(total, variance)
    )
    deviations: list[float] = []
    gaussian = routing_vectors.noise.gaussian
    monkeypatch.setattr(
        routing_vectors.noise,
        "gaussian",
        lambda count, deviation, **more: deviations.append(deviation) or gaussian(count, deviation),
    )
    alone: list[int] = []
    tokens = Seed.tokens

    def counted(self: Seed, texts: Sequence[str]) -> Any:
        own = [text for text in texts if text in mine and text not in public]
        alone.extend([len(texts)] * bool(own))
        return tokens(self, texts)

    quick = {**OPTIONS["expert"], "epochs": 2}
    round_ = world.begin("round", ["bank"], {**OPTIONS, "expert": quick, "router": {"vectors": "private", "epochs": 0}})
    mine, public = set(tables.read(world.private("bank")).texts()), set(_public_texts(world))
    monkeypatch.setattr(Seed, "tokens", counted)
    steps = RealSteps(Privacy(4.0, 1.0, 2.0, 1e-5), measure=False)
    made = world.contribute(round_, "bank", steps)
    monkeypatch.undo()
    assert alone and set(alone) == {1}  # no private example shared a batch with another one

    told = contribution.read_report(made)
    parts = {one["artefact"]: one["differential_privacy"] for one in told["artefacts"]}
    assert (parts["proxy ids"]["epsilon"], parts["expert weights"]["epsilon"]) == (1.0, 5.0)  # choice and training
    assert 2.0 < parts["routing vectors"]["epsilon"] < 3.0  # choice and vectors
    # The choice: one sum, with the noise that the claim is about.
    work = made.parent / owners.WORK
    ids, weights, vectors = (claims.kept(work, part) for part in claims.PARTS)
    assert len(sums) == 1 and ids.noise == pytest.approx((sums[0] / selection.SENSITIVITY_SQUARED) ** 0.5)
    assert accounting.total([ids.release()], 1e-5).epsilon <= 1.0 + 1e-3
    # The vectors: likewise.
    assert deviations == [pytest.approx(vectors.noise * routing_vectors.GRID)]
    assert accounting.total([vectors.release()], 1e-5).epsilon <= 2.0 + 1e-3
    # The weights: the plan that training followed costs no more than is claimed, by another library's reckoning too.
    plan = json.loads((work / "training" / "privacy.json").read_text())["plan"]
    sampled = accounting.SampledGaussian(plan["noise"], plan["rate"], plan["steps"])
    spent = accounting.total([accounting.Release("expert", sampled)], 1e-5).epsilon + plan["count_epsilon"]
    assert spent <= weights.epsilon == 4.0
    losses = load_file(work / "training" / "training.safetensors")["losses"]
    assert len(losses) == plan["steps"]
    # All together.
    bound = claims.together((ids, weights, vectors))
    assert told["together"]["epsilon"] == bound.epsilon < 7.0 and told["together"]["delta"] == pytest.approx(2e-5)
    # Told again with figures, the claims are the same; and what the noise bounds, the attack stays below.
    steps = RealSteps(Privacy(4.0, 1.0, 2.0, 1e-5), references=2)
    home = disclose.measured(round_.folder / INVITATION, world.private("bank"), made.parent, steps=steps)
    assert home["together"] == bound.text()
    figures = [figure for item in home["artefacts"] for figure in item["figures"] if figure["at_most"] is not None]
    assert figures and all(figure["value"] <= figure["at_most"] for figure in figures)
    assert contribution.read_report(made) == told


def test_work_done_otherwise_is_not_taken_for_private(world: World) -> None:
    """The expert was trained without noise; asking for noise later must not put an epsilon on it."""
    pytest.importorskip("opacus", reason="the optional extra `dp` is not installed")
    pytest.importorskip("dp_accounting", reason="the optional extra `dp` is not installed")
    round_ = world.begin("round", ["bank"], {**OPTIONS, "expert": {"epochs": 1}})
    plain = world.contribute(round_, "bank", RealSteps(measure=False))
    noisy = RealSteps(Privacy(epsilon=4.0, selection_epsilon=1.0), measure=False)
    with pytest.raises(UsageError, match="no differential privacy instead of expert epsilon 4, selection epsilon 1"):
        world.contribute(round_, "bank", noisy)
    assert "none" in contribution.read_report(plain)["together"]
    again = world.contribute(round_, "bank", noisy, reconsider=True)
    assert contribution.read_report(again)["together"]["delta"] == pytest.approx(2e-5)
    # A report made by steps that lie about themselves tells what was done all the same.
    liar = RealSteps(measure=False)
    liar.privacy = Privacy(epsilon=0.1)
    given = round_.invitation
    found = liar.report(
        given.seed(), given.public, world.private("bank"), [], plain, given.recipe.terms, again.parent / owners.WORK,
        None,  # type: ignore[arg-type]
    )  # fmt: skip
    assert [one["differential_privacy"] for one in found["artefacts"]][1]["epsilon"] == 5.0  # type: ignore[index]


def test_an_expert_that_tells_too_much_does_not_leave(world: World) -> None:
    round_ = world.begin("round", ["bank"], {**OPTIONS, "expert": {"epochs": 12, "lr": 2e-2, "method": "full"}})
    with pytest.raises(WouldRevealSecret, match=r"at most 0\.51"):
        world.contribute(round_, "bank", RealSteps(references=2, max_membership=0.51))
    assert not (world.folder / "owners" / "bank" / owners.CONTRIBUTION).exists()
    with pytest.raises(UsageError, match="cannot be refused"):
        RealSteps(measure=False, max_membership=0.6)


def test_random_choices_differ_between_owners_and_read_nothing(world: World) -> None:
    terms = {**OPTIONS, "selection": {"count": 20, "method": "random"}, "expert": {"epochs": 1}}
    round_ = world.begin("round", ["bank", "travel"], terms)
    chosen = {}
    for name in ("bank", "travel"):
        made = world.contribute(round_, name, RealSteps(measure=False))
        chosen[name] = json.loads((made / contribution.PROXIES).read_text())["ids"]
    assert len(set(chosen["bank"]) & set(chosen["travel"])) < 15
    # Other private examples, the same choice.
    world.private("bank").write_bytes(world.private("kitchen").read_bytes())
    again = world.contribute(round_, "bank", RealSteps(measure=False), place="other")
    assert json.loads((again / contribution.PROXIES).read_text())["ids"] == chosen["bank"]


@pytest.mark.parametrize("privacy", [Privacy(-1.0), Privacy(1.0, delta=0.0), Privacy(selection_epsilon=float("nan"))])
def test_what_is_no_guarantee_is_refused_at_once(privacy: Privacy) -> None:
    with pytest.raises(UsageError, match="epsilon"):
        RealSteps(privacy)


def test_what_is_missing_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.unify.rounds.real.find_spec", lambda name: None)
    with pytest.raises(NotAvailable, match="opacus and dp_accounting") as caught:
        RealSteps(Privacy(epsilon=1.0, selection_epsilon=1.0))
    assert "cloister[dp]" in caught.value.advice
    RealSteps()
