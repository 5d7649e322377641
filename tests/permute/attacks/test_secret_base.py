"""What is left to see when table and model are secret, and the two ways round it."""

from __future__ import annotations

import numpy as np
import pytest

from cloister.permute.attacks import equality, frequency, known_rows, scenarios
from cloister.permute.attacks.matching import percent, round_bfloat16


def markov_text(random, chain, length):
    tokens = [0]
    for _ in range(length - 1):
        tokens.append(int(random.choice(len(chain), p=chain[tokens[-1]])))
    return np.array(tokens)


@pytest.fixture
def language(random):
    """A language of 40 words with its own bigrams."""
    chain = random.dirichlet(np.full(40, 0.15), size=40)
    return [markov_text(random, chain, 60) for _ in range(60)], [markov_text(random, chain, 60) for _ in range(200)]


def test_equal_tokens_are_linked(small_table, random):
    truth = random.integers(0, 50, 400)
    rows = scenarios.draw_transform("orthogonal", 96, random)(small_table[truth])
    measured = equality.measure_equality(equality.kinds_of(rows), truth)
    assert measured.linked == 100
    assert measured.repeated > 95


def test_equal_tokens_are_linked_under_a_factor_per_token(small_table, random):
    truth = random.integers(0, 50, 400)
    rows = small_table[truth] * random.lognormal(size=(400, 1)).astype(np.float32)
    assert equality.measure_equality(equality.kinds_of(rows), truth).linked == 0  # factors do hide bit-for-bit equality
    assert equality.measure_equality(equality.kinds_of(rows, ignore_scale=True), truth).linked == 100


def test_a_fresh_transform_for_every_row_hides_equality(small_table, random):
    truth = random.integers(0, 50, 100)
    rows = np.concatenate([scenarios.draw_transform("orthogonal", 96, random)(small_table[[i]]) for i in truth])
    assert equality.measure_equality(equality.kinds_of(rows), truth).linked == 0
    assert equality.measure_equality(equality.kinds_of(rows, ignore_scale=True), truth).linked == 0


def test_bigrams_beat_counts_on_a_cipher(language, random):
    traffic, reference = language
    cipher = random.permutation(40)
    truth = np.concatenate(traffic)
    kinds = cipher[truth]
    counted = percent(frequency.read(kinds, frequency.match_counts(kinds, np.concatenate(reference))) == truth)
    matched = percent(frequency.read(kinds, frequency.match_bigrams(traffic, kinds, reference)) == truth)
    assert matched > counted
    assert matched > 90


def test_counting_loses_when_every_occurrence_looks_new(language):
    traffic, reference = language
    truth = np.concatenate(traffic)
    fresh = np.arange(len(truth))
    guess = frequency.match_bigrams(traffic, fresh, reference)
    assert percent(frequency.read(fresh, guess) == truth) < 5


def test_counting_loses_against_a_reference_in_another_language(language, random):
    traffic, reference = language
    truth = np.concatenate(traffic)
    renamed = random.permutation(40)
    kinds = random.permutation(40)[truth]
    guess = frequency.match_bigrams(traffic, kinds, [renamed[piece] for piece in reference])
    assert percent(frequency.read(kinds, guess) == truth) < 25


def test_tiny_traffic_is_not_an_error():
    guess = frequency.match_bigrams([np.array([1])], np.array([9]), [np.array([4, 4])])
    assert guess == {9: 4}


def test_one_known_row_fixes_a_float32_permutation(minilm, random):
    rows = minilm.table[random.choice(len(minilm.table), 3, replace=False)]
    assert known_rows.settled_features(rows[:1]) > 99
    assert known_rows.settled_features(round_bfloat16(rows[:1])) < 90
    assert known_rows.settled_features(round_bfloat16(rows)) > 99


def test_a_rotation_needs_as_many_rows_as_its_width(small_table, random):
    rotation = scenarios.draw_transform("orthogonal", 96, random).rotation
    for count, expected in [(24, np.sqrt(0.75)), (96, 0.0)]:
        rows = random.standard_normal((count, 96))
        assert known_rows.rotation_error(rows @ rotation, rows, rotation) == pytest.approx(expected, abs=0.02)


def test_one_client_directory_reads_every_user(small_table, random):
    transform = scenarios.draw_transform("orthogonal", 96, random)
    client = transform(small_table, "bfloat16")
    ids = random.integers(0, len(small_table), 300)
    assert percent(known_rows.read_with_client(client[ids], client) == ids) == 100
    other = scenarios.draw_transform("orthogonal", 96, random)(small_table, "bfloat16")
    assert percent(known_rows.read_with_client(client[ids], other) == ids) < 20
