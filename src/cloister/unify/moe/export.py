"""A unified decoder as a stock Mixture-of-Experts checkpoint, which transformers, vLLM and others know.

    seed             stock architecture     when
    Llama, Qwen2     Qwen2-MoE              any top_k: its router does not renormalise either (norm_topk_prob false)
    Qwen3            Qwen3-MoE              the same
    Llama, Mistral   Mixtral                top_k = experts only: its router renormalises over the chosen ones

None of them knows a context, so only models built with context "none" can be expressed. Qwen2-MoE has a shared expert
that every token passes; here its weights are zero, so that it adds nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from cloister import storage
from cloister.errors import UnsupportedModel

from . import build, folders
from .architecture import PREFIX

Target = Literal["qwen2_moe", "qwen3_moe", "mixtral"]
SHARED = 64  # neurons of the shared expert that adds nothing: a size that servers can divide among devices
_SEEDS: dict[Target, tuple[str, ...]] = {
    "qwen2_moe": ("llama", "mistral", "qwen2"),
    "qwen3_moe": ("qwen3",),
    "mixtral": ("llama", "mistral"),
}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_COMMON = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "tie_word_embeddings",
    "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
_INSIDE = re.compile(r"^(model\.layers\.\d+)\.mlp\.(?:experts\.(\d+)\.(\w+)|router)\.(weight|vectors)$")


def export_stock(model: Any, out: str | Path, *, target: Target | None = None) -> Path:
    """Write `model` as a stock checkpoint into the folder `out`; `UnsupportedModel` with every reason if it cannot be.

    Without a `target` the first one that fits is taken.
    """
    build.routed(model)
    kind = model.config.model_type.removeprefix(PREFIX)
    tried = (target,) if target else tuple(name for name, seeds in _SEEDS.items() if kind in seeds) or ("qwen2_moe",)
    reasons = {name: _reasons(model, kind, name) for name in tried}
    chosen = next((name for name in tried if not reasons[name]), None)
    if chosen is None:
        advice = "Serve it with `cloister serve`, or load it with transformers after `import cloister.unify.moe`."
        if model.config.context != "none":
            advice = "Build it with context 'none' and train its router again (`unify(..., context='none')`). " + advice
        raise UnsupportedModel(
            f"This model cannot be written as a stock {' or '.join(tried)} checkpoint:",
            list(dict.fromkeys(reason for name in tried for reason in reasons[name])), advice=advice,
        )  # fmt: skip
    config = _config(model.config, chosen)
    with storage.fresh_directory(out) as partial:
        folders.write_shards(partial, _tensors(model, chosen))
        config.save_pretrained(str(partial))
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(str(partial))
    return Path(out)


def _reasons(model: Any, kind: str, target: Target) -> list[str]:
    config, reasons = model.config, []
    if kind not in _SEEDS[target] or not type(model).__name__.endswith("ForCausalLM"):
        reasons.append(f"{target} has no place for {type(model).__name__}; it takes decoders of {_SEEDS[target]}")
        return reasons
    if config.context != "none":
        reasons.append(f"its router sees a context ({config.context!r}), and no stock architecture has one")
    if target == "mixtral" and config.experts_per_token != config.experts:
        reasons.append(
            f"mixtral makes the weights of the {config.experts_per_token} chosen of {config.experts} experts add up to "
            "one; this router does not, unless every expert is chosen"
        )
    if getattr(config, "mlp_bias", False):
        reasons.append(f"its experts have biases, those of {target} have none")
    biased = bool(getattr(config, "attention_bias", False))
    if biased and target == "qwen2_moe":
        reasons.append("its output projection has a bias, that of qwen2_moe has none")
    if biased and target == "mixtral":
        reasons.append("its attention has biases, that of mixtral has none")
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds or (kind == "mistral" and getattr(config, "sliding_window", None)):
        reasons.append("its attention has a sliding window")
    return reasons


def _config(config: Any, target: Target) -> Any:
    import transformers

    values = {name: getattr(config, name) for name in _COMMON if getattr(config, name, None) is not None}
    values.setdefault("head_dim", config.hidden_size // config.num_attention_heads)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values.setdefault(name, None)
    if target == "mixtral":
        made: Any = transformers.MixtralConfig(
            **values, intermediate_size=config.intermediate_size, num_local_experts=config.experts,
            num_experts_per_tok=config.experts_per_token, sliding_window=None,
        )  # fmt: skip
        made.architectures = ["MixtralForCausalLM"]
    else:
        values |= {
            "num_experts": config.experts, "num_experts_per_tok": config.experts_per_token, "norm_topk_prob": False,
            "moe_intermediate_size": config.intermediate_size, "intermediate_size": config.intermediate_size,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False,
        }  # fmt: skip
        if target == "qwen2_moe":
            bias = config.model_type == f"{PREFIX}qwen2"
            made = transformers.Qwen2MoeConfig(**values, shared_expert_intermediate_size=SHARED, qkv_bias=bias)
            made.architectures = ["Qwen2MoeForCausalLM"]
        else:
            made = transformers.Qwen3MoeConfig(**values, attention_bias=bool(config.attention_bias))
            made.architectures = ["Qwen3MoeForCausalLM"]
    made.dtype = getattr(config, "dtype", None)
    return made


def _tensors(model: Any, target: Target) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they lie in stock files."""
    block = "block_sparse_moe" if target == "mixtral" else "mlp"
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        found = _INSIDE.match(name)
        if found is None:
            yield name, tensor
        elif found[3] is None:
            yield f"{found[1]}.{block}.gate.weight", tensor.to(model.dtype)
            if target == "qwen2_moe":
                hidden = model.config.hidden_size
                shapes = {"gate_proj": (SHARED, hidden), "up_proj": (SHARED, hidden), "down_proj": (hidden, SHARED)}
                for part, shape in shapes.items():
                    yield f"{found[1]}.mlp.shared_expert.{part}.weight", torch.zeros(shape, dtype=model.dtype)
                yield f"{found[1]}.mlp.shared_expert_gate.weight", torch.zeros(1, hidden, dtype=model.dtype)
        else:
            part = _MIXTRAL[found[3]] if target == "mixtral" else found[3]
            yield f"{found[1]}.{block}.experts.{found[2]}.{part}.weight", tensor
