"""The text trials: rows are made right, nothing is measured twice, and test sets stay apart from training data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cloister.bench.schema import Report, Row
from cloister.bench.unify import pictures, text_rows

pytest.importorskip("matplotlib")


def scores(*averages: float) -> list[dict[str, float]]:
    """Two owners around each average."""
    return [{"bank": value - 0.02, "travel": value + 0.02} for value in averages]


FOUND = {
    "unified": scores(0.90, 0.91),
    "zero-shot": scores(0.60, 0.60),
    "FlexOlmo": scores(0.88, 0.91),
    "unrestricted": scores(0.90, 0.93),
    "pooled": scores(0.91, 0.92),
}


def test_ours_is_compared_with_the_best_of_each_kind():
    above, behind, *rest = text_rows.compared(FOUND)
    assert above.value == pytest.approx(1.0) and "FlexOlmo" in above.baseline and above.ok and not above.at_most
    assert behind.value == pytest.approx(1.0) and behind.bar == 1.5 and behind.ok
    assert [row.name for row in rest] == [f"text {name}" for name in FOUND]
    assert rest[0].figures == pytest.approx({"bank": 88.5, "travel": 92.5})
    assert rest[0].spread == pytest.approx(0.7071, rel=1e-3)


def test_a_loss_is_called_a_loss():
    worse = {**FOUND, "unified": scores(0.87, 0.88)}
    above, behind, *_ = text_rows.compared(worse)
    assert not above.ok and above.value is not None and above.value < 0
    assert not behind.ok


def test_quick_runs_claim_nothing():
    above, behind, *_ = text_rows.compared({name: draws[:1] for name, draws in FOUND.items()}, bars=False)
    assert above.bar is None and behind.bar is None and above.spread is None
    assert "without --quick" in above.note


def test_the_picture_shows_every_method(tmp_path):
    rows = tuple(text_rows.compared(FOUND))
    report = Report("unify", "2026-01-01T00:00:00+00:00", 1.0, {}, "", {}, False, rows)
    (path,) = pictures.draw(report, tmp_path)
    assert path.stat().st_size > 5000
    assert pictures.draw(replace(report, rows=(Row.measured("other", 1.0, "s"),)), tmp_path) == []


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    from cloister.bench.unify import text, text_data
    from cloister.errors import NotAvailable

    plan = replace(text.QUICK, private={"": 16}, test=20, public=120, proxies=20, pool=60, domains=("travel",))
    try:
        root = text_data.data_directory()
        text_data.minilm(8)
    except NotAvailable as error:
        pytest.skip(str(error))
    return text.Trial(plan, cache=tmp_path_factory.mktemp("cache"), root=root)


def test_a_small_trial_runs_and_is_not_measured_twice(trial, monkeypatch):
    from cloister.bench.unify import text

    first = {method: trial.score(method) for method in ("unified", "zero-shot", "BTM", "FlexOlmo")}
    assert all(set(found) == {"travel", "banking77", "openbookqa"} for found in first.values())
    assert trial.seconds["selection dpp"] > 0 and trial.seconds["joint training"] > 0
    again = text.Trial(trial.plan, cache=trial.cache, root=trial.root)
    monkeypatch.setattr(text, "train_expert", lambda *_, **__: pytest.fail("trained again"))
    assert {method: again.score(method) for method in first} == first
    share = text_rows.selection_share([again], bars=False)
    assert share.value is not None and 0 < share.value < 1


def test_remembered_answers_are_the_ensemble_s(trial):
    from cloister.unify import baselines

    owner = trial.owners[0]
    ensemble = baselines.ensemble(trial.seed, trial.experts(None))
    assert ensemble.evaluate(owner.task, owner.test).value == pytest.approx(trial.score("BTM")[owner.name])


def test_development_data_are_no_test_data(trial):
    from cloister.bench.unify import text

    other = text.Trial(replace(trial.plan, development=True), root=trial.root)
    for real, held_out in zip(trial.owners, other.owners, strict=True):
        assert real.train.ids == held_out.train.ids
        assert not set(held_out.test.texts()) & set(held_out.train.texts())
        assert not set(held_out.test.texts()) & set(real.test.texts()) or real.name in ("banking77", "openbookqa")


def test_public_data_without_the_owners_subjects_are_farther_from_them(trial):
    from cloister.bench.unify import text_data
    from cloister.unify.tasks import spoken

    tasks = [owner.task for owner in trial.owners]
    names = trial.seed.remembered([spoken(label) for task in tasks for label in getattr(task, "labels", ())])
    closest = {}
    for kind in ("alpaca and wikipedia", "no shared subjects", "questions and stories"):
        found = text_data.public(trial.root, kind, 60, seed=trial.seed, tasks=tasks)
        assert len(found) == 60 and len(set(found.ids)) == 60
        vectors = trial.seed.encode_all(trial.seed.model, found.texts())
        closest[kind] = float((vectors @ names.T).max(1).values.max())
    assert closest["no shared subjects"] < closest["alpaca and wikipedia"] - 0.1
