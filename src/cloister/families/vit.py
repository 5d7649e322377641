"""ViT: pre-norm image encoder, bare or with a classifier."""

from __future__ import annotations

from cloister.families import vision
from cloister.families.decoder import IGNORABLE, Config
from cloister.families.layout import Axis, Elementwise, Layout, Residual, Segment, TensorSpec

MODEL_TYPES = ("vit",)
ARCHITECTURES = ("ViTModel", "ViTForImageClassification")


def reasons_against(config: Config) -> list[str]:
    """What in this configuration the family cannot express."""
    return []


def layout(config: Config, names: frozenset[str]) -> Layout:
    """Where the parts are."""
    size = config["hidden_size"]
    architecture = (config.get("architectures") or ["ViTForImageClassification"])[0]
    classifies = architecture == "ViTForImageClassification"
    prefix = "vit." if any(name.startswith("vit.") for name in names) or (not names and classifies) else ""
    model = Layout(family="vit", task="vision", ignorable=IGNORABLE, vision_residual="residual")
    model.add(Residual("residual", size, "layer"))
    residual = Segment("residual", size)
    rows, columns = vision.grid(config)
    model.max_positions = rows * columns + 1
    model.vector(f"{prefix}embeddings.cls_token", residual, lead=2)
    axes = (Segment(None, 1),), (Segment(None, rows * columns + 1),), (residual,)
    positions = TensorSpec(tuple(Axis("out", segments) for segments in axes), kind="vector")
    model.tensors[f"{prefix}embeddings.position_embeddings"] = positions
    model.vector(f"{prefix}embeddings.mask_token", residual, lead=2, optional=True)
    vision.patches(model, f"{prefix}embeddings.patch_embeddings.projection", config, residual, bias=True)
    for index in range(config["num_hidden_layers"]):
        layer = f"{prefix}encoder.layer.{index}"
        part_names = {
            "first": f"{layer}.layernorm_before", "second": f"{layer}.layernorm_after",
            "q": f"{layer}.attention.attention.query", "k": f"{layer}.attention.attention.key",
            "v": f"{layer}.attention.attention.value", "o": f"{layer}.attention.output.dense",
            "up": f"{layer}.intermediate.dense", "down": f"{layer}.output.dense",
        }  # fmt: skip
        vision.layer(model, f"layer{index}", config, residual, part_names, bias=bool(config.get("qkv_bias", True)))
    final = model.norm(f"{prefix}layernorm", residual, bias=True)
    if classifies:
        count = len(config.get("id2label") or {0: "", 1: ""})
        model.add(Elementwise("labels", count))
        model.linear("classifier", Segment("labels", count), residual, norm=final, bias=True)
        model.output = "labels"
    else:
        model.add(Elementwise("pooled", size))
        model.linear(
            f"{prefix}pooler.dense", Segment("pooled", size), residual, norm=final, bias="optional", optional=True
        )
        model.output = "residual"
        model.blocked["orthogonal"] = [
            "the model's answer is the normed residual stream itself; only its order can be undone without the weights"
        ]
    return model
