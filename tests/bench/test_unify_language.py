"""The language trials: how texts are cut and to whom they belong, the seed, and that every method can be scored."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from cloister.bench.unify import language
from cloister.bench.unify.rows import perplexities
from cloister.bench.unify.text import NO_PRIVACY, OURS
from cloister.unify.examples import Examples
from cloister.unify.experts import Settings
from cloister.unify.joint import JointSettings

TINY = language.Pretraining(pieces=32, hidden=32, layers=1)
PLAN = replace(
    language.QUICK,
    private={"": 8}, test=4, public=40, proxies=6, pool=20, max_tokens=24, pretraining=TINY,
    expert=Settings(epochs=1, batch=8, proxy_batch=4), joint=JointSettings(), routers=JointSettings(),
)  # fmt: skip


@pytest.fixture(scope="module")
def held(data_dir: Path) -> list[tuple[str, Examples, Examples]]:
    return language.private(data_dir)


def test_pieces_are_whole_words_in_order_and_nothing_twice() -> None:
    words = [f"word{i}" for i in range(500)]
    lines = "\n".join(" ".join(words[start : start + 7]) for start in range(0, 500, 7))
    found = list(language.pieces(lines, 60))
    assert all(20 < len(piece) <= 60 for piece in found)
    assert " ".join(found).split() == words[: len(" ".join(found).split())]
    assert any("\n" in piece for piece in found)


def test_a_word_longer_than_a_piece_is_cut_and_the_end_is_reached() -> None:
    assert list(language.pieces("x" * 50, 20)) == ["x" * 20, "x" * 20, "x" * 10]


def test_owners_share_no_text_and_test_on_other_texts(held: list[tuple[str, Examples, Examples]]) -> None:
    assert [name for name, *_ in held] == [language.PLAYS, language.ARTICLES, language.QUESTIONS]
    train = {text for _, own, _ in held for text in own.texts()}
    assert sum(len(set(own.texts())) for _, own, _ in held) == len(train)
    assert not train & {text for _, _, tested in held for text in tested.texts()}


def test_development_tests_on_training_data_only(data_dir: Path, held: list[tuple[str, Examples, Examples]]) -> None:
    for number, (name, whole, held_out) in enumerate(held):
        trial = language.Trial(replace(PLAN, development=True), root=data_dir)
        train, tested = trial.part(number, name, whole, held_out)
        assert set(tested.texts()) <= set(whole.texts()) and not set(tested.ids) & set(train.ids)
        _, tested = language.Trial(PLAN, root=data_dir).part(number, name, whole, held_out)
        assert set(tested.texts()) <= set(held_out.texts())


def test_the_seed_is_trained_once_and_read_from_the_cache_afterwards(tmp_path: Path) -> None:
    texts = Examples("text", ("a", "b"), ("Once upon a time there was a model.", "It had read two lines."), None)
    made = language.seed(TINY, texts, 16, tmp_path)
    assert language.seed(TINY, texts, 16, tmp_path).fingerprint == made.fingerprint
    assert made.model.config.model_type == "llama"


def test_the_mean_is_that_of_the_logarithms() -> None:
    assert math.isclose(language.mean({"a": 10.0, "b": 1000.0}), 100.0)


def test_every_method_has_a_perplexity_and_becomes_a_row(data_dir: Path) -> None:
    trial = language.Trial(PLAN, root=data_dir)
    names = [name for name in trial.methods() if not name.startswith(f"{OURS}:")]
    assert {OURS, "zero-shot", "BTM", "ModelSoup", "BTX", "FlexOlmo", "FlexOlmo, our selection", *NO_PRIVACY} < {*names}
    scores = {name: trial.score(name) for name in names}
    assert all(1 < value < 10_000 for found in scores.values() for value in found.values())
    rows = {row.name: row for row in perplexities("language", [scores], behind=0.05)}
    assert len(rows) == len(names) + 2
    ours = rows["language unified"].value
    assert ours is not None and math.isclose(ours, language.mean(scores[OURS]))


def test_a_lower_perplexity_is_the_better_one() -> None:
    owners = dict.fromkeys(("a", "b"), 0.0)
    values = {OURS: 10.0, "BTM": 12.0, "ModelSoup": 11.0, "pooled": 9.5, "unrestricted": 9.8}
    draws = [{method: dict.fromkeys(owners, value) for method, value in values.items()}]
    above, behind, *_ = perplexities("language", draws, behind=0.05)
    assert above.ok and math.isclose(above.value or 0, math.log(1.1)) and "ModelSoup" in above.baseline
    assert (
        not behind.ok
        and math.isclose(behind.value or 0, math.log(10 / 9.5), abs_tol=0.01)
        and "pooled" in behind.baseline
    )
