"""What an owner's weights and a coordinator's router vectors must be, with every reason when they are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cloister.errors import BrokenCheckpoint, UnsupportedModel, UsageError

FALLBACK = "seed"  # what the fallback expert is called; no owner may have that name
MOST_SHOWN = 40


@dataclass(frozen=True)
class Wanted:
    """What a feed-forward parameter must look like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def wanted(tensors: Mapping[str, Tensor]) -> dict[str, Wanted]:
    """What the tensors of another expert must look like, given these."""
    return {name: Wanted(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def states(owners: Mapping[str, Mapping[str, Tensor]], expected: Mapping[str, Wanted]) -> None:
    """Raise `BrokenCheckpoint` with everything that is wrong with the owners' weights."""
    faults = [fault for name, state in owners.items() for fault in _state(name, state, expected)]
    if faults:
        shown = faults[:MOST_SHOWN] + ([f"and {len(faults) - MOST_SHOWN} more"] if len(faults) > MOST_SHOWN else [])
        raise BrokenCheckpoint(
            "\n  - ".join(["These experts do not fit the seed:", *shown]),
            advice="An expert is the seed's feed-forward parameters, as `feed_forward_names` lists them; merge LoRA "
            "factors first, and keep the seed's number format.",
        )


def _state(owner: str, state: Mapping[str, Tensor], expected: Mapping[str, Wanted]) -> list[str]:
    faults = [f"{owner}: {name} is missing" for name in expected if name not in state]
    faults += [f"{owner}: {name} is no feed-forward parameter of the seed" for name in state if name not in expected]
    for name, want in expected.items():
        if name not in state:
            continue
        tensor: Any = state[name]
        if not isinstance(tensor, Tensor):
            faults.append(f"{owner}: {name} is a {type(tensor).__name__}, not a tensor")
            continue
        if tuple(tensor.shape) != want.shape:
            faults.append(f"{owner}: {name} has shape {list(tensor.shape)}, the seed's has {list(want.shape)}")
        if tensor.dtype != want.dtype:
            faults.append(f"{owner}: {name} is stored as {tensor.dtype}, the seed's as {want.dtype}")
        elif not bool(torch.isfinite(tensor).all()):
            faults.append(f"{owner}: {name} has numbers that are not finite")
    return faults


def names(owners: Sequence[Any]) -> None:
    """Raise `UsageError` if these cannot be the names of a model's owners."""
    faults = [] if owners else ["no owner is named"]
    for name in owners:
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > 200:
            faults.append(f"{name!r} is no name: it must be text of 1 to 200 printable characters")
    if FALLBACK in owners:
        faults.append(f"{FALLBACK!r} is what the fallback expert is called")
    if len(set(owners)) != len(owners):
        faults.append("a name occurs twice")
    if faults:
        raise UsageError("\n  - ".join(["These owners cannot be:", *faults]))


def settings(context: str, top_k: int, experts: int, *, causal: bool, what: str) -> None:
    """Raise `UnsupportedModel` if a model of this kind cannot have such a router."""
    reasons = []
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= experts:
        reasons.append(f"top_k is {top_k!r}, of {experts} experts")
    if context not in ("sequence", "prefix", "none"):
        reasons.append(f"there is no context {context!r}")
    elif causal and context == "sequence":
        reasons.append("context 'sequence' would let a decoder's tokens see later ones; use 'prefix'")
    elif not causal and context == "prefix":
        reasons.append("context 'prefix' is for decoders; an encoder sees the whole sequence")
    if reasons:
        raise UnsupportedModel(f"{what} cannot get this router:", reasons)


def vectors(given: Sequence[Tensor], layers: int, rows: tuple[int, ...], hidden: int) -> None:
    """Raise `BrokenCheckpoint` with everything that is wrong with router vectors; `rows` are the counts allowed."""
    faults = [] if len(given) == layers else [f"there are vectors for {len(given)} layers, the model has {layers}"]
    for layer, tensor in enumerate(given):
        if not isinstance(tensor, Tensor) or tensor.dim() != 2 or not tensor.is_floating_point():
            faults.append(f"layer {layer}: not a floating-point tensor [experts, hidden]")
        elif tensor.shape[0] not in rows or tensor.shape[1] != hidden:
            counts = " or ".join(str(count) for count in rows)
            faults.append(f"layer {layer}: shape {list(tensor.shape)}, expected [{counts}, {hidden}]")
        elif not bool(torch.isfinite(tensor).all()):
            faults.append(f"layer {layer}: numbers that are not finite")
    if faults:
        raise BrokenCheckpoint("\n  - ".join(["These router vectors do not fit the model:", *faults[:MOST_SHOWN]]))
