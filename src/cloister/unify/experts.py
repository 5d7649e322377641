"""An owner's expert: the seed's feed-forward blocks, trained on the owner's examples and its proxies.

    result = train_expert(seed, task, private, proxies, Settings(), workdir=folder)
    state = apply_delta(seed, result.delta)     # the feed-forward weights in full

Only feed-forward weights move, by LoRA (PEFT) or in full; everything else is the seed's, so that experts fit together.
The proxies are trained on too ("alignment"): the router will only ever see proxies. `delta` is what may leave the
owner, together with nothing else of this result: the count of losses would tell the size of the private data.

So does the distance that the weights have moved, which anybody sees who has them: it grows with the number of steps.
With `epochs` that follows from the private data; with `steps` it is the same for everybody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cloister.errors import BrokenCheckpoint, UsageError
from cloister.progress import SILENT, Progress
from cloister.unify.examples import Examples
from cloister.unify.moe.blocks import feed_forward_names
from cloister.unify.seeds import Seed
from cloister.unify.tasks import Task, public_loss, public_targets
from cloister.unify.training import Descent, Loop, order, stamp

Delta = dict[str, Tensor]
A, B = ".lora_A", ".lora_B"


@dataclass(frozen=True)
class DpSettings:
    """Differential privacy of the released weights with respect to one private example (added or removed)."""

    epsilon: float
    delta: float = 1e-5
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and 0 < self.delta < 1 and self.clip > 0):
            raise UsageError("Differential privacy needs epsilon > 0, 0 < delta < 1 and clip > 0.")


@dataclass(frozen=True)
class Settings:
    """How an expert is trained. Nothing in here is secret."""

    method: Literal["lora", "full"] = "lora"
    rank: int = 16
    alpha: float = 32.0
    epochs: int = 3
    steps: int | None = None  # so many whatever the number of examples, instead of `epochs`
    lr: float = 5e-4
    batch: int = 32
    proxy_batch: int = 16  # proxies a step, beside `batch` private examples
    proxy_weight: float = 0.5
    warmup: float = 0.1
    seed_for_order: int = 0
    keep_every: float = 120.0  # seconds between checkpoints
    dp: DpSettings | None = None


@dataclass(frozen=True)
class ExpertResult:
    """The trained expert; only `delta` is meant to leave."""

    delta: Delta
    losses: list[float]
    epsilon: float | None
    seconds: float


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of the feed-forward blocks, by module path."""
    from transformers.pytorch_utils import Conv1D

    wanted = {name.rpartition(".")[0] for name in feed_forward_names(model)}
    return {n: m for n, m in model.named_modules() if n in wanted and isinstance(m, nn.Linear | Conv1D)}


def trainable(model: nn.Module, settings: Settings) -> dict[str, nn.Parameter]:
    """Make the feed-forward blocks of a frozen model trainable; the parameters, by the names that `delta` uses."""
    if settings.method == "full":
        own = dict(model.named_parameters())
        chosen = {name: own[name] for name in feed_forward_names(model)}
        for parameter in chosen.values():
            parameter.requires_grad_(True)
        return chosen
    return lora(model, list(linears(model)), settings.rank, settings.alpha, settings.seed_for_order)


def lora(model: nn.Module, modules: list[str], rank: int, alpha: float, seed: int) -> dict[str, nn.Parameter]:
    """Put LoRA factors beside these linear layers (PEFT, without dropout); the factors by name."""
    import warnings

    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    turned = any(isinstance(model.get_submodule(name), Conv1D) for name in modules)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=modules,
        fan_in_fan_out=turned,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    found: dict[str, nn.Parameter] = {}
    for name in modules:
        layer: Any = model.get_submodule(name)
        found[name + A], found[name + B] = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        for parameter in (found[name + A], found[name + B]):
            parameter.requires_grad_(True)
    return found


def delta_of(parameters: Mapping[str, nn.Parameter], settings: Settings) -> Delta:
    """What was learned: LoRA factors with the scale in B, or full tensors."""
    scale = settings.alpha / settings.rank
    return {
        name: (p.detach() * scale if name.endswith(B) else p.detach()).clone().contiguous()
        for name, p in parameters.items()
    }


def apply_delta(seed: Seed, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The feed-forward parameters in full, by the seed's names; `BrokenCheckpoint` if `delta` does not fit the seed."""
    state = {
        n: p.detach().clone() for n, p in seed.model.named_parameters() if n in set(feed_forward_names(seed.model))
    }
    layers = linears(seed.model)
    for name, value in delta.items():
        if not torch.isfinite(value).all():
            raise BrokenCheckpoint(f"{name} is not finite.")
        module, ending = name.rpartition(".")[0], name[name.rfind(".") :]
        if ending == B:
            continue
        if ending == A:
            if module not in layers or module + B not in delta:
                raise BrokenCheckpoint(f"{name} belongs to no feed-forward layer of the seed, or lacks its other half.")
            weight = state[module + ".weight"]
            change = delta[module + B].to(weight.dtype) @ value.to(weight.dtype)
            change = change if isinstance(layers[module], nn.Linear) else change.T
            if change.shape != weight.shape:
                raise BrokenCheckpoint(
                    f"{module}: the change has shape {list(change.shape)}, not {list(weight.shape)}."
                )
            state[module + ".weight"] = weight + change
        elif name not in state or state[name].shape != value.shape:
            raise BrokenCheckpoint(f"{name} is not a feed-forward parameter of the seed, or has another shape.")
        else:
            state[name] = value.to(state[name].dtype).clone()
    if unpaired := [n for n in delta if n.endswith(B) and n.removesuffix(B) + A not in delta]:
        raise BrokenCheckpoint(f"{unpaired[0]} lacks its other half.")
    return state


def train_expert(
    seed: Seed,
    task: Task,
    private: Examples,
    proxies: Examples | None,
    settings: Settings | None = None,
    *,
    workdir: Path | None = None,
    progress: Progress = SILENT,
) -> ExpertResult:
    """Train an owner's expert. `proxies` None: on private examples only, as FlexOlmo does.

    With `workdir` a killed run continues and ends with the same numbers; without it nothing is written.
    """
    settings = settings or Settings()
    task.check(private)
    _check(private, proxies, settings)
    model = seed.fresh_model()
    parameters = trainable(model, settings)
    model.eval()  # no dropout: it costs a fifth of the time, and experts are small changes to begin with
    steps = settings.steps or math.ceil(len(private) / settings.batch) * settings.epochs
    planned = None
    if settings.dp is not None:
        from cloister.unify import dp

        # Not even how many steps there are may follow from the exact number of private examples.
        planned = dp.plan(
            len(private), settings.dp, batch=settings.batch, epochs=settings.epochs, fixed=settings.steps,
            workdir=workdir,
        )  # fmt: skip
        steps = planned.steps
    loop = Loop(
        parameters,
        steps=steps,
        settings=Descent(settings.lr, settings.warmup, clip=0.0 if settings.dp else 1.0),
        stamp=stamp(
            settings={k: v for k, v in asdict(settings).items() if k != "keep_every"},
            task=task.key(), seed=seed.fingerprint, private=private.digest(), proxies=proxies and proxies.digest(),
        ),
        seed=settings.seed_for_order,
        workdir=workdir,
        keep_every=settings.keep_every,
    )  # fmt: skip
    public = _public_part(seed, model, proxies, settings, steps)
    if settings.dp is not None and planned is not None:
        gradients = dp.private_gradients(
            model, seed, task, private, parameters, settings.dp.clip, planned,
            batch=settings.batch, public=public, public_weight=settings.proxy_weight,
        )  # fmt: skip
        loop.go(lambda _: torch.zeros(()), progress=progress, what="Training the expert", gradients=gradients)
        return ExpertResult(delta_of(parameters, settings), loop.losses, planned.epsilon, loop.seconds)
    rows = _rows(len(private), steps, settings)

    def loss_at(step: int) -> Tensor:
        loss = task.loss(model, seed, private, rows(step))
        return loss if public is None else loss + settings.proxy_weight * public(step)

    loop.go(loss_at, progress=progress, what="Training the expert")
    return ExpertResult(delta_of(parameters, settings), loop.losses, None, loop.seconds)


def _rows(count: int, steps: int, settings: Settings) -> Callable[[int], list[int]]:
    """The private examples of a step. With a fixed number of steps every batch is full, also the last of an epoch and
    those of an owner that has fewer examples than that: a smaller batch would be a step of another kind."""
    batch = settings.batch
    if settings.steps:
        every = order(count, math.ceil(steps * batch / count), settings.seed_for_order)
        return lambda step: every[step * batch : (step + 1) * batch].tolist()
    epochs = order(count, settings.epochs, settings.seed_for_order).reshape(settings.epochs, -1)
    steps_an_epoch = math.ceil(count / batch)

    def chosen(step: int) -> list[int]:
        epoch, place = divmod(step, steps_an_epoch)
        return epochs[epoch, place * batch : (place + 1) * batch].tolist()

    return chosen


def _public_part(seed: Seed, model: nn.Module, proxies: Examples | None, settings: Settings, steps: int) -> Any:
    """The public loss of a step, or None where no proxies are trained on."""
    if proxies is None or not settings.proxy_batch or not settings.proxy_weight:
        return None
    needed = steps * settings.proxy_batch
    rows = order(len(proxies), math.ceil(needed / len(proxies)), settings.seed_for_order + 10_000)
    targets = public_targets(seed, proxies)

    def loss(step: int) -> Tensor:
        chosen = rows[step * settings.proxy_batch : (step + 1) * settings.proxy_batch].tolist()
        return public_loss(model, seed, proxies, chosen, targets)

    return loss


def _check(private: Examples, proxies: Examples | None, settings: Settings) -> None:
    if not len(private) or (proxies is not None and not len(proxies)):
        raise UsageError("An expert needs private examples, and proxies unless there are to be none.")
    fixed = 1 if settings.steps is None else settings.steps
    if min(settings.rank, settings.epochs, settings.batch, fixed) < 1 or not settings.lr > 0:
        raise UsageError("Rank, epochs, steps, batch and learning rate must be positive.")
