"""Joint training: the router of a unified model learns where examples belong, on proxies alone.

    set_router(model, router_vectors_from_proxies(seed, proxies))
    train_jointly(model, seed, proxies, experts)
    routing_accuracy(model, seed, held_out)     # {"bank": 0.97, ...}

Every proxy has a sender. Three things are wanted of the unified model on it:

    teacher     the same output as the sender's own expert gives (its vector; for language its next-token probabilities)
    route       the weight of the sender's expert near one, on every token of every layer
    public      what the public example itself teaches (its second half; for language the next token)

The teacher is computed from what was sent, so nothing more leaves an owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from cloister.errors import UsageError
from cloister.progress import SILENT, Progress
from cloister.unify.examples import Examples
from cloister.unify.experts import lora
from cloister.unify.seeds import GROUP, Batch, Seed, batches_by_length, pooled, with_state
from cloister.unify.tasks import SCALE, public_targets, vector_loss
from cloister.unify.training import Descent, Loop, order, stamp
from cloister.unify.views import block_inputs

State = Mapping[str, Tensor]
Part = Literal["router", "experts"]
SHARP = 10.0  # makes the mean weight of the chosen expert about 0.9 on proxies; routing is the same


@dataclass(frozen=True)
class JointSettings:
    """How the unified model is trained. Every owner's proxies count equally, an example that several chose for each."""

    epochs: float = 1.0
    lr: float = 5e-5  # of the experts
    router_lr: float = 2e-5  # a fitted start knows the proxies already; more makes it forget what they stand for
    batch: int = 24
    rank: int = 16
    alpha: float = 32.0
    teacher_weight: float = 1.0
    route_weight: float = 1.0
    public_weight: float = 0.1
    warmup: float = 0.1
    seed_for_order: int = 0
    keep_every: float = 120.0


@dataclass(frozen=True)
class JointResult:
    """What the training said."""

    losses: list[float]
    seconds: float


def router_vectors_from_proxies(
    seed: Seed, proxies_by_owner: Mapping[str, Examples], *, how: Literal["mean", "fit"] = "mean"
) -> list[Tensor]:
    """A vector for each owner, one tensor (owners, hidden) a layer, from the *seed's* block inputs on the proxies.

    "mean": the mean over real tokens (equation 7's start, without private data). "fit": logistic regression of the
    senders on each sequence's mean, which is the same thing learned; a much better start. It is made `SHARP` times
    steeper, since a chosen expert's output is multiplied by its weight.
    """
    per_owner = _block_inputs_by_owner(seed, list(proxies_by_owner.values()))
    layers = len(per_owner[0])
    if how == "mean":
        return [torch.stack([one[layer].mean(0) for one in per_owner]) for layer in range(layers)]
    owner = torch.cat([torch.full((len(one[0]),), i) for i, one in enumerate(per_owner)])
    return [_regress(torch.cat([one[layer] for one in per_owner]), owner, len(per_owner)) for layer in range(layers)]


def _block_inputs_by_owner(seed: Seed, proxies: Sequence[Examples]) -> list[list[Tensor]]:
    """`block_inputs` of each, layer by layer; a text that several owners chose goes through the seed once."""
    if seed.kind == "vision":
        return [_by_layer(torch.from_numpy(block_inputs(seed, examples))) for examples in proxies]
    place: dict[str, int] = {}
    for examples in proxies:
        for text in examples.texts():
            place.setdefault(text, len(place))
    names = tuple(str(i) for i in range(len(place)))
    together = torch.from_numpy(block_inputs(seed, Examples("text", names, tuple(place), None)))
    return [_by_layer(together[[place[text] for text in examples.texts()]]) for examples in proxies]


def _by_layer(found: Tensor) -> list[Tensor]:
    return list(found.transpose(0, 1))


def _regress(features: Tensor, owner: Tensor, owners: int, penalty: float = 0.03) -> Tensor:
    """Logistic regression on standardised features, as vectors for the features as they are.

    A router has no constant term. Behind a layer norm some vector has the same product with every input, and a multiple
    of it is the constant; where there is none, the closest there is.
    """
    mean, spread = features.mean(0), features.std(0).clamp(min=1e-6)
    scaled = ((features - mean) / spread).double()
    vectors = torch.zeros(owners, features.shape[1], dtype=torch.float64, requires_grad=True)
    constants = torch.zeros(owners, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([vectors, constants], max_iter=100, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = functional.cross_entropy(scaled @ vectors.T + constants, owner) + penalty * vectors.pow(2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    solver.step(closure)  # type: ignore[no-untyped-call]
    found = vectors.detach() / spread
    left = constants.detach() - found @ mean.double()
    wide = features.double()
    gram = wide.T @ wide / len(wide)
    small = 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    constant = torch.linalg.solve(gram + small, wide.mean(0))
    return SHARP * (found + left[:, None] * constant).float()


def shared(seed: Seed, states: Mapping[str, State], share: float) -> dict[str, State]:
    """Experts that also have a part of what the others learned: their own change plus `share` of each other's.

    A token that goes to the wrong expert then still finds some of the right one. With 1 all experts are the same.
    """
    own = dict(seed.model.named_parameters())
    names = list(next(iter(states.values())))
    total = {name: sum(state[name] - own[name].detach() for state in states.values()) for name in names}
    return {
        owner: {
            name: own[name].detach() + (1 - share) * (state[name] - own[name].detach()) + share * total[name]
            for name in names
        }
        for owner, state in states.items()
    }


def train_jointly(
    unified: Any,
    seed: Seed,
    proxies_by_owner: Mapping[str, Examples],
    teachers: Mapping[str, State],
    settings: JointSettings | None = None,
    *,
    workdir: Path | None = None,
    progress: Progress = SILENT,
    train: Sequence[Part] = ("router", "experts"),
    only: Sequence[str] | None = None,
    others: Examples | None = None,
) -> JointResult:
    """Train the unified model in place on the union of the proxies.

    `teachers`: each owner's feed-forward state, as `apply_delta` gives it. `only`: the owners whose experts are trained
    (for one that joined later); the router always serves all. `others`: public examples that nobody chose, which the
    fallback expert answers as the seed does.
    """
    settings = settings or JointSettings()
    material = _material(unified, seed, proxies_by_owner, teachers, others)
    what = {
        "settings": {k: v for k, v in asdict(settings).items() if k != "keep_every"},
        "seed": seed.fingerprint,
        "data": [table.examples.digest() for table in material],
        "train": list(train),
        "only": only and list(only),
    }
    steps = max(1, math.ceil(settings.epochs * sum(len(t.examples) for t in material) / settings.batch))
    picks = _picks([len(t.examples) for t in material], steps, settings.batch, settings.seed_for_order, seed.kind)
    loss_of = _language_loss if seed.kind == "decoder" else _vector_loss

    def loss_at(step: int) -> Tensor:
        return loss_of(unified, seed, material, picks[step], settings)

    return descend(
        unified, loss_at, steps, settings, what=what, train=train, only=only, workdir=workdir, progress=progress
    )


def descend(
    unified: Any,
    loss_at: Callable[[int], Tensor],
    steps: int,
    settings: JointSettings,
    *,
    what: Mapping[str, Any],
    train: Sequence[Part] = ("router", "experts"),
    only: Sequence[str] | None = None,
    workdir: Path | None = None,
    progress: Progress = SILENT,
) -> JointResult:
    """Train routers and experts of a unified model on any loss; experts move by LoRA, merged at the end."""
    from cloister.unify.moe import Router, owners

    unified.requires_grad_(False)
    parameters: dict[str, nn.Parameter] = {}
    if "router" in train:
        for path, part in unified.named_modules():
            if isinstance(part, Router):
                parameters |= {f"{path}.{name}": p for name, p in part.named_parameters()}
    rates = dict.fromkeys(parameters, settings.router_lr / settings.lr)
    modules: list[str] = []
    if "experts" in train:
        first = int(unified.config.fallback)
        chosen = {first + i for i, name in enumerate(owners(unified)) if only is None or name in only}
        modules = expert_linears(unified, chosen)
        parameters |= lora(unified, modules, settings.rank, settings.alpha, settings.seed_for_order)
    for parameter in parameters.values():  # PEFT has frozen all but its own
        parameter.requires_grad_(True)
    loop = Loop(
        parameters,
        steps=steps,
        settings=Descent(settings.lr, settings.warmup),
        stamp=stamp(**what),
        seed=settings.seed_for_order,
        workdir=workdir,
        keep_every=settings.keep_every,
        rates=rates,
    )
    unified.eval()  # no dropout: the teachers' answers have none either
    try:
        loop.go(loss_at, progress=progress, what="Joint training")
    finally:
        merge(unified, modules)
        unified.requires_grad_(False)
    return JointResult(loop.losses, loop.seconds)


def expert_linears(unified: nn.Module, experts: set[int]) -> list[str]:
    """Paths of the linear layers of these experts."""
    from transformers.pytorch_utils import Conv1D

    from cloister.unify.moe.blocks import EXPERT

    found = [(n, EXPERT.match(n)) for n, m in unified.named_modules() if isinstance(m, nn.Linear | Conv1D)]
    return [name for name, match in found if match and int(match["index"]) in experts]


def merge(model: nn.Module, modules: Sequence[str]) -> None:
    """Add what LoRA learned to the weights and take the factors out."""
    for name in modules:
        layer: Any = model.get_submodule(name)
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.get_base_layer())


def routing_accuracy(
    unified: Any, seed: Seed, examples_by_owner: Mapping[str, Examples], *, batch: int = 64
) -> dict[str, float]:
    """For each owner the share of real tokens, over all layers, that go to its own expert first."""
    from cloister.unify.moe import owners

    first = int(unified.config.fallback)
    place = {name: first + i for i, name in enumerate(owners(unified))}
    found: dict[str, float] = {}
    for name, examples in examples_by_owner.items():
        right, total = 0.0, 0.0
        with torch.inference_mode():
            for rows in batches_by_length(examples.inputs, batch):
                inputs = seed.batch(examples.some(rows))
                with routes(unified) as weights:
                    pooled(unified, inputs, seed.kind)
                for layer in weights:
                    hit = layer.argmax(-1) == place[name]
                    real = inputs.get("attention_mask", torch.ones_like(hit)).bool()
                    right, total = right + float(hit[real].sum()), total + float(real.sum())
        found[name] = right / max(total, 1)
    return found


@contextmanager
def routes(unified: nn.Module) -> Iterator[list[Tensor]]:
    """The router weights (batch, tokens, experts) of the passes inside, layer by layer, with their gradients."""
    from cloister.unify.moe import Router

    seen: list[Tensor] = []
    handles = [
        part.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        for part in unified.modules()
        if isinstance(part, Router)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------- one step


@dataclass(frozen=True)
class _Table:
    """One owner's proxies, ready to train on; for encoders and vision with what their vectors should be."""

    expert: int
    examples: Examples
    state: State
    taught: Tensor  # by the sender's expert
    targets: Tensor  # by the public examples themselves
    paired: Tensor  # which of them have a second half


def _material(
    unified: Any,
    seed: Seed,
    proxies_by_owner: Mapping[str, Examples],
    teachers: Mapping[str, State],
    others: Examples | None,
) -> list[_Table]:
    from cloister.unify.moe import owners

    first = int(unified.config.fallback)
    place = {name: first + i for i, name in enumerate(owners(unified))}
    if unknown := sorted(set(proxies_by_owner) - set(place)) + sorted(set(proxies_by_owner) - set(teachers)):
        raise UsageError(f"{unknown[0]} sent proxies but has no expert in this model, or no teacher was given.")
    if others is not None and not first:
        raise UsageError("Examples that nobody chose need a model with a fallback.")
    sets = [(place[name], examples, teachers[name]) for name, examples in proxies_by_owner.items()]
    sets += [] if others is None else [(0, others, {})]
    tables = []
    for expert, examples, state in sets:
        paired = torch.tensor([seed.kind == "encoder" and examples.target(i) is not None for i in range(len(examples))])
        taught = torch.zeros(0)
        if seed.kind != "decoder":
            taught = seed.encode_all(with_state(seed, state), examples.inputs)
        tables.append(_Table(expert, examples, state, taught, public_targets(seed, examples), paired))
    return tables


def _picks(sizes: Sequence[int], steps: int, batch: int, seed: int, kind: str) -> list[list[tuple[int, int]]]:
    """For each step (table, row) pairs; for language all of one table, since each has a teacher of its own."""
    pairs = [(table, row) for table, size in enumerate(sizes) for row in range(size)]
    if kind != "decoder":
        needed = order(len(pairs), math.ceil(steps * batch / len(pairs)), seed)
        return [[pairs[i] for i in needed[s * batch : (s + 1) * batch]] for s in range(steps)]
    draw = np.random.default_rng(seed)
    chosen = draw.choice(len(sizes), steps, p=np.array(sizes) / sum(sizes))
    return [[(int(t), int(r)) for r in draw.choice(sizes[t], min(batch, sizes[t]), replace=False)] for t in chosen]


def _vector_loss(
    unified: Any, seed: Seed, material: Sequence[_Table], picks: Sequence[tuple[int, int]], settings: JointSettings
) -> Tensor:
    experts = torch.tensor([material[t].expert for t, _ in picks])
    taught = torch.stack([material[t].taught[row] for t, row in picks])
    if seed.kind == "vision":
        images = np.stack([material[t].examples.pixels()[row] for t, row in picks])
        vectors, route = _pass(unified, seed, seed.batch(images), experts)
    else:
        texts = [material[t].examples.texts()[row] for t, row in picks]
        parts = list(batches_by_length(texts, GROUP))
        found = [_pass(unified, seed, seed.tokens([texts[i] for i in rows]), experts[rows]) for rows in parts]
        route = torch.stack([one * len(rows) for (_, one), rows in zip(found, parts, strict=True)]).sum() / len(texts)
        vectors = torch.cat([one for one, _ in found])[torch.tensor([i for rows in parts for i in rows]).argsort()]
    loss = settings.teacher_weight * SCALE * (1 - (vectors * taught).sum(-1)).mean() + settings.route_weight * route
    if settings.public_weight:
        targets = torch.stack([material[t].targets[row] for t, row in picks])
        paired = torch.stack([material[t].paired[row] for t, row in picks])
        loss = loss + settings.public_weight * vector_loss(vectors, targets, paired)
    return loss


def _pass(unified: Any, seed: Seed, batch: Batch, experts: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors of a batch, and how far its routes are from the wanted experts."""
    with routes(unified) as weights:
        vectors = pooled(unified, batch, seed.kind)
    return vectors, route_loss(weights, experts, batch.get("attention_mask"))


def route_loss(weights: Sequence[Tensor], experts: Tensor, real: Tensor | None) -> Tensor:
    """Mean over layers and real tokens of -log of the wanted expert's weight."""
    total = torch.zeros(())
    for layer in weights:
        own = layer.gather(-1, experts.reshape(-1, 1, 1).expand(-1, layer.shape[1], 1)).squeeze(-1)
        missed = -own.clamp(min=1e-9).log()
        total = total + (missed.mean() if real is None else (missed * real).sum() / real.sum())
    return total / len(weights)


def _language_loss(
    unified: Any, seed: Seed, material: Sequence[_Table], picks: Sequence[tuple[int, int]], settings: JointSettings
) -> Tensor:
    table = material[picks[0][0]]
    batch = seed.tokens([table.examples.texts()[row] for _, row in picks])
    real = batch["attention_mask"][:, 1:].bool()
    with routes(unified) as weights:
        logits = unified(**batch, use_cache=False).logits[:, :-1][real].float()
    with torch.no_grad():
        taught = torch.func.functional_call(seed.model, dict(table.state), kwargs={**batch, "use_cache": False})
        wanted = functional.log_softmax(taught.logits[:, :-1][real].float(), dim=-1)
    own = functional.log_softmax(logits, dim=-1)
    teacher = functional.kl_div(own, wanted, log_target=True, reduction="batchmean")
    public = functional.nll_loss(own, batch["input_ids"][:, 1:][real])
    experts = torch.full((len(picks),), table.expert)
    route = route_loss(weights, experts, batch["attention_mask"])
    return settings.teacher_weight * teacher + settings.public_weight * public + settings.route_weight * route
