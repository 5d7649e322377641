"""The report on one's own contribution: runs the attacks on a real seed, task and expert.

    report = of_contribution(seed, task, private, public, chosen, settings, workdir=folder)
    report.shared()     # for the contribution

Membership is the expensive part: every reference expert is one more training. `references=0` leaves it out, and the
report says that it was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.progress import SILENT, Progress
from cloister.unify.disclosure import accounting, membership, proxies, report
from cloister.unify.disclosure.accounting import NotDependent, NotPrivate, Release, Stated

if TYPE_CHECKING:
    from cloister.unify.examples import Examples
    from cloister.unify.experts import Settings
    from cloister.unify.seeds import Seed
    from cloister.unify.tasks import Task

WITHOUT = {
    "proxy ids": "the proxies were chosen without differential privacy",
    "expert weights": "the expert was trained without differential privacy",
}


def of_contribution(
    seed: Seed,
    task: Task,
    private: Examples,
    public: Examples,
    chosen: Sequence[int],
    settings: Settings,
    *,
    references: int = membership.REFERENCES,
    quick: bool = False,
    selection: Release | None = None,
    expert: Release | None = None,
    vectors: Release | None = None,
    delta: float = 1e-5,
    workdir: Path | None = None,
    progress: Progress = SILENT,
) -> report.Report:
    """Measure what `chosen` (rows of the public set) and an expert trained with `settings` reveal.

    `selection`, `expert` and `vectors` say what was done with differential privacy; None: nothing, and no private
    vectors leave. The expert's own (epsilon, delta) is taken from `settings` where it trains with DP-SGD.
    """
    if expert is None and settings.dp is not None:
        expert = Release("expert weights", Stated(settings.dp.epsilon, settings.dp.delta))
    public_vectors, private_vectors = (seed.vectors(one, progress=progress) for one in (public, private))
    regions = proxies.clusters(public_vectors)
    betrayed = proxies.regions_betrayed(regions, chosen, private_vectors)
    figures = [] if betrayed is None else [report.Figure("regions betrayed", betrayed.value, betrayed)]
    missed = [] if betrayed is not None else ["regions: the private data lie everywhere that the public set does"]
    notes = []
    if public.kind == "text":
        own = proxies.shared_records(private.texts(), public.texts())
        taken = len(set(map(int, chosen)) & set(own.tolist()))
        if len(own):
            notes.append(f"{len(own)} of your records also lie in the public set; {taken} of them were chosen.")
    leak = None
    if references:
        leak = attack_expert(
            seed, task, private, public.rows(chosen), settings,
            references=references, quick=quick, workdir=workdir, progress=progress,
        )  # fmt: skip
        notes_of_expert = tuple(leak.caveats())
    else:
        missed.append("membership in the expert's training data: reference experts were not asked for")
        notes_of_expert = ()
    items = (
        report.Item("proxy ids", figures=tuple(figures), private=selection is not None, notes=tuple(notes)),
        report.Item(
            "expert weights", figures=report.membership_figures(leak) if leak else (), private=expert is not None,
            notes=notes_of_expert,
        ),
        report.Item(
            "routing vectors", leaves=vectors is not None, depends=vectors is not None, private=vectors is not None
        ),
    )  # fmt: skip
    releases = [
        selection or Release("proxy ids", NotPrivate(WITHOUT["proxy ids"])),
        expert or Release("expert weights", NotPrivate(WITHOUT["expert weights"])),
        vectors or Release("routing vectors", NotDependent("the coordinator makes them from the proxies and the seed")),
    ]
    return report.Report(items, accounting.total(releases, delta), tuple(missed), leak)


def attack_expert(
    seed: Seed,
    task: Task,
    private: Examples,
    proxy_examples: Examples | None,
    settings: Settings,
    *,
    references: int = membership.REFERENCES,
    quick: bool = False,
    workdir: Path | None = None,
    progress: Progress = SILENT,
) -> membership.Leak:
    """Membership inference on experts trained like the real one, on halves of the private examples."""
    from cloister.unify.experts import apply_delta, train_expert
    from cloister.unify.seeds import with_state
    from cloister.unify.training import stamp

    def train(rows: membership.Rows) -> membership.Scorer:
        delta = train_expert(seed, task, private.rows(rows), proxy_examples, replace(settings)).delta
        return scorer(with_state(seed, apply_delta(seed, delta)), seed, task, private)

    name = stamp(
        seed=seed.fingerprint, task=repr(task), private=private.digest(), settings=repr(settings),
        proxies=proxy_examples and proxy_examples.digest(),
    )  # fmt: skip
    return membership.attack(
        train, len(private), references=references, quick=quick, logits=seed.kind != "decoder", stamp=name,
        workdir=workdir, progress=progress,
    )  # fmt: skip


def scorer(model: Any, seed: Seed, task: Task, examples: Examples, *, batch: int = 64) -> membership.Scorer:
    """Log-probabilities of the true answers; of texts that are modelled token by token, the mean."""
    import torch

    def score(rows: membership.Rows) -> Any:
        found = np.empty(len(rows))
        size = 1 if seed.kind == "decoder" else batch
        with torch.inference_mode():
            fixed = task.fixed(model, seed)
            for start in range(0, len(rows), size):
                at = rows[start : start + size]
                told = task.predict(model, seed, examples, [int(i) for i in at], fixed)
                right = told.log_probabilities.double().gather(1, told.right[:, None])[:, 0]
                found[start : start + size] = right.mean() if size == 1 else right.numpy()
        return found

    return score


def shared(found: report.Report, *, count: int, texts: Sequence[str] = ()) -> Mapping[str, Any]:
    """The part that leaves, looked through for the count and the texts of the private data first."""
    import json

    told = found.shared()
    bound = found.bound
    report.check_leaving(
        json.dumps(told) + report.markdown(told), count=count, texts=texts, allowed=(bound.epsilon, bound.delta)
    )
    return told
