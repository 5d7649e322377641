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

from . import passes

Context = Literal["sequence", "prefix", "none"]
CONTEXTS: tuple[Context, ...] = ("sequence", "prefix", "none")


class Router(nn.Module):
    """Scores experts for every token, in single precision or better whatever the rest computes in."""

    def __init__(self, hidden: int, experts: int, context: Context, layer: int):
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(experts, hidden, dtype=torch.float32))
        self.blend: nn.Parameter | None  # before the sigmoid
        blend = nn.Parameter(torch.zeros(1, dtype=torch.float32)) if context != "none" else None
        self.register_parameter("blend", blend)
        self.context, self.layer = context, layer

    def forward(self, z: Tensor) -> Tensor:
        """Router weights [batch, tokens, experts], which add up to one."""
        details = passes.current()
        scores = nn.functional.linear(_single(z), _single(self.vectors))
        if self.blend is not None:
            share = torch.sigmoid(_single(self.blend))
            scores = torch.lerp(scores, self._mean(scores, details).expand_as(scores), share)
        weights = torch.softmax(scores, dim=-1)
        if details.routes is not None:
            details.routes.weights.append(weights.detach())
            details.routes.real.append(details.real)
        return weights

    def _mean(self, scores: Tensor, details: passes.Pass) -> Tensor:
        """Mean score over the real tokens of the sequence, or of its beginning up to each token.

        Scores of padding are replaced, not multiplied by zero: they may be NaN."""
        real = details.real
        if self.context == "sequence":
            if real is None:
                return scores.mean(1, keepdim=True)
            kept = scores.masked_fill(~real[..., None], 0.0).sum(1, keepdim=True)
            return kept / real.sum(1)[:, None, None].clamp(min=1)
        if real is None:
            sums = torch.cat([scores, torch.ones_like(scores[..., :1])], dim=-1)
        else:
            sums = torch.cat([scores.masked_fill(~real[..., None], 0.0), real[..., None].to(scores.dtype)], dim=-1)
        sums = sums.cumsum(1)
        if details.cache is not None:
            sums = passes.continued(sums, details.cache, self.layer, details.layers)
        return sums[..., :-1] / sums[..., -1:].clamp(min=1)


def _single(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class RoutedFeedForward(nn.Module):
    """The block: a router and the experts, each a feed-forward block of the seed's own kind.

    Tokens are sorted by expert, each expert sees its tokens once and as one block, and the results are put back where
    the tokens were. How many tokens each expert got is the only thing that the host waits for."""

    def __init__(self, experts: Sequence[nn.Module], hidden: int, *, top_k: int, context: Context, layer: int):
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.router = Router(hidden, len(experts), context, layer)
        self.top_k = top_k

    def forward(self, z: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs; z is [batch, tokens, hidden]."""
        weights = self.router(z).flatten(0, 1)
        rows = z.flatten(0, 1)
        if self.top_k == 1:
            best, chosen = weights.max(-1, keepdim=True)
        else:
            best, chosen = weights.topk(self.top_k, dim=-1)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        if self.top_k == 1 and max(counts) == len(rows):
            found = self.experts[counts.index(len(rows))](rows)
            return (found * best.to(found.dtype)).reshape(z.shape)
        order = chosen.flatten().argsort()
        source = order if self.top_k == 1 else order // self.top_k
        parts = torch.split(rows.index_select(0, source), counts)
        found = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])
        results = found.index_select(0, order.argsort())
        if self.top_k == 1:
            return (results * best.to(results.dtype)).reshape(z.shape)
        results = results.reshape(len(rows), self.top_k, -1)
        return (best.to(results.dtype)[:, None] @ results).reshape(z.shape)
