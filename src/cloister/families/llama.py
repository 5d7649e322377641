"""LLaMA and its dense relatives Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped queries, SwiGLU."""

from __future__ import annotations

from cloister.families import decoder
from cloister.families.decoder import Config
from cloister.families.layout import Layout

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def reasons_against(config: Config) -> list[str]:
    """What in this configuration the family cannot express."""
    return ["pretraining_tp > 1 splits projections"] if config.get("pretraining_tp", 1) not in (None, 1) else []


def layout(config: Config, names: frozenset[str], *, prefix: str = "model", head: str = "lm_head") -> Layout:
    """Where the parts are."""
    kind = config.get("model_type", "llama")
    bias = kind == "qwen2" or bool(config.get("attention_bias"))
    model, residual = decoder.start(config, "llama", prefix=prefix, head=head)
    for index in range(config["num_hidden_layers"]):
        layer, space = f"{prefix}.layers.{index}", f"layer{index}"
        first = model.norm(f"{layer}.input_layernorm", residual)
        decoder.attention(
            model, f"{layer}.self_attn", f"{space}.attention", config, residual, first,
            qkv_bias=bias, out_bias=bias and kind != "qwen2", qk_norm="head" if kind == "qwen3" else "none",
        )  # fmt: skip
        second = model.norm(f"{layer}.post_attention_layernorm", residual)
        decoder.gated_block(
            model, f"{layer}.mlp", f"{space}.mlp", config["intermediate_size"], residual, second,
            bias=bool(config.get("mlp_bias")),
        )  # fmt: skip
    return model
