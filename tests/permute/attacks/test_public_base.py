"""A server that knows the base wins; the same attack loses against what it was not made for."""

from __future__ import annotations

import numpy as np
import pytest

from cloister.permute.attacks import contexts, gram, noise, output_vocabulary, scenarios, sorted_rows, weights
from cloister.permute.attacks.matching import percent, round_bfloat16


@pytest.fixture
def ids(small_table, random):
    return random.choice(len(small_table), 200, replace=False)


def seen_rows(kind, table, ids, random, dtype="float32"):
    transform = scenarios.draw_transform(kind, table.shape[1], random)
    return transform, transform(table[ids], dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sorted_rows_read_a_permuted_table(small_table, ids, random, dtype):
    _, seen = seen_rows("permutation", small_table, ids, random, dtype)
    assert percent(sorted_rows.match_sorted(seen, small_table).index == ids) == 100


def test_sorted_rows_read_rows_each_permuted_afresh(small_table, ids, random):
    seen = np.stack([random.permutation(small_table[i]) for i in ids])
    assert percent(sorted_rows.match_sorted(seen, small_table).index == ids) == 100


def test_sorted_rows_lose_against_a_secret_table(small_table, ids, random):
    secret = random.standard_normal(small_table.shape).astype(np.float32)
    _, seen = seen_rows("permutation", secret, ids, random)
    assert percent(sorted_rows.match_sorted(seen, small_table).index == ids) < 3


def test_sorted_rows_lose_against_a_rotation(small_table, ids, random):
    _, seen = seen_rows("orthogonal", small_table, ids, random)
    assert percent(sorted_rows.match_sorted(seen, small_table).index == ids) < 20


def test_wide_rows_are_matched_by_averaged_signatures(random):
    table = random.standard_normal((300, 2100)).astype(np.float32)
    assert sorted_rows.signature(table).shape == (300, 700)
    assert percent(sorted_rows.match_sorted(table[:50, random.permutation(2100)], table).index == np.arange(50)) == 100


def test_learning_the_order_beats_drift(small_table, ids, random):
    drifted = noise.add_noise(small_table, 0.25, random)
    transform, seen = seen_rows("permutation", drifted, ids, random)
    first = percent(sorted_rows.match_sorted(seen, small_table).index == ids)
    learned = sorted_rows.match_and_learn(seen, small_table)
    assert first < 90
    assert percent(learned.matches.index == ids) > 99
    assert percent(learned.order == transform.order) > 99


def test_row_factors_do_not_stop_unit_rows(small_table, ids, random):
    _, seen = seen_rows("permutation", small_table, ids, random)
    scaled = seen * random.lognormal(size=(len(ids), 1)).astype(np.float32)
    assert (
        percent(sorted_rows.match_sorted(scaled, small_table).index == ids) < 20
    )  # the guard does stop the plain attack
    assert percent(sorted_rows.match_sorted(scaled, small_table, ignore_scale=True).index == ids) == 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inner_products_with_three_known_rows(small_table, ids, random, dtype):
    transform, seen = seen_rows("orthogonal", small_table, ids, random, dtype)
    known = np.array([0, 1, 2])
    found = gram.match_known(seen, small_table, transform(small_table[known], dtype), known, rounds=1)
    assert percent(found.index == ids) == 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inner_products_with_nothing_known(small_table, ids, random, dtype):
    _, seen = seen_rows("orthogonal", small_table, ids, random, dtype)
    assert percent(gram.match_blind(seen, small_table).index == ids) == 100


def test_inner_products_lose_against_a_secret_table(small_table, ids, random):
    secret = random.standard_normal(small_table.shape).astype(np.float32)
    _, seen = seen_rows("orthogonal", secret, ids, random)
    assert percent(gram.match_blind(seen, small_table).index == ids) < 3


def test_inner_products_lose_when_every_row_has_its_own_rotation(small_table, ids, random):
    seen = np.concatenate([seen_rows("orthogonal", small_table, [i], random, "bfloat16")[1] for i in ids])
    found = gram.match_blind(seen, small_table)
    assert percent(found.index == ids) < 60  # what the norms alone give
    scaled = seen * random.lognormal(size=(len(ids), 1)).astype(np.float32)
    assert percent(gram.match_blind(scaled, small_table).index == ids) < 3


@pytest.mark.parametrize("kind", scenarios.TRANSFORMS)
@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_weights_alone_give_the_transform(small_table, ids, random, kind, drift):
    strengths = np.exp(0.7 * random.standard_normal(96))
    public = (random.standard_normal((400, 96)) * strengths * np.exp(0.3 * random.standard_normal((400, 1)))).astype(
        np.float32
    )
    transform, seen = seen_rows(kind, small_table, ids, random, "bfloat16")
    held, row_order = scenarios.shuffled(noise.add_noise(public, drift, random), transform, random)
    align = weights.align_permuted if kind == "permutation" else weights.align_rotated
    found = align(held, public)
    assert percent(found.row_order == row_order) > 95
    assert percent(found.match(seen, small_table).index == ids) > 99


@pytest.mark.parametrize("kind", scenarios.TRANSFORMS)
def test_weights_of_another_model_explain_nothing(random, kind):
    held = random.standard_normal((300, 96)).astype(np.float32)
    public = random.standard_normal((300, 96)).astype(np.float32)
    align = weights.align_permuted if kind == "permutation" else weights.align_rotated
    assert align(held, public).explained < 5


def test_row_scales_of_an_up_projection_do_not_hide_a_permutation(random):
    public = random.standard_normal((300, 96)).astype(np.float32)
    transform = scenarios.draw_transform("permutation", 96, random)
    held, _ = scenarios.shuffled(public * random.uniform(0.5, 2, (300, 1)).astype(np.float32), transform, random)
    np.testing.assert_array_equal(weights.align_permuted(held, public).order, transform.order)


def test_ordered_weights_fix_the_permutation_at_once(random):
    norms = random.standard_normal((4, 96)).astype(np.float32)
    order = random.permutation(96)
    np.testing.assert_array_equal(weights.align_ordered(norms[:, order], norms), order)


@pytest.mark.parametrize("kind", scenarios.TRANSFORMS)
def test_output_vocabulary(small_table, random, kind):
    transform = scenarios.draw_transform(kind, 96, random)
    head, order = scenarios.shuffled(small_table, transform, random)
    alignment = weights.align_rotated(head, small_table) if kind == "orthogonal" else None
    assert percent(output_vocabulary.match_outputs(head[:300], small_table, alignment).index == order[:300]) > 99
    links = output_vocabulary.linked_to_outputs(transform(small_table[:100]), head)
    assert percent(order[links.index] == np.arange(100)) == 100


@pytest.mark.parametrize("kind", scenarios.TRANSFORMS)
def test_two_contexts_link_and_two_models_do_not(random, kind):
    model = (random.standard_normal((400, 96)) * np.exp(0.7 * random.standard_normal(96))).astype(np.float32)
    first, second = (scenarios.shuffled(model, scenarios.draw_transform(kind, 96, random), random)[0] for _ in range(2))
    assert contexts.link_contexts({"gate": first}, {"gate": second}) > 99
    stranger = random.standard_normal(model.shape).astype(np.float32)
    assert contexts.link_contexts({"gate": first}, {"gate": stranger}) < 5
    assert contexts.link_contexts({"gate": first}, {"other": second}) == 0


def test_noise_of_a_tenth_changes_nothing(small_table, ids, random):
    noisy = noise.add_noise(small_table[ids], 0.1, random)
    np.testing.assert_allclose(
        np.linalg.norm(noisy - small_table[ids], axis=1) / np.linalg.norm(small_table[ids], axis=1), 0.1, rtol=0.4
    )
    assert percent(noise.match_noisy(noisy, small_table).index == ids) == 100
    drowned = noise.add_noise(small_table[ids], 20.0, random)
    assert percent(noise.match_noisy(drowned, small_table).index == ids) < 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", scenarios.TRANSFORMS)
def test_real_table_and_real_questions(minilm, data_dir, random, kind, dtype):
    requests = scenarios.requests_from(minilm, scenarios.read_texts(data_dir, "banking77"), tokens=600)
    ids = np.setdiff1d(np.concatenate(requests), minilm.known_tokens)
    transform, seen = seen_rows(kind, minilm.table, ids, random, dtype)
    if kind == "permutation":
        found = sorted_rows.match_sorted(seen, minilm.table)
    else:
        known = np.array(minilm.known_tokens)
        found = gram.match_known(seen, minilm.table, transform(minilm.table[known], dtype), known)
    assert percent(found.index == ids) > 99


def test_bfloat16_hides_norms_but_not_inner_products(minilm, random):
    ids = random.choice(len(minilm.table), 300, replace=False)
    _, seen = seen_rows("orthogonal", minilm.table, ids, random)
    assert percent(gram.match_norms(seen, minilm.table).index == ids) > 95
    assert percent(gram.match_norms(round_bfloat16(seen), minilm.table).index == ids) < 30
    assert percent(gram.match_blind(round_bfloat16(seen), minilm.table).index == ids) > 99
