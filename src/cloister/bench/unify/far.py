"""Trials whose experts end far from their seed, images and language: data cut in two, and a router fitted inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cloister.bench.unify import text
from cloister.unify.examples import Examples
from cloister.unify.router_fit import fit_router


class Trial(text.Trial):
    """What both have in common."""

    def part(self, number: int, name: str, whole: Examples, held_out: Examples) -> tuple[Examples, Examples]:
        """An owner's training and test examples in this draw; in development, tests are other rows of the training."""
        count = self.plan.private.get(name, self.plan.private[""])
        rows = np.random.default_rng([self.draw, number]).permutation(len(whole))
        if self.plan.development:
            return whole.rows(rows[:count]), whole.rows(rows[count : count + self.plan.test])
        tested = np.random.default_rng([self.draw, number, 1]).permutation(len(held_out))
        return whole.rows(rows[:count]), held_out.rows(tested[: self.plan.test])

    def start(self, model: Any, chosen: Mapping[str, Examples], variant: text.Variant) -> None:
        """Layer by layer inside the model."""
        if variant.start == "fit":
            fit_router(model, self.seed, chosen, blend=self.plan.blend)
        else:
            super().start(model, chosen, variant)
