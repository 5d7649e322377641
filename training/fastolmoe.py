"""A training forward pass for transformers' OlmoeForCausalLM that is quick on one processor core.

It reads the parameters of the stock model and computes the same function (`check_equal` compares the
two), but sorts tokens by expert once per layer, slices the fused expert weights with one `unbind`, and
keeps the router probabilities for a balance loss per layer. The stock balance loss mixes all layers,
so one layer may starve an expert that another layer overuses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import OlmoeConfig, OlmoeForCausalLM

from tokenizing import CONTEXT, EOS_ID, PAD_ID, VOCABULARY


def make_config() -> OlmoeConfig:
    """The architecture of the embedded model: 7.6 million parameters, 16 experts in each of 4 layers."""
    return OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=112,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=CONTEXT,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def rotary(config: OlmoeConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the rotary embedding, each of shape (length, head size)."""
    size = config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    frequency = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def document_mask(document: torch.Tensor) -> torch.Tensor:
    """True where a token may look: at itself and earlier tokens of its own document."""
    same = document[:, :, None] == document[:, None, :]
    return (same & torch.ones(same.shape[-2:], dtype=torch.bool).tril())[:, None]


def _norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _attention(module: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor, rope: tuple) -> torch.Tensor:
    rows, length, width = x.shape
    joint = F.linear(x, torch.cat((module.q_proj.weight, module.k_proj.weight, module.v_proj.weight)))
    q, k, v = joint.chunk(3, dim=-1)
    shape = (rows, length, -1, module.head_dim)
    q = _turn(_norm(module.q_norm, q).view(shape).transpose(1, 2), *rope)
    k = _turn(_norm(module.k_norm, k).view(shape).transpose(1, 2), *rope)
    out = F.scaled_dot_product_attention(q, k, v.reshape(shape).transpose(1, 2), attn_mask=mask)
    return F.linear(out.transpose(1, 2).reshape(rows, length, width), module.o_proj.weight)


def _experts(block: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mixture-of-experts block on (tokens, width); also returns router logits and chosen experts."""
    gate = block.gate
    logits = F.linear(x, gate.weight)
    scores, chosen = logits.softmax(dim=-1).topk(gate.top_k, dim=-1)
    if gate.norm_topk_prob:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    token = order // gate.top_k
    counts = torch.bincount(flat, minlength=gate.num_experts).tolist()
    outputs = []
    weights = zip(block.experts.gate_up_proj.unbind(0), block.experts.down_proj.unbind(0), strict=True)
    for part, (gate_up, down) in zip(x[token].split(counts), weights, strict=True):
        first, second = F.linear(part, gate_up).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(first) * second, down))
    weighted = torch.cat(outputs) * scores.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, token, weighted), logits, chosen


def hidden_states(
    model: OlmoeForCausalLM, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Final hidden states, and for every layer the router logits and the chosen experts."""
    config, inner = model.config, model.model
    rope = rotary(config, ids.shape[1])
    x = F.embedding(ids, inner.embed_tokens.weight)
    routing = []
    for layer in inner.layers:
        x = x + _attention(layer.self_attn, _norm(layer.input_layernorm, x), mask, rope)
        flat = _norm(layer.post_attention_layernorm, x).flatten(0, 1)
        out, logits, chosen = _experts(layer.mlp, flat)
        x = x + out.view_as(x)
        routing.append((logits, chosen))
    return _norm(inner.norm, x), routing


def balance_loss(routing: list[tuple[torch.Tensor, torch.Tensor]], real: torch.Tensor) -> torch.Tensor:
    """Switch-style balance loss, 1.0 when even, averaged over the layers and the real tokens."""
    total = torch.zeros(())
    for logits, chosen in routing:
        experts = logits.shape[-1]
        probability = logits[real].softmax(dim=-1).mean(dim=0)
        load = torch.bincount(chosen[real].flatten(), minlength=experts).float()
        total = total + experts * (probability * load / load.sum()).sum()
    return total / len(routing)


def check_equal(model: OlmoeForCausalLM) -> float:
    """Largest difference of the logits of the stock and the quick forward pass on random tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (2, 48), generator=generator)
    with torch.no_grad():
        quick, _ = hidden_states(model, ids, document_mask(torch.ones_like(ids)))
        quick = F.linear(quick, model.lm_head.weight)
        difference = (model(input_ids=ids).logits - quick).abs().max().item()
    if difference > 1e-3:
        raise RuntimeError(f"The quick forward pass differs from transformers by {difference}.")
    return difference
