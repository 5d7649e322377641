"""The router and the routed block against slow twins; padding, batch mates and threads change nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tiny_unified import inputs, unified, words  # noqa: E402

import cloister.unify.moe as moe  # noqa: E402
from cloister.errors import InvalidParameter  # noqa: E402
from cloister.unify.moe import passes  # noqa: E402
from cloister.unify.moe.routing import RoutedFeedForward, Router  # noqa: E402

FEW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 2e-5}


def random_router(context: Any, experts: int = 3, hidden: int = 8) -> Router:
    router = Router(hidden, experts, context, layer=0)
    torch.nn.init.normal_(router.vectors)
    if router.blend is not None:
        torch.nn.init.constant_(router.blend, 0.7)
    return router


def slow_router(router: Router, z: Any, real: Any) -> Any:
    """Equation 7 as it is written, token by token."""
    result = torch.zeros(*z.shape[:2], router.vectors.shape[0])
    share = 0.0 if router.blend is None else float(torch.sigmoid(router.blend.detach()))
    for row in range(z.shape[0]):
        for at in range(z.shape[1]):
            seen = range(z.shape[1]) if router.context == "sequence" else range(at + 1)
            those = [z[row, t] for t in seen if real[row, t]]
            mean = torch.stack(those).mean(0) if those else torch.zeros(z.shape[2])
            blended = (1 - share) * z[row, at] + share * mean
            result[row, at] = torch.softmax(router.vectors.detach() @ blended, 0)
    return result


@FEW
@given(data=st.data(), context=st.sampled_from(["sequence", "prefix", "none"]))
def test_the_router_is_equation_7_over_the_real_tokens(data: st.DataObject, context: Any) -> None:
    batch, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    real = torch.rand(batch, tokens) < 0.7
    router, z = random_router(context), torch.randn(batch, tokens, 8)
    with torch.no_grad(), passes.passing(passes.Pass(real=real)):
        found = router(z)
    assert torch.allclose(found, slow_router(router, z, real), atol=1e-5)


def test_numbers_that_are_not_finite_in_padding_reach_nobody() -> None:
    z, real = torch.randn(1, 4, 8), torch.tensor([[True, True, False, False]])
    z[0, 2:] = float("nan")
    for context in ("sequence", "prefix"):
        router: Any = random_router(context)
        with torch.no_grad(), passes.passing(passes.Pass(real=real)):
            assert torch.isfinite(router(z)[0, :2]).all()


@FEW
@given(top_k=st.integers(1, 4), rows=st.integers(1, 3), tokens=st.integers(1, 7), seed=st.integers(0, 50))
def test_the_block_is_the_weighted_sum_of_the_chosen_experts(top_k: int, rows: int, tokens: int, seed: int) -> None:
    torch.manual_seed(seed)
    experts = [torch.nn.Linear(8, 8) for _ in range(4)]
    block = RoutedFeedForward(experts, 8, top_k=top_k, context="none", layer=0)
    torch.nn.init.normal_(block.router.vectors)
    z = torch.randn(rows, tokens, 8)
    with torch.no_grad():
        weights, found = block.router(z), block(z)
        for row in range(rows):
            for at in range(tokens):
                best, chosen = weights[row, at].topk(top_k)
                slow = sum(w * experts[int(e)](z[row, at]) for w, e in zip(best, chosen, strict=True))
                assert torch.allclose(found[row, at], slow, atol=1e-5)


@pytest.mark.parametrize("kind", ["BertModel", "LlamaForCausalLM", "ViTForImageClassification"])
def test_router_and_blend_have_a_gradient_with_one_expert_a_token(kind: str) -> None:
    model = unified(kind, top_k=1)
    output = model(**inputs(model))[0]
    (output * torch.randn_like(output)).sum().backward()
    for block in (part for part in model.modules() if isinstance(part, RoutedFeedForward)):
        assert block.router.vectors.grad.abs().max() > 1e-7
        assert block.router.blend.grad.abs().max() > 1e-7
    first = next(part for part in model.modules() if isinstance(part, RoutedFeedForward))
    assert sum(any(p.grad is not None for p in e.parameters()) for e in first.experts) > 1


# ---- padding and batch mates ------------------------------------------------------------------------------------


def padded(lengths: list[int], side: str, number: int) -> tuple[Any, Any, list[Any]]:
    """Sequences of these lengths in one batch, its mask, and each for itself."""
    longest = max(lengths)
    alone = [words(1, length, number + 31 * index) for index, length in enumerate(lengths)]
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, one in enumerate(alone):
        place = slice(0, one.shape[1]) if side == "right" else slice(longest - one.shape[1], longest)
        ids[index, place], mask[index, place] = one[0], 1
    return ids, mask, alone


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@FEW
@given(lengths=LENGTHS, number=st.integers(0, 99), top_k=st.sampled_from([1, 2]))
def test_encoders_do_not_notice_padding_and_batch_mates(lengths: list[int], number: int, top_k: int) -> None:
    model = unified("BertModel", top_k=top_k)
    ids, mask, alone = padded(lengths, "right", number)
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask).last_hidden_state
        for index, one in enumerate(alone):
            expected = model(input_ids=one).last_hidden_state[0]
            assert torch.allclose(together[index, : one.shape[1]], expected, **CLOSE)


@FEW
@given(lengths=LENGTHS, number=st.integers(0, 99), side=st.sampled_from(["left", "right"]))
def test_decoders_do_not_notice_padding_and_batch_mates(lengths: list[int], number: int, side: str) -> None:
    model = unified("LlamaForCausalLM")
    ids, mask, alone = padded(lengths, side, number)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        for index, one in enumerate(alone):
            expected = model(input_ids=one).logits[0]
            assert torch.allclose(together[index][mask[index].bool()], expected, **CLOSE)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(lengths=LENGTHS, number=st.integers(0, 99), kind=st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM"]))
def test_generation_does_not_notice_padding_and_batch_mates(lengths: list[int], number: int, kind: str) -> None:
    model = unified(kind)
    ids, mask, alone = padded(lengths, "left", number)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for index, one in enumerate(alone):
        expected = model.generate(one, attention_mask=torch.ones_like(one), **options)[0, one.shape[1] :]
        assert together[index].tolist() == expected.tolist()


@FEW
@given(mates=st.integers(0, 4), number=st.integers(0, 99), kind=st.sampled_from(["ViTModel", "CLIPVisionModel"]))
def test_images_do_not_notice_batch_mates(mates: int, number: int, kind: str) -> None:
    model = unified(kind)
    pixels = torch.randn(1 + mates, 3, 16, 16, generator=torch.Generator().manual_seed(number))
    with torch.no_grad():
        together = model(pixel_values=pixels).last_hidden_state[0]
        assert torch.allclose(together, model(pixel_values=pixels[:1]).last_hidden_state[0], **CLOSE)


def test_a_mask_that_tells_nothing_is_refused() -> None:
    model = unified("BertModel")
    with pytest.raises(InvalidParameter, match="which tokens are real"):
        model(input_ids=words(1, 4), attention_mask=torch.ones(1, 4, 4))
    decoder = unified()
    with pytest.raises(InvalidParameter, match="3 columns for 4 tokens"):
        decoder(input_ids=words(1, 4), attention_mask=torch.ones(1, 3))
    assert passes.current().real is None  # nothing is left behind by a pass that failed
    decoder(input_ids=words(1, 4))


# ---- how it is called -------------------------------------------------------------------------------------------


def test_the_backbone_alone_knows_the_mask_too() -> None:
    model = unified("BertForMaskedLM")
    ids, mask, alone = padded([3, 8], "right", 1)
    with torch.no_grad():
        together = model.bert(ids, mask).last_hidden_state[0, :3]
        assert torch.allclose(together, model.bert(alone[0]).last_hidden_state[0], **CLOSE)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    ids, mask, _ = padded([3, 9], "left", 2)
    grads = []
    for on in (False, True):
        model = unified("LlamaForCausalLM").train()
        if on:
            model._set_gradient_checkpointing(
                enable=True,
                gradient_checkpointing_func=lambda f, *a, **k: torch.utils.checkpoint.checkpoint(
                    f, *a, use_reentrant=reentrant, **k
                ),
            )
            model.enable_input_require_grads()
        with moe.record() as routes:
            loss = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()].square().mean()
            loss.backward()
        assert len(routes.weights) == 2
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.allclose(grads[0][name], grads[1][name], atol=1e-5) for name in grads[0])


def test_two_threads_with_one_model_do_not_see_each_other() -> None:
    model = unified("BertModel")
    batches = [padded(lengths, "right", 5) for lengths in ([2, 11], [7, 9])]
    with torch.no_grad():
        expected = [model(input_ids=ids, attention_mask=mask).last_hidden_state for ids, mask, _ in batches]
    wrong: list[int] = []

    def work(index: int) -> None:
        ids, mask, _ = batches[index]
        with torch.no_grad():
            for _ in range(15):
                found = model(input_ids=ids, attention_mask=mask).last_hidden_state
                if not torch.allclose(found[mask.bool()], expected[index][mask.bool()], **CLOSE):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_routes_are_recorded_with_the_tokens_that_are_real() -> None:
    model = unified("BertModel")
    ids, mask, _ = padded([3, 5], "right", 0)
    with torch.no_grad(), moe.record() as routes:
        model(input_ids=ids, attention_mask=mask)
    assert [tuple(weights.shape) for weights in routes.weights] == [(2, 5, 3)] * 2
    assert all(torch.allclose(weights.sum(-1), torch.ones(2, 5)) for weights in routes.weights)
    assert all(real is not None and real.tolist() == mask.bool().tolist() for real in routes.real)


def test_the_router_computes_in_single_precision_in_a_bfloat16_model() -> None:
    model = unified("LlamaForCausalLM").to(torch.bfloat16)
    with torch.no_grad(), moe.record() as routes:
        assert model(input_ids=words(1, 5)).logits.dtype == torch.bfloat16
    assert routes.weights[0].dtype == torch.float32
