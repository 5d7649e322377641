"""Tokens to their experts and back: which expert each token goes to, and their outputs put where the tokens were.

    choice = dispatch.by_weights(weights, top_k, real)      # tensor operations: any device, with gradients, any top_k
    routing = dispatch.Routing(z, context, layers, ...)     # once a pass, where the Rust core is free and z fits
    choice = routing.choose(z, vectors, blend, layer)       # one call of the core

Both give the same up to rounding. As tensor operations the router is a dozen calls over a few numbers a token, which
for one image or one new token take longer than what they compute; the core does them in one pass. Without the core
nothing is missing but that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """Where the tokens of a pass go. A token has `top_k` places, one after the other."""

    counts: list[int]  # places of each expert
    order: Tensor  # places sorted by expert; behind them those of padding, which nobody computes
    weights: Tensor  # [tokens, top_k]: of the chosen experts

    @property
    def alone(self) -> int | None:
        """The one expert of every token, if there is one."""
        places = self.order.shape[0]
        return self.counts.index(places) if places in self.counts and self.weights.shape[1] == 1 else None

    def parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The tokens [tokens, hidden] of each expert."""
        top_k, computed = self.weights.shape[1], sum(self.counts)
        source = self.order[:computed] if top_k == 1 else self.order[:computed] // top_k
        return torch.split(rows.index_select(0, source), self.counts)

    def scaled(self, output: Tensor) -> Tensor:
        """The output [tokens, hidden] of the one expert of every token, weighted."""
        return output * self.weights.to(output)

    def gathered(self, outputs: Sequence[Tensor]) -> Tensor:
        """The weighted sum of each token's outputs [tokens, hidden], zero for padding. `outputs`: of the experts that
        have tokens, one after the other."""
        place, computed = self.order.argsort(), sum(self.counts)
        found = list(outputs)
        if computed < len(self.order):  # what nobody computed is read from a row of zeros behind the others
            found.append(torch.zeros_like(found[0][:1]))
            place = place.clamp(max=computed)
        result = torch.cat(found).index_select(0, place)
        weights = self.weights.to(result.dtype)
        if weights.shape[1] == 1:
            return result * weights
        return (weights[:, None] @ result.reshape(*weights.shape, -1)).squeeze(1)


class Routing:
    """The Rust core for the routers of one pass. What they have in common is made ready once: `real` is [batch, tokens]
    and `earlier` [batch, 1, layers x (experts + 1)], the last running sums of a prefix before this pass. With `keep`,
    `sums` are those of this pass, [batch, tokens, experts + 1] a layer, side by side in memory."""

    def __init__(
        self, z: Tensor, context: str, *, layers: int, experts: int, real: Tensor | None, earlier: Tensor | None,
        keep: bool,
    ):  # fmt: skip
        batch, tokens, _ = self.shape = z.shape
        self.weights = z.new_empty(batch * tokens, 1)  # of the router that chose last
        self.turn = 0
        self._all = z.new_empty(batch, tokens, layers * (experts + 1)) if keep else None
        self.sums = () if self._all is None else self._all.chunk(layers, -1)
        marks = None if real is None else real.to(z.device).contiguous().view(torch.uint8).numpy()
        before = None if earlier is None else earlier.to(z).contiguous().numpy()
        sums = None if self._all is None else self._all.numpy()
        self._core = _core().Routing(context, tokens, layers, self.weights.numpy(), marks, before, sums)

    def choose(self, z: Tensor, vectors: Tensor, blend: float, layer: int) -> CoreChoice:
        """The expert of the largest weight for each token of z [batch, tokens, hidden]. `blend` is the context's part
        in the scores before the sigmoid."""
        rows, ours = z.contiguous().numpy(), vectors.contiguous().numpy()
        routed = self._core.choose(rows, ours, blend, layer)
        self.turn += 1
        return CoreChoice(routed, self)

    def whole(self, sums: Sequence[Tensor]) -> Tensor | None:
        """All sums as one, if these are all of ours."""
        own = len(sums) == len(self.sums) and all(one is ours for one, ours in zip(sums, self.sums, strict=True))
        return self._all if own else None


class CoreChoice:
    """Where the tokens of a pass go, kept by the Rust core."""

    def __init__(self, routed: Any, routing: Routing):
        self.routed, self._routing, self._turn = routed, routing, routing.turn
        self.alone: int | None = routed.alone

    def weights(self) -> Tensor:
        """Of the chosen expert: [tokens, 1]."""
        if self._routing.turn == self._turn:
            return self._routing.weights
        # another block was asked within this one, by a hook on an expert
        return torch.frombuffer(self.routed.weights(), dtype=torch.float32)[:, None]

    def as_tensors(self) -> Choice:
        """For outputs that the core cannot read."""
        order = torch.frombuffer(self.routed.order(), dtype=torch.int64)
        return Choice(self.routed.counts, order, self.weights())

    def parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """See `Choice`."""
        return self.as_tensors().parts(rows)

    def scaled(self, output: Tensor) -> Tensor:
        """See `Choice`."""
        like = fits_core(output)  # asked first: `to` takes longer
        return output * (self.weights() if like else self.weights().to(output))

    def gathered(self, outputs: Sequence[Tensor]) -> Tensor:
        """See `Choice`. The result is new memory: somebody may still hold the outputs."""
        if not all(fits_core(one) for one in outputs):
            return self.as_tensors().gathered(outputs)
        arrays = [one.contiguous().numpy() for one in outputs]
        result = outputs[0].new_empty(self._routing.weights.shape[0], outputs[0].shape[1])
        self.routed.gather(arrays, result.shape[1], result.numpy())
        return result


def by_weights(weights: Tensor, top_k: int, real: Tensor | None) -> Choice:
    """The `top_k` experts of the largest weights; `weights` are [tokens, experts], `real` is [tokens]."""
    experts = weights.shape[1]
    best, chosen = weights.max(-1, keepdim=True) if top_k == 1 else weights.topk(top_k, dim=-1)
    if real is not None:
        chosen = chosen.masked_fill(~real[:, None], experts)  # an expert behind the last: nobody
        best = best.masked_fill(~real[:, None], 0.0)  # padding may be anything, and its weight too
    chosen = chosen.flatten()
    counts = torch.bincount(chosen, minlength=experts).tolist()[:experts]
    return Choice(counts, chosen.argsort(), best)


_left_alone: ContextVar[bool] = ContextVar("cloister_core_left_alone", default=False)


@contextmanager
def by_operations() -> Iterator[None]:
    """Passes inside take the tensor operations, whether the core is here or not: to compare."""
    token = _left_alone.set(True)
    try:
        yield
    finally:
        _left_alone.reset(token)


def core_is_free() -> bool:
    """Whether the Rust core is here and nobody looks on who would not see what it does: a tracer, forward
    differentiation, hooks on all modules, or what `wants_operations` names."""
    return not (
        _core() is None
        or _left_alone.get()
        or torch.jit.is_tracing()  # type: ignore[no-untyped-call, attr-defined]
        or torch.autograd.forward_ad._current_level >= 0
        or torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
        or wants_operations()
    )


def wants_operations() -> bool:
    """Whether gradients, another precision or a compiled graph are asked for. That may change within a pass."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()


def fits_core(tensor: Tensor) -> bool:
    """Whether the core can read this: numbers in single precision, on the processor."""
    return type(tensor) is Tensor and tensor.dtype is torch.float32 and tensor.is_cpu


@cache
def _core() -> Any:
    """The native module, or None where it is not installed or was built before it could do this."""
    try:
        module = import_module("cloister_native")
    except ImportError:
        return None
    return module if hasattr(module, "Routing") else None
