"""Unified models (`cloister.unify`): a dense seed's layout, with experts and a router in each feed-forward block.

The router scores an expert by z . e_p, so its vectors are rows of a linear layer that writes to the experts and reads
the stream; the means it blends in are of such scores, one number an expert, and follow the experts' order. The blend
itself is one number a layer and has no coordinates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from cloister.families import bert, llama, vision, vit
from cloister.families.decoder import Config
from cloister.families.layout import Axis, Experts, Layout, Neurons, Segment, TensorSpec

PREFIX, CLASS_PREFIX = "cloister_moe_", "Cloister"
SEEDS: tuple[ModuleType, ...] = (bert, llama, vit)
MODEL_TYPES = tuple(PREFIX + kind for seed in SEEDS for kind in seed.MODEL_TYPES)
ARCHITECTURES = tuple(CLASS_PREFIX + name for seed in SEEDS for name in seed.ARCHITECTURES)
# the seed's part of a block -> (block that replaces it, the part inside an expert)
_PARTS: dict[str, dict[str, tuple[str, str]]] = {
    "bert": {"intermediate.dense": ("intermediate", "opening.dense"), "output.dense": ("intermediate", "closing")},
    "llama": {part: ("mlp", part.removeprefix("mlp.")) for part in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")},
    "vit": {"intermediate.dense": ("mlp", "fc1"), "output.dense": ("mlp", "fc2")},
}


def reasons_against(config: Config) -> list[str]:
    """What in this configuration the family cannot express."""
    reasons: list[str] = list(_seed(config).reasons_against(dense(config)))
    for name in ("experts", "experts_per_token"):
        if not isinstance(config.get(name, 1), int) or config.get(name, 1) < 1:
            reasons.append(f"{name} is {config.get(name)!r}")
    return reasons


def dense(config: Config) -> dict[str, Any]:
    """The configuration of the seed."""
    names = [name.removeprefix(CLASS_PREFIX) for name in config.get("architectures") or []]
    return {**config, "model_type": config["model_type"].removeprefix(PREFIX), "architectures": names}


def server_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Whose the experts are is nobody's business on the server, and their order is another there."""
    changed = vision.server_config(config) if _seed(config) is vit else dict(config)
    return {**changed, "experts": config.get("experts", 1), "owners": None, "fallback": False}


def layout(config: Config, names: frozenset[str]) -> Layout:
    """Where the parts are."""
    seed = _seed(config)
    family = seed.__name__.rsplit(".", 1)[-1]
    model: Layout = seed.layout(dense(config), names)
    model.family = "unified"
    count, contextual = config.get("experts", 1), config.get("context", "none") != "none"
    tensors: dict[str, TensorSpec] = {}
    for name, spec in model.tensors.items():
        found = _part(name, _PARTS[family])
        if found is None:
            tensors[name] = spec
            continue
        layer, block, inner, ending = found
        linear = model.tensors[f"{name.removesuffix(f'.{ending}')}.weight"]
        space = f"{_neurons(model, linear)}.experts"
        for index in range(count):
            tensors[f"{layer}.{block}.experts.{index}.{inner}.{ending}"] = _expert(model, spec, space, index)
        router = f"{layer}.{block}.router"
        if space not in model.spaces:
            model.add(Experts(space, count))
        if f"{router}.vectors" not in tensors and spec.kind == "linear" and _reads_stream(model, spec):
            axes = Axis("out", (Segment(space, count),)), spec.axes[[axis.side for axis in spec.axes].index("in")]
            tensors[f"{router}.vectors"] = TensorSpec(axes, norm=spec.norm, router=True)
            if contextual:
                tensors[f"{router}.blend"] = TensorSpec((Axis("out", (Segment(None, 1),)),), kind="vector")
    for name in [name for name, space in model.spaces.items() if isinstance(space, Neurons)]:
        if f"{name}.experts" in model.spaces:
            del model.spaces[name]
    model.tensors = tensors
    model.notes.append("the server must know the architecture: `import cloister.unify.moe` (`cloister serve` does)")
    return model


def _seed(config: Mapping[str, Any]) -> ModuleType:
    kind = str(config.get("model_type", "")).removeprefix(PREFIX)
    return next(seed for seed in SEEDS if kind in seed.MODEL_TYPES)


def _part(name: str, parts: Mapping[str, tuple[str, str]]) -> tuple[str, str, str, str] | None:
    found = re.match(r"^(.*\blayers?\.\d+)\.(.+)\.(weight|bias)$", name)
    if found is None or found[2] not in parts:
        return None
    return found[1], *parts[found[2]], found[3]


def _segments(spec: TensorSpec) -> list[Segment]:
    return [segment for axis in spec.axes for segment in axis.segments]


def _reads_stream(model: Layout, spec: TensorSpec) -> bool:
    return any(a.side == "in" and a.segments[0].space == model.residual for a in spec.axes)


def _neurons(model: Layout, spec: TensorSpec) -> str:
    """The space of the dense block's neurons that this linear writes to or reads."""
    for segment in _segments(spec):
        base = (segment.space or "").removesuffix(".up")
        if isinstance(model.spaces.get(base), Neurons):
            return base
    raise KeyError("neurons")


def _expert(model: Layout, spec: TensorSpec, space: str, index: int) -> TensorSpec:
    dense_space = space.removesuffix(".experts")
    neurons = model.spaces[dense_space]
    assert isinstance(neurons, Neurons)
    own = f"{space}.{index}"
    if own not in model.spaces:
        model.add(Neurons(own, neurons.size, neurons.gated))

    def moved(segment: Segment) -> Segment:
        if segment.space in (dense_space, f"{dense_space}.up"):
            assert segment.space is not None
            return Segment(own + segment.space.removeprefix(dense_space), segment.size)
        return segment

    axes = tuple(Axis(axis.side, tuple(moved(segment) for segment in axis.segments)) for axis in spec.axes)
    return replace(spec, axes=axes, expert=(space, index))
