"""The disclosure report: what leaves is no function of private data, what stays is measured, bounds are added up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from cloister.errors import BrokenManifest, NotAvailable, UsageError
from cloister.unify.disclosure import accounting, claims, measures, membership, proxies, report
from cloister.unify.disclosure.accounting import Gaussian, NotDependent, NotPrivate, Release, Stated, total
from cloister.unify.disclosure.claims import Done
from cloister.unify.disclosure.measures import Estimate, auc, rate_at, separation, share

COUNT = 1387
PLAIN = (Done("proxy ids", "plain"), Done("expert weights", "plain"), Done("routing vectors", "absent"))
PRIVATE = (
    Done("proxy ids", "noise", 1.0, 1e-5, noise=4.0),
    Done("expert weights", "stated", 4.0, 1e-5),
    Done("routing vectors", "noise", 2.0, 1e-5, noise=2.2),
)


def a_report(done: tuple[Done, ...]) -> report.Report:
    draw = np.random.default_rng(0)
    member = np.arange(2 * COUNT) < COUNT
    scores = draw.normal(size=2 * COUNT) + member
    found = separation(scores, member)
    leak = membership.Leak(found, found, 16, False, False, scores, member, np.arange(2 * COUNT))
    betrayed = report.Figure("regions betrayed", 0.9137, Estimate(0.91, 0.87, 0.95))
    items = (
        report.Item("proxy ids", (betrayed,)),
        report.Item(
            "expert weights", report.membership_figures(leak, claims.alone(done[1], done)), (f"{COUNT} examples",)
        ),
        report.Item("routing vectors"),
    )
    return report.Report(done, items, ("the weather",), 16, leak)


def test_the_page_that_stays(tmp_path: Path) -> None:
    page = a_report(PLAIN).write(tmp_path / "home")
    home = report.read(tmp_path / "home")
    assert str(COUNT) in page.read_text() and "0.914 (0.870 to 0.950)" in page.read_text()
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "home").iterdir())
    assert report.value(home, "regions betrayed") == 0.9137
    assert report.value(home, "labels betrayed") is None
    assert "the weather" in home["not_measured"]
    cells = report.rows(home)
    assert cells[0][0] == "proxy ids" and cells[0][-1] == "no limit"
    assert cells[-1][:2] == ("no routing vectors", "nothing")
    assert home["together"].startswith("No bound: the proxies were chosen without differential privacy; the expert")
    (tmp_path / "home" / report.JSON).write_text("{")
    with pytest.raises(BrokenManifest, match="cannot be read"):
        report.read(tmp_path / "home")


def test_what_leaves_is_made_of_options_alone() -> None:
    """Nothing but what the owner decided goes in, so nothing else comes out; and no number but epsilons."""
    told = claims.public(PLAIN)
    assert told["together"]["none"] == [claims.PLAIN["proxy ids"], claims.PLAIN["expert weights"]]
    assert [one["leaves"] for one in told["artefacts"]] == [True, True, False]
    numbers: list[float] = []
    json.loads(json.dumps(told), parse_float=numbers.append, parse_int=numbers.append)
    assert not numbers


def test_a_random_choice_needs_no_bound() -> None:
    found = claims.together((Done("proxy ids", "independent"), PRIVATE[1], PLAIN[2]))
    assert found.holds and (found.epsilon, found.delta) == (4.0, 1e-5)


def test_what_leaves_with_noise_states_the_sum() -> None:
    pytest.importorskip("dp_accounting", reason="the optional extra `dp` is not installed")
    told = claims.public(PRIVATE)
    assert told["together"]["delta"] == pytest.approx(2e-5)
    both = total([PRIVATE[0].release(), PRIVATE[2].release()], 1e-5)
    assert told["together"]["epsilon"] == pytest.approx(4.0 + both.epsilon)
    # The expert and the vectors are made with the chosen ids: each alone costs what the choice cost, too.
    each = [one["differential_privacy"]["epsilon"] for one in told["artefacts"]]
    assert each == [1.0, 5.0, both.epsilon]
    assert [one.get("for_given_proxies", {}).get("epsilon") for one in told["artefacts"]] == [None, 4.0, 2.0]


def test_noise_in_the_training_bounds_nothing_after_a_choice_without() -> None:
    """The owner who says --dp-epsilon alone must not read, nor send, an epsilon of its weights."""
    done = (PLAIN[0], PRIVATE[1], PLAIN[2])
    told = claims.public(done)["artefacts"][1]
    assert told["differential_privacy"] == "none"
    assert told["for_given_proxies"]["epsilon"] == 4.0 and "the same proxies" in told["for_given_proxies"]["means"]
    found = a_report(done)
    home = found.home()
    ids, weights = home["artefacts"][:2]
    assert weights["limit"] == "no limit" and weights["bounded_by"] == "nothing"
    assert all(figure["at_most"] is None for figure in weights["figures"])
    assert any("(4, 1e-05)" in note and "bounds nothing" in note for note in weights["notes"]) and not ids["notes"]
    # A choice at random tells nothing, so there the noise of the training is the bound.
    drawn = (Done("proxy ids", "independent"), PRIVATE[1], PLAIN[2])
    told = claims.public(drawn)["artefacts"][1]
    assert told["differential_privacy"] == {"epsilon": 4.0, "delta": 1e-5}


def test_what_no_attack_on_the_weights_exceeds_is_of_choice_and_training_together() -> None:
    done = (Done("proxy ids", "noise", 0.5, 1e-5, noise=8.0), Done("expert weights", "stated", 1.0, 1e-5), PLAIN[2])
    weights = a_report(done).home()["artefacts"][1]
    limits = {figure["name"]: figure["at_most"] for figure in weights["figures"]}
    assert limits["membership, likelihood ratio"] == round(measures.most_auc(1.5, 2e-5), 4)
    assert limits["membership at 1 % false positives"] == round(measures.most_rate(1.5, 2e-5), 4)
    assert weights["limit"] == "epsilon 1.5, delta 2e-05" and "together" in weights["bounded_by"]


def test_a_claim_is_what_the_step_wrote_down(tmp_path: Path) -> None:
    for one in PRIVATE:
        one.keep(tmp_path)
    assert tuple(claims.kept(tmp_path, part) for part in claims.PARTS) == PRIVATE
    path = tmp_path / claims.FOLDER / "proxy-ids.json"
    assert path.stat().st_mode & 0o077 == 0
    path.write_text((tmp_path / claims.FOLDER / "expert-weights.json").read_text())
    with pytest.raises(BrokenManifest, match="not about"):
        claims.kept(tmp_path, "proxy ids")
    path.write_text('{"part": "proxy ids"}')
    with pytest.raises(BrokenManifest, match="damaged"):
        claims.kept(tmp_path, "proxy ids")
    path.unlink()
    with pytest.raises(UsageError, match="Nothing says"):
        claims.kept(tmp_path, "proxy ids")


def test_what_no_attack_exceeds() -> None:
    """Randomised response reaches the limit; the area is that under the rates."""
    for epsilon, delta in ((0.5, 0.0), (1.0, 1e-5), (3.0, 0.01)):
        few = np.linspace(0, 1, 20_001)
        rates = np.array([measures.most_rate(epsilon, delta, float(x)) for x in few])
        assert measures.most_auc(epsilon, delta) == pytest.approx(float(np.trapezoid(rates, few)), abs=1e-4)
    truth = np.exp(1.0) / (1 + np.exp(1.0))
    assert measures.most_rate(1.0, 0.0, 1 - truth) == pytest.approx(truth)
    assert measures.most_auc(0.0, 0.0) == pytest.approx(0.5)


# ---- measures --------------------------------------------------------------------------------------------------------


def test_auc_is_that_of_all_pairs() -> None:
    draw = np.random.default_rng(1)
    yes, no = draw.integers(0, 9, 40).astype(float), draw.integers(2, 11, 30).astype(float)
    slow = np.mean([(a > b) + (a == b) / 2 for a in yes for b in no])
    assert auc(yes, no) == pytest.approx(slow)


def test_the_rate_allows_one_in_a_hundred() -> None:
    no = np.arange(200.0)
    assert rate_at(np.array([196.0, 197.0, 198.0, 199.0, 300.0]), no) == pytest.approx(3 / 5)


def test_the_interval_covers_guessing() -> None:
    draw = np.random.default_rng(2)
    held = sum(separation(draw.normal(size=300), np.arange(300) < 150, seed=n).auc.holds(0.5) for n in range(20))
    assert held >= 16


def test_a_share_has_an_interval() -> None:
    assert share(0, 10).low == 0
    assert 0.25 < share(0, 10).high < 0.35


# ---- membership ------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 120, 200
_draw = np.random.default_rng(0)
X, Y = _draw.normal(size=(ROWS, WIDTH)), _draw.integers(0, 2, ROWS) * 2 - 1


def _log_p(margins: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0, -margins)


def overfit(rows: np.ndarray) -> membership.Scorer:
    """A linear classifier of random labels with more weights than rows: it can only memorise."""
    weights = np.zeros(WIDTH)
    for _ in range(100):
        pull = Y[rows] / (1 + np.exp(Y[rows] * (X[rows] @ weights)))
        weights += 0.5 * (X[rows] * pull[:, None]).mean(0)
    return lambda at: _log_p(Y[at] * (X[at] @ weights))


def test_an_overfitted_model_is_caught() -> None:
    found = membership.attack(overfit, ROWS)
    assert found.likelihood.auc.low > 0.9
    assert found.likelihood.tpr is not None and found.likelihood.tpr.low > 0.1
    assert found.loss.auc.low > 0.8
    assert not found.quick


def test_the_expert_that_leaves_can_be_the_target() -> None:
    member = np.arange(ROWS) < ROWS // 2
    found = membership.attack(overfit, ROWS, target=overfit(np.flatnonzero(member)), member=member)
    assert found.own_expert and found.likelihood.auc.low > 0.85


def test_a_model_that_never_saw_the_data_gives_nothing_away() -> None:
    draw = np.random.default_rng(3)

    def never(_: np.ndarray) -> membership.Scorer:
        weights = draw.normal(size=WIDTH) / 20
        return lambda at: _log_p(Y[at] * (X[at] @ weights))

    found = membership.attack(never, ROWS)
    assert abs(found.likelihood.auc.value - 0.5) < 0.06
    assert abs(found.loss.auc.value - 0.5) < 0.06


def test_quick_says_so() -> None:
    found = membership.attack(overfit, ROWS, quick=True)
    assert found.quick and found.references == membership.QUICK
    assert any("Quick" in one for one in found.caveats())


def test_a_killed_attack_goes_on(tmp_path: Path) -> None:
    trained: list[int] = []

    def train(rows: np.ndarray, most: int = 3) -> membership.Scorer:
        if len(trained) == most:
            raise KeyboardInterrupt
        trained.append(len(rows))
        return overfit(rows)

    with pytest.raises(KeyboardInterrupt):
        membership.attack(train, ROWS, quick=True, workdir=tmp_path, stamp="a")
    damaged = next(tmp_path.rglob("1.npy"))
    damaged.write_bytes(damaged.read_bytes()[:50])
    again = membership.attack(lambda rows: train(rows, 99), ROWS, quick=True, workdir=tmp_path, stamp="a")
    assert len(trained) == 3 + 1 + 2  # the damaged one and the two that were left
    assert np.array_equal(again.scores, membership.attack(overfit, ROWS, quick=True).scores)


def test_a_confident_model_keeps_its_logits_apart() -> None:
    assert np.isfinite(membership.scaled_logit(np.array([0.0, -1e-15, -800.0]))).all()
    assert membership.scaled_logit(np.log([0.5, 0.9])) == pytest.approx([0, np.log(9)])


# ---- proxies ---------------------------------------------------------------------------------------------------------


def test_proxies_near_a_class_betray_it() -> None:
    draw = np.random.default_rng(4)
    centres = draw.normal(size=(12, 20)) * 2
    classes = [c + draw.normal(size=(30, 20)) for c in centres]
    public = np.concatenate([c + draw.normal(size=(80, 20)) for c in centres])
    held = np.arange(12) < 5
    chosen = np.concatenate([np.arange(80 * c, 80 * c + 20) for c in range(5)])
    scores = proxies.rank_classes(public[chosen], public, classes)
    assert proxies.classes_betrayed(scores, held).value > 0.95
    regions = proxies.clusters(public, 12)
    found = proxies.regions_betrayed(regions, chosen, np.concatenate(classes[:5]))
    assert found is not None and found.value > 0.9
    nothing = proxies.regions_betrayed(regions, draw.permutation(len(public))[:100], np.concatenate(classes[:5]))
    assert nothing is not None and nothing.value < 0.9


def test_own_records_in_the_public_set() -> None:
    rows = proxies.shared_records(["My  Card is lost", "x"], ["a", "my card is LOST", "b"])
    assert rows.tolist() == [1]
    found = proxies.chosen_more([*range(40), 60, 61], np.arange(50), np.arange(50, 100))
    assert found.betrays and found.own.value == 0.8


def test_one_record_changes_the_choice() -> None:
    changed, of = proxies.changed_without(lambda rows: [int(rows.sum()) % 50, 51, 52], 20)
    assert changed == 1 and of == 3


# ---- accounting ------------------------------------------------------------------------------------------------------


def test_one_release_without_privacy_leaves_no_bound() -> None:
    why = "the expert was trained without differential privacy"
    found = total([Release("proxies", Stated(1, 1e-7)), Release("expert", NotPrivate(why))], 1e-5)
    assert not found.holds and found.text() == f"No bound: {why}."


def test_stated_parts_are_added() -> None:
    parts = [Release("proxies", Stated(1, 1e-6)), Release("expert", Stated(2, 2e-6)), Release("v", NotDependent("so"))]
    assert total(parts, 1e-5).epsilon == 3
    assert not total(parts, 2e-6).holds
    assert total([Release("v", NotDependent("made from proxies"))], 1e-5).epsilon == 0


def test_neighbours_must_agree() -> None:
    removed, replaced = Release("a", Stated(1, 1e-6)), Release("b", Stated(1, 1e-6), "replaced")
    assert not total([removed, replaced], 1e-5).holds
    assert total([removed, replaced], 1e-5, neighbours="replaced").epsilon == 3


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(NotAvailable, match=r"cloister\[dp\]"):
        accounting.noise_for(1, 1e-5)


def test_composition_is_that_of_dp_accounting() -> None:
    pytest.importorskip("dp_accounting", reason="the optional extra `dp` is not installed")
    noise = accounting.noise_for(2, 1e-5)
    alone = total([Release("v", Gaussian(noise))], 1e-5).epsilon
    both = total([Release("v", Gaussian(noise)), Release("p", Gaussian(noise))], 1e-5).epsilon
    assert alone == pytest.approx(2, abs=0.01)
    assert both == pytest.approx(total([Release("v", Gaussian(noise, times=2))], 1e-5).epsilon)
    assert 2 * alone > both > alone
    sampled = accounting.sampled_noise_for(4, 1e-5, rate=0.05, steps=100)
    parts = [Release("e", accounting.SampledGaussian(sampled, 0.05, 100))]
    assert total(parts, 1e-5).epsilon == pytest.approx(4, abs=0.05)
    with pytest.raises(UsageError):
        total(parts, 2.0)


@pytest.mark.parametrize("look", [None, "last"])
def test_the_attack_on_the_ids_looks_where_the_choice_did(look: Literal["last"] | None) -> None:
    """An image seed chooses by early block inputs; each figure is that of the better of both ways to look."""
    from tiny import images, vision

    from cloister.unify.disclosure import contribution
    from cloister.unify.experts import Settings
    from cloister.unify.tasks import Images
    from cloister.unify.views import view

    seed, private, public = vision(), images(60, seed=1), images(80, seed=2)
    private = private.rows([i for i, label in enumerate(private.targets or ()) if label == "above"])
    public.pixels()[5:11] = private.pixels()[:6]
    here, theirs = view(seed, public)
    mine = here.vectors(private)
    task = Images(("above", "below"), np.random.default_rng(0).normal(size=(2, seed.hidden)).astype(np.float32))
    won: set[bool] = set()
    for vectors in (theirs @ mine.mean(0), seed.vectors(public) @ seed.vectors(private).mean(0)):
        chosen = [int(row) for row in np.argsort(-vectors)[:12]]
        found = contribution.of_contribution(
            seed, task, private, public, chosen, Settings(), PLAIN, look=look, references=0
        )
        last, early = (
            {
                one.name: one.value
                for one in contribution._of_ids(seed, task, private, public, chosen, [way], []).figures
            }
            for way in [(seed.vectors(private), seed.vectors(public)), (mine, theirs)]
        )
        told = {figure.name: figure.value for figure in found.items[0].figures}
        for name in ("regions betrayed", "direction of the mean", "own records chosen"):
            assert told[name] == pytest.approx(last[name] if look else max(last[name], early[name])), name
            won |= {early[name] > last[name]}
        assert told["labels betrayed"] == pytest.approx(last["labels betrayed"])
        assert (contribution.BETTER_WAY in found.items[0].notes) == (look is None)
    assert won == {False, True}, "one way is always the better one, so nothing was tested"


def test_a_real_expert_is_attacked_and_reported(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    import torch
    from transformers import ViTConfig, ViTModel

    from cloister.unify.disclosure import contribution
    from cloister.unify.examples import Examples
    from cloister.unify.experts import Settings
    from cloister.unify.seeds import Seed
    from cloister.unify.tasks import Images

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4
    )
    seed = Seed.of(ViTModel(config, add_pooling_layer=False))
    draw = np.random.default_rng(0)

    def images(count: int) -> Examples:
        pixels = draw.integers(0, 256, (count, 3, 8, 8)).astype(np.uint8)
        return Examples("image", tuple(map(str, range(count))), pixels, tuple("ab"[i % 2] for i in range(count)))

    private, public = images(48), images(40)
    public.pixels()[5:8] = private.pixels()[:3]  # own records that are public too; the first is chosen
    task = Images(("a", "b"), draw.normal(size=(2, 16)).astype(np.float32))
    found = contribution.of_contribution(
        seed, task, private, public, [1, 5, 9, 30], Settings(epochs=1, rank=2), PLAIN, references=2, workdir=tmp_path
    )
    home = found.home()
    assert report.value(home, "membership, likelihood ratio") is not None
    assert report.value(home, "direction of the mean") is not None
    assert list(tmp_path.rglob("*.npy"))
    assert any("Quick" in note for note in found.items[1].notes)
    assert any("3 of your records also lie in the public set; 1 of them" in note for note in found.items[0].notes)
    few = contribution.of_contribution(
        seed, task, private.rows(range(20)), public, [1, 5], Settings(epochs=1, rank=2), PLAIN, references=2
    )
    assert few.leak is None and any("20 examples are too few" in one for one in few.not_measured)
    none = contribution.of_contribution(
        seed, task, private, public, [1, 5], Settings(epochs=1, rank=2), PLAIN, references=0
    )
    assert none.leak is None and any("not asked for" in one for one in none.not_measured)
