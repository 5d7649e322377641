"""DP-SGD for an expert: what one private example can change in the released weights is bounded by (epsilon, delta).

Each step draws every private example with the same probability (Poisson), clips each example's gradient and adds
Gaussian noise. The public part of the loss needs neither. Gradients are taken one example at a time: slow, and right
for any model. Opacus finds the noise for the wanted epsilon (Renyi accountant).

Draws and noise are secret, so they come from the system and a resumed run does not repeat them. They are made by
ordinary generators seeded from the system, not by cryptographic ones, and in floating point. What this does not cover:
the choice of the proxies, which has a guarantee of its own or none, and the size of the private data.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from cloister.errors import NotAvailable
from cloister.unify.examples import Examples
from cloister.unify.seeds import Seed
from cloister.unify.tasks import Task


def private_gradients(
    model: nn.Module,
    seed: Seed,
    task: Task,
    private: Examples,
    parameters: Mapping[str, nn.Parameter],
    dp: Any,
    *,
    batch: int,
    steps: int,
    public: Callable[[int], Tensor] | None,
    public_weight: float,
) -> tuple[Callable[[int], float], float]:
    """A function that fills the gradients of a step and returns the loss, and the epsilon of all steps together."""
    rate = min(1.0, batch / len(private))
    noise, epsilon = _noise(dp, rate, steps)
    draw = np.random.default_rng(secrets.randbits(128))
    source = torch.Generator().manual_seed(secrets.randbits(63))
    held = list(parameters.values())

    def fill(step: int) -> float:
        with torch.no_grad():
            fixed = task.fixed(model, seed)  # label vectors: no function of the private examples of this step
        total = [torch.zeros_like(p) for p in held]
        losses = []
        for row in np.flatnonzero(draw.random(len(private)) < rate).tolist():
            found = task.predict(model, seed, private, [row], fixed)
            loss = functional.nll_loss(found.log_probabilities, found.right)
            gradients = torch.autograd.grad(loss, held, allow_unused=True)
            _add_clipped(total, gradients, dp.clip)
            losses.append(float(loss.detach()))
        for parameter, summed in zip(held, total, strict=True):
            rough = torch.normal(0.0, noise * dp.clip, summed.shape, generator=source)
            parameter.grad = (summed + rough) / batch
        if public is not None:
            (public_weight * public(step)).backward()  # type: ignore[no-untyped-call]
        return float(np.mean(losses)) if losses else 0.0

    return fill, epsilon


def _add_clipped(total: list[Tensor], gradients: tuple[Tensor | None, ...], clip: float) -> None:
    norm = torch.sqrt(sum((g.pow(2).sum() for g in gradients if g is not None), torch.zeros(())))
    share = min(1.0, clip / max(float(norm), 1e-12))
    for summed, gradient in zip(total, gradients, strict=True):
        if gradient is not None:
            summed.add_(gradient, alpha=share)


def _noise(dp: Any, rate: float, steps: int) -> tuple[float, float]:
    """The noise multiplier that keeps all steps within epsilon, and the epsilon that it gives."""
    try:
        from opacus.accountants import RDPAccountant
        from opacus.accountants.utils import get_noise_multiplier
    except ImportError:
        raise NotAvailable(
            "Training with differential privacy needs Opacus.", advice="Install it: pip install opacus."
        ) from None
    accountant = RDPAccountant()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # its list of orders may end before the best one: the bound is looser, not wrong
        noise = float(
            get_noise_multiplier(
                target_epsilon=dp.epsilon, target_delta=dp.delta, sample_rate=rate, steps=steps, accountant="rdp"
            )
        )
        accountant.history = [(noise, rate, steps)]
        return noise, float(accountant.get_epsilon(dp.delta))
