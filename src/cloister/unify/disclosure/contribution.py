"""The report on one's own contribution: runs the attacks on a real seed, task and expert.

    found = of_contribution(seed, task, private, public, chosen, settings, done, workdir=folder)
    found.write(folder)

Membership is the expensive part: every reference expert is one more training, on half of at most `MOST_ROWS` of the
private examples. `references=0` leaves it out, and the report says so.

Who has the ids has the seed and the public set too, and may look at them in any way: in the seed's last states, or in
the view that the choice was made in, where that is another (`unify.views`). Both are tried, and the better one counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cloister.errors import DataError
from cloister.progress import SILENT, Progress
from cloister.unify.disclosure import claims, membership, proxies
from cloister.unify.disclosure.claims import Done
from cloister.unify.disclosure.report import Figure, Item, Report, membership_figures

if TYPE_CHECKING:
    from cloister.unify.examples import Examples
    from cloister.unify.experts import Settings
    from cloister.unify.seeds import Seed
    from cloister.unify.selection.looks import Look
    from cloister.unify.tasks import Task

REFERENCES = membership.QUICK  # cheap; the report says that more would find more
FEWEST = 40  # private examples with which a figure on membership says anything
MOST_ROWS = 2000
FEWEST_SHARED = 5  # private records in the public set from which shares are compared
BETTER_WAY = (
    "Regions, the direction of the mean and own records were looked for in the seed's last states and in what choices "
    "by relevance compare; each figure is the larger of both, so where nothing shows it lies a little above guessing."
)
Vectors = NDArray[np.float32]
Ways = Sequence[tuple[Vectors, Vectors]]  # private and public vectors: the seed's last states, then the choice's


def of_contribution(
    seed: Seed,
    task: Task,
    private: Examples,
    public: Examples,
    chosen: Sequence[int],
    settings: Settings,
    done: tuple[Done, Done, Done],
    *,
    sent: Vectors | None = None,
    look: Look | None = None,
    references: int = REFERENCES,
    workdir: Path | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Measure what `chosen` (rows of the public set), an expert trained with `settings` and the routing vectors `sent`
    (layers, hidden) reveal. `done` says how the three were made, `look` what the choice compared, if not `BY_KIND`."""
    missed: list[str] = []
    ids = _of_ids(seed, task, private, public, chosen, _ways(seed, private, public, look, progress), missed)
    leak, notes = _of_weights(seed, task, private, public.rows(chosen), settings, references, workdir, progress, missed)
    bound = claims.alone(done[1], done)
    weights = Item("expert weights", membership_figures(leak, bound) if leak else (), tuple(notes))
    sent_item = Item("routing vectors")
    if sent is not None:
        cosine = _direction_of_layers(seed, private, public, sent, progress)
        sent_item = Item("routing vectors", (Figure("direction of the mean", cosine),))
    return Report(done, (ids, weights, sent_item), tuple(missed), references, leak)


# ---- proxy ids -------------------------------------------------------------------------------------------------------


def _ways(seed: Seed, private: Examples, public: Examples, look: Look | None, progress: Progress) -> Ways:
    from cloister.unify.selection.looks import BY_KIND
    from cloister.unify.views import view

    last = seed.vectors(private, progress=progress), seed.vectors(public, progress=progress)
    if (look or BY_KIND[seed.kind]) == "last":
        return [last]
    here, theirs = view(seed, public, look, progress=progress)
    return [last, (here.vectors(private, progress=progress), theirs)]


def _of_ids(
    seed: Seed,
    task: Task,
    private: Examples,
    public: Examples,
    chosen: Sequence[int],
    ways: Ways,
    missed: list[str],
) -> Item:
    figures, notes = [], [BETTER_WAY] if len(ways) > 1 else []
    rows, (_, last) = list(chosen), ways[0]
    if (found := _labels(seed, task, private, last[rows], last)) is not None:  # of labels there are no other vectors
        figures.append(found[0])
        notes.append(found[1])
    regions = [proxies.regions_betrayed(proxies.clusters(theirs), chosen, mine) for mine, theirs in ways]
    if seen := [one for one in regions if one is not None]:
        most = max(seen, key=lambda one: one.value)
        figures.append(Figure("regions betrayed", most.value, most))
    else:
        missed.append("regions: your data lie everywhere that the public set does, or nowhere more than it")
    figures.append(Figure("direction of the mean", max(_direction(theirs, rows, mine) for mine, theirs in ways)))
    own = _shared(private, public)
    if len(own):
        taken = len(set(map(int, chosen)) & set(own.tolist()))
        notes.append(f"{len(own)} of your records also lie in the public set; {taken} of them were chosen.")
    if len(own) >= FEWEST_SHARED:
        more = [proxies.chosen_more(chosen, own, _alike(theirs, own)) for _, theirs in ways]
        figures.append(Figure("own records chosen", max(one.own.value - one.alike.value for one in more)))
        if any(one.betrays for one in more):
            notes.append("Being chosen says that a public example is yours: leave such records out of your data.")
    return Item("proxy ids", tuple(figures), tuple(notes))


def _labels(seed: Seed, task: Task, private: Examples, picked: Vectors, public: Vectors) -> tuple[Figure, str] | None:
    """Does the choice tell which of the round's labels, which everybody knows, the owner holds?"""
    labels: tuple[str, ...] = getattr(task, "labels", ())
    if len(labels) < 2:
        return None
    fixed = task.fixed(seed.model, seed)
    vectors = getattr(task, "vectors", None) if fixed is None else fixed.detach().numpy()
    if vectors is None:
        return None
    mine = set(private.targets or ())
    held = np.array([label in mine for label in labels])
    if held.all() or not held.any():
        return None
    scores = proxies.rank_classes(picked, public, [row[None] for row in np.asarray(vectors)])
    betrayed = proxies.classes_betrayed(scores, held)
    first = np.argsort(-scores)[: int(held.sum())]
    named = [labels[i] for i in first if held[i]]
    said = f"Of the {len(first)} labels that the choice points to most, {len(named)} are yours"
    said += f": {', '.join(named[:5])}{', ...' if len(named) > 5 else ''}." if named else "."
    return Figure("labels betrayed", betrayed.value, betrayed), said


def _shared(private: Examples, public: Examples) -> NDArray[np.int64]:
    """Rows of the public set that are private records too."""
    if private.kind == "text":
        return proxies.shared_records(private.texts(), public.texts())
    have = {hashlib.sha256(one.tobytes()).digest() for one in private.pixels()}
    same = [row for row, one in enumerate(public.pixels()) if hashlib.sha256(one.tobytes()).digest() in have]
    return np.array(same, dtype=np.int64)


def _alike(vectors: Vectors, own: NDArray[np.int64]) -> NDArray[np.int64]:
    """The nearest other public example of each own record: like it, and not the owner's."""
    others = np.setdiff1d(np.arange(len(vectors)), own)
    return np.unique(others[np.argmax(vectors[own] @ vectors[others].T, axis=1)])


def _direction(public: Vectors, chosen: list[int], private: Vectors) -> float:
    """How well the chosen examples' mean points to the private one, as seen from the public set's."""
    middle = public.mean(0)
    return _cosine(public[chosen].mean(0) - middle, private.mean(0) - middle)


def _cosine(a: Vectors, b: Vectors) -> float:
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30))


# ---- routing vectors -------------------------------------------------------------------------------------------------


def _direction_of_layers(seed: Seed, private: Examples, public: Examples, sent: Vectors, progress: Progress) -> float:
    """The mean over layers of how well the vectors that are sent point to the private mean."""
    from cloister.unify.views import block_inputs

    middle, mine = (block_inputs(seed, one, progress=progress).mean(0) for one in (public, private))
    return float(np.mean([_cosine(a - c, b - c) for a, b, c in zip(sent, mine, middle, strict=True)]))


# ---- expert weights --------------------------------------------------------------------------------------------------


def _of_weights(
    seed: Seed,
    task: Task,
    private: Examples,
    chosen: Examples,
    settings: Settings,
    references: int,
    workdir: Path | None,
    progress: Progress,
    missed: list[str],
) -> tuple[membership.Leak | None, list[str]]:
    what = "membership in the expert's training data"
    if not references:
        missed.append(f"{what}: reference experts were not asked for (--measure-references)")
    elif len(private) < FEWEST:
        missed.append(
            f"{what}: {len(private)} examples are too few to measure it with, {FEWEST} are the least. Small sets leak "
            "more than large ones"
        )
    else:
        try:
            leak = attack_expert(
                seed, task, private, chosen, settings, references=references, workdir=workdir, progress=progress
            )
        except DataError as error:
            missed.append(f"{what}: {error.message}")
        else:
            notes = leak.caveats()
            if len(private) > MOST_ROWS:
                notes.append(
                    f"The attacked experts were trained on {MOST_ROWS // 2} of {MOST_ROWS} examples drawn from yours. "
                    "Smaller sets leak more, so the figures are rather too high in this respect."
                )
            return leak, notes
    return None, []


def attack_expert(
    seed: Seed,
    task: Task,
    private: Examples,
    proxy_examples: Examples | None,
    settings: Settings,
    *,
    references: int = membership.REFERENCES,
    workdir: Path | None = None,
    progress: Progress = SILENT,
) -> membership.Leak:
    """Membership inference on experts trained like the real one, on halves of the private examples."""
    from cloister.unify.experts import apply_delta, train_expert
    from cloister.unify.seeds import with_state
    from cloister.unify.training import stamp

    if len(private) > MOST_ROWS:
        private = private.rows(np.sort(np.random.default_rng(0).permutation(len(private))[:MOST_ROWS]))

    def train(rows: membership.Rows) -> membership.Scorer:
        delta = train_expert(seed, task, private.rows(rows), proxy_examples, settings).delta
        return scorer(with_state(seed, apply_delta(seed, delta)), seed, task, private)

    name = stamp(
        seed=seed.fingerprint, task=task.key(), private=private.digest(), settings=repr(settings),
        proxies=proxy_examples and proxy_examples.digest(),
    )  # fmt: skip
    return membership.attack(
        train, len(private), references=references, logits=seed.kind != "decoder", stamp=name, workdir=workdir,
        progress=progress,
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
                found[start : start + size] = (right.mean() if len(right) else 0.0) if size == 1 else right.numpy()
        return found

    return score
