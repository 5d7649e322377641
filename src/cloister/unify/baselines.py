"""What the unified model is compared with. Each gives a `Predictor`; all use the same tasks, data and seed.

    zero_shot       the seed as it is
    alone           one owner's expert, for everybody
    ensemble        BTM: the experts' probabilities averaged; every expert runs on every example
    soup            ModelSoup: the experts' weights averaged
    btx             BTX: experts mixed, router from scratch, trained on public examples; there is no rest to average,
                    since only feed-forward weights ever moved
    flex_olmo       FlexOlmo: experts fixed, router from the means of the proxies, then trained on them; token by token
    pooled          no privacy: one dense model, trained on everybody's private examples together
    unrestricted    no privacy: the unified model, trained jointly on everybody's private examples

Departures from the papers. BTX and FlexOlmo train their routers on proxies with the public loss, because private data
cannot be had there (as in the MetaMoE paper's comparison); BTX's experts stay fixed. FlexOlmo's public expert is left
out: there are as many experts as owners. Its experts are trained on private examples alone. BTM's average is uniform
unless weights are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloister.progress import SILENT, Progress
from cloister.unify.examples import Examples, concat
from cloister.unify.experts import Settings, apply_delta, delta_of, trainable
from cloister.unify.joint import JointSettings, descend, route_loss, router_vectors_from_proxies, routes
from cloister.unify.seeds import Seed, with_state
from cloister.unify.tasks import Score, Task, evaluate, public_loss, public_targets
from cloister.unify.training import Descent, Loop, order, stamp

State = Mapping[str, Tensor]
Weigh = Callable[[Examples], NDArray[np.float32]]


@dataclass(frozen=True)
class Predictor:
    """One or several models that answer together."""

    name: str
    seed: Seed
    models: tuple[Any, ...]
    weigh: Weigh | None = None  # how much each model counts for each example

    def evaluate(self, task: Task, examples: Examples, *, batch: int = 64) -> Score:
        """The score on these examples."""
        weights = None if self.weigh is None else self.weigh(examples)
        return evaluate(task, self.models, self.seed, examples, weights=weights, batch=batch)


def zero_shot(seed: Seed) -> Predictor:
    """The seed as it is."""
    return Predictor("zero-shot", seed, (seed.model,))


def alone(seed: Seed, owner: str, state: State) -> Predictor:
    """One owner's expert, for everybody."""
    return Predictor(f"expert {owner}", seed, (with_state(seed, state),))


def ensemble(seed: Seed, states: Mapping[str, State], weigh: Weigh | None = None) -> Predictor:
    """BTM: all experts answer, their probabilities are averaged."""
    return Predictor("BTM", seed, tuple(with_state(seed, state) for state in states.values()), weigh)


def soup(seed: Seed, states: Mapping[str, State]) -> Predictor:
    """ModelSoup: the mean of the experts' weights."""
    names = next(iter(states.values()))
    mean = {name: torch.stack([state[name] for state in states.values()]).mean(0) for name in names}
    return Predictor("ModelSoup", seed, (with_state(seed, mean),))


def btx(
    seed: Seed,
    states: Mapping[str, State],
    proxies: Mapping[str, Examples],
    settings: JointSettings | None = None,
    *,
    workdir: Path | None = None,
    progress: Progress = SILENT,
) -> Predictor:
    """Experts mixed; a router without context, from scratch, trained with the public loss."""
    from cloister.unify.moe import set_router, unify

    settings = settings or JointSettings()
    model = unify(seed.model, states, context="none")
    draw = torch.Generator().manual_seed(settings.seed_for_order)
    layers = len(router_shapes(model))
    vectors = [0.02 * torch.randn(len(states), seed.hidden, generator=draw) for _ in range(layers)]
    set_router(model, vectors)
    _train_router(model, seed, proxies, settings, workdir, progress)
    return Predictor("BTX", seed, (model,))


def flex_olmo(
    seed: Seed,
    states: Mapping[str, State],
    proxies: Mapping[str, Examples],
    settings: JointSettings | None = None,
    *,
    name: str = "FlexOlmo",
    sharpness: float = 1.0,
    workdir: Path | None = None,
    progress: Progress = SILENT,
) -> Predictor:
    """Experts fixed; a router without context that starts at the means of the proxies, trained with the public loss.

    With proxies by our selection it is "FlexOlmo with our selection". `sharpness` multiplies the means: top-1 weights
    are not renormalised here, and means lie close together.
    """
    from cloister.unify.moe import set_router, unify

    model = unify(seed.model, states, context="none")
    set_router(model, [sharpness * layer for layer in router_vectors_from_proxies(seed, proxies)])
    _train_router(model, seed, proxies, settings or JointSettings(), workdir, progress)
    return Predictor(name, seed, (model,))


def router_shapes(model: Any) -> list[tuple[int, ...]]:
    """The shape of each layer's router vectors."""
    from cloister.unify.moe import Router

    return [tuple(part.vectors.shape) for part in model.modules() if isinstance(part, Router)]


def _train_router(
    model: Any,
    seed: Seed,
    proxies: Mapping[str, Examples],
    settings: JointSettings,
    workdir: Path | None,
    progress: Progress,
) -> None:
    union = concat(list(proxies.values()))
    targets = public_targets(seed, union)
    steps = max(1, math.ceil(settings.epochs * len(union) / settings.batch))
    rows = order(len(union), math.ceil(steps * settings.batch / len(union)), settings.seed_for_order)

    def loss_at(step: int) -> Tensor:
        chosen = rows[step * settings.batch : (step + 1) * settings.batch].tolist()
        return public_loss(model, seed, union, chosen, targets)

    what = {"settings": asdict(settings), "seed": seed.fingerprint, "data": union.digest(), "router": "public loss"}
    descend(model, loss_at, steps, settings, what=what, train=("router",), workdir=workdir, progress=progress)


def _shared_steps(sizes: Sequence[int], batch: int, epochs: int, seed: int) -> list[tuple[int, list[int]]]:
    """(owner, rows) of each step: every owner's batches, all shuffled together."""
    found: list[tuple[int, list[int]]] = []
    for epoch in range(epochs):
        steps: list[tuple[int, list[int]]] = []
        for owner, size in enumerate(sizes):
            rows = order(size, 1, seed + epoch).tolist()
            steps += [(owner, rows[start : start + batch]) for start in range(0, size, batch)]
        found += [steps[i] for i in order(len(steps), 1, seed + epoch)]
    return found


def pooled(
    seed: Seed,
    tasks: Mapping[str, Task],
    private: Mapping[str, Examples],
    settings: Settings | None = None,
    *,
    workdir: Path | None = None,
    progress: Progress = SILENT,
) -> Predictor:
    """One dense model, trained on everybody's private examples in as many steps as all experts together."""
    settings = settings or Settings()
    model = seed.fresh_model()
    parameters = trainable(model, settings)
    model.eval()  # no dropout, as for experts
    names = list(private)
    steps = _shared_steps([len(private[n]) for n in names], settings.batch, settings.epochs, settings.seed_for_order)

    def loss_at(step: int) -> Tensor:
        owner, rows = steps[step]
        return tasks[names[owner]].loss(model, seed, private[names[owner]], rows)

    loop = Loop(
        parameters, steps=len(steps), settings=Descent(settings.lr, settings.warmup), seed=settings.seed_for_order,
        stamp=stamp(pooled=asdict(settings), seed=seed.fingerprint, data=[private[n].digest() for n in names]),
        workdir=workdir, keep_every=settings.keep_every,
    )  # fmt: skip
    loop.go(loss_at, progress=progress, what="Training on pooled data")
    return Predictor("pooled", seed, (with_state(seed, apply_delta(seed, delta_of(parameters, settings))),))


def unrestricted(
    seed: Seed,
    states: Mapping[str, State],
    tasks: Mapping[str, Task],
    private: Mapping[str, Examples],
    settings: JointSettings | None = None,
    *,
    epochs: int = 1,
    blend: float = 0.9,
    workdir: Path | None = None,
    progress: Progress = SILENT,
) -> Predictor:
    """The unified model with router and experts trained on everybody's private examples, senders known."""
    from cloister.unify.moe import set_router, unify

    settings = settings or JointSettings()
    model = unify(seed.model, states)
    set_router(model, router_vectors_from_proxies(seed, private, how="fit"), blend=blend)
    names = list(states)
    steps = _shared_steps([len(private[n]) for n in names], settings.batch, epochs, settings.seed_for_order)

    def loss_at(step: int) -> Tensor:
        owner, rows = steps[step]
        with routes(model) as weights:
            loss = tasks[names[owner]].loss(model, seed, private[names[owner]], rows)
        total = torch.zeros(())
        for layer in weights:  # the passes hold label names too; all belong to this owner
            total = total + route_loss([layer], torch.full((layer.shape[0],), owner), None)
        return loss + settings.route_weight * total / max(len(weights), 1)

    what = {"unrestricted": asdict(settings), "seed": seed.fingerprint, "data": [private[n].digest() for n in names]}
    descend(model, loss_at, len(steps), settings, what=what, workdir=workdir, progress=progress)
    return Predictor("unrestricted", seed, (model,))
