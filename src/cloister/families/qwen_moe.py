"""Qwen2-MoE (with one gated shared expert) and Qwen3-MoE (with norms on queries and keys)."""

from __future__ import annotations

from cloister.families import decoder
from cloister.families.decoder import Config
from cloister.families.layout import Layout, Segment

MODEL_TYPES = ("qwen2_moe", "qwen3_moe")
ARCHITECTURES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


def reasons_against(config: Config) -> list[str]:
    """What in this configuration the family cannot express."""
    return []


def layout(config: Config, names: frozenset[str]) -> Layout:
    """Where the parts are; some layers may be dense (`mlp_only_layers`, `decoder_sparse_step`)."""
    second_generation = config["model_type"] == "qwen2_moe"
    model, residual = decoder.start(config, "qwen_moe")
    bias = bool(config.get("qkv_bias", True)) if second_generation else bool(config.get("attention_bias"))
    count = config.get("num_experts") or config["num_local_experts"]
    step, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or [])
    for index in range(config["num_hidden_layers"]):
        layer, space = f"model.layers.{index}", f"layer{index}"
        first = model.norm(f"{layer}.input_layernorm", residual)
        decoder.attention(
            model, f"{layer}.self_attn", f"{space}.attention", config, residual, first,
            qkv_bias=bias, out_bias=bias and not second_generation, qk_norm="none" if second_generation else "head",
        )  # fmt: skip
        second = model.norm(f"{layer}.post_attention_layernorm", residual)
        if index in dense or count == 0 or (index + 1) % step:
            size = config["intermediate_size"]
            decoder.gated_block(model, f"{layer}.mlp", f"{space}.mlp", size, residual, second)
            continue
        decoder.router(model, f"{layer}.mlp.gate", f"{space}.experts", count, residual, second)
        decoder.experts(
            model, f"{layer}.mlp.experts", f"{space}.experts", count, config["moe_intermediate_size"], residual, second
        )
        if second_generation:
            decoder.gated_block(
                model, f"{layer}.mlp.shared_expert", f"{space}.shared", config["shared_expert_intermediate_size"],
                residual, second,
            )  # fmt: skip
            model.linear(f"{layer}.mlp.shared_expert_gate", Segment(None, 1), residual, norm=second)
    return model
