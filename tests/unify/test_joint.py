"""Joint training: the router learns where examples belong, also on data that it never saw; and it can be resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import TOPICS, decoder, encoder, sentences

from cloister.errors import UsageError
from cloister.unify import joint, moe
from cloister.unify.experts import Settings, apply_delta, train_expert
from cloister.unify.joint import JointSettings, train_jointly
from cloister.unify.seeds import Seed, with_state
from cloister.unify.tasks import Classify, Language

SETTINGS = JointSettings(epochs=15, batch=8, rank=4, alpha=8, router_lr=3e-2, keep_every=0.0)
PROXIES = {name: replace(sentences(name, 24), targets=None) for name in TOPICS}
HELD_OUT = {name: sentences(name, 40, seed=5) for name in TOPICS}


@pytest.fixture(scope="module")
def experts() -> tuple[Seed, dict[str, dict[str, torch.Tensor]]]:
    seed = encoder()
    short = Settings(epochs=6, batch=8, rank=4, alpha=8, lr=5e-3)
    return seed, {
        name: apply_delta(seed, train_expert(seed, Classify(tuple(words)), sentences(name, 40), None, short).delta)
        for name, words in TOPICS.items()
    }


def test_vectors_from_proxies_are_means_over_real_tokens(experts):
    seed, _ = experts
    seen = []
    handle = seed.model.encoder.layer[1].intermediate.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for text in PROXIES["bank"].texts():
        seed.encode(seed.model, [text])
    handle.remove()
    slow = torch.stack([z[0].mean(0) for z in seen]).mean(0)
    vectors = joint.router_vectors_from_proxies(seed, PROXIES)
    assert len(vectors) == 2 and vectors[1].shape == (3, 32)
    assert torch.allclose(vectors[1][0], slow, atol=1e-5)


def test_a_fitted_router_needs_no_constant_term_of_its_own():
    """The classes differ by a threshold, and what comes out are vectors alone: behind a layer norm that is enough."""
    draw = torch.Generator().manual_seed(0)
    norm = torch.nn.LayerNorm(16)
    with torch.no_grad():
        norm.weight.copy_(0.5 + torch.rand(16, generator=draw))
        norm.bias.copy_(torch.randn(16, generator=draw))
        features = norm(torch.randn(600, 16, generator=draw))
    score = features[:, 0] - features[:, 3]
    owner = torch.bucketize(score, torch.quantile(score, torch.tensor([0.2, 0.9])))  # unequal: constants matter
    vectors = joint._regress(features[:400], owner[:400], 3)
    assert vectors.shape == (3, 16)
    right = ((features[400:] @ vectors.T).argmax(-1) == owner[400:]).float().mean()
    centred = joint._regress(features[:400] - 3, owner[:400], 3)
    assert right > 0.75, right
    assert torch.isfinite(centred).all()


@pytest.mark.parametrize("how", ["mean", "fit"])
def test_the_router_learns_and_the_model_answers_like_the_senders_experts(experts, how):
    seed, states = experts
    model = moe.unify(seed.model, states)
    moe.set_router(model, joint.router_vectors_from_proxies(seed, PROXIES, how=how))
    train_jointly(model, seed, PROXIES, states, SETTINGS)
    found = joint.routing_accuracy(model, seed, HELD_OUT)
    assert sum(found.values()) / 3 > 0.65 and min(found.values()) > 0.5, found  # chance is a third
    for name, words in TOPICS.items():
        task, own = Classify(tuple(words)), with_state(seed, states[name])
        alone = task.evaluate(own, seed, HELD_OUT[name]).value
        assert task.evaluate(model, seed, HELD_OUT[name]).value > alone - 0.15


def test_a_resumed_training_ends_with_the_same_weights(experts, tmp_path):
    seed, states = experts
    whole, stopped = moe.unify(seed.model, states), moe.unify(seed.model, states)
    short = replace(SETTINGS, epochs=1)
    first = train_jointly(whole, seed, PROXIES, states, short)

    class Stop(Exception):
        pass

    calls = []

    def count(*_: object) -> None:
        calls.append(1)
        if len(calls) > 8:
            raise Stop

    handle = stopped.register_forward_pre_hook(count)
    with pytest.raises(Stop):
        train_jointly(stopped, seed, PROXIES, states, short, workdir=tmp_path)
    handle.remove()
    fresh = moe.unify(seed.model, states)
    second = train_jointly(fresh, seed, PROXIES, states, short, workdir=tmp_path)
    assert first.losses == second.losses
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in whole.state_dict().items())


def test_only_the_parts_that_are_asked_for_move(experts):
    seed, states = experts
    short = replace(SETTINGS, epochs=0.5)
    for train, only, moves in [
        (("router",), None, ()),
        (("router", "experts"), ["travel"], (".experts.1.",)),
        (("experts",), ["bank"], (".experts.0.",)),
    ]:
        model, before = moe.unify(seed.model, states), moe.unify(seed.model, states).state_dict()
        train_jointly(model, seed, PROXIES, states, short, train=train, only=only)
        moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
        allowed = (*moves, ".router.") if "router" in train else moves
        assert moved and all(any(part in name for part in allowed) for name in moved)
        assert set(model.state_dict()) == set(before), "the factors must be gone"


def test_language_models_and_the_fallback():
    seed = decoder()
    short = Settings(epochs=6, batch=8, rank=4, alpha=8, lr=5e-3)
    topics = ["bank", "kitchen"]
    states = {
        name: apply_delta(seed, train_expert(seed, Language(16), sentences(name, 40), None, short).delta)
        for name in topics
    }
    proxies = {name: PROXIES[name] for name in topics}
    model = moe.unify(seed.model, states, fallback=True)
    before = Language(16).evaluate(model, seed, PROXIES["bank"]).value
    train_jointly(model, seed, proxies, states, replace(SETTINGS, epochs=8), others=PROXIES["travel"])
    assert Language(16).evaluate(model, seed, PROXIES["bank"]).value < before
    found = joint.routing_accuracy(model, seed, proxies)
    assert set(found) == set(topics) and sum(found.values()) / 2 > 0.45  # chance is a third


def test_what_cannot_be_is_refused(experts):
    seed, states = experts
    model = moe.unify(seed.model, states)
    with pytest.raises(UsageError, match="no expert"):
        train_jointly(model, seed, {**PROXIES, "stranger": PROXIES["bank"]}, states, SETTINGS)
    with pytest.raises(UsageError, match="fallback"):
        train_jointly(model, seed, PROXIES, states, SETTINGS, others=PROXIES["bank"])


def test_the_route_loss_ignores_padding():
    weights = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])
    real = torch.tensor([[1, 0]])
    assert float(joint.route_loss([weights], torch.tensor([0]), real)) == pytest.approx(-torch.tensor(0.9).log().item())
