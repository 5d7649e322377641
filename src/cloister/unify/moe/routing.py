"""The routed feed-forward block: several experts where the seed has one, and a router that sees the context.

For a token with block input z the router scores expert p by z . e_p, blended with the mean of those scores over the
sequence (the paper's equation 7). Because the score is linear, that mean is the score of the mean vector, so only one
number an expert needs to be averaged, or cached:

    s = z . E^T                                   [tokens, experts]
    s~ = (1 - b) s + b mean(s over real tokens)   the whole sequence, or for causal models the tokens so far
    w = softmax(s~),   y = sum over the k largest of w_p FFN_p(z)

The weights are not renormalised over the chosen experts: with one expert a token, they would all be 1 and the router
would get no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from . import dispatch, passes, products

Context = Literal["sequence", "prefix", "none"]
CONTEXTS: tuple[Context, ...] = ("sequence", "prefix", "none")
START = 2.2  # the blend before training, before the sigmoid: 0.9. Vectors fitted to sequences route best near there


class Router(nn.Module):
    """Scores experts for every token, in single precision or better whatever the rest computes in."""

    def __init__(self, hidden: int, experts: int, context: Context, layer: int):
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(experts, hidden, dtype=torch.float32))
        self.blend: nn.Parameter | None  # before the sigmoid
        blend = nn.Parameter(torch.full((1,), START, dtype=torch.float32)) if context != "none" else None
        self.register_parameter("blend", blend)
        self.context, self.layer = context, layer

    def forward(self, z: Tensor) -> Tensor:
        """Router weights [batch, tokens, experts], which add up to one."""
        kind = z.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self._weights(z)
        return self._weights(z)

    def in_core(self, z: Tensor, real: Tensor | None, details: passes.Pass) -> dispatch.CoreChoice | None:
        """The expert of every token by the Rust core, padding excepted; None where `forward` must be called: for
        gradients, in another precision, or because somebody watches or replaces it."""
        own = self._parameters  # not as attributes: those are searched for, and this is called for every layer
        kept, blend = own.get("vectors"), own.get("blend")
        watched = self._forward_hooks or self._forward_pre_hooks or "forward" in self.__dict__
        if watched or kept is None or (blend is None) != (self.context == "none") or not z.numel():
            return None
        vectors = kept.detach()
        if not dispatch.fits_core(z) or not dispatch.fits_core(vectors):
            return None
        routing = details.routing
        if routing is None or routing.shape != z.shape:
            routing = details.routing = dispatch.Routing(
                z, self.context, layers=details.layers, experts=vectors.shape[0], real=real, earlier=details.earlier,
                keep=details.cache is not None,
            )  # fmt: skip
        if routing.sums:
            details.sums[self.layer] = routing.sums[self.layer]
        return routing.choose(z, vectors, 0.0 if blend is None else blend.item(), self.layer)

    def _weights(self, z: Tensor) -> Tensor:
        details = passes.current()
        scores = nn.functional.linear(_single(z), _single(self.vectors))
        if self.blend is not None:
            mean = self._sequence(scores, details) if self.context == "sequence" else self._prefix(scores, details)
            scores = torch.lerp(scores, mean.expand_as(scores), torch.sigmoid(_single(self.blend)))
        weights = torch.softmax(scores, dim=-1)
        if details.routes is not None:
            details.routes.weights.append(weights.detach())
            details.routes.real.append(details.real)
        return weights

    # Scores of padding are replaced, not multiplied by zero: they may be NaN.

    def _sequence(self, scores: Tensor, details: passes.Pass) -> Tensor:
        """Mean score over the real tokens of each token's sequence."""
        if details.real is None and details.starts is None:
            return scores.mean(1, keepdim=True)
        counted = _counted(scores, details.real)
        if details.starts is None:
            sums = counted.sum(1, keepdim=True)
        else:
            which = details.starts.cumsum(1)[..., None].expand_as(counted)
            sums = torch.zeros_like(counted[:, :1]).expand(-1, counted.shape[1] + 1, -1)
            sums = sums.scatter_add(1, which, counted).gather(1, which)
        return sums[..., :-1] / sums[..., -1:].clamp(min=1)

    def _prefix(self, scores: Tensor, details: passes.Pass) -> Tensor:
        """Mean score over the real tokens of each token's sequence up to this token."""
        sums = _counted(scores, details.real)
        if sums.shape[1] > 1:
            sums = sums.cumsum(1)
        if details.starts is not None:
            sums = sums - _before(sums, details.starts)
        if details.earlier is not None:  # what came earlier does not count where another sequence has begun since
            earlier = details.earlier.chunk(details.layers, dim=-1)[self.layer].to(sums)
            going_on = 1 if details.starts is None else (details.starts.cumsum(1) == 0)[..., None]
            sums = sums + earlier * going_on
        if details.cache is not None:
            details.sums[self.layer] = sums
        return sums[..., :-1] / sums[..., -1:].clamp(min=1)


def _counted(scores: Tensor, real: Tensor | None) -> Tensor:
    """The scores with a one behind each token's; for padding all zero."""
    if real is None:
        return nn.functional.pad(scores, (0, 1), value=1.0)
    real = real[..., None]
    return torch.cat([scores.masked_fill(~real, 0.0), real.to(scores.dtype)], dim=-1)


def _before(sums: Tensor, starts: Tensor) -> Tensor:
    """For every token the running sum just before its sequence began, zero if that was before this pass."""
    places = torch.arange(1, starts.shape[1] + 1, device=starts.device)
    began = (places * starts).cummax(1).values  # 0: before this pass; else the place, counted from one
    shifted = nn.functional.pad(sums, (0, 0, 2, 0))[:, : sums.shape[1] + 1]
    return shifted.gather(1, began[..., None].expand_as(sums))


def _single(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class RoutedFeedForward(nn.Module):
    """The block: a router and the experts, each a feed-forward block of the seed's own kind.

    Tokens are sorted by expert, each expert sees its tokens once and as one block, and the results are put back where
    the tokens were. How many tokens each expert got is the only thing that the host waits for. Padding is left out:
    no expert computes it, its result is zero."""

    def __init__(self, experts: Sequence[nn.Module], hidden: int, *, top_k: int, context: Context, layer: int):
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.router = Router(hidden, len(experts), context, layer)
        self.top_k = top_k

    def forward(self, z: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs; z is [batch, tokens, hidden]."""
        rows, choice = z.flatten(0, 1), self._choice(z)
        experts = list(self.experts)  # once: looking one up takes longer than the list
        if (alone := choice.alone) is not None:
            return choice.scaled(products.applied(experts[alone], rows)).view_as(z)
        parts = choice.parts(rows)
        outputs = [products.applied(e, part) for e, part in zip(experts, parts, strict=True) if len(part)]
        return choice.gathered(outputs).view_as(z) if outputs else torch.zeros_like(z)

    def _choice(self, z: Tensor) -> dispatch.Choice | dispatch.CoreChoice:
        details, router = passes.current(), self.router
        real, choice = details.real_of(z), None
        if details.core and self.top_k == 1 and type(router) is Router and not dispatch.wants_operations():
            choice = router.in_core(z, real, details)
        if choice is not None:
            return choice
        return dispatch.by_weights(router(z).flatten(0, 1), self.top_k, None if real is None else real.flatten())
