"""A router fitted layer by layer inside the unified model, on proxies.

    fit_router(model, seed, proxies, blend=0.9)

`joint.router_vectors_from_proxies` looks at the seed's hidden states. But what a layer's router will meet has been
through experts, by the routers before it, right or wrong; where experts are far from their seed, vectors fitted on the
seed miss. Here the first layer is fitted and installed, then the second on what the first makes of the proxies, and so
on: one pass a layer, and a logistic regression of the senders on exactly the numbers that the router multiplies: the
token blended with its context, for a few tokens of each sequence. Nothing but proxies and what was sent is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cloister.progress import SILENT, Progress
from cloister.unify import joint
from cloister.unify.examples import Examples
from cloister.unify.seeds import Seed, batches_by_length, pooled

PENALTY = 0.001  # there are several tokens a sequence, so less of it than for means


def fit_router(
    model: Any,
    seed: Seed,
    proxies_by_owner: Mapping[str, Examples],
    *,
    blend: float = 0.9,
    tokens: int | None = None,
    batch: int = 64,
    progress: Progress = SILENT,
) -> None:
    """Set the routers of a unified model in place.

    `tokens` of each sequence are looked at, drawn by a fixed seed: four, or eight where context is what came before.
    """
    from cloister.unify.moe import set_router
    from cloister.unify.moe.routing import RoutedFeedForward

    blocks = [part for part in model.modules() if isinstance(part, RoutedFeedForward)]
    share = 0.0 if model.config.context == "none" else blend
    tokens = tokens or (8 if model.config.context == "prefix" else 4)
    vectors = [torch.zeros(len(proxies_by_owner), seed.hidden) for _ in blocks]
    set_router(model, vectors, blend=share or None)
    draw = torch.Generator().manual_seed(0)
    with progress.task("Fitting the router", total=len(blocks), unit="layers") as told:
        for layer, block in enumerate(blocks):
            features, owner = _inputs(model, block, seed, proxies_by_owner, share, tokens, batch, draw)
            vectors[layer] = joint._regress(features, owner, len(proxies_by_owner), PENALTY)
            set_router(model, vectors, blend=share or None)
            told.advance()


def _inputs(
    model: Any, block: nn.Module, seed: Seed, proxies_by_owner: Mapping[str, Examples], share: float, tokens: int,
    batch: int, draw: torch.Generator,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the router of one block multiplies with its vectors, and whose proxy each row is from."""
    found: list[Tensor] = []
    now: dict[str, Any] = {}

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        z = args[0]
        real = torch.ones(z.shape[:2]) if now["real"] is None else now["real"].to(z.dtype)
        counted = z * real[..., None]
        if model.config.context == "prefix":
            mean = counted.cumsum(1) / real.cumsum(1)[..., None].clamp(min=1)
        else:
            mean = (counted.sum(1) / real.sum(1)[:, None].clamp(min=1))[:, None].expand_as(z)
        seen = torch.lerp(z, mean, share)
        # As many as each row has, at most `tokens`: the first of its tokens in a random order.
        order = torch.where(real > 0, torch.rand(real.shape, generator=draw), 2.0).argsort(1)[:, :tokens]
        found.append(seen[torch.arange(len(seen))[:, None], order][real.gather(1, order) > 0])

    owner = []
    handle = block.register_forward_pre_hook(keep)
    try:
        with torch.inference_mode():
            for number, examples in enumerate(proxies_by_owner.values()):
                before = sum(map(len, found))
                for rows in batches_by_length(examples.inputs, batch):
                    inputs = seed.batch(examples.some(rows))
                    now["real"] = inputs.get("attention_mask")
                    pooled(model, inputs, seed.kind)
                owner.append(torch.full((sum(map(len, found)) - before,), number))
    finally:
        handle.remove()
    return torch.cat(found).clone(), torch.cat(owner)
