"""What a choice of proxies compares: a function of the example, the seed and the public examples alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import decoder, encoder, images, sentences, vision

from cloister.unify import views
from cloister.unify.moe.blocks import find
from cloister.unify.selection import Selection, choose


def _texts(count: int, seed: int = 0):
    return replace(sentences("bank", count, seed=seed), targets=None)


# Models of two layers, so only the first is early.
KINDS = [(encoder, _texts, "last", 1), (decoder, _texts, "both", 2), (vision, images, "early", 1)]


@pytest.mark.parametrize(("make", "examples", "look", "parts"), KINDS)
def test_rows_have_length_one(make, examples, look, parts):
    seed = make()
    here, public = views.view(seed, examples(12, seed=1))
    assert here.look == look
    assert public.shape == (12, parts * seed.hidden)
    private = here.vectors(examples(5, seed=2))
    assert np.allclose(np.linalg.norm(np.concatenate([public, private]), axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(("make", "examples", "look", "parts"), KINDS)
def test_one_by_one_an_example_says_nothing_of_the_others(make, examples, look, parts):
    """Differential privacy of the choice rests on it."""
    here, _ = views.view(make(), examples(12, seed=1))
    all_of_them = examples(6, seed=2)
    whole = here.vectors(all_of_them, batch=1)
    alone = np.concatenate([here.vectors(all_of_them.rows([row]), batch=1) for row in range(6)])
    assert np.array_equal(whole, alone)


def test_a_private_example_that_is_public_too_has_the_same_row():
    public = images(10, seed=3)
    here, vectors = views.view(vision(), public)
    assert np.allclose(here.vectors(public.rows([7, 2])), vectors[[7, 2]], atol=1e-5)


def test_block_inputs_are_means_over_real_tokens():
    seed, texts = encoder(), _texts(9)
    whole = views.block_inputs(seed, texts)
    assert whole.shape == (9, len(find(seed.model)), seed.hidden)
    assert np.array_equal(views.block_inputs(seed, texts, layers=(1,))[:, 0], whole[:, 1])
    one_by_one = views.block_inputs(seed, texts, batch=1)  # without any padding
    assert np.allclose(whole, one_by_one, atol=1e-5)


def test_nothing_is_computed_behind_the_last_block_that_is_wanted():
    seed, runs = vision(), []
    last = find(seed.model)[-1]
    handle = getattr(last.owner, last.name).register_forward_hook(lambda *_: runs.append(1))
    views.view(seed, images(5))
    views.block_inputs(seed, images(5))
    handle.remove()
    assert runs == []


def test_both_parts_of_a_decoder_s_rows_are_made_in_one_pass():
    seed, texts, runs = decoder(), _texts(7), []
    handle = seed.model.register_forward_pre_hook(lambda *_: runs.append(1))
    _, rows = views.view(seed, texts)
    handle.remove()
    assert len(runs) == 1
    assert np.allclose(rows[:, seed.hidden :] * 2**0.5, seed.vectors(texts), atol=1e-6)


def test_hooks_go_when_the_model_fails():
    seed = encoder()
    broken = replace(seed, model=seed.fresh_model())
    broken.model.embeddings.word_embeddings.weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises((RuntimeError, IndexError)):
        views.block_inputs(broken, _texts(3))
    assert not any(part._forward_pre_hooks for part in broken.model.modules())


def test_looks_choose_what_subjects_cannot():
    """The public images show the same things in light and in dark; the owner's are dark."""
    light = images(30, seed=4)
    dark_pixels = (light.pixels() // 4).astype(np.uint8)
    public = replace(
        light, ids=tuple(str(i) for i in range(60)), inputs=np.concatenate([light.pixels(), dark_pixels]),
        targets=None,
    )  # fmt: skip
    own = images(20, seed=5)
    own = replace(own, inputs=(own.pixels() // 4).astype(np.uint8), targets=None)
    here, vectors = views.view(vision(), public, "early")
    chosen = choose(here.vectors(own), vectors, Selection(count=15, pool=30, folds=3)).indices
    assert sum(index >= 30 for index in chosen) >= 14
