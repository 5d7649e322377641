"""GPT-2: pre-norm with LayerNorm, learned positions, fused q/k/v, weights stored [in, out], head tied to the table."""

from __future__ import annotations

from cloister.families.decoder import IGNORABLE, Config
from cloister.families.layout import Heads, Layout, Neurons, Residual, Segment, Vocabulary

MODEL_TYPES = ("gpt2",)
ARCHITECTURES = ("GPT2LMHeadModel",)


def reasons_against(config: Config) -> list[str]:
    """What in this configuration the family cannot express."""
    reasons = []
    if config.get("add_cross_attention"):
        reasons.append("cross-attention is not supported")
    if config.get("scale_attn_by_inverse_layer_idx") and config.get("reorder_and_upcast_attn"):
        reasons.append("reorder_and_upcast_attn is not supported")
    return reasons


def layout(config: Config, names: frozenset[str]) -> Layout:
    """Where the parts are. Old checkpoints lack the `transformer.` prefix."""
    size, heads, vocabulary = config["n_embd"], config["n_head"], config["vocab_size"]
    inner = config.get("n_inner") or 4 * size
    prefix = "transformer." if not names or any(name.startswith("transformer.") for name in names) else ""
    model = Layout(family="gpt2", task="generate", ignorable=IGNORABLE)
    model.add(Residual("residual", size, "layer"), Vocabulary("vocabulary", vocabulary))
    residual, words = Segment("residual", size), Segment("vocabulary", vocabulary)
    model.embedding, model.head, model.output = f"{prefix}wte.weight", "lm_head.weight", "vocabulary"
    model.max_positions = config["n_positions"]
    model.table(model.embedding, words, residual)
    model.table(f"{prefix}wpe.weight", Segment(None, config["n_positions"]), residual)
    for index in range(config["n_layer"]):
        layer, space = f"{prefix}h.{index}", f"layer{index}"
        model.add(Heads(f"{space}.attention", heads, heads, size // heads, size // heads))
        model.add(Neurons(f"{space}.mlp", inner, gated=False))
        q, k, v, o = (Segment(f"{space}.attention.{part}", size) for part in "qkvo")
        neurons = Segment(f"{space}.mlp", inner)
        first = model.norm(f"{layer}.ln_1", residual, bias=True)
        model.linear(f"{layer}.attn.c_attn", (q, k, v), residual, norm=first, bias=True, transposed=True)
        model.linear(f"{layer}.attn.c_proj", residual, o, bias=True, transposed=True)
        second = model.norm(f"{layer}.ln_2", residual, bias=True)
        model.linear(f"{layer}.mlp.c_fc", neurons, residual, norm=second, bias=True, transposed=True)
        model.linear(f"{layer}.mlp.c_proj", residual, neurons, bias=True, transposed=True)
    final = model.norm(f"{prefix}ln_f", residual, bias=True)
    model.linear("lm_head", words, residual, norm=final, optional=True)
    return model
