"""Tiny random models of every family, a plain residual permutation of them, and an enclave process for each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cloister.permute.enclave.bundle import Bundle  # noqa: E402
from cloister.permute.enclave.client import EnclaveProcess  # noqa: E402
from cloister.permute.enclave.host import EnclavedModel  # noqa: E402
from cloister.permute.enclave.making import make_bundle  # noqa: E402

HIDDEN = 40  # no other dimension has this size, so an axis of this size is the residual stream (but see INNER)
VOCABULARY = 96
SHAPE = {
    "hidden_size": HIDDEN, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **SHAPE, "num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
VISION = {
    "hidden_size": HIDDEN, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 5, "image_size": 12,
    "patch_size": 4, "num_channels": 3,
}  # fmt: skip
# Projections whose other axis has the hidden size by chance: only this axis is the residual stream's.
INNER = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "query": 1, "key": 1, "value": 1, "o_proj": 0, "out_proj": 0,
         "attention.output.dense": 0, "attn.c_proj": 1, "visual_projection": 1}  # fmt: skip


def _t(name: str) -> Any:
    return getattr(transformers, name)


def _llama_like(name: str, **more: Any) -> Callable[[], Any]:
    return lambda: _t(f"{name}ForCausalLM")(_t(f"{name}Config")(**{**SHAPE, **more}))


def _bert() -> Any:
    config = _t("BertConfig")(
        hidden_size=HIDDEN, intermediate_size=56, num_hidden_layers=2, num_attention_heads=5, vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )  # fmt: skip
    return _t("BertModel")(config, add_pooling_layer=False)


def _bert_without_biases() -> Any:
    model = _bert()
    with torch.no_grad():
        for layer in model.encoder.layer:
            attention = layer.attention
            for part in (attention.self.query, attention.self.key, attention.self.value, attention.output.dense):
                part.bias.zero_()
    return model


def _gpt2() -> Any:
    return _t("GPT2LMHeadModel")(
        _t("GPT2Config")(n_embd=HIDDEN, n_layer=2, n_head=5, vocab_size=VOCABULARY, n_positions=64, n_inner=56)
    )


def _llava() -> Any:
    text = _t("LlamaConfig")(**SHAPE)
    vision = _t("CLIPVisionConfig")(**{**VISION, "hidden_size": 30})
    return _t("LlavaForConditionalGeneration")(
        _t("LlavaConfig")(vision_config=vision, text_config=text, image_token_index=95)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama": _llama_like("Llama"),
    "mistral": _llama_like("Mistral", sliding_window=5),
    "qwen2": _llama_like("Qwen2"),
    "qwen3": _llama_like("Qwen3"),
    "mixtral": _llama_like("Mixtral", num_local_experts=4),
    "qwen2_moe": _llama_like("Qwen2Moe", shared_expert_intermediate_size=20, **EXPERTS),
    "qwen3_moe": _llama_like("Qwen3Moe", **EXPERTS),
    "olmoe": lambda: _t("OlmoeForCausalLM")(
        _t("OlmoeConfig")(**{**SHAPE, "num_key_value_heads": 4, "head_dim": 10}, num_experts=4, num_experts_per_tok=2)
    ),
    "deepseek_v2": lambda: _t("DeepseekV2ForCausalLM")(_t("DeepseekV2Config")(**LATENT)),
    "deepseek_v3": lambda: _t("DeepseekV3ForCausalLM")(_t("DeepseekV3Config")(**LATENT)),
    "llava": _llava,
    "vit": lambda: _t("ViTForImageClassification")(_t("ViTConfig")(**VISION, num_labels=7)),
    "clip": lambda: _t("CLIPVisionModelWithProjection")(_t("CLIPVisionConfig")(**VISION, projection_dim=22)),
    "bert without biases": _bert_without_biases,
}


def tiny(name: str) -> Any:
    """A tiny random model. Norm weights and biases are made uneven, so that a wrong order cannot go unnoticed."""
    torch.manual_seed(7)
    model = (MODELS | {"bert": _bert})[name]().float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key.lower() or ".ln_" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif key.endswith("bias") and name != "bert without biases":
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(3)  # the classes' initialisation is so small that attention would be uniform
    return model


def permuted(model: Any, order: np.ndarray, outputs: np.ndarray) -> Any:
    """The server's model: residual features and outputs in another order."""
    server = copy.deepcopy(model)
    features = torch.as_tensor(order)
    head = next(
        (h for n in ("lm_head", "classifier", "visual_projection") if (h := getattr(server, n, None)) is not None), None
    )
    if head is not None:
        head.weight = torch.nn.Parameter(head.weight.detach()[torch.as_tensor(outputs)])
        if head.bias is not None:
            head.bias = torch.nn.Parameter(head.bias.detach()[torch.as_tensor(outputs)])
    with torch.no_grad():
        for name, parameter in server.named_parameters():
            stem, _, leaf = name.rpartition(".")
            if stem.endswith(("q_norm", "k_norm")) or "vision_tower" in stem:  # other axes than the residual stream's
                continue
            inner = next((axis for part, axis in INNER.items() if stem.endswith(part)), None)
            if (
                leaf == "bias"
                and inner is not None
                and stem.split(".")[-1] in {"q_proj", "k_proj", "v_proj", "query", "key", "value"}
            ):
                continue
            axes = (
                [inner]
                if inner is not None and leaf == "weight"
                else [a for a, n in enumerate(parameter.shape) if n == HIDDEN]
            )
            for axis in axes:
                parameter.copy_(parameter.index_select(axis, features))
    return server


@dataclass
class Served:
    """A plain model, its permuted server wired to an enclave process, and what the enclave was given."""

    name: str
    plain: Any
    server: Any
    bundle: Bundle
    enclave: EnclaveProcess
    wired: EnclavedModel

    @property
    def vision(self) -> bool:
        return self.name in ("vit", "clip")

    def values(self, batch: int = 2, rows: int = 9) -> np.ndarray:
        """Random token ids, or pictures cut into patches."""
        draw = np.random.default_rng(5)
        if self.vision:
            return draw.standard_normal((batch, 9, 48)).astype(np.float32)
        return draw.integers(3, 90, (batch, rows), dtype=np.int32)

    def expected_rows(self, values: np.ndarray) -> np.ndarray:
        """The rows behind the embedding in the server's feature order, without any scaling."""
        from cloister.permute.enclave.functions import Functions

        return Functions(self.bundle)._plain_rows(values, 0)

    def expected(self, values: np.ndarray) -> Any:
        """The plain model's answer."""
        with torch.inference_mode():
            if self.vision:
                # patches [batch, 9, 3*4*4] back to a picture
                picture = (
                    torch.from_numpy(values).view(-1, 3, 3, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, 12, 12)
                )
                result = self.plain(pixel_values=picture)
                return (result.logits if self.name == "vit" else result.image_embeds)[:, None]
            result = self.plain(input_ids=torch.from_numpy(values).long())
            return result.last_hidden_state if self.name.startswith("bert") else result.logits


def serve(name: str, directory: Path) -> Served:
    plain = tiny(name)
    draw = np.random.default_rng(3)
    order = draw.permutation(HIDDEN)
    sizes = {"vit": 7, "clip": 22, "bert without biases": HIDDEN}
    outputs = order if name.startswith("bert") else draw.permutation(sizes.get(name, VOCABULARY))
    bundle = make_bundle(plain, order, outputs)
    bundle.write(directory)
    server = permuted(plain, order, outputs)
    enclave = EnclaveProcess(directory)
    return Served(name, plain, server, bundle, enclave, EnclavedModel(server, enclave))
