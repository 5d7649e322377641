"""Where a seed keeps its feed-forward blocks, and what their parameters are called before and after.

    seed        model.layers.3.mlp.up_proj.weight               encoder.layer.3.output.dense.weight
    unified     model.layers.3.mlp.experts.1.up_proj.weight     encoder.layer.3.intermediate.experts.1.closing.weight

An owner trains and sends parameters by the seed's names; the unified model's names say whose they are by a number.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cloister.errors import UnsupportedModel

from .routing import RoutedFeedForward

NAMES = ("mlp", "ffn", "feed_forward")
EXPERT = re.compile(r"^(?P<path>.+)\.experts\.(?P<index>\d+)\.(?P<inner>.+)$")


class Pair(nn.Module):
    """Two modules in a row that the seed keeps apart."""

    def __init__(self, opening: nn.Module, closing: nn.Module):
        super().__init__()
        self.opening, self.closing = opening, closing

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        result: torch.Tensor = self.closing(self.opening(z))
        return result


@dataclass(frozen=True)
class Block:
    """A feed-forward block of a layer: one module, or one that opens and one that closes."""

    path: str  # of the opening module, where the routed block will be
    owner: nn.Module
    name: str
    closing: tuple[nn.Module, str] | None = None

    def take(self) -> nn.Module:
        """The block as one module."""
        first: nn.Module = getattr(self.owner, self.name)
        return first if self.closing is None else Pair(first, getattr(*self.closing))

    def put(self, block: nn.Module) -> None:
        """Put another in its place."""
        setattr(self.owner, self.name, block)
        if self.closing is not None:
            setattr(*self.closing, nn.Identity())


def expert_name(path: str, index: int, inner: str) -> str:
    """The unified model's name of a parameter of one expert."""
    return f"{path}.experts.{index}.{inner}"


def seed_name(path: str, inner: str) -> str:
    """The seed's name of the same parameter."""
    if inner.startswith("opening."):
        return f"{path}.{inner.removeprefix('opening.')}"
    if inner.startswith("closing."):
        return f"{path.rsplit('.', 1)[0]}.output.dense.{inner.removeprefix('closing.')}"
    return f"{path}.{inner}"


def parameters(model: nn.Module) -> dict[str, tuple[str, str]]:
    """The feed-forward parameters of a seed or a unified model: the seed's name -> (path of the block, name inside)."""
    routed = {name: part for name, part in model.named_modules() if isinstance(part, RoutedFeedForward)}
    inside = {path: block.experts[0] for path, block in routed.items()} or {b.path: b.take() for b in find(model)}
    return {
        seed_name(path, inner): (path, inner) for path, block in inside.items() for inner, _ in block.named_parameters()
    }


def feed_forward_names(model: nn.Module) -> list[str]:
    """Names of the feed-forward parameters in the seed's own naming, layer by layer: what an owner trains and sends."""
    return list(parameters(model))


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The one list of layers that attend; `UnsupportedModel` if there is none, or more than one."""
    lists = [
        (name, part) for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) and all(_attends(layer) for layer in part)
    ]  # fmt: skip
    if len(lists) != 1:
        what = "has no layers with attention" if not lists else f"has several: {', '.join(name for name, _ in lists)}"
        raise UnsupportedModel(
            "This architecture cannot be unified:",
            [f"one list of layers with attention is needed, and {type(model).__name__} {what}"],
            advice="Dense encoders and decoders can be unified, each tower of a larger model for itself.",
        )
    return lists[0]


def find(model: nn.Module) -> list[Block]:
    """The feed-forward blocks of a seed, layer by layer; `UnsupportedModel` with every reason against it."""
    name, layers = layer_list(model)
    found = [_block(f"{name}.{index}", layer) for index, layer in enumerate(layers)]
    config: Any = getattr(model, "config", None)
    reasons = [
        f"layer {index} ({type(layer).__name__}) has no dense feed-forward block that can be replaced as a whole"
        for index, layer in enumerate(layers) if found[index] is None
    ]  # fmt: skip
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        reasons.append("models with an encoder and a decoder have two sequences, and the router sees one")
    if getattr(config, "chunk_size_feed_forward", 0):
        reasons.append("chunk_size_feed_forward must be 0: the router needs the whole sequence")
    if not isinstance(getattr(config, "hidden_size", None), int):
        reasons.append("its configuration has no hidden_size")
    if reasons:
        raise UnsupportedModel("This architecture cannot be unified:", reasons)
    return [block for block in found if block is not None]


def _attends(layer: nn.Module) -> bool:
    return any("attn" in name or "attention" in name for name, _ in layer.named_children())


def _takes_tokens_alone(part: nn.Module) -> bool:
    """Whether the block is a whole one and called with its input and nothing else: some add the residual themselves."""
    if isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Linear):
        return False
    wanted = [
        one for one in inspect.signature(part.forward).parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    return len(wanted) == 1


def _block(path: str, layer: nn.Module) -> Block | None:
    for name in NAMES:
        part = getattr(layer, name, None)
        if isinstance(part, nn.Module):
            routed = any(hasattr(part, mark) for mark in ("experts", "gate", "router"))
            return Block(f"{path}.{name}", layer, name) if _takes_tokens_alone(part) and not routed else None
    opening, output = getattr(layer, "intermediate", None), getattr(layer, "output", None)
    if isinstance(opening, nn.Module) and isinstance(getattr(output, "dense", None), nn.Module):
        assert output is not None
        return Block(f"{path}.intermediate", layer, "intermediate", (output, "dense"))
    return None
