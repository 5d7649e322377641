"""What an owner's own report says, on real data: MiniLM as seed, one CLINC150 domain, 2,000 Alpaca and Wikipedia texts.

The owner holds 300 records of a domain; the round's labels are those of five domains and Banking77 together. The choice
and the expert are made by the steps of a round, with and without differential privacy, and attacked as
`cloister unify contribute` does it, but with more reference experts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cloister.bench.schema import Row
from cloister.bench.suites import Options, Workload
from cloister.bench.unify import text_data
from cloister.unify.disclosure import contribution, membership
from cloister.unify.disclosure.claims import Done
from cloister.unify.disclosure.report import Figure, FigureName, Report
from cloister.unify.examples import Examples
from cloister.unify.experts import DpSettings, Settings, apply_delta, train_expert
from cloister.unify.seeds import Seed, with_state
from cloister.unify.selection import Selection, choose
from cloister.unify.tasks import Classify

DOMAIN, RECORDS, PUBLIC, PROXIES = "travel", 300, 2000, 200
DELTA = 1e-5
PLAIN = Settings(epochs=4, lr=2e-3, batch=16, proxy_batch=4, keep_every=1e9)
# With noise: fewer weights and more steps of larger batches. Chosen on training data.
NOISY = replace(PLAIN, rank=4, alpha=8, epochs=6, batch=64, lr=4e-3, dp=DpSettings(8.0, DELTA))
ABSENT = Done("routing vectors", "absent")


@dataclass(frozen=True)
class World:
    """One owner and what everybody has."""

    seed: Seed
    task: Classify
    own: Classify
    train: Examples
    test: Examples
    public: Examples

    def choose(self, selection: Selection) -> list[int]:
        """Rows of the public set."""
        private = self.seed.vectors(self.train, batch=1 if selection.epsilon else 64)
        return [int(row) for row in choose(private, self.seed.vectors(self.public), selection).indices]


@lru_cache(maxsize=1)
def _world(quick: bool) -> World:
    root, seed = text_data.data_directory(), text_data.minilm(32)
    size = {"": 60 if quick else RECORDS}
    everybody = text_data.owners(root, text_data.DOMAINS, size, 300, 0, development=False)
    classifiers = [(owner, owner.task) for owner in everybody if isinstance(owner.task, Classify)]
    labels = sorted({label for _, task in classifiers for label in task.labels})
    own, task = next((owner, task) for owner, task in classifiers if owner.name == DOMAIN)
    count = 300 if quick else PUBLIC
    public = text_data.public(root, "alpaca and wikipedia", count, seed=seed, tasks=[])
    return World(seed, Classify(tuple(labels)), task, own.train, own.test, public)


def _selection(options: Options) -> Selection:
    return Selection(pool=200, count=60) if options.quick else Selection(pool=1000, count=PROXIES)


def _figure(found: Report, name: FigureName) -> Figure:
    return next(figure for item in found.items for figure in item.figures if figure.name == name)


def _choice(options: Options) -> list[Row]:
    world = _world(options.quick)
    rows = []
    plain = _selection(options)
    for name, selection in (("", plain), ("-dp-1", replace(plain, epsilon=1.0, delta=DELTA))):
        found = contribution.of_contribution(
            world.seed, world.task, world.train, world.public, world.choose(selection), PLAIN,
            (Done("proxy ids", "plain"), Done("expert weights", "plain"), ABSENT), references=0,
        )  # fmt: skip
        labels, mean = _figure(found, "labels betrayed"), _figure(found, "direction of the mean")
        assert labels.interval is not None
        rows.append(
            Row.measured(
                f"contribution-labels{name}", labels.value, "AUC", baseline="guessing: 0.5",
                spread=(labels.interval.high - labels.interval.low) / 2,
                note=f"which of {len(world.task.labels)} labels are the owner's {len(world.own.labels)}; the proxies' "
                f"mean points to the private mean with cosine {mean.value:.2f}",
                figures={"auc": labels.value, "direction": mean.value},
            )
        )  # fmt: skip
    return rows


def _membership(options: Options) -> list[Row]:
    world = _world(options.quick)
    proxies = world.public.rows(world.choose(_selection(options)))
    rows = []
    # With noise an expert takes ten times as long, so fewer of them are made.
    for name, settings, references in (
        ("", PLAIN, membership.REFERENCES),
        ("-dp-8", NOISY, membership.REFERENCES // 2),
    ):
        options.progress.note(f"contribution-membership{name}: the expert")
        began = time.perf_counter()
        made = train_expert(world.seed, world.task, world.train, proxies, settings)
        training = time.perf_counter() - began
        model = with_state(world.seed, apply_delta(world.seed, made.delta))
        accuracy, before = (world.own.evaluate(m, world.seed, world.test).value for m in (model, world.seed.model))
        leak = contribution.attack_expert(
            world.seed, world.task, world.train, proxies, settings, progress=options.progress,
            references=membership.QUICK if options.quick else references,
        )  # fmt: skip
        measuring = time.perf_counter() - began - training
        auc, rate = leak.likelihood.auc, leak.likelihood.tpr
        figures: dict[str, Any] = {"auc": auc.value, "loss_auc": leak.loss.auc.value, "accuracy": accuracy}
        figures |= {"seed_accuracy": before, "training_seconds": training, "measuring_seconds": measuring}
        rows.append(
            Row.measured(
                f"contribution-membership{name}", auc.value, "AUC", spread=(auc.high - auc.low) / 2,
                baseline="guessing: 0.5",
                note=f"{leak.references} reference experts; loss attack {leak.loss.auc.text()}"
                + (f"; {rate.text()} named at 1 % false ones" if rate else "")
                + f"; accuracy {accuracy:.3f}, the seed's {before:.3f}; measuring took {measuring / training:.1f} "
                "times the training",
                figures=figures,
            )
        )  # fmt: skip
    return rows


WORKLOADS = (
    Workload("contribution-labels", "which labels an owner's proxy ids betray, with and without noise", _choice, "AUC"),
    Workload("contribution-membership", "membership inference on an owner's expert, as it leaves", _membership, "AUC"),
)
