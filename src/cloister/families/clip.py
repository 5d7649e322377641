"""CLIP's vision encoder, bare or with its projection. Its first norm writes to the residual stream: permutations
only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloister.families import vision
from cloister.families.decoder import IGNORABLE, Config
from cloister.families.layout import Elementwise, Layout, Residual, Segment

MODEL_TYPES = ("clip_vision_model",)
ARCHITECTURES = ("CLIPVisionModel", "CLIPVisionModelWithProjection")
WHY_NOT = "CLIP's first norm writes its scale to the residual stream, so only permutations leave it as it is"


def reasons_against(config: Config) -> list[str]:
    """What in this configuration the family cannot express."""
    return []


def layout(config: Config, names: frozenset[str]) -> Layout:
    """Where the parts are. Files may or may not say `vision_model.`."""
    prefix = "vision_model." if not names or any(name.startswith("vision_model.") for name in names) else ""
    model = Layout(family="clip", task="vision", ignorable=IGNORABLE, vision_residual="vision", output="vision")
    residual = tower(model, prefix, config, "vision")
    projects = (config.get("architectures") or [""])[0] == "CLIPVisionModelWithProjection"
    model.norm(f"{prefix}post_layernorm", residual, bias=True, foldable=False)
    if projects:
        size = config["projection_dim"]
        model.add(Elementwise("projection", size))
        model.linear("visual_projection", Segment("projection", size), residual)
        model.output = "projection"
    model.blocked["orthogonal"] = [WHY_NOT]
    return model


def tower(model: Layout, prefix: str, config: Mapping[str, Any], space: str) -> Segment:
    """Declare everything up to the last layer; also the vision half of LLaVA."""
    size = config["hidden_size"]
    model.add(Residual(space, size, "layer", rotatable=False, why_not=WHY_NOT))
    residual = Segment(space, size)
    rows, columns = vision.grid(config)
    if not model.max_positions:
        model.max_positions = rows * columns + 1
    model.vector(f"{prefix}embeddings.class_embedding", residual)
    model.table(f"{prefix}embeddings.position_embedding.weight", Segment(None, rows * columns + 1), residual)
    vision.patches(model, f"{prefix}embeddings.patch_embedding", config, residual, bias=False)
    model.norm(f"{prefix}pre_layrnorm", residual, bias=True, foldable=False)
    for index in range(config["num_hidden_layers"]):
        layer = f"{prefix}encoder.layers.{index}"
        names = {
            "first": f"{layer}.layer_norm1", "second": f"{layer}.layer_norm2",
            "q": f"{layer}.self_attn.q_proj", "k": f"{layer}.self_attn.k_proj", "v": f"{layer}.self_attn.v_proj",
            "o": f"{layer}.self_attn.out_proj", "up": f"{layer}.mlp.fc1", "down": f"{layer}.mlp.fc2",
        }  # fmt: skip
        vision.layer(model, f"{space}.layer{index}", config, residual, names)
    return residual
