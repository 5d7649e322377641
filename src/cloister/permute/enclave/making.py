"""Make the enclave's bundle from the plain model and the drawn orders. The model developer runs this."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cloister.errors import UnsupportedModel
from cloister.permute.enclave.bundle import Bundle
from cloister.permute.enclave.host import form_of_model, parts_of

Order = NDArray[np.integer[Any]]


def make_bundle(plain: nn.Module, order: Order, output_order: Order) -> Bundle:
    """The bundle for `plain`; the server's feature j is plain feature `order[j]`, its output j is `output_order[j]`."""
    form = form_of_model(plain)
    parts = parts_of(plain)
    outer: Any = plain
    features = torch.as_tensor(np.asarray(order, np.int64))
    tensors: dict[str, torch.Tensor | None] = {}
    settings: dict[str, float] = {}
    norm: Any = parts.final_norm
    tensors["final_norm_weight"], tensors["final_norm_bias"] = norm.weight, getattr(norm, "bias", None)
    if parts.vision:
        _vision(tensors, settings, parts.embeddings)
        block: Any = parts.attention_block
        tensors["attention_output_bias"] = (block.o_proj if hasattr(block, "o_proj") else block.out_proj).bias
        settings["entrance_eps"] = _first_norm_eps(plain, form.family)
    elif form.family == "bert":
        embeddings: Any = parts.embeddings[0]
        tensors["embedding"] = embeddings.word_embeddings.weight
        tensors["position"] = embeddings.position_embeddings.weight
        tensors["type_row"] = embeddings.token_type_embeddings.weight[0]
        _norm(tensors, settings, embeddings.LayerNorm)
    else:
        tensors["embedding"] = outer.get_input_embeddings().weight
        if form.family == "gpt2":
            positions: Any = parts.silenced[0]
            tensors["position"] = positions.weight
        block = parts.attention_block
        output = block.c_proj if hasattr(block, "c_proj") else block.o_proj
        tensors["attention_output_bias"] = output.bias
        settings["entrance_eps"] = _first_norm_eps(plain, form.family)
    arrays = {
        name: np.ascontiguousarray(tensor.detach().float()[..., features].numpy())
        for name, tensor in tensors.items()
        if tensor is not None
    }
    arrays["output_order"] = np.argsort(np.asarray(output_order)).astype(np.int32)
    head = _head(outer)
    if head is not None and getattr(head, "bias", None) is not None:
        arrays["output_bias"] = head.bias.detach().float()[torch.as_tensor(np.asarray(output_order, np.int64))].numpy()
    return Bundle(form, int(features.numel()), final_norm_eps=_eps(norm), tensors=arrays, **settings)


def _vision(tensors: dict[str, Any], settings: dict[str, float], embeddings: tuple[nn.Module, ...]) -> None:
    first: Any = embeddings[0]
    if hasattr(first, "patch_embeddings"):  # ViT
        projection, tensors["class_row"] = first.patch_embeddings.projection, first.cls_token.reshape(-1)
        tensors["position"] = first.position_embeddings[0]
    else:
        projection, tensors["class_row"] = first.patch_embedding, first.class_embedding
        tensors["position"] = first.position_embedding.weight
        _norm(tensors, settings, embeddings[1])
    tensors["patch_weight"] = projection.weight.reshape(projection.weight.shape[0], -1).T
    tensors["patch_bias"] = projection.bias


def _norm(tensors: dict[str, Any], settings: dict[str, float], norm: Any) -> None:
    tensors["embedding_norm_weight"], tensors["embedding_norm_bias"] = norm.weight, norm.bias
    settings["embedding_norm_eps"] = _eps(norm)


def _eps(norm: Any) -> float:
    return float(getattr(norm, "eps", None) or norm.variance_epsilon)


def _first_norm_eps(plain: nn.Module, family: str) -> float:
    wanted = {"gpt2": "h.0.ln_1", "vit": "0.layernorm_before", "clip_vision_model": "0.layer_norm1"}.get(
        family, "0.input_layernorm"
    )
    for name, module in plain.named_modules():
        if name.endswith(wanted):
            return _eps(module)
    raise UnsupportedModel("The norm at the first layer's entrance is not where it should be.")


def _head(model: Any) -> Any:
    for name in ("lm_head", "classifier", "visual_projection"):
        if isinstance(getattr(model, name, None), nn.Module):
            return getattr(model, name)
    return None
