"""`measure` on what a server of each loop holds: the figure that `protect` prints and the manifest carries."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
import tomli_w

from cloister.permute import recovery
from cloister.permute.attacks import scenarios

VOCABULARY, WIDTH = 1200, 96


@pytest.fixture
def random():
    return np.random.default_rng(11)


@pytest.fixture
def base(random):
    """(table, feed-forward matrix, requests): word counts are skewed, every request starts with token 0."""
    strengths = np.exp(0.5 * random.standard_normal(WIDTH))
    table = (random.standard_normal((VOCABULARY, WIDTH)) * strengths).astype(np.float32)
    matrix = (random.standard_normal((300, WIDTH)) * strengths).astype(np.float32)
    share = 1 / np.arange(1, VOCABULARY)
    words = [1 + random.choice(VOCABULARY - 1, 30, p=share / share.sum()) for _ in range(40)]
    return table, matrix, [np.concatenate([[0], piece]) for piece in words]


def server_loop(base, kind, random):
    """The whole permuted table lies on the server, requests are ids into it."""
    table, matrix, requests = base
    transform = scenarios.draw_transform(kind, WIDTH, random)
    rows, order = scenarios.shuffled(table, transform, random)
    head, head_order = scenarios.shuffled(table, transform, random)
    to_server = np.argsort(order)
    return recovery.ServerView(
        rows=rows,
        row_ids=order,
        requests=[to_server[request] for request in requests],
        request_ids=requests,
        weights={"gate": scenarios.shuffled(matrix, transform, random)[0]},
        head=head,
        head_ids=head_order,
        transform=kind,
    )


def token_loop(base, kind, random, dtype="bfloat16"):
    """Only vectors that are sent reach the server."""
    table, matrix, requests = base
    transform = scenarios.draw_transform(kind, WIDTH, random)
    sent = [transform(table[request], dtype) for request in requests]
    weights = {"gate": scenarios.shuffled(matrix, transform, random)[0]}
    return recovery.ServerView(np.concatenate(sent), np.concatenate(requests), sent, requests, weights, transform=kind)


@pytest.mark.parametrize("loop", [server_loop, token_loop])
@pytest.mark.parametrize("kind", scenarios.TRANSFORMS)
def test_a_public_base_recovers_everything(base, random, loop, kind):
    table, matrix, requests = base
    measured = recovery.measure(loop(base, kind, random), recovery.Knowledge(table, {"gate": matrix}, known_tokens=[0]))
    assert measured.percent > 99
    assert measured.recovered["weights"] > 99
    assert measured.linked == 100
    assert measured.tokens == sum(len(request) - 1 for request in requests)  # the first token is known for free
    assert measured.outputs is None if loop is token_loop else measured.outputs > 99


@pytest.mark.parametrize("kind", scenarios.TRANSFORMS)
def test_the_wrong_public_base_recovers_nothing(base, random, kind):
    wrong = random.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    matrix = random.standard_normal((300, WIDTH)).astype(np.float32)
    measured = recovery.measure(
        token_loop(base, kind, random), recovery.Knowledge(wrong, {"gate": matrix}, known_tokens=[0])
    )
    assert measured.percent < 5


def test_a_view_without_requests_is_measured_on_its_table(base, random):
    table, _, _ = base
    view = server_loop(base, "permutation", random)
    bare = recovery.ServerView(view.rows, view.row_ids, transform="permutation")
    measured = recovery.measure(bare, recovery.Knowledge(table), tokens=300)
    assert measured.percent == 100
    assert measured.tokens == 300
    assert measured.repeated == 0


def test_an_undeclared_transform_is_attacked_both_ways(base, random):
    table, _, _ = base
    view = token_loop(base, "orthogonal", random)
    undeclared = recovery.ServerView(view.rows, view.row_ids, view.requests, view.request_ids)
    measured = recovery.measure(undeclared, recovery.Knowledge(table, known_tokens=[0]))
    assert {"sorted_rows", "inner_products"} <= measured.recovered.keys()
    assert measured.percent > 99


def test_norm_vectors_in_public_order_betray_a_permutation(base, random):
    table, _, requests = base
    norms = random.standard_normal((3, WIDTH)).astype(np.float32)
    transform = scenarios.draw_transform("permutation", WIDTH, random)
    sent = [transform(table[request]) for request in requests]
    view = recovery.ServerView(
        np.concatenate(sent),
        np.concatenate(requests),
        sent,
        requests,
        ordered_weights={"norms": norms[:, transform.order]},
    )
    measured = recovery.measure(view, recovery.Knowledge(table, ordered_weights={"norms": norms}))
    assert measured.recovered["weights"] == 100


@pytest.mark.parametrize("loop", [server_loop, token_loop])
def test_a_secret_base_leaks_equality_and_frequent_words(base, random, loop):
    _, _, requests = base
    corpus = requests[20:]
    measured = recovery.measure(loop(base, "permutation", random), recovery.Knowledge(corpus=corpus, known_tokens=[0]))
    assert measured.base == "secret"
    assert measured.linked == 100
    assert measured.recovered.keys() == {"frequency", "bigrams"}
    assert 0 < measured.percent < 100


def test_without_reference_text_the_sentence_says_so(base, random):
    measured = recovery.measure(token_loop(base, "permutation", random), recovery.Knowledge())
    assert measured.recovered == {}
    assert measured.percent == 0
    assert "want of reference text" in measured.sentence()
    assert "100.0 %" in measured.sentence()


def test_limits_are_kept_and_reported(base, random):
    table, _, _ = base
    view = server_loop(base, "permutation", random)
    measured = recovery.measure(view, recovery.Knowledge(table), tokens=60, distinct=20, numbers=200 * WIDTH)
    assert measured.tokens <= 100
    assert "200 of 1,200 table rows" in " ".join(measured.notes)
    assert measured.recovered["sorted_rows"] == 100
    hasty = recovery.measure(view, recovery.Knowledge(table), seconds=-1)
    assert hasty.recovered == {}
    assert "time limit" in hasty.notes[0]


def test_the_manifest_form_is_flat_toml(base, random):
    table, _, _ = base
    measured = recovery.measure(server_loop(base, "permutation", random), recovery.Knowledge(table))
    flat = measured.to_manifest()
    assert tomllib.loads(tomli_w.dumps(flat)) == flat
    assert all(isinstance(value, str | int | float) for value in flat.values())
    assert flat["percent"] == 100
    assert flat["sentence"] == measured.sentence()
    assert "knows the public base recovers 100.0 %" in measured.sentence()


def test_secrets_do_not_show_in_repr(base, random):
    view = server_loop(base, "permutation", random)
    assert "array" not in repr(view)
    assert "array" not in repr(recovery.Knowledge(base[0]))
