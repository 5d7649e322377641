"""DP-SGD for an expert: what one private example can change in the released weights is bounded by (epsilon, delta).

Each step draws every private example with the same probability (Poisson), clips each example's gradient and adds
Gaussian noise. The public part of the loss needs neither. Gradients are taken one example at a time: slow, and right
for any model. Opacus finds the noise for the wanted epsilon (Renyi accountant).

How many steps there are and with which probability an example is drawn follow from the number of private examples,
which is private too: `plan` reads it through noise (discrete Laplace, a twentieth of epsilon) and all else follows from
the noisy number. So the bound holds for one example added or removed without a public count. A number of steps that
the recipe fixes (`fixed`) follows from nothing; the probability still does.

Draws and noise are secret, so they come from the system and a resumed run does not repeat them. They are made by
ordinary generators seeded from the system, not by cryptographic ones, and in floating point; the noisy count alone is
drawn exactly. What this does not cover: the choice of the proxies, which has a guarantee of its own or none.
"""

from __future__ import annotations

import json
import math
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from cloister import storage
from cloister.errors import NotAvailable
from cloister.unify import noise as discrete
from cloister.unify.examples import Examples
from cloister.unify.seeds import Seed
from cloister.unify.tasks import Task

FILE = "privacy.json"
FOR_THE_COUNT = 0.05  # share of epsilon
# Of the Renyi divergence. All give bounds and the least is taken; Opacus' own list is four times as slow for up to half
# a percent less noise.
ORDERS = [1.5, 1.75, 2.5, *range(2, 33), *range(36, 65, 4), 96, 128, 256, 512]


@dataclass(frozen=True)
class Plan:
    """What is fixed before training: a function of the noisy count and of public settings alone."""

    count: int  # noisy
    rate: float  # with which an example is drawn at a step
    steps: int
    noise: float  # standard deviation over the clipping norm
    count_epsilon: float
    steps_epsilon: float
    delta: float

    @property
    def epsilon(self) -> float:
        """Of the count and all steps together."""
        return self.count_epsilon + self.steps_epsilon


def plan(
    count: int, dp: Any, *, batch: int, epochs: int, fixed: int | None = None, workdir: Path | None = None
) -> Plan:
    """Steps, rate and noise for `count` private examples. With `workdir` a resumed run gets the same plan again."""
    asked = {"epsilon": dp.epsilon, "delta": dp.delta, "batch": batch, "epochs": epochs, "steps": fixed}
    path = workdir and workdir / FILE
    if path and path.is_file():
        kept = json.loads(path.read_text())
        if kept.get("asked") == asked:
            return Plan(**kept["plan"])
    scale = math.ceil(1 / (FOR_THE_COUNT * dp.epsilon))
    noisy = max(count + discrete.laplace(scale), 1)
    steps, rate = fixed or math.ceil(noisy / batch) * epochs, min(1.0, batch / noisy)
    noise, spent = _noise(dp.epsilon - 1 / scale, dp.delta, rate, steps)
    made = Plan(noisy, rate, steps, noise, 1 / scale, spent, dp.delta)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_secret(path, json.dumps({"asked": asked, "plan": asdict(made)}).encode())
    return made


def private_gradients(
    model: nn.Module,
    seed: Seed,
    task: Task,
    private: Examples,
    parameters: Mapping[str, nn.Parameter],
    clip: float,
    planned: Plan,
    *,
    batch: int,
    public: Callable[[int], Tensor] | None,
    public_weight: float,
) -> Callable[[int], float]:
    """A function that fills the gradients of a step and returns the loss."""
    draw = np.random.default_rng(secrets.randbits(128))
    source = torch.Generator().manual_seed(secrets.randbits(63))
    held = list(parameters.values())

    def fill(step: int) -> float:
        with torch.no_grad():
            fixed = task.fixed(model, seed)  # label vectors: no function of the private examples of this step
        total = [torch.zeros_like(p) for p in held]
        losses = []
        for row in np.flatnonzero(draw.random(len(private)) < planned.rate).tolist():
            found = task.predict(model, seed, private, [row], fixed)
            loss = functional.nll_loss(found.log_probabilities, found.right)
            gradients = torch.autograd.grad(loss, held, allow_unused=True)
            _add_clipped(total, gradients, clip)
            losses.append(float(loss.detach()))
        for parameter, summed in zip(held, total, strict=True):
            rough = torch.normal(0.0, planned.noise * clip, summed.shape, generator=source)
            parameter.grad = (summed + rough) / batch
        if public is not None:
            (public_weight * public(step)).backward()  # type: ignore[no-untyped-call]
        return float(np.mean(losses)) if losses else 0.0

    return fill


def _add_clipped(total: list[Tensor], gradients: tuple[Tensor | None, ...], clip: float) -> None:
    norm = torch.sqrt(sum((g.pow(2).sum() for g in gradients if g is not None), torch.zeros(())))
    share = min(1.0, clip / max(float(norm), 1e-12))
    for summed, gradient in zip(total, gradients, strict=True):
        if gradient is not None:
            summed.add_(gradient, alpha=share)


def _noise(epsilon: float, delta: float, rate: float, steps: int) -> tuple[float, float]:
    """The noise multiplier that keeps all steps within epsilon, and the epsilon that it gives."""
    try:
        from opacus.accountants import RDPAccountant
        from opacus.accountants.utils import get_noise_multiplier
    except ImportError:
        raise NotAvailable(
            "Training with differential privacy needs Opacus.", advice="Install it: pip install 'cloister[dp]'."
        ) from None
    accountant = RDPAccountant()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # its list of orders may end before the best one: the bound is looser, not wrong
        noise = float(
            get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=rate,
                steps=steps,
                accountant="rdp",
                alphas=ORDERS,
            )
        )
        accountant.history = [(noise, rate, steps)]
        return noise, float(accountant.get_epsilon(delta, alphas=ORDERS))
