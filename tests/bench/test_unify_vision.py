"""The image trials: whose the images are, where the seed comes from, and that every method can be scored."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib", reason="the public images are drawn with matplotlib's fonts")
pytest.importorskip("peft")

from cloister.bench.unify import vision
from cloister.bench.unify.rows import accuracies
from cloister.bench.unify.text import NO_PRIVACY, OURS
from cloister.errors import NotAvailable
from cloister.unify.experts import Settings
from cloister.unify.joint import JointSettings

TINY = vision.Pretraining(glyphs=64, epochs=1, batch=32, hidden=24, layers=1)
PLAN = replace(
    vision.QUICK,
    private={"": 16}, test=12, public=60, proxies=8, pool=30, pretraining=TINY,
    expert=Settings(epochs=1, batch=16, proxy_batch=4), joint=JointSettings(), routers=JointSettings(),
)  # fmt: skip


@pytest.fixture(scope="module")
def held(data_dir: Path) -> list[tuple[str, object, object]]:
    try:
        return list(vision.handwritten(data_dir))
    except NotAvailable as missing:
        pytest.skip(str(missing))


def _bytes(examples: object, *, inverted: bool = False) -> set[bytes]:
    pixels = examples.pixels()  # type: ignore[attr-defined]
    return {image.tobytes() for image in (255 - pixels if inverted else pixels)}


def test_print_is_the_same_for_the_same_draw_and_never_for_another() -> None:
    once, again, other = vision.printed(30, draw=1), vision.printed(30, draw=1), vision.printed(30, draw=2)
    assert np.array_equal(once.pixels(), again.pixels()) and once.targets == again.targets
    assert not _bytes(once) & _bytes(other)
    assert once.pixels().shape == (30, 1, vision.SIDE, vision.SIDE) and set(once.targets or ()) <= set(vision.GLYPHS)


def test_print_comes_in_both_polarities() -> None:
    edges = vision.printed(200, draw=0).pixels()[:, 0, 0, :].mean(1)
    assert (edges > 200).mean() > 0.2 and (edges < 55).mean() > 0.2


def test_no_image_has_two_owners_and_none_is_tested_that_was_trained_on(held: list) -> None:  # type: ignore[type-arg]
    (_, white, white_test), (_, black, black_test), (_, tablet, tablet_test) = held
    sets = [
        _bytes(white), _bytes(white_test), _bytes(black, inverted=True), _bytes(black_test, inverted=True),
        _bytes(tablet), _bytes(tablet_test),
    ]  # fmt: skip
    assert sum(map(len, sets)) == len(set().union(*sets))
    assert all(set(examples.labels()) == set(vision.DIGITS) for _, *both in held for examples in both)


@pytest.mark.usefixtures("held")
def test_development_tests_on_training_data_only(data_dir: Path) -> None:
    for name, whole, held_out in vision.handwritten(data_dir):
        trial = vision.Trial(replace(PLAN, development=True), root=data_dir)
        train, tested = trial.part(0, name, whole, held_out)
        assert _bytes(tested) <= _bytes(whole) and not _bytes(tested) & _bytes(train)
        train, tested = vision.Trial(PLAN, root=data_dir).part(0, name, whole, held_out)
        assert _bytes(tested) <= _bytes(held_out) and _bytes(train) <= _bytes(whole)


def test_the_seed_is_trained_once_and_read_from_the_cache_afterwards(tmp_path: Path) -> None:
    made = vision.seed(TINY, tmp_path)
    assert vision.seed(TINY, tmp_path).fingerprint == made.fingerprint == vision.seed(TINY).fingerprint
    assert vision.seed(replace(TINY, epochs=2), tmp_path).fingerprint != made.fingerprint


def test_digits_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotAvailable, match="scikit-learn"):
        vision._tablet()


@pytest.mark.usefixtures("held")
def test_every_method_is_scored_for_every_owner_and_becomes_a_row(data_dir: Path) -> None:
    trial = vision.Trial(PLAN, root=data_dir)
    names = [name for name in trial.methods() if not name.startswith(f"{OURS}:")]
    assert {OURS, "zero-shot", "BTM", "ModelSoup", "BTX", "FlexOlmo", "FlexOlmo, our selection", *NO_PRIVACY} < {*names}
    scores = {name: trial.score(name) for name in names}
    for found in scores.values():
        assert set(found) == {vision.WHITE, vision.BLACK, vision.TABLET}
        assert all(0 <= value <= 1 for value in found.values())
    rows = accuracies("vision", [scores, scores], behind=1.5)
    assert [row.name for row in rows[:2]] == ["vision-above-baselines", "vision-behind-pooling"]
    assert len(rows) == len(names) + 2
    ours = next(row for row in rows if row.name == "vision unified")
    assert ours.value is not None and math.isclose(ours.value, 100 * sum(scores[OURS].values()) / 3)
