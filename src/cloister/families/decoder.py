"""What LLaMA-shaped decoders share: pre-norm layers, separate q/k/v/o projections, gated feed-forward blocks, experts.

A family file calls these with its own names and sizes; nothing here knows a model by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cloister.families.layout import Axis, Experts, Heads, Layout, Neurons, Residual, Segment, TensorSpec, Vocabulary

Config = Mapping[str, Any]
IGNORABLE = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "position_ids")


def rope_kind(config: Config) -> Literal["half", "fixed"]:
    """ "half" for full rotary heads; "fixed" where only a part of a head is turned, so that its insides stay put."""
    rope = config.get("rope_parameters") or {}
    factor = config.get(
        "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0) if isinstance(rope, dict) else 1.0
    )
    return "half" if factor in (None, 1, 1.0) else "fixed"


def start(config: Config, family: str, *, prefix: str = "model", head: str = "lm_head") -> tuple[Layout, Segment]:
    """A layout with residual stream, vocabulary, token table, final norm and head."""
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    layout = Layout(family=family, task="generate", ignorable=IGNORABLE)
    layout.add(Residual("residual", size, "rms"), Vocabulary("vocabulary", vocabulary))
    residual, words = Segment("residual", size), Segment("vocabulary", vocabulary)
    layout.embedding, layout.head, layout.output = f"{prefix}.embed_tokens.weight", f"{head}.weight", "vocabulary"
    layout.table(layout.embedding, words, residual)
    final = layout.norm(f"{prefix}.norm", residual)
    layout.linear(head, words, residual, norm=final, optional=True)
    layout.max_positions = int(config.get("max_position_embeddings") or 0)
    return layout, residual


def attention(
    layout: Layout,
    name: str,
    space: str,
    config: Config,
    residual: Segment,
    norm: str,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: Literal["none", "head", "all"] = "none",
) -> None:
    """Declare q_proj, k_proj, v_proj, o_proj and, if any, q_norm and k_norm under `name`."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    clipped = config.get("clip_qkv") is not None
    layout.add(Heads(space, heads, kv_heads, size, size, rope=rope_kind(config), qk_norm=qk_norm, clipped=clipped))
    q, o = Segment(f"{space}.q", heads * size), Segment(f"{space}.o", heads * size)
    k, v = Segment(f"{space}.k", kv_heads * size), Segment(f"{space}.v", kv_heads * size)
    layout.linear(f"{name}.q_proj", q, residual, norm=norm, bias=qkv_bias)
    layout.linear(f"{name}.k_proj", k, residual, norm=norm, bias=qkv_bias)
    layout.linear(f"{name}.v_proj", v, residual, norm=norm, bias=qkv_bias)
    layout.linear(f"{name}.o_proj", residual, o, bias=out_bias)
    if qk_norm == "all":
        layout.norm(f"{name}.q_norm", q, foldable=False)
        layout.norm(f"{name}.k_norm", k, foldable=False)
    elif qk_norm == "head":
        layout.norm(f"{name}.q_norm", Segment(None, size), foldable=False)
        layout.norm(f"{name}.k_norm", Segment(None, size), foldable=False)


def gated_block(
    layout: Layout,
    name: str,
    space: str,
    size: int,
    residual: Segment,
    norm: str,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
    expert: tuple[str, int] | None = None,
    optional: bool = False,
) -> None:
    """Declare down(act(gate(x)) * up(x)) under `name`."""
    layout.add(Neurons(space, size, gated=True))
    gate, up = Segment(space, size), Segment(f"{space}.up", size)
    layout.linear(f"{name}.{names[0]}", gate, residual, norm=norm, bias=bias, expert=expert, optional=optional)
    layout.linear(f"{name}.{names[1]}", up, residual, norm=norm, bias=bias, expert=expert, optional=optional)
    layout.linear(f"{name}.{names[2]}", residual, up, bias=bias, expert=expert, optional=optional)


def experts(
    layout: Layout,
    name: str,
    space: str,
    count: int,
    size: int,
    residual: Segment,
    norm: str,
    *,
    fused_name: str | None = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    groups: int = 1,
) -> None:
    """Declare `count` gated experts in both forms that occur on disk: one tensor per expert
    (`name.E.gate_proj.weight`) and
    the fused form of transformers 5 (`fused_name.gate_up_proj` [E, 2m, d] and `fused_name.down_proj` [E, d, m])."""
    layout.add(Experts(space, count, groups))
    for index in range(count):
        gated_block(
            layout, f"{name}.{index}", f"{space}.{index}", size, residual, norm,
            names=names, expert=(space, index), optional=True,
        )  # fmt: skip
    fused = fused_name or name
    up_specs, down_specs = [], []
    for index in range(count):
        gate, up = Segment(f"{space}.{index}", size), Segment(f"{space}.{index}.up", size)
        up_specs.append(TensorSpec((Axis("out", (gate, up)), Axis("in", (residual,))), norm=norm))
        down_specs.append(TensorSpec((Axis("out", (residual,)), Axis("in", (up,)))))
    layout.tensors[f"{fused}.gate_up_proj"] = TensorSpec((), stacked=(space, tuple(up_specs)), norm=norm, optional=True)
    layout.tensors[f"{fused}.down_proj"] = TensorSpec((), stacked=(space, tuple(down_specs)), optional=True)


def router(layout: Layout, name: str, space: str, count: int, residual: Segment, norm: str) -> None:
    """Declare the linear that scores the experts."""
    layout.linear(name, Segment(space, count), residual, norm=norm, router=True)
