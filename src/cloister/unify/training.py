"""A training loop that may be killed at any moment and ends with the same numbers.

    run = Loop(parameters, steps=300, settings=Descent(lr=1e-4), stamp=..., workdir=...)
    run.go(lambda step: loss_of_that_step)

Everything random is a function of the step: `loss_at(step)` draws its rows from `order`, and dropout is seeded anew
for every step. So a checkpoint need only hold parameters, the optimiser's moments and the losses so far: one
safetensors file, written whole or not at all, never a pickle. `stamp` says what is being trained; a checkpoint of
something else is refused instead of being continued.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloister import storage
from cloister.errors import DataError, UsageError
from cloister.progress import SILENT, Progress

FILE = "training.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class NotFinite(DataError):
    """A loss that is not a finite number."""


@dataclass(frozen=True)
class Descent:
    """AdamW without weight decay; the rate rises over `warmup` of the steps, then falls to zero along a line."""

    lr: float = 5e-4
    warmup: float = 0.1
    clip: float = 1.0

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of this step."""
        rising = max(1, round(self.warmup * steps))
        return self.lr * min((step + 1) / rising, (steps - step) / max(1, steps - rising + 1))


def stamp(**what: Any) -> str:
    """One name for what is trained: SHA-256 over settings, seed and data."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def order(count: int, epochs: int, seed: int) -> NDArray[np.int64]:
    """Each epoch's rows, shuffled by a seed that is no secret, one epoch after the other."""
    draw = np.random.default_rng(seed)
    return np.concatenate([draw.permutation(count) for _ in range(epochs)] or [np.empty(0, dtype=np.int64)])


class Loop:
    """Minimises a loss over `parameters` (by name) in `steps` steps."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        steps: int,
        settings: Descent,
        stamp: str,
        seed: int = 0,
        workdir: Path | None = None,
        keep_every: float = 120.0,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        """`rates` multiplies the learning rate of single parameters; `keep_every` is in seconds."""
        if not parameters or steps < 1:
            raise UsageError("There is nothing to train.")
        self.parameters = dict(parameters)
        self.steps, self.settings, self.stamp, self.seed = steps, settings, stamp, seed
        self.workdir, self.keep_every = workdir, keep_every
        self.rates = dict(rates or {})
        self.losses: list[float] = []
        self.seconds = 0.0
        self.optimiser = torch.optim.AdamW(
            [{"params": [p], "lr": 0.0} for p in self.parameters.values()], betas=(0.9, 0.999), weight_decay=0.0
        )

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.losses)

    def go(
        self,
        loss_at: Callable[[int], Tensor],
        *,
        progress: Progress = SILENT,
        what: str = "Training",
        gradients: Callable[[int], float] | None = None,
    ) -> list[float]:
        """Train to the end, from the checkpoint if there is one; the losses of all steps.

        `gradients(step)`, where given, fills the gradients itself and returns the loss (private training does so).
        """
        self.resume()
        last_kept, started = time.monotonic(), time.monotonic()
        before = self.seconds
        with progress.task(what, total=self.steps, unit="steps") as task:
            task.advance(self.step)
            while self.step < self.steps:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed((self.seed << 32) + self.step)
                    loss = gradients(self.step) if gradients else self._descend(loss_at(self.step))
                self._move(loss)
                task.advance()
                self.seconds = before + time.monotonic() - started
                if self.workdir is not None and time.monotonic() - last_kept >= self.keep_every:
                    self.keep()
                    last_kept = time.monotonic()
        self.keep()
        return self.losses

    def _descend(self, loss: Tensor) -> float:
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _move(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise NotFinite(
                f"The loss of step {self.step + 1} is not a finite number.", advice="Lower the learning rate."
            )
        if self.settings.clip:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip)
        rate = self.settings.rate(self.step, self.steps)
        for name, group in zip(self.parameters, self.optimiser.param_groups, strict=True):
            group["lr"] = rate * self.rates.get(name, 1.0)
        self.optimiser.step()
        self.losses.append(loss)

    def keep(self) -> None:
        """Write the checkpoint, whole or not at all."""
        if self.workdir is None:
            return
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {"losses": torch.tensor(self.losses, dtype=torch.float64)}
        for name, parameter in self.parameters.items():
            tensors[f"parameter.{name}"] = parameter.detach()
            for moment, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = value.detach()
        about = {"stamp": self.stamp, "seconds": repr(self.seconds)}
        self.workdir.mkdir(parents=True, exist_ok=True)
        contiguous = {name: value.contiguous().clone() for name, value in tensors.items()}
        storage.write_bytes(self.workdir / FILE, save(contiguous, metadata=about), mode=storage.SECRET_MODE)

    def resume(self) -> None:
        """Continue from the checkpoint in `workdir`, if there is one."""
        path = None if self.workdir is None else self.workdir / FILE
        if path is None or not path.is_file():
            return
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("stamp") != self.stamp:
                    raise UsageError(
                        f"{path} belongs to another training: other data, another seed or other settings.",
                        advice="Give a folder of its own to each training, or remove this one.",
                    )
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} is damaged: {error}.", advice="Remove it; the training begins anew.") from None
        self._put_back(held, path)
        self.seconds = float(about["seconds"])

    def _put_back(self, held: dict[str, Tensor], path: Path) -> None:
        try:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(held[f"parameter.{name}"])
                    state = {moment: held[f"{moment}.{name}"] for moment in MOMENTS if f"{moment}.{name}" in held}
                    if state:
                        self.optimiser.state[parameter] = state
            self.losses = held["losses"].tolist()
        except (KeyError, RuntimeError) as error:
            raise DataError(f"{path} does not fit: {error}.", advice="Remove it; the training begins anew.") from None
