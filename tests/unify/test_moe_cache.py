"""A causal router's running mean lives in the KV cache: token by token, in pieces, with beams, cropped, static."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tiny_unified import unified, words  # noqa: E402

from cloister.errors import UnsupportedParameter  # noqa: E402

DECODERS = ["LlamaForCausalLM", "GPT2LMHeadModel", "MistralForCausalLM", "Qwen2ForCausalLM", "GPTNeoXForCausalLM"]
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 2e-5}


def in_pieces(model: Any, ids: Any, sizes: list[int], cache: Any = None, mask: Any = None) -> tuple[Any, Any]:
    """Logits of `ids` computed a few tokens at a time, and the cache."""
    found, at = [], 0
    for size in sizes:
        part = ids[:, at : at + size]
        known = None if mask is None else mask[:, : at + part.shape[1]]
        output = model(input_ids=part, past_key_values=cache, use_cache=True, attention_mask=known)
        cache, at = output.past_key_values, at + part.shape[1]
        found.append(output.logits)
    return torch.cat(found, 1), cache


@pytest.mark.parametrize("kind", DECODERS)
def test_token_by_token_is_one_pass(kind: str) -> None:
    model, ids = unified(kind), words(2, 12)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        assert torch.allclose(in_pieces(model, ids, [1] * 12)[0], whole, **CLOSE)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), static=st.booleans(), number=st.integers(0, 50))
def test_any_pieces_and_either_cache_are_one_pass(sizes: list[int], static: bool, number: int) -> None:
    from transformers import DynamicCache, StaticCache

    model, ids = unified(), words(2, sum(sizes), number)
    cache: Any = StaticCache(config=model.config, max_cache_len=32) if static else DynamicCache()
    with torch.no_grad():
        assert torch.allclose(in_pieces(model, ids, sizes, cache)[0], model(input_ids=ids).logits, **CLOSE)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "MistralForCausalLM"])
@pytest.mark.parametrize("implementation", [None, "static"])
def test_generate_is_the_same_as_recomputing_each_time(kind: str, implementation: str | None) -> None:
    model, ids = unified(kind), torch.cat([torch.zeros(1, 3, dtype=torch.long), words(1, 7)], 1)
    mask = torch.tensor([[0, 0, 0] + [1] * 7])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=mask, cache_implementation=implementation, **options)
    slow = ids[:, 3:]
    with torch.no_grad():
        for _ in range(8):
            slow = torch.cat([slow, model(input_ids=slow, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert found[:, 3:].tolist() == slow.tolist()


def test_a_static_cache_can_be_used_again() -> None:
    model, ids = unified(), words(1, 5)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": "static", "attention_mask": torch.ones_like(ids)}
    first = model.generate(ids, **options)
    model.generate(words(1, 5, 9), **options)
    assert model.generate(ids, **options).tolist() == first.tolist()


def test_beams_carry_their_sums_with_them() -> None:
    model, ids = unified(), words(2, 6)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
    options |= {"attention_mask": torch.ones_like(ids)}
    assert model.generate(ids, **options).tolist() == model.generate(ids, use_cache=False, **options).tolist()


def test_cropping_selecting_and_repeating_rows() -> None:
    model, ids, more = unified(), words(3, 8), words(3, 4, 5)
    with torch.no_grad():
        _, cache = in_pieces(model, ids, [8])
        cache.crop(-3)
        found, cache = in_pieces(model, more, [2, 2], cache)
        assert torch.allclose(found, model(input_ids=torch.cat([ids[:, :5], more], 1)).logits[:, 5:], **CLOSE)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        rows = torch.tensor([2, 2, 0, 0])
        last = words(4, 1, 8)
        whole = model(input_ids=torch.cat([ids[rows, :5], more[rows], last], 1)).logits[:, -1:]
        assert torch.allclose(in_pieces(model, last, [1], cache)[0], whole, **CLOSE)


def test_prompts_of_mixed_lengths_continue_after_padding_on_the_right() -> None:
    model = unified("GPTNeoXForCausalLM")
    ids, mask = words(2, 6), torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6])
    more = words(2, 2, 4)
    full = torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], 1)
    positions = torch.tensor([[3, 4], [6, 7]])
    with torch.no_grad():
        cache = model(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values
        output = model(input_ids=more, attention_mask=full, position_ids=positions, past_key_values=cache)
        alone = model(input_ids=torch.cat([ids[:1, :3], more[:1]], 1)).logits[0, 3:]
        assert torch.allclose(output.logits[0], alone, **CLOSE)


def test_caches_that_cannot_carry_the_sums_are_refused() -> None:
    from transformers import DynamicCache, EncoderDecoderCache

    model, ids = unified(), words(1, 4)
    with pytest.raises(UnsupportedParameter, match="no place"):
        model(input_ids=ids, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()))
    offloaded = DynamicCache()
    offloaded.offloading = True  # without a GPU it cannot be made
    with pytest.raises(UnsupportedParameter, match="offloading"):
        model(input_ids=ids, past_key_values=offloaded)
    foreign = unified(context="none")(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(UnsupportedParameter, match="filled without"):
        model(input_ids=ids, past_key_values=foreign)


def test_a_pass_leaves_one_layer_behind_the_models_own() -> None:
    model = unified()
    cache = model(input_ids=words(2, 4), use_cache=True).past_key_values
    layers, experts = model.config.num_hidden_layers, len(model.model.layers[0].mlp.experts)
    assert len(cache.layers) == layers + 1
    assert cache.layers[layers].keys.shape == (2, 1, 4, layers * (experts + 1))


def test_blocks_that_are_passed_over_leave_nothing_to_go_on_with() -> None:
    """Who replaces a block, to see what it does, may compute and train; only going on needs all blocks' sums."""
    model, ids = unified(), words(1, 4)
    whole = model(input_ids=ids).past_key_values
    model.model.layers[0].mlp = torch.nn.Identity()
    model(input_ids=ids).logits.sum().backward()
    with torch.no_grad():
        begun = model(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(UnsupportedParameter, match="filled without"):
            model(input_ids=ids, past_key_values=begun)
        model(input_ids=ids, past_key_values=whole)
        with pytest.raises(UnsupportedParameter, match="has not all"):
            model(input_ids=ids, past_key_values=whole)


def test_what_a_failed_pass_left_is_not_gone_on_with() -> None:
    model, ids = unified(), words(1, 9)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :6], use_cache=True).past_key_values
        broken = model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=ids[:, 6:], past_key_values=cache)
        broken.remove()
        for undone in (0, 3):  # attention has kept its part of the failed pass
            if undone:
                cache.crop(-undone)
            with pytest.raises(UnsupportedParameter, match="has not all"):
                model(input_ids=ids[:, 6:], past_key_values=cache)


def test_a_cache_of_a_model_with_more_experts_is_refused() -> None:
    from cloister.unify.moe import passes

    model, ids = unified(), words(1, 4)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    passes.check_cache(cache, 2, 3)
    with pytest.raises(UnsupportedParameter, match="has not all"):
        passes.check_cache(cache, 2, 4)


def test_leaving_early_and_a_model_with_layers_cut_off() -> None:
    """transformers sets `num_hidden_layers` anew while it drafts with the first layers only."""
    model, ids = unified(), words(1, 7)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, assistant_early_exit=1, **options)
    assert found.tolist() == model.generate(ids, **options).tolist()
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    cut = model.generate(ids, **options)
    assert cut.tolist() == model.generate(ids, use_cache=False, **options).tolist()


def test_a_context_free_model_leaves_the_cache_as_it_is() -> None:
    model = unified(context="none")
    cache = model(input_ids=words(1, 4), use_cache=True).past_key_values
    assert len(cache.layers) == model.config.num_hidden_layers
