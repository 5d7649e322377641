"""Every baseline answers; the simple ones are what their names say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import TOPICS, encoder, sentences

from cloister.unify import baselines
from cloister.unify.experts import Settings, apply_delta, train_expert
from cloister.unify.joint import JointSettings
from cloister.unify.tasks import Classify, evaluate

SHORT = Settings(epochs=4, batch=8, rank=4, alpha=8, lr=5e-3)
JOINT = JointSettings(epochs=2, batch=8, rank=4, alpha=8, lr=5e-4, router_lr=5e-3)
TASKS = {name: Classify(tuple(words)) for name, words in TOPICS.items()}
PRIVATE = {name: sentences(name, 40) for name in TOPICS}
PROXIES = {name: sentences(name, 16, seed=2) for name in TOPICS}
TEST = {name: sentences(name, 40, seed=3) for name in TOPICS}


@pytest.fixture(scope="module")
def ready():
    seed = encoder()
    return seed, {n: apply_delta(seed, train_expert(seed, TASKS[n], PRIVATE[n], None, SHORT).delta) for n in TOPICS}


def test_soup_is_the_mean_and_the_ensemble_the_average(ready):
    seed, states = ready
    model = baselines.soup(seed, states).models[0]
    name = "encoder.layer.1.output.dense.weight"
    mean = sum(state[name] for state in states.values()) / 3
    assert torch.allclose(model.get_parameter(name), mean, atol=1e-6)
    assert torch.equal(model.embeddings.word_embeddings.weight, seed.model.embeddings.word_embeddings.weight)
    together = baselines.ensemble(seed, states)
    assert together.evaluate(TASKS["bank"], TEST["bank"]) == evaluate(
        TASKS["bank"], list(together.models), seed, TEST["bank"]
    )
    one = baselines.ensemble(seed, states, lambda e: np.tile(np.float32([1, 0, 0]), (len(e), 1)))
    alone = baselines.alone(seed, "bank", states["bank"])
    assert one.evaluate(TASKS["bank"], TEST["bank"]) == alone.evaluate(TASKS["bank"], TEST["bank"])


def test_an_expert_is_better_at_home(ready):
    seed, states = ready
    zero, own = baselines.zero_shot(seed), baselines.alone(seed, "bank", states["bank"])
    assert own.evaluate(TASKS["bank"], TEST["bank"]).value > zero.evaluate(TASKS["bank"], TEST["bank"]).value + 0.05


def test_mixtures_train_their_routers_and_nothing_else(ready):
    seed, states = ready
    for made in (baselines.btx(seed, states, PROXIES, JOINT), baselines.flex_olmo(seed, states, PROXIES, JOINT)):
        model = made.models[0]
        assert model.config.context == "none"
        for index, state in enumerate(states.values()):
            own = model.state_dict()[f"encoder.layer.0.intermediate.experts.{index}.opening.dense.weight"]
            assert torch.equal(own, state["encoder.layer.0.intermediate.dense.weight"])
        assert 0 <= made.evaluate(TASKS["bank"], TEST["bank"]).value <= 1


def test_without_privacy_all_owners_are_served(ready, tmp_path):
    seed, states = ready
    dense = baselines.pooled(seed, TASKS, PRIVATE, SHORT, workdir=tmp_path / "pooled")
    mixed = baselines.unrestricted(seed, states, TASKS, PRIVATE, JOINT)
    zero = baselines.zero_shot(seed)
    for made in (dense, mixed):
        gained = [made.evaluate(TASKS[n], TEST[n]).value - zero.evaluate(TASKS[n], TEST[n]).value for n in TOPICS]
        assert np.mean(gained) > 0.05, (made.name, gained)
    again = baselines.pooled(seed, TASKS, PRIVATE, SHORT, workdir=tmp_path / "pooled")
    assert again.evaluate(TASKS["bank"], TEST["bank"]) == dense.evaluate(TASKS["bank"], TEST["bank"])
