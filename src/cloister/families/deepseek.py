"""DeepSeek-V2 and V3: multi-head latent attention, shared experts beside routed ones, grouped routing, correction
bias."""

from __future__ import annotations

from cloister.families import decoder
from cloister.families.decoder import Config
from cloister.families.layout import Latent, LatentHeads, Layout, Segment

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


def reasons_against(config: Config) -> list[str]:
    """What in this configuration the family cannot express."""
    reasons = []
    groups, count = config.get("n_group") or 1, config.get("n_routed_experts") or 0
    if count % groups:
        reasons.append(f"n_routed_experts {count} is not a multiple of n_group {groups}")
    if config.get("model_type") == "deepseek_v3" and config.get("rope_interleave") is False:
        reasons.append("rope_interleave = false is not supported")
    return reasons


def layout(config: Config, names: frozenset[str]) -> Layout:
    """Where the parts are. Multi-token-prediction layers beyond `num_hidden_layers` are not loaded by transformers."""
    model, residual = decoder.start(config, "deepseek")
    count, groups = config.get("n_routed_experts") or 0, config.get("n_group") or 1
    for index in range(config["num_hidden_layers"]):
        layer, space = f"model.layers.{index}", f"layer{index}"
        first = model.norm(f"{layer}.input_layernorm", residual)
        _attention(model, f"{layer}.self_attn", f"{space}.attention", config, residual, first)
        second = model.norm(f"{layer}.post_attention_layernorm", residual)
        if not count or index < config.get("first_k_dense_replace", 0) or index % (config.get("moe_layer_freq") or 1):
            decoder.gated_block(model, f"{layer}.mlp", f"{space}.mlp", config["intermediate_size"], residual, second)
            continue
        size = config["moe_intermediate_size"]
        decoder.router(model, f"{layer}.mlp.gate", f"{space}.experts", count, residual, second)
        model.vector(f"{layer}.mlp.gate.e_score_correction_bias", Segment(f"{space}.experts", count), optional=True)
        decoder.experts(model, f"{layer}.mlp.experts", f"{space}.experts", count, size, residual, second, groups=groups)
        if shared := config.get("n_shared_experts"):
            decoder.gated_block(
                model, f"{layer}.mlp.shared_experts", f"{space}.shared", size * shared, residual, second
            )
    return model


def _attention(model: Layout, name: str, space: str, config: Config, residual: Segment, norm: str) -> None:
    heads, bias = config["num_attention_heads"], bool(config.get("attention_bias"))
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    model.add(LatentHeads(space, heads, nope, rope, value))
    q, o = Segment(f"{space}.q", heads * (nope + rope)), Segment(f"{space}.o", heads * value)
    if rank := config.get("q_lora_rank"):
        model.add(Latent(f"{space}.q_latent", rank))
        latent = Segment(f"{space}.q_latent", rank)
        model.linear(f"{name}.q_a_proj", latent, residual, norm=norm, bias=bias)
        inner = model.norm(f"{name}.q_a_layernorm", latent)
        model.linear(f"{name}.q_b_proj", q, latent, norm=inner)
    else:
        model.linear(f"{name}.q_proj", q, residual, norm=norm)
    rank = config["kv_lora_rank"]
    model.add(Latent(f"{space}.kv_latent", rank))
    latent, shared = Segment(f"{space}.kv_latent", rank), Segment(f"{space}.k_rope", rope)
    model.linear(f"{name}.kv_a_proj_with_mqa", (latent, shared), residual, norm=norm, bias=bias)
    inner = model.norm(f"{name}.kv_a_layernorm", latent)
    model.linear(f"{name}.kv_b_proj", Segment(f"{space}.kv", heads * (nope + value)), latent, norm=inner)
    model.linear(f"{name}.o_proj", residual, o, bias=bias)
