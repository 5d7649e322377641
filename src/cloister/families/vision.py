"""What vision transformers share: a patch projection that moves to the client, and pre-norm layers with biases.

The protected checkpoint keeps its architecture: its configuration says patch size 1, as many channels as the model is
wide, and an
image as large as the grid of patches. The client projects and transforms the patches and sends them as such an
"image"; the server's projection is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloister.families.layout import Axis, Heads, Layout, Neurons, Segment, TensorSpec


def pair(value: Any) -> tuple[int, int]:
    """A size given as one number or as two."""
    return (int(value[0]), int(value[1])) if isinstance(value, list | tuple) else (int(value), int(value))


def grid(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of patches."""
    image, patch = pair(config.get("image_size", 224)), pair(config.get("patch_size", 16))
    return image[0] // patch[0], image[1] // patch[1]


def server_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the protected checkpoint: see the module's docstring."""
    rows, columns = grid(config)
    size = rows if rows == columns else [rows, columns]
    return {**config, "patch_size": 1, "num_channels": config["hidden_size"], "image_size": size}


def patches(layout: Layout, name: str, config: Mapping[str, Any], residual: Segment, *, bias: bool) -> None:
    """Declare the patch projection `name` [hidden, channels, p, p]."""
    height, width = pair(config.get("patch_size", 16))
    tail = (config.get("num_channels", 3), height, width)
    layout.tensors[f"{name}.weight"] = TensorSpec((Axis("out", (residual,)),), kind="patch", shape_tail=tail)
    if bias:
        layout.tensors[f"{name}.bias"] = TensorSpec((Axis("out", (residual,)),), kind="patch")
    layout.patch = name


def layer(
    layout: Layout,
    space: str,
    config: Mapping[str, Any],
    residual: Segment,
    names: dict[str, str],
    *,
    bias: bool = True,
) -> None:
    """Declare one pre-norm layer; `names` maps first, second, q, k, v, o, up and down to the tensors' prefixes."""
    size, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    layout.add(Heads(f"{space}.attention", heads, heads, size // heads, size // heads))
    layout.add(Neurons(f"{space}.mlp", inner, gated=False))
    first = layout.norm(names["first"], residual, bias=True)
    for part in "qkv":
        layout.linear(names[part], Segment(f"{space}.attention.{part}", size), residual, norm=first, bias=bias)
    layout.linear(names["o"], residual, Segment(f"{space}.attention.o", size), bias=True)
    second = layout.norm(names["second"], residual, bias=True)
    layout.linear(names["up"], Segment(f"{space}.mlp", inner), residual, norm=second, bias=True)
    layout.linear(names["down"], residual, Segment(f"{space}.mlp", inner), bias=True)
