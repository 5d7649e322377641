"""Comparisons are medians of pairs, so that a disturbed run does not decide."""

from __future__ import annotations

from cloister.bench import timing
from cloister.bench.timing import Comparison


def test_the_ratio_ignores_a_disturbance() -> None:
    quiet = Comparison((2.0,) * 9, (1.0,) * 9)
    disturbed = Comparison((2.0,) * 8 + (50.0,), (1.0,) * 9)
    assert quiet.ratio == disturbed.ratio == 2.0
    assert quiet.spread == 0.0


def test_both_are_run_in_turn() -> None:
    order: list[str] = []
    found = timing.compare(lambda: order.append("a"), lambda: order.append("b"), pairs=4, warm_up=1)
    assert "".join(order) == "ab" + "abba" * 2
    assert len(found.a) == len(found.b) == 4


def test_a_deadline_ends_it() -> None:
    calls: list[int] = []
    found = timing.compare(lambda: calls.append(1), lambda: None, pairs=1000, warm_up=0, deadline=0)
    assert len(found.a) == 5


def test_one_thing_alone() -> None:
    calls: list[int] = []
    seconds, spread = timing.measure(lambda: calls.append(1), repeats=7, warm_up=2, inner=3)
    assert len(calls) == 2 + 7 * 3 and seconds > 0 and spread >= 0
