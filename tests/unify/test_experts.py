"""Experts: only feed-forward weights move, a killed run ends with the same numbers, privacy clips and adds noise."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import TOPICS, decoder, encoder, images, sentences, vision

from cloister.errors import BrokenCheckpoint, DataError, UsageError
from cloister.unify import experts
from cloister.unify.experts import DpSettings, Settings, apply_delta, train_expert
from cloister.unify.moe import feed_forward_names
from cloister.unify.seeds import with_state
from cloister.unify.tasks import Classify, Images, Language, prototypes
from cloister.unify.training import FILE, Descent, order

SHORT = Settings(epochs=4, batch=8, proxy_batch=4, rank=4, alpha=8, lr=5e-3)
TASK = Classify(tuple(TOPICS["bank"]))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_an_expert_learns_and_only_its_feed_forward_blocks_move(method):
    seed, private = encoder(), sentences("bank", 64)
    settings = replace(SHORT, method=method, epochs=8)
    result = train_expert(seed, TASK, private, sentences("travel", 16), settings)
    state = apply_delta(seed, result.delta)
    assert set(state) == set(feed_forward_names(seed.model)) and result.epsilon is None
    expert = with_state(seed, state)
    test = sentences("bank", 60, seed=1)
    assert TASK.evaluate(expert, seed, test).value > TASK.evaluate(seed.model, seed, test).value + 0.1
    moved = {n for n, p in expert.named_parameters() if not torch.equal(p, seed.model.get_parameter(n))}
    assert moved and moved <= set(state)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoders_of_both_layouts(kind):
    seed, private = decoder(kind), sentences("kitchen", 32)
    result = train_expert(seed, Language(16), private, sentences("bank", 8), replace(SHORT, epochs=6))
    expert = with_state(seed, apply_delta(seed, result.delta))
    assert Language(16).evaluate(expert, seed, private).value < Language(16).evaluate(seed.model, seed, private).value


@pytest.mark.parametrize("kind", ["vit", "clip"])
def test_vision_towers(kind):
    seed, private = vision(kind), images(32)
    task = Images(("above", "below"), prototypes(seed, private, ("above", "below")))
    result = train_expert(seed, task, private, images(8, seed=1), replace(SHORT, epochs=2))
    assert result.losses[-1] < result.losses[0]


def test_the_delta_is_what_the_training_computed():
    """LoRA's own forward pass agrees with the full weights that the delta gives."""
    seed, private = encoder(), sentences("bank", 16)
    model = seed.fresh_model()
    parameters = experts.trainable(model, SHORT)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.normal_(std=0.1)
    full = with_state(seed, apply_delta(seed, experts.delta_of(parameters, SHORT)))
    assert torch.allclose(seed.encode(model.eval(), private.texts()), seed.encode(full, private.texts()), atol=1e-5)


def train(folder: Path | None, **rest: object):
    settings = replace(SHORT, keep_every=0.0, **rest)
    return train_expert(encoder(), TASK, sentences("bank", 40), sentences("travel", 12), settings, workdir=folder)


CHILD = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {here!r})
    import torch
    torch.set_num_threads(1)
    import test_experts
    test_experts.train(Path({folder!r}))
"""


def test_a_killed_run_ends_with_the_same_numbers(tmp_path):
    torch.set_num_threads(1)
    code = textwrap.dedent(CHILD).format(here=str(Path(__file__).parent), folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    while not (tmp_path / FILE).exists() and child.poll() is None:
        time.sleep(0.005)
    child.kill()
    _, said = child.communicate()
    assert (tmp_path / FILE).exists(), said.decode()
    resumed, whole = train(tmp_path), train(None)
    assert resumed.losses == whole.losses and len(whole.losses) == 20
    assert all(torch.equal(resumed.delta[name], value) for name, value in whole.delta.items())
    assert oct((tmp_path / FILE).stat().st_mode)[-3:] == "600"


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    train(tmp_path)
    assert train(tmp_path).losses  # the same: nothing left to do
    with pytest.raises(UsageError, match="another training"):
        train(tmp_path, lr=1e-4)
    (tmp_path / FILE).write_bytes(b"12345678 not a checkpoint")
    with pytest.raises(DataError, match="damaged"):
        train(tmp_path)


def test_deltas_that_do_not_fit_are_refused():
    seed = encoder()
    name = "encoder.layer.0.output.dense"
    a, b = torch.zeros(4, 48), torch.zeros(32, 4)
    assert apply_delta(seed, {f"{name}.lora_A": a, f"{name}.lora_B": b})
    for wrong in (
        {f"{name}.lora_A": a},
        {f"{name}.lora_B": b},
        {f"{name}.lora_A": a, f"{name}.lora_B": b[:3]},
        {f"{name}.lora_A": a * float("nan"), f"{name}.lora_B": b},
        {"encoder.layer.0.attention.self.query.lora_A": a, "encoder.layer.0.attention.self.query.lora_B": b},
        {"embeddings.word_embeddings.weight": seed.model.embeddings.word_embeddings.weight},
        {f"{name}.bias": torch.zeros(3)},
    ):
        with pytest.raises(BrokenCheckpoint):
            apply_delta(seed, wrong)


def test_settings_and_data_that_cannot_be():
    seed, private = encoder(), sentences("bank", 4)
    for settings in (replace(SHORT, epochs=0), replace(SHORT, steps=0), replace(SHORT, lr=0.0), replace(SHORT, rank=0)):
        with pytest.raises(UsageError):
            train_expert(seed, TASK, private, None, settings)
    with pytest.raises(DataError):
        train_expert(seed, TASK, sentences("travel", 4), None, SHORT)
    with pytest.raises(UsageError):
        DpSettings(epsilon=0)


def test_private_training_states_its_epsilon_and_bounds_an_example():
    pytest.importorskip("opacus", reason="Opacus is not installed")
    seed, private = encoder(), sentences("bank", 24)
    settings = replace(SHORT, epochs=2, dp=DpSettings(epsilon=3.0, clip=0.5))
    result = train_expert(seed, TASK, private, sentences("travel", 8), settings)
    assert result.epsilon is not None and 2.5 < result.epsilon <= 3.0
    again = train_expert(seed, TASK, private, sentences("travel", 8), settings)
    assert any(not torch.equal(again.delta[n], v) for n, v in result.delta.items()), "the noise must not repeat"


def test_one_example_s_gradient_is_clipped():
    from cloister.unify.dp import _add_clipped

    total = [torch.zeros(3), torch.zeros(2)]
    _add_clipped(total, (torch.tensor([30.0, 0, 0]), torch.tensor([0.0, 40.0])), 0.5)
    assert float(torch.cat(total).norm()) == pytest.approx(0.5)
    _add_clipped(total, (torch.tensor([0.0, 0.1, 0]), None), 0.5)
    assert float(total[0][1]) == pytest.approx(0.1)


def test_how_far_an_expert_has_moved_tells_the_number_of_examples_unless_the_steps_are_fixed():
    """LoRA's start is in the recipe, so whoever gets the factors sees the distance."""
    seed = encoder()

    def moved(count: int, **how: object) -> float:
        settings = replace(SHORT, batch=16, lr=1e-3, epochs=2, **how)
        start = experts.trainable(seed.fresh_model(), settings)
        delta = train_expert(seed, TASK, sentences("bank", count), sentences("travel", 12), settings).delta
        return sum(float((delta[n] - p.detach()).norm()) ** 2 for n, p in start.items() if n.endswith(experts.A)) ** 0.5

    by_epochs = [moved(count) for count in (10, 80, 320)]
    assert 4 * by_epochs[0] < by_epochs[1] and 1.5 * by_epochs[1] < by_epochs[2], by_epochs
    fixed = [moved(count, steps=12) for count in (10, 80, 320)]
    assert max(fixed) < 1.1 * min(fixed), fixed


@pytest.mark.parametrize("count", [3, 20])
def test_with_fixed_steps_all_batches_are_full_and_every_example_comes_equally_often(count):
    rows = experts._rows(count, 10, replace(SHORT, steps=10))
    drawn = [rows(step) for step in range(10)]
    assert all(len(found) == SHORT.batch for found in drawn)
    times = np.bincount(np.concatenate(drawn), minlength=count)
    assert len(times) == count and max(times) - min(times) <= 1
    result = train_expert(encoder(), TASK, sentences("bank", count), None, replace(SHORT, steps=10))
    assert len(result.losses) == 10


def test_private_training_for_a_fixed_number_of_steps():
    pytest.importorskip("opacus", reason="Opacus is not installed")
    settings = replace(SHORT, steps=7, dp=DpSettings(epsilon=3.0))
    for count in (10, 40):
        result = train_expert(encoder(), TASK, sentences("bank", count), sentences("travel", 8), settings)
        assert len(result.losses) == 7 and result.epsilon is not None and result.epsilon <= 3.0


def test_orders_and_rates():
    rows = order(7, 3, seed=1).reshape(3, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in rows.tolist()) and not np.array_equal(rows[0], rows[1])
    rates = [Descent(1.0, 0.2).rate(step, 10) for step in range(10)]
    assert max(rates) == 1.0 and rates[0] == 0.5 and 0 < rates[-1] < 0.2
