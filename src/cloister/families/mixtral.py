"""Mixtral: LLaMA's attention, and in every layer a router over gated experts."""

from __future__ import annotations

from cloister.families import decoder
from cloister.families.decoder import Config
from cloister.families.layout import Layout

MODEL_TYPES = ("mixtral",)
ARCHITECTURES = ("MixtralForCausalLM",)


def reasons_against(config: Config) -> list[str]:
    """What in this configuration the family cannot express."""
    return []


def layout(config: Config, names: frozenset[str]) -> Layout:
    """Where the parts are. The hub's files say `block_sparse_moe.experts.E.w1`; fused files say
    `mlp.experts.gate_up_proj`."""
    model, residual = decoder.start(config, "mixtral")
    count = config["num_local_experts"]
    block = "mlp" if any(".mlp.gate.weight" in name for name in names) else "block_sparse_moe"
    for index in range(config["num_hidden_layers"]):
        layer, space = f"model.layers.{index}", f"layer{index}"
        first = model.norm(f"{layer}.input_layernorm", residual)
        decoder.attention(model, f"{layer}.self_attn", f"{space}.attention", config, residual, first)
        second = model.norm(f"{layer}.post_attention_layernorm", residual)
        decoder.router(model, f"{layer}.{block}.gate", f"{space}.experts", count, residual, second)
        decoder.experts(
            model, f"{layer}.{block}.experts", f"{space}.experts", count, config["intermediate_size"], residual, second,
            names=("w1", "w3", "w2"),
        )  # fmt: skip
    return model
