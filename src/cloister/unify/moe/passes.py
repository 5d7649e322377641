"""What a routed block must know beside its input: which tokens are real, and what came before them.

A forward pass of the whole model describes itself in a `Pass`. It lives in a context variable, so that two threads with
one model do not see each other's, and is set by hooks on the model's backbone, so that it is there however the backbone
is called.

The running sums of causal routers are kept in the KV cache, in one layer behind the model's own, as if they were keys
of one head: one vector of layers x (experts + 1) numbers a token, read when a pass begins and written when it ends.
Whatever is done to a cache (reordering for beams, cropping, repeating, selecting rows) is so done to them too. A cache
that cannot take such a layer is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from cloister.errors import InvalidParameter, UnsupportedParameter

from . import dispatch, tokens

CACHES = "DynamicCache, StaticCache (neither offloaded), QuantizedCache, and the cache of `cloister serve`"


@dataclass
class Routes:
    """What `record` collected: router weights [batch, tokens, experts] layer by layer, pass after pass, and for each of
    them which tokens were real ([batch, tokens], or None: all)."""

    weights: list[Tensor] = field(default_factory=list)
    real: list[Tensor | None] = field(default_factory=list)


@dataclass
class Pass:
    """One forward pass of the backbone."""

    real: Tensor | None = None  # [batch, tokens] of this pass, true for real tokens; None: all are real
    starts: Tensor | None = None  # [batch, tokens], true where another sequence begins in a row; None: nowhere
    cache: Any = None  # the KV cache, which also keeps the routers' running sums
    layers: int = 0  # the model's own in the cache, behind which the sums lie; as many as there are routers
    earlier: Tensor | None = None  # all routers' sums before this pass: [batch, 1, layers x (experts + 1)]
    sums: dict[int, Tensor] = field(default_factory=dict)  # each router's in this pass: [batch, tokens, experts + 1]
    core: bool = False  # whether the Rust core may choose the experts
    routing: dispatch.Routing | None = None  # what it has made ready for this pass
    routes: Routes | None = None  # where to note the router's weights
    owner: nn.Module | None = None
    token: Token[Pass | None] | None = None

    def real_of(self, z: Tensor) -> Tensor | None:
        """Which tokens of a block's input are real."""
        known = self.real if self.real is not None else self.starts
        if z.dim() != 3 or (known is not None and known.shape != z.shape[:2]):
            expected = "[batch, tokens, numbers]" if known is None else f"{[*known.shape]} tokens"
            raise InvalidParameter(
                f"A routed block was given {[*z.shape]} where {expected} were expected.",
                advice="Something between the model's inputs and its layers adds, drops or flattens tokens; that "
                "cannot be used with a unified model.",
            )
        return self.real


_now: ContextVar[Pass | None] = ContextVar("cloister_pass", default=None)
_recording: ContextVar[Routes | None] = ContextVar("cloister_routes", default=None)


def current() -> Pass:
    """The pass that is going on; outside of one, a pass in which every token is real."""
    return _now.get() or Pass()


@contextmanager
def record() -> Iterator[Routes]:
    """Collect the router weights of the passes inside."""
    routes = Routes()
    token = _recording.set(routes)
    try:
        yield routes
    finally:
        _recording.reset(token)


@contextmanager
def passing(details: Pass | None) -> Iterator[None]:
    """Make `details` the pass that is going on."""
    token = _now.set(details)
    try:
        yield
    finally:
        _now.reset(token)


def checkpointing(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Gradient checkpointing that computes a layer the second time knowing what it knew the first time."""

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        details, runs = _now.get(), 0

        def inside(*inner: Any, **more: Any) -> Any:
            nonlocal runs
            runs += 1
            again = details is not None and runs > 1
            with passing(replace(details, routes=None) if again and details else details):
                return function(*inner, **more)

        return checkpoint(inside, *args, **kwargs)

    return call


# ---- the backbone's hooks -----------------------------------------------------------------------------------------


def watch(backbone: Any) -> None:
    """Let every call of the backbone describe itself to the routed blocks in it."""
    # Read here: a configuration takes its time to look up a value, and a pass begins often. How many layers there are
    # is not: transformers changes that to leave a model early.
    context, experts = str(backbone.config.context), int(backbone.config.experts)
    backbone.register_forward_pre_hook(partial(_begin, context=context, experts=experts), with_kwargs=True)
    backbone.register_forward_hook(_end, always_call=True)


def _begin(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, context: str, experts: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = _names(type(module).forward)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    details = Pass(owner=module, routes=_recording.get())
    if context == "prefix":
        details.layers = int(module.config.num_hidden_layers)
        details.cache = given.get("past_key_values")
        if module.training and any(getattr(part, "gradient_checkpointing", False) for part in module.modules()):
            details.cache = None  # transformers drops the cache too
        elif details.cache is None and "past_key_values" in names and _wants_cache(module, given):
            from transformers import DynamicCache

            details.cache = DynamicCache(config=module.config)
            place = names.index("past_key_values")
            if place < len(args):
                args = (*args[:place], details.cache, *args[place + 1 :])
            else:
                kwargs = {**kwargs, "past_key_values": details.cache}
        if details.cache is not None:
            check_cache(details.cache, details.layers, experts)
            details.earlier = _earlier(details)
    if context == "none":
        details.real = tokens.padding(given)
    else:
        details.real, details.starts = tokens.understand(given, details.cache, module.config)
    details.core = details.routes is None and details.starts is None and dispatch.core_is_free()
    details.token = _now.set(details)
    return args, kwargs


def _end(module: nn.Module, args: Any, output: Any) -> None:
    details = _now.get()
    if details is not None and details.owner is module and details.token is not None:
        _now.reset(details.token)
        if details.cache is not None and output is not None:  # None: the pass has failed
            _keep(details)


@cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters behind `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _wants_cache(module: Any, given: dict[str, Any]) -> bool:
    wanted = given.get("use_cache")
    return bool(getattr(module.config, "use_cache", False) if wanted is None else wanted)


# ---- running sums in the cache ------------------------------------------------------------------------------------


def check_cache(cache: Any, layers: int, experts: int) -> None:
    """Refuse a cache that cannot keep running sums, or that has not those of all its tokens."""
    held = getattr(cache, "layers", None)
    if not isinstance(held, list) or getattr(cache, "offloading", False):
        kind = f"{type(cache).__name__}{' with offloading' if isinstance(held, list) else ''}"
        raise UnsupportedParameter(
            f"This model's router keeps running sums in the KV cache, and a {kind} has no place for them.",
            advice=f"Use one of: {CACHES}. A model built with context 'none' takes any cache.",
            param="past_key_values",
        )
    length, wrong = cache.get_seq_length(), ""
    if len(held) <= layers:
        wrong = "was filled without" if int(length) else ""
    elif isinstance(length, int) and isinstance(own := held[layers].get_seq_length(), int):  # tensors: not waited for
        numbers = held[layers].keys.shape[-1] if own else layers * (experts + 1)
        wrong = "has not all of" if own != length or numbers != layers * (experts + 1) else ""
    if wrong:
        raise UnsupportedParameter(
            f"This KV cache {wrong} the running sums of this model's routers.",
            advice="Begin with an empty cache, or one that this model returned from a whole pass: a pass that failed, "
            "or that passed routed blocks over, leaves none to go on with.",
            param="past_key_values",
        )


def _earlier(details: Pass) -> Tensor | None:
    """What the cache holds of the tokens before this pass: all routers' sums at the last of them, if there is one."""
    held = details.cache.layers
    return _last(held[details.layers]) if len(held) > details.layers else None


def _keep(details: Pass) -> None:
    """Leave the sums of this pass's tokens in the cache for the next. If blocks were passed over there are none; the
    cache is refused then when it comes again, not now: perhaps nobody wants to go on."""
    found = [details.sums[layer] for layer in range(details.layers) if layer in details.sums]
    if len(found) < details.layers:
        return
    whole = details.routing.whole(found) if details.routing is not None else None
    entry = (torch.cat([one.to(found[0].device) for one in found], -1) if whole is None else whole).unsqueeze(1)
    _layer_behind(details.cache.layers, details).update(entry, entry[..., :0])


def _layer_behind(held: list[Any], details: Pass) -> Any:
    from transformers.cache_utils import DynamicLayer, StaticLayer

    while len(held) < details.layers:  # a cache that makes its layers when they are needed
        held.append((details.cache.layer_class_to_replicate or DynamicLayer)())
    if len(held) == details.layers:
        # a window shortens what attention looks back on, not the past that the router averages over
        longest = max(
            (one.max_cache_len for one in held if isinstance(one, StaticLayer) and not one.is_sliding), default=0
        )
        held.append(StaticLayer(max_cache_len=longest) if longest else DynamicLayer())
    return held[details.layers]


def _last(kept: Any) -> Tensor | None:
    """The entry of the last token [batch, 1, numbers]; None where there is none yet."""
    from transformers.cache_utils import StaticLayer

    if hasattr(kept, "last_entry"):
        found: Tensor = kept.last_entry()
        return found
    if isinstance(kept, StaticLayer):
        if not kept.is_initialized:
            return None
        length = kept.cumulative_length  # a tensor: nothing here waits for the device
        found = kept.keys[:, 0].index_select(1, (length - 1).clamp(min=0).reshape(1))
        return torch.where(length > 0, found, torch.zeros_like(found))
    if not kept.get_seq_length():
        return None
    last: Tensor = kept.keys[:, 0, -1:, :]
    return last
