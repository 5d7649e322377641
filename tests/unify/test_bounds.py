"""One owner's expert must not be able to spoil a round for all: what is beyond every training is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import TOPICS, decoder, encoder, images, sentences, vision
from torch import Tensor

from cloister.errors import BrokenCheckpoint, CloisterError, DataError, DiskFull, UsageError
from cloister.unify import bounds
from cloister.unify import examples as tables
from cloister.unify.experts import A, B, Settings, apply_delta, linears, train_expert
from cloister.unify.keys import Key
from cloister.unify.moe import feed_forward_names
from cloister.unify.rounds import contribution
from cloister.unify.rounds import recipe as recipes
from cloister.unify.rounds.begin import begin
from cloister.unify.rounds.coordinator import Coordinator
from cloister.unify.rounds.provenance import PROVENANCE, read_provenance
from cloister.unify.rounds.real import RealSteps
from cloister.unify.seeds import Seed
from cloister.unify.tasks import Classify
from cloister.unify.training import NotFinite
from cloister.unify.views import block_inputs

SEEDS = {"encoder": encoder, "llama": decoder, "gpt2": lambda: decoder("gpt2"), "vision": vision}


def factors(seed: Seed, size: float, rank: int = 2) -> dict[str, Tensor]:
    """LoRA factors whose entries are all `size`."""
    found = {}
    for name, layer in linears(seed.model).items():
        wide, deep = layer.weight.shape  # type: ignore[misc, union-attr]
        if "Conv1D" in type(layer).__name__:
            wide, deep = deep, wide
        found[name + A], found[name + B] = torch.full((rank, deep), size), torch.full((wide, rank), size)
    return found


@pytest.mark.parametrize("kind", SEEDS)
def test_factors_whose_product_is_too_large(kind: str) -> None:
    seed = SEEDS[kind]()
    assert bounds.of_expert(seed, factors(seed, 0.01)) == []
    for size, said in ((2.0, "times as large as the seed's"), (1e8, "at most 10 are taken"), (1e30, "not finite")):
        reasons = bounds.of_expert(seed, factors(seed, size))
        assert len(reasons) == len(linears(seed.model)) and all(said in reason for reason in reasons)


def test_a_product_that_is_lost_on_the_way_to_a_small_sum() -> None:
    """As numbers the two terms cancel; the product that is computed is not a number."""
    seed = encoder()
    found = factors(seed, 0.0)
    name = next(iter(linears(seed.model)))
    found[name + A][:] = 1e25
    found[name + B][:, 0], found[name + B][:, 1] = 1e25, -1e25
    assert bounds.of_expert(seed, found) == [f"{name}.weight: seed and change together are not finite"]


@pytest.mark.parametrize("kind", SEEDS)
def test_full_weights_are_measured_against_the_seed(kind: str) -> None:
    seed = SEEDS[kind]()
    own = dict(seed.model.named_parameters())
    full = {name: own[name].detach().clone() for name in feed_forward_names(seed.model)}
    assert bounds.of_expert(seed, full) == []
    for name, tensor in full.items():  # biases are zero in a seed that nobody has trained; they may move all the same
        tensor += 0.5 * tensor.std().nan_to_num(0.0) if tensor.dim() > 1 else 0.01
        assert bounds.of_expert(seed, full) == [], name
    for name in full:
        changed = {**full, name: torch.full_like(full[name], 20.0)}
        (reason,) = bounds.of_expert(seed, changed)
        assert reason.startswith(f"{name}: the change is ")


@pytest.mark.parametrize("method", ["lora", "full"])
def test_training_stays_far_below(method: Any) -> None:
    """Even at a learning rate five times the default, on a seed that nobody has trained, whose tensors move most."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    seed = encoder()
    private = sentences("bank", 64)
    settings = Settings(method=method, epochs=15, lr=5e-3, batch=8, proxy_batch=0)
    made = train_expert(seed, Classify(tuple(TOPICS["bank"])), private, None, settings)
    own = dict(seed.model.named_parameters())
    after = apply_delta(seed, made.delta)
    change = max(float((after[name] - own[name]).norm() / own[name].norm()) for name in after if own[name].dim() > 1)
    assert bounds.of_expert(seed, made.delta) == []
    assert change < bounds.MOST_CHANGE / 2, "what is bounded must not come near what is honest"


def test_routing_vectors_are_measured_against_what_the_router_sees() -> None:
    for seed, proxies in ((encoder(), sentences("bank", 12)), (vision(), images(12))):
        seen = torch.from_numpy(block_inputs(seed, proxies)).mean(0)
        assert bounds.of_vectors(seed, seen, proxies) == []
        assert bounds.of_vectors(seed, 3 * seen, proxies) == []
        for size in (1e3, 1e30):
            bad = seen.clone()
            bad[1] *= size
            (reason,) = bounds.of_vectors(seed, bad, proxies)
            assert reason.startswith("the routing vector of layer 1 is ")


# A round ------------------------------------------------------------------------------------------------------------


class Owners:
    """Contributions without training: every one fits every check but that of size."""

    def __init__(self, folder: Path, method: str) -> None:
        self.folder, self.seed, self.method = folder, encoder(), method
        self.seed.model.save_pretrained(folder / "seed")
        self.seed.tokenizer.save_pretrained(folder / "seed")
        lines = [json.dumps({"id": f"p{i}", "text": text}) for i, text in enumerate(sentences("bank", 40).texts())]
        (folder / "public.jsonl").write_text("\n".join(lines) + "\n")
        self.keys = {name: Key.at(folder / "keys" / name) for name in ("coordinator", *TOPICS)}

    def begin(self) -> Coordinator:
        self.round = begin(
            self.folder / "round",
            self.folder / "seed",
            self.folder / "public.jsonl",
            [recipes.Owner(name=name, key=self.keys[name].public.text) for name in TOPICS],
            key=self.keys["coordinator"],
            steps=RealSteps(),
            task=recipes.Task(kind="choose"),
            terms={"selection": {"count": 8}, "expert": {"rank": 2, "method": self.method}, "router": {"epochs": 1}},
            quorum=2,
        )
        return self.round

    def sends(self, name: str, tensors: dict[str, Tensor]) -> Path:
        save_file({key: value.contiguous() for key, value in tensors.items()}, self.folder / "expert.safetensors")
        start = 8 * sorted(TOPICS).index(name)
        contribution.write(
            out := self.folder / name, self.round.recipe, name, self.keys[name],
            proxies=[f"p{start + i}" for i in range(8)], expert=self.folder / "expert.safetensors", report={},
        )  # fmt: skip
        return out

    def honest(self, draw: int) -> dict[str, Tensor]:
        torch.manual_seed(draw)
        return {name: 0.05 * torch.randn_like(value) for name, value in factors(self.seed, 1.0).items()}


@pytest.mark.parametrize("size", [1e8, 1e30])
def test_only_the_owner_of_a_huge_expert_is_refused(size: float, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    owners = Owners(tmp_path, "lora")
    round_ = owners.begin()
    assert round_.receive(owners.sends("bank", owners.honest(1)))[1].stage == "received"
    name, entry = round_.receive(owners.sends("kitchen", factors(owners.seed, size)))
    assert (name, entry.stage) == ("kitchen", "refused")
    assert all("the change is " in reason or "not finite" in reason for reason in entry.reasons)
    assert round_.receive(owners.sends("travel", owners.honest(2)))[1].stage == "received"
    round_.build(tmp_path / "model", wait=False)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["owners"] == ["bank", "travel"]
    assert round_.receive(owners.sends("kitchen", owners.honest(3)))[1].stage == "received"  # mended


def test_what_is_just_within_the_bounds_stops_nobody(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    owners = Owners(tmp_path, "full")
    round_ = owners.begin()
    own = dict(owners.seed.model.named_parameters())
    honest = {name: own[name].detach() for name in feed_forward_names(owners.seed.model)}
    most = {}
    for name, tensor in honest.items():
        direction = torch.zeros_like(tensor)
        direction.view(-1)[0] = 1.0  # all of it in one place, where it does most
        most[name] = tensor + 0.99 * bounds.MOST_CHANGE * tensor.norm() * direction
    for name, tensors in (("bank", honest), ("kitchen", most)):
        assert round_.receive(owners.sends(name, tensors))[1].stage == "received"
    round_.build(tmp_path / "model", wait=False)


@pytest.mark.parametrize("size", [1e8, 1e30])
def test_who_stops_the_building_is_named(size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should an expert slip through, it is not the others who are told to have sent something bad."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    owners = Owners(tmp_path, "lora")
    round_ = owners.begin()
    monkeypatch.setattr(bounds, "of_expert", lambda seed, delta: [])
    for name, tensors in (("bank", owners.honest(1)), ("kitchen", factors(owners.seed, size))):
        assert round_.receive(owners.sends(name, tensors))[1].stage == "received"
    with pytest.raises(DataError, match="experts of kitchen answer with numbers that are not finite") as caught:
        round_.build(tmp_path / "model", wait=False)
    assert "bank" not in caught.value.message and caught.value.advice.endswith("remove ROUND kitchen")
    assert not (tmp_path / "model").exists()


def test_nobody_is_blamed_for_another_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out who it was takes every owner's proxies through a model: not for a full disk."""
    from cloister.unify.rounds import building

    owners = Owners(tmp_path, "lora")
    round_ = owners.begin()
    for draw, name in enumerate(("bank", "kitchen")):
        assert round_.receive(owners.sends(name, owners.honest(draw)))[1].stage == "received"

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(building, "unified", fail)
    asked: list[Any] = []
    monkeypatch.setattr(bounds, "finite_alone", lambda *given: asked.append(given) or True)
    troubles: list[tuple[CloisterError, int]] = [
        (UsageError("nothing is left"), 0), (DiskFull("full"), 0), (DataError("damaged"), 0),
        (NotFinite("step 1"), 2), (BrokenCheckpoint("not finite"), 2),
    ]  # fmt: skip
    for error, times in troubles:
        asked.clear()
        with pytest.raises(type(error), match=error.message):
            round_.build(tmp_path / "model", wait=False)
        assert len(asked) == times


def test_bounds_are_numbers() -> None:
    assert 0 < bounds.MOST_CHANGE < math.inf and 0 < bounds.MOST_VECTOR < math.inf


def test_a_model_and_its_provenance_must_name_the_same_owners(tmp_path: Path) -> None:
    """Else an old expert would stay under the digest of a new contribution."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    owners = Owners(tmp_path, "lora")
    round_ = owners.begin()
    for draw, name in enumerate(("bank", "kitchen")):
        round_.receive(owners.sends(name, owners.honest(draw)))
    two = round_.build(tmp_path / "two", wait=False)
    made = dict(read_provenance(two))
    (two / PROVENANCE).write_text(json.dumps({**made, "owners": {"bank": made["owners"]["bank"]}}))
    with pytest.raises(UsageError, match=r"experts of bank, kitchen, and cloister-unify\.json in it says bank\."):
        round_.build(tmp_path / "three", onto=two, wait=False)
    assert not (tmp_path / "three").exists()


# What every owner must have got -------------------------------------------------------------------------------------


def test_the_digest_is_of_the_examples_that_are_used(tmp_path: Path) -> None:
    """Neither a consistent other set nor a decoy beside it has the digest that was agreed on."""
    steps = RealSteps()
    tables.write(tmp_path / "public.jsonl", sentences("bank", 9))
    agreed = steps.public(tmp_path / "public.jsonl", tmp_path / "public", licence="", description="")
    assert steps.public_digest(tmp_path / "public") == agreed
    tables.write(tmp_path / "probes.jsonl", sentences("travel", 9))
    other = tmp_path / "other"
    assert steps.public(tmp_path / "probes.jsonl", other, licence="", description="") != agreed
    shutil.copyfile(tmp_path / "public" / "examples.jsonl", other / "images.safetensors")
    assert steps.public_digest(other) != agreed
    about = json.loads((other / "public.json").read_text())
    lying = shutil.copytree(other, tmp_path / "lying")
    (lying / "public.json").write_text(json.dumps({**about, "sha256": agreed}))
    with pytest.raises(DataError, match=r"is not what public\.json says"):
        steps.public_digest(lying)
