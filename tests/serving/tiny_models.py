"""Random models of every family, small enough to be made on the spot."""

from __future__ import annotations

from typing import Any


def tiny_config(kind: str) -> Any:
    """A configuration of a model with about 30,000 parameters; `kind` is the name of its configuration class."""
    import transformers

    common: dict[str, Any] = {"vocab_size": 101, "bos_token_id": 0, "eos_token_id": None}
    decoder = common | {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    experts = decoder | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    latent = decoder | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "topk_group": 1,
    }
    fields: dict[str, dict[str, Any]] = {
        "GPT2": common | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
        "Llama": decoder,
        "Mistral": decoder | {"sliding_window": 8},
        "Qwen2": decoder | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "Qwen3": decoder | {"head_dim": 8},
        "Mixtral": decoder | {"num_local_experts": 4},
        "Qwen2Moe": experts | {"shared_expert_intermediate_size": 32},
        "Qwen3Moe": experts | {"head_dim": 8},
        "Olmoe": experts | {"intermediate_size": 16},
        "DeepseekV2": latent | {"q_lora_rank": None, "n_group": 1, "topk_method": "greedy"},
        "DeepseekV3": latent | {"q_lora_rank": 16, "n_group": 2},
    }
    return getattr(transformers, f"{kind}Config")(**fields[kind])


def tiny_causal_lm(kind: str, seed: int = 0) -> Any:
    """A random model whose answers vary: larger weights than the usual start, or every answer repeats one token."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(kind)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.35)
        elif "norm" not in name and "ln" not in name:
            parameter.normal_(0, 0.1)
    return model
