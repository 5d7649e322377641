"""OLMoE: experts in every layer, and one norm over all query heads and one over all key heads."""

from __future__ import annotations

from cloister.families import decoder
from cloister.families.decoder import Config
from cloister.families.layout import Layout

MODEL_TYPES = ("olmoe",)
ARCHITECTURES = ("OlmoeForCausalLM",)


def reasons_against(config: Config) -> list[str]:
    """What in this configuration the family cannot express."""
    return []


def layout(config: Config, names: frozenset[str]) -> Layout:
    """Where the parts are."""
    model, residual = decoder.start(config, "olmoe")
    count, bias = config["num_experts"], bool(config.get("attention_bias"))
    for index in range(config["num_hidden_layers"]):
        layer, space = f"model.layers.{index}", f"layer{index}"
        first = model.norm(f"{layer}.input_layernorm", residual)
        decoder.attention(
            model, f"{layer}.self_attn", f"{space}.attention", config, residual, first,
            qkv_bias=bias, out_bias=bias, qk_norm="all",
        )  # fmt: skip
        second = model.norm(f"{layer}.post_attention_layernorm", residual)
        decoder.router(model, f"{layer}.mlp.gate", f"{space}.experts", count, residual, second)
        decoder.experts(
            model, f"{layer}.mlp.experts", f"{space}.experts", count, config["intermediate_size"], residual, second
        )
    return model
