"""Tiny random seeds of several architectures, and unified models made of them whose experts and routes differ."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import cloister.unify.moe as moe
from cloister.unify.moe import build

WORDS = 97
_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_DECODER = {**_TEXT, "num_key_value_heads": 2}
_SIGHT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
SEEDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("BertConfig", _TEXT),
    "BertForMaskedLM": ("BertConfig", _TEXT),
    "BertForSequenceClassification": ("BertConfig", _TEXT),
    "RobertaModel": ("RobertaConfig", _TEXT | {"pad_token_id": 1}),
    "XLMRobertaModel": ("XLMRobertaConfig", _TEXT | {"pad_token_id": 1}),
    "CamembertModel": ("CamembertConfig", _TEXT | {"pad_token_id": 1}),
    "ElectraModel": ("ElectraConfig", _TEXT | {"embedding_size": 32}),
    "DistilBertModel": (
        "DistilBertConfig",
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": WORDS, "max_position_embeddings": 64},
    ),
    "MPNetModel": ("MPNetConfig", _TEXT | {"pad_token_id": 1}),
    "DebertaV2Model": ("DebertaV2Config", _TEXT | {"pad_token_id": 0, "relative_attention": True}),
    "ModernBertModel": ("ModernBertConfig", _TEXT | {"pad_token_id": 0}),
    "ViTForImageClassification": ("ViTConfig", _SIGHT),
    "ViTModel": ("ViTConfig", _SIGHT),
    "DeiTForImageClassification": ("DeiTConfig", _SIGHT),
    "Dinov2Model": ("Dinov2Config", {k: v for k, v in _SIGHT.items() if k != "intermediate_size"}),
    "Dinov2WithRegistersModel": (
        "Dinov2WithRegistersConfig", {k: v for k, v in _SIGHT.items() if k != "intermediate_size"},
    ),
    "DINOv3ViTModel": ("DINOv3ViTConfig", _SIGHT),
    "BeitModel": ("BeitConfig", _SIGHT),
    "CLIPVisionModel": ("CLIPVisionConfig", _SIGHT),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", _SIGHT),
    "SiglipVisionModel": ("SiglipVisionConfig", _SIGHT),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 64, "bos_token_id": None,
         "eos_token_id": None},
    ),
    "LlamaForCausalLM": ("LlamaConfig", _DECODER),
    "MistralForCausalLM": ("MistralConfig", _DECODER | {"sliding_window": 6}),
    "Qwen2ForCausalLM": ("Qwen2Config", _DECODER | {"tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("Qwen3Config", _DECODER | {"head_dim": 8}),
    "GemmaForCausalLM": ("GemmaConfig", _DECODER | {"head_dim": 8, "pad_token_id": 0}),
    "Gemma2ForCausalLM": ("Gemma2Config", _DECODER | {"head_dim": 8, "pad_token_id": 0, "sliding_window": 6}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", _DECODER | {"head_dim": 8, "pad_token_id": 0, "sliding_window": 6}),
    "PhiForCausalLM": ("PhiConfig", _DECODER),
    "Phi3ForCausalLM": ("Phi3Config", _DECODER | {"pad_token_id": 0}),
    "OlmoForCausalLM": ("OlmoConfig", _DECODER | {"pad_token_id": 0}),
    "Olmo2ForCausalLM": ("Olmo2Config", _DECODER),
    "Olmo3ForCausalLM": ("Olmo3Config", _DECODER | {"sliding_window": 6}),
    "GraniteForCausalLM": ("GraniteConfig", _DECODER | {"pad_token_id": 0}),
    "Starcoder2ForCausalLM": ("Starcoder2Config", _DECODER),
    "FalconForCausalLM": (
        "FalconConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS,
         "bos_token_id": None, "eos_token_id": None},
    ),
    "SmolLM3ForCausalLM": ("SmolLM3Config", _DECODER | {"pad_token_id": 0}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", _TEXT),
}  # fmt: skip


def seed(kind: str = "LlamaForCausalLM", number: int = 0) -> Any:
    """A random seed whose outputs vary."""
    torch.manual_seed(number)
    config, arguments = SEEDS[kind]
    model = getattr(transformers, kind)(getattr(transformers, config)(**arguments)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


def state(model: Any, number: int) -> dict[str, torch.Tensor]:
    """An owner's feed-forward parameters: the seed's, changed."""
    torch.manual_seed(100 + number)
    found = dict(model.named_parameters())
    names = moe.feed_forward_names(model)
    return {name: found[name].detach() + 0.3 * torch.randn_like(found[name]) for name in names}


def unified(kind: str = "LlamaForCausalLM", *, owners: int = 3, blend: float | None = 0.4, **options: Any) -> Any:
    """A unified model with a random router, in evaluation mode."""
    dense = seed(kind)
    model = moe.unify(dense, {f"owner {n}": state(dense, n) for n in range(owners)}, **options)
    count = owners + bool(options.get("fallback"))
    moe.set_router(model, router_vectors(model, count), blend=blend if model.config.context != "none" else None)
    return model


def router_vectors(model: Any, count: int) -> list[torch.Tensor]:
    """Random vectors under which every expert is used."""
    torch.manual_seed(7)
    return [torch.randn(count, model.config.hidden_size) for _ in build.routed(model)]


def words(batch: int, length: int, number: int = 0) -> torch.Tensor:
    """Random token ids without the padding id."""
    return torch.randint(2, WORDS, (batch, length), generator=torch.Generator().manual_seed(number))


def inputs(model: Any, batch: int = 2) -> dict[str, torch.Tensor]:
    """Something that the model takes."""
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(3))}
    return {"input_ids": words(batch, 9)}
