"""Choosing one token: each setting does what it says, and the order of the vocabulary does not matter."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cloister.modes import Sampling  # noqa: E402
from cloister.serving.server.sampling import Sampler  # noqa: E402

LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))


def drawn(count: int = 400, logits: Any = LOGITS, **settings: Any) -> dict[int, int]:
    """How often each token is chosen, each time anew."""
    seen: dict[int, int] = {}
    for seed in range(count):
        token = Sampler(Sampling(temperature=1.0, seed=seed, **settings), frozenset()).choose(logits, 0).id
        seen[token] = seen.get(token, 0) + 1
    return seen


def test_draws_follow_the_probabilities() -> None:
    seen = drawn(4000)
    for token, logit in enumerate(LOGITS):
        assert seen[token] / 4000 == pytest.approx(float(logit.exp()), abs=0.03)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.6, "min_p": 0.9}, {0}),
        ({"logit_bias": {0: -100.0, 1: -100.0}}, {2, 3, 4}),
        ({}, {0, 1, 2, 3, 4}),
    ],
)
def test_truncation_keeps_exactly(settings: dict[str, Any], kept: set[int]) -> None:
    assert set(drawn(**settings)) == kept


def test_a_seed_gives_the_same_tokens_in_a_permuted_vocabulary() -> None:
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(2))
    wish = Sampling(temperature=0.9, top_p=0.95, top_k=200, seed=5)
    plain, permuted = Sampler(wish, frozenset()), Sampler(wish, frozenset())
    for row in logits:
        assert plain.choose(row, 0).id == int(order[permuted.choose(row[order], 0).id])


def test_penalties_by_hand() -> None:
    sampler = Sampler(Sampling(frequency_penalty=0.5, presence_penalty=0.25), frozenset())
    logits = torch.tensor([2.0, 1.9, 0.0])
    # 2.0, then 2.0 - 0.75 < 1.9, then 1.9 - 0.75 < 1.25, then 2.0 - 1.25 < 1.15
    assert [sampler.choose(logits, at).id for at in range(4)] == [0, 1, 0, 1]
    repeated = Sampler(Sampling(repetition_penalty=2.0), frozenset(), prompt_ids=frozenset([0]))
    assert repeated.choose(torch.tensor([2.0, 1.1, -1.0]), 0).id == 1
    negative = Sampler(Sampling(repetition_penalty=2.0), frozenset(), prompt_ids=frozenset([0]))
    assert negative.choose(torch.tensor([-1.0, -1.5, -9.0]), 0).id == 1


def test_end_tokens_are_masked_until_min_tokens() -> None:
    sampler = Sampler(Sampling(min_tokens=2), frozenset([0]))
    assert [sampler.choose(torch.tensor([3.0, 2.0]), produced).id for produced in range(4)] == [1, 1, 0, 0]


def test_log_probabilities_are_taken_before_everything_else() -> None:
    choice = Sampler(Sampling(logprobs=2, logit_bias={4: 100.0}), frozenset()).choose(LOGITS, 0)
    assert choice.id == 4 and choice.logprob == pytest.approx(float(LOGITS[4]), abs=1e-5)
    assert [token for token, _ in choice.top] == [0, 1]


def test_without_a_seed_answers_differ() -> None:
    logits = torch.zeros(1_000_000)
    assert len({Sampler(Sampling(temperature=1.0), frozenset()).choose(logits, 0).id for _ in range(3)}) > 1
