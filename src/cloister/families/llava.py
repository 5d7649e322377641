"""LLaVA: a CLIP vision tower, a two-layer projector and a LLaMA-like language model.

The projector leads from the vision tower's space to the language model's, so each half may have a transform of its
own: the language half can be rotated while the vision half is only permuted.
"""

from __future__ import annotations

from cloister.families import clip, llama, vision
from cloister.families.decoder import Config
from cloister.families.layout import Layout, Neurons, Segment

MODEL_TYPES = ("llava",)
ARCHITECTURES = ("LlavaForConditionalGeneration",)


def reasons_against(config: Config) -> list[str]:
    """What in this configuration the family cannot express."""
    reasons = []
    text, image = config.get("text_config") or {}, config.get("vision_config") or {}
    if text.get("model_type", "llama") not in llama.MODEL_TYPES:
        reasons.append(f"language model {text.get('model_type')!r} inside LLaVA is not supported")
    if image.get("model_type", "clip_vision_model") not in clip.MODEL_TYPES:
        reasons.append(f"vision tower {image.get('model_type')!r} inside LLaVA is not supported")
    if config.get("vision_feature_select_strategy", "default") not in ("default", "full"):
        reasons.append("vision_feature_select_strategy must be 'default' or 'full'")
    return reasons + llama.reasons_against(text)


def layout(config: Config, names: frozenset[str]) -> Layout:
    """Where the parts are. Older files say `language_model.model.`, newer ones `model.language_model.`."""
    newer = any(name.startswith("model.language_model.") for name in names)
    text_prefix = "model.language_model" if newer else "language_model.model"
    head = "lm_head" if newer else "language_model.lm_head"
    tower, projector = (
        ("model.vision_tower.", "model.multi_modal_projector") if newer else ("vision_tower.", "multi_modal_projector")
    )
    inner = "vision_model." if any(name.startswith(f"{tower}vision_model.") for name in names) else ""
    text, image = config["text_config"], config["vision_config"]
    model = llama.layout({"model_type": "llama", **text}, names, prefix=text_prefix, head=head)
    model.family = "llava"
    sight = clip.tower(model, f"{tower}{inner}", image, "vision")
    model.norm(f"{tower}{inner}post_layernorm", sight, bias=True, foldable=False)
    model.vision_residual = "vision"
    size, bias = text["hidden_size"], bool(config.get("multimodal_projector_bias", True))
    layers = config.get("vision_feature_layer", -2)
    count = len(layers) if isinstance(layers, list) else 1
    model.add(Neurons("projector", size, gated=False))
    neurons = Segment("projector", size)
    model.linear(f"{projector}.linear_1", neurons, (sight,) * count, bias=bias)
    model.linear(f"{projector}.linear_2", Segment("residual", size), neurons, bias=bias)
    model.notes.append("images are only permuted (CLIP's first norm forbids rotations), text can be rotated")
    return model


def server_config(config: Config) -> dict[str, object]:
    """The configuration of the protected checkpoint."""
    return {**config, "vision_config": vision.server_config(config["vision_config"])}
