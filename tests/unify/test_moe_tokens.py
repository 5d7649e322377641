"""Sequences that are packed, masked in four dimensions or batched continuously: the router sees what attention sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tiny_unified import inputs, seed, state, unified, words  # noqa: E402

import cloister.unify.moe as moe  # noqa: E402
from cloister.errors import InvalidParameter, UnsupportedParameter  # noqa: E402
from cloister.unify.moe import passes, products, tokens  # noqa: E402
from cloister.unify.moe.routing import RoutedFeedForward  # noqa: E402

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 2e-5}
FEW = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
EAGER = SimpleNamespace(_attn_implementation="eager")
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def packed(lengths: list[int], number: int) -> tuple[Any, Any, list[Any]]:
    """Sequences in one row, their positions, and each for itself."""
    alone = [words(1, length, number + 31 * index) for index, length in enumerate(lengths)]
    return torch.cat(alone, 1), torch.cat([torch.arange(n) for n in lengths])[None], alone


def same_sequence(lengths: list[int], causal: bool) -> Any:
    """The attention mask [1, 1, tokens, tokens] of packed sequences."""
    which = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = which[:, None] == which
    return (seen.tril() if causal else seen)[None, None]


# ---- packed rows ------------------------------------------------------------------------------------------------


@FEW
@given(lengths=LENGTHS, number=st.integers(0, 99), kind=st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM"]))
def test_sequences_in_one_row_do_not_see_each_other(lengths: list[int], number: int, kind: str) -> None:
    """Positions that begin again, as `DataCollatorWithFlattening` gives them."""
    model = unified(kind)
    ids, positions, alone = packed(lengths, number)
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        expected = torch.cat([model(input_ids=one).logits for one in alone], 1)
    assert torch.allclose(together, expected, **CLOSE)


@FEW
@given(lengths=LENGTHS, number=st.integers(0, 99), cached=st.booleans())
def test_packed_by_a_mask_of_four_dimensions(lengths: list[int], number: int, cached: bool) -> None:
    model = unified()
    ids, positions, alone = packed(lengths, number)
    mask = same_sequence(lengths, causal=True)
    with torch.no_grad():
        output = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=cached)
        expected = torch.cat([model(input_ids=one).logits for one in alone], 1)
        assert torch.allclose(output.logits, expected, **CLOSE)
        if cached:  # the last sequence goes on
            more = words(1, 2, number + 7)
            seen = torch.cat([mask[:, :, -1:, :].expand(-1, -1, 2, -1), torch.ones(2, 2).tril()[None, None].bool()], 3)
            last = lengths[-1]
            output = model(
                input_ids=more, position_ids=torch.tensor([[last, last + 1]]), attention_mask=seen,
                past_key_values=output.past_key_values,
            )  # fmt: skip
            expected = model(input_ids=torch.cat([alone[-1], more], 1)).logits[:, -2:]
            assert torch.allclose(output.logits, expected, **CLOSE)


@FEW
@given(lengths=LENGTHS, number=st.integers(0, 99))
def test_an_encoder_packed_by_a_mask(lengths: list[int], number: int) -> None:
    model = unified("BertModel")
    ids, positions, alone = packed(lengths, number)
    mask = torch.where(same_sequence(lengths, causal=False), 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions, attention_mask=mask).last_hidden_state
        expected = torch.cat([model(input_ids=one).last_hidden_state for one in alone], 1)
    assert torch.allclose(together, expected, **CLOSE)


def test_lengths_told_to_flash_attention_are_starts() -> None:
    ends = torch.tensor([0, 2, 5, 6], dtype=torch.int32)
    real, starts = tokens.understand({"input_ids": words(1, 6), "cu_seq_lens_q": ends}, None, EAGER)
    assert real is None and starts is not None and starts.tolist() == [[True, False, True, False, False, True]]
    flash = SimpleNamespace(_attn_implementation="flash_attention_2")
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    told = {"input_ids": words(1, 5), "position_ids": positions}
    assert tokens.understand(told, object(), EAGER) == (None, None)  # a cache: transformers does not look either
    _, starts = tokens.understand(told, object(), flash)
    assert starts is not None and starts.tolist() == [[False, False, True, False, False]]


def test_orders_that_a_mean_cannot_have_are_refused() -> None:
    tree = torch.ones(3, 3).tril().bool()
    tree[2, 1] = False  # two drafts of the second token
    with pytest.raises(InvalidParameter, match="tree of drafts"):
        unified()(input_ids=words(1, 3), attention_mask=tree[None, None])
    paged = SimpleNamespace(_attn_implementation="paged|sdpa")
    with pytest.raises(UnsupportedParameter, match="continuous batching"):
        tokens.understand({"input_ids": words(1, 3)}, None, paged)


def test_padded_patches_are_padding() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    real, _ = tokens.understand({"pixel_values": torch.zeros(2, 3, 4), "pixel_attention_mask": mask}, None, EAGER)
    assert real is not None and real.tolist() == mask.bool().tolist()
    assert tokens.understand({"pixel_values": torch.zeros(2, 3, 4)}, None, EAGER) == (None, None)


# ---- padding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["sequence", "none"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_no_expert_computes_padding(context: Any, top_k: int) -> None:
    model = unified("BertModel", context=context, top_k=top_k)
    seen: list[int] = []
    for block in (part for part in model.modules() if isinstance(part, RoutedFeedForward)):
        for expert in block.experts:
            expert.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    mask = torch.tensor([[1] * 3 + [0] * 6, [1] * 5 + [0] * 4])
    with torch.no_grad():
        model(input_ids=words(2, 9), attention_mask=mask)
    assert sum(seen) == top_k * 8 * 2  # real tokens, layers


def test_a_row_of_nothing_but_padding_and_an_empty_batch() -> None:
    model = unified("BertModel")
    ids, mask = words(2, 4), torch.tensor([[0] * 4, [1] * 4])
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask).last_hidden_state[1]
        assert torch.allclose(found, model(input_ids=ids[1:]).last_hidden_state[0], **CLOSE)
        assert model(input_ids=ids, attention_mask=torch.zeros(2, 4)).last_hidden_state.shape == (2, 4, 32)
    block = next(part for part in model.modules() if isinstance(part, RoutedFeedForward))
    assert block(torch.zeros(0, 4, 32)).shape == (0, 4, 32)


def test_one_row_of_positions_stands_for_all() -> None:
    model, ids, positions = unified(), words(2, 5), torch.tensor([[0, 1, 0, 1, 2]])
    with torch.no_grad():
        one = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        both = model(input_ids=ids, position_ids=positions.expand(2, -1), use_cache=False).logits
    assert torch.equal(one, both)


def test_tokens_that_appear_on_the_way_are_noticed() -> None:
    block = next(part for part in unified("BertModel").modules() if isinstance(part, RoutedFeedForward))
    with (
        passes.passing(passes.Pass(real=torch.ones(2, 5).bool())),
        pytest.raises(InvalidParameter, match="adds, drops or flattens"),
    ):
        block(torch.zeros(2, 6, 32))
    with pytest.raises(InvalidParameter, match="flattens"):
        block(torch.zeros(12, 32))


# ---- how it computes --------------------------------------------------------------------------------------------


def test_the_router_stays_single_under_autocast() -> None:
    model = unified()
    with torch.no_grad(), moe.record() as plain:
        model(input_ids=words(1, 9))
    with torch.no_grad(), moe.record() as mixed, torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=words(1, 9))
    assert mixed.weights[0].dtype == torch.float32
    block = next(part for part in model.modules() if isinstance(part, RoutedFeedForward))
    z = torch.randn(1, 9, 32)
    with torch.no_grad():
        expected = block.router(z)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(block.router(z), expected)
    assert plain.weights[0].shape == mixed.weights[0].shape


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertModel", "ViTModel", "GPT2LMHeadModel"])
@pytest.mark.parametrize("count", [1, products.FEWEST, 40, products.MOST, products.MOST + 1])
def test_the_transposed_product_is_the_product(kind: str, count: int) -> None:
    block = next(part for part in unified(kind).modules() if isinstance(part, RoutedFeedForward))
    rows = torch.randn(count, 32)
    with torch.no_grad():
        assert torch.allclose(products.applied(block.experts[0], rows), block.experts[0](rows), **CLOSE)
    assert products.applied(block.experts[0], rows).requires_grad


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 2}, {"assistant_model": "seed"}])
def test_drafts_that_are_taken_back_leave_no_trace(options: dict[str, Any]) -> None:
    """Assisted decoding crops the cache, and the running sums with it."""
    model = unified()
    ids = words(1, 4).repeat(1, 3)
    if "assistant_model" in options:
        options = {"assistant_model": seed()}
    common: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    common["attention_mask"] = torch.ones_like(ids)
    assert model.generate(ids, **common, **options).tolist() == model.generate(ids, **common).tolist()


# ---- encoders that are decoders, and the other way about ---------------------------------------------------------


def test_switches_that_turn_an_architecture_round_are_followed() -> None:
    own = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    decoder = transformers.BertModel(transformers.BertConfig(**own, vocab_size=97, is_decoder=True))
    assert moe.unify(decoder, {"a": state(decoder, 0)}).config.context == "prefix"
    wide = transformers.Gemma3TextConfig(
        **own, vocab_size=97, num_key_value_heads=2, head_dim=8, use_bidirectional_attention=True
    )
    encoder = transformers.Gemma3TextModel(wide)
    assert moe.unify(encoder, {"a": state(encoder, 0)}).config.context == "sequence"


def test_nobody_before_a_token_learns_of_it() -> None:
    """Causality, for every kind of decoder that is listed: a later token changes nothing before it."""
    for kind in ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "FalconForCausalLM"):
        model = unified(kind)
        one, other = words(1, 8), words(1, 8)
        other[0, 5] = (other[0, 5] + 1) % 90 + 2
        with torch.no_grad():
            a, b = model(input_ids=one).logits, model(input_ids=other).logits
        assert torch.allclose(a[:, :5], b[:, :5], **CLOSE) and not torch.allclose(a[:, 5:], b[:, 5:], **CLOSE)


def test_every_input_of_the_tiny_models_is_understood() -> None:
    for kind in ("Dinov2Model", "SiglipVisionModel", "ModernBertModel", "DistilBertModel"):
        model = unified(kind)
        with torch.no_grad():
            assert torch.isfinite(model(**inputs(model))[0]).all()
