"""The Rust core chooses and gathers as the tensor operations do, wherever it is used; and is left alone elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tiny_unified import inputs, unified, words  # noqa: E402

import cloister.unify.moe as moe  # noqa: E402
from cloister.errors import InvalidParameter  # noqa: E402
from cloister.unify.moe import dispatch, passes  # noqa: E402
from cloister.unify.moe.routing import RoutedFeedForward, Router  # noqa: E402

pytestmark = pytest.mark.skipif(dispatch._core() is None, reason="the Rust core is not installed here")
FEW = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 2e-5}


@contextmanager
def calls() -> Iterator[list[str]]:
    """The contexts with which the core was asked inside."""
    made: list[str] = []
    core = dispatch._core()

    class Counting:
        def __init__(self, context: str, *more: Any):
            self._context, self._routing = context, core.Routing(context, *more)

        def choose(self, *arguments: Any) -> Any:
            made.append(self._context)
            return self._routing.choose(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_core", lambda: SimpleNamespace(Routing=Counting))
        yield made


def block(context: Any, hidden: int = 24, experts: int = 4) -> RoutedFeedForward:
    made = RoutedFeedForward(
        [torch.nn.Linear(hidden, hidden) for _ in range(experts)], hidden, top_k=1, context=context, layer=0
    )
    torch.nn.init.normal_(made.router.vectors)
    if made.router.blend is not None:
        torch.nn.init.normal_(made.router.blend)
    return made


@FEW
@given(
    context=st.sampled_from(["sequence", "prefix", "none"]), rows=st.integers(1, 4), tokens=st.integers(1, 9),
    hidden=st.integers(1, 70), real=st.sampled_from([0.0, 0.6, 1.0]), number=st.integers(0, 99),
)  # fmt: skip
def test_both_ways_give_the_same(context: Any, rows: int, tokens: int, hidden: int, real: float, number: int) -> None:
    torch.manual_seed(number)
    one, z = block(context, hidden), torch.randn(rows, tokens, hidden)
    marks = None if real == 1.0 else torch.rand(rows, tokens) < real
    if marks is not None:
        z[~marks] = float("nan")
    with torch.no_grad(), calls() as made:
        with passes.passing(passes.Pass(real=marks, core=True)):
            found = one(z)
        with passes.passing(passes.Pass(real=marks)):
            expected = one(z)
    assert made == [context]
    assert torch.allclose(found, expected, **CLOSE)
    assert marks is None or not found[~marks].any()


@pytest.mark.parametrize("kind", ["BertModel", "LlamaForCausalLM", "ViTModel", "Gemma3ForCausalLM"])
def test_a_whole_model_answers_the_same(kind: str) -> None:
    model = unified(kind)
    given = inputs(model)
    with torch.inference_mode(), calls() as made:
        found = model(**given)[0]
    with torch.no_grad(), dispatch.by_operations():
        assert torch.allclose(model(**given)[0], found, **CLOSE)
    assert len(made) == 2  # the layers of these models


def test_generation_with_a_cache_goes_on_from_what_either_way_left() -> None:
    model, ids = unified("LlamaForCausalLM"), words(3, 7)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with calls() as made:
        found = model.generate(ids, **options)
    assert len(made) == 16 and set(made) == {"prefix"}
    with dispatch.by_operations():
        assert model.generate(ids, **options).tolist() == found.tolist()
        with torch.no_grad():
            begun = model(input_ids=ids, use_cache=True)
    with torch.no_grad(), calls() as made:  # by tensor operations so far, by the core from here
        after = model(input_ids=ids[:, :1], past_key_values=begun.past_key_values).logits[:, -1]
        whole = model(input_ids=torch.cat([ids, ids[:, :1]], 1)).logits[:, -1]
    assert len(made) == 4 and torch.allclose(after, whole, **CLOSE)


@pytest.mark.parametrize("cache", ["static", "quantized", "dynamic"])
def test_caches_of_every_kind_carry_the_sums(cache: str) -> None:
    if cache == "quantized":
        pytest.importorskip("optimum.quanto")
    model, ids = unified("LlamaForCausalLM"), words(2, 8)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0,
        "cache_implementation": cache,
    }  # fmt: skip
    if cache == "quantized":
        options["cache_config"] = {"backend": "quanto", "nbits": 4, "q_group_size": 16, "residual_length": 4}
    with calls() as made:
        found = model.generate(ids, **options)
    assert len(made) == 12
    with dispatch.by_operations():
        assert model.generate(ids, **options).tolist() == found.tolist()


def test_the_core_is_left_alone_where_it_cannot_do_what_is_asked() -> None:
    model, ids = unified("LlamaForCausalLM"), words(2, 6)
    with calls() as made:
        model(input_ids=ids).logits.sum().backward()  # gradients
        with torch.no_grad(), moe.record():
            model(input_ids=ids)  # all experts' weights are wanted
        seen: list[Any] = []
        routers = [part for part in model.modules() if isinstance(part, Router)]
        handles = [router.register_forward_hook(lambda *arguments: seen.append(arguments[2])) for router in routers]
        with torch.no_grad():
            model(input_ids=ids)  # and so here
        assert [weights.shape for weights in seen] == [(2, 6, 3)] * 2
        for handle in handles:
            handle.remove()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(input_ids=ids)
        with torch.no_grad():
            model(
                input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, -1), use_cache=False
            )  # packed
            unified("LlamaForCausalLM", top_k=2)(input_ids=ids)
            unified("LlamaForCausalLM").to(torch.bfloat16)(input_ids=ids)
            unified("LlamaForCausalLM").double()(input_ids=ids)
    assert made == []
    with torch.no_grad(), calls() as made:
        model(input_ids=ids)
    assert len(made) == 2


def test_experts_of_another_precision_than_their_input() -> None:
    class Halved(torch.nn.Linear):
        def forward(self, input: Any) -> Any:
            return super().forward(input).to(torch.bfloat16)

    one = block("none")
    one.experts = torch.nn.ModuleList([Halved(24, 24) for _ in range(4)])
    z = torch.randn(3, 5, 24)
    for some in (z, z[:1, :1]):
        with torch.no_grad(), passes.passing(passes.Pass(core=True)):
            found = one(some)
        with torch.no_grad():
            assert torch.allclose(found.float(), one(some).float(), atol=1e-2)


def test_inputs_in_another_order_in_memory() -> None:
    one, z = block("sequence"), torch.randn(24, 5, 3).permute(2, 1, 0)
    with torch.no_grad(), passes.passing(passes.Pass(core=True)):
        found = one(z)
    with torch.no_grad():
        assert torch.allclose(found, one(z), **CLOSE)


def test_the_core_refuses_what_does_not_fit_and_does_not_die() -> None:
    core: Any = dispatch._core()
    z, vectors, weights = torch.randn(6, 8).numpy(), torch.randn(3, 8).numpy(), torch.zeros(6, 1)
    frozen = torch.zeros(6, 8).numpy()
    frozen.flags.writeable = False

    def numbers(*shape: int) -> Any:
        return torch.zeros(*shape).numpy()

    ours = weights.numpy()
    marks = torch.ones(5, dtype=torch.uint8).numpy()
    for begun, asked in (
        (("none", 3, 1, ours), (z, vectors[:, :0], 0.0, 0)), (("none", 3, 1, ours), (z, vectors[:, :7], 0.0, 0)),
        (("none", 4, 1, ours), (z, vectors, 0.0, 0)), (("none", 0, 1, ours), (z, vectors, 0.0, 0)),
        (("all", 3, 1, ours), (z, vectors, 0.0, 0)), (("none", 3, 1, ours), (z, vectors[:0], 0.0, 0)),
        (("none", 3, 1, ours), (z.T, vectors, 0.0, 0)), (("none", 3, 1, ours), (z, vectors[0], 0.0, 0)),
        (("none", 3, 1, ours[:5]), (z, vectors, 0.0, 0)),
        (("none", 3, 1, frozen.reshape(-1)[:6]), (z, vectors, 0.0, 0)),
        (("none", 3, 1, ours, marks), (z, vectors, 0.0, 0)),
        (("prefix", 3, 1, ours, None, numbers(7)), (z, vectors, 0.0, 0)),
        (("prefix", 3, 2, ours, None, numbers(2, 4)), (z, vectors, 0.0, 0)),
        (("prefix", 3, 2, ours, None, numbers(2, 8)), (z, vectors, 0.0, 2)),
        (("prefix", 3, 2**63, ours, None, numbers(2, 8)), (z, vectors, 0.0, 0)),
        (("prefix", 3, 0, ours, None, numbers(2, 8)), (z, vectors, 0.0, 0)),
        (("prefix", 3, 2, ours, None, None, numbers(5, 8)), (z, vectors, 0.0, 0)),
        (("prefix", 3, 2, ours, None, None, numbers(6, 7)), (z, vectors, 0.0, 0)),
        (("prefix", 3, 2, ours, None, None, numbers(6, 8)), (z, vectors, 0.0, 2)),
        (("none", 3, 2, ours, None, None, numbers(6, 8)), (z, vectors, 0.0, 0)),
    ):  # fmt: skip
        with pytest.raises(core.EngineError):
            core.Routing(*begun).choose(*asked)
    same = core.Routing("prefix", 3, 2, z[:, :1].copy(), None, z.reshape(-1)[:16], z).choose(z, vectors, 0.0, 1)
    assert sum(same.counts) == 6  # what it writes lay where it read
    z = torch.randn(6, 8).numpy()
    routed = core.Routing("none", 3, 1, ours).choose(z, vectors, 0.0, 0)
    assert weights.all()
    result = torch.zeros(6, 8)
    half = result[:3].numpy()
    for parts, width, out in (
        ([z], 8, result[:5].numpy()), ([z[:5]], 8, result.numpy()), ([z], 0, result.numpy()), ([z, z], 8, z),
        ([half, half], 8, result.numpy()), ([z], 8, result.T.numpy()),
    ):  # fmt: skip
        with pytest.raises(core.EngineError):
            routed.gather(parts, width, out)
    with pytest.raises(core.EngineError):
        routed.gather([z], 8, frozen)
    assert not result.any()


def test_a_block_refuses_another_shape_than_its_pass() -> None:
    one = block("sequence")
    with torch.no_grad(), passes.passing(passes.Pass(core=True, real=torch.ones(2, 5, dtype=torch.bool))):
        for shape in ((2, 4, 24), (10, 24)):
            with pytest.raises(InvalidParameter, match="were expected"):
                one(torch.randn(*shape))
        assert not one(torch.randn(2, 5, 24)[:, :, :]).isnan().any()
    with torch.no_grad(), passes.passing(passes.Pass(core=True)):
        assert one(torch.randn(0, 5, 24)).shape == (0, 5, 24)


# ---- who looks on, and what they hold ---------------------------------------------------------------------------


def agrees(one: RoutedFeedForward, z: Any, made: list[str], *, used: bool) -> None:
    """Core and operations agree, and the core was asked or not."""
    made.clear()
    with torch.no_grad(), passes.passing(passes.Pass(core=True)):
        found = one(z)
    assert bool(made) == used
    with torch.no_grad(), passes.passing(passes.Pass()):
        assert torch.allclose(found, one(z), **CLOSE)


def test_a_router_that_is_replaced_wrapped_or_kept_otherwise_is_asked_itself() -> None:
    z = torch.randn(2, 5, 24)
    with calls() as made:
        agrees(block("sequence"), z, made, used=True)
        one = block("sequence")
        forward = one.router.forward
        one.router.forward = lambda z: forward(z).flip(-1)  # as accelerate does to bring weights from elsewhere
        agrees(one, z, made, used=False)

        class Wrapped(torch.nn.Module):
            def __init__(self, inner: Any):
                super().__init__()
                self.inner = inner

            def forward(self, z: Any) -> Any:
                return self.inner(z).flip(-1)

        one = block("sequence")
        one.router = Wrapped(one.router)  # type: ignore[assignment]
        agrees(one, z, made, used=False)
        one = block("sequence")
        torch.nn.utils.parametrize.register_parametrization(one.router, "vectors", torch.nn.Tanh())
        agrees(one, z, made, used=False)
        for dtype in (torch.bfloat16, torch.float16):
            one = block("sequence")
            one.router.vectors.data = one.router.vectors.data.to(dtype)
            agrees(one, z, made, used=False)
        one = block("sequence")
        one.router.vectors.data = one.router.vectors.data.t().contiguous().t()
        agrees(one, z, made, used=True)


def test_gradients_asked_for_inside_a_pass_are_there() -> None:
    one = block("sequence")
    with torch.no_grad(), passes.passing(passes.Pass(core=True)), torch.enable_grad():
        assert one(torch.randn(1, 5, 24)).requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracers_and_forward_differentiation_see_everything() -> None:
    model, z = unified("ViTModel"), torch.randn(2, 3, 16, 16)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        traced = torch.jit.trace(model, (z,), strict=False, check_trace=False)
        assert torch.allclose(traced(z)["last_hidden_state"], model(z).last_hidden_state, **CLOSE)
    hooked: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda one, *_: hooked.append(type(one).__name__))
    with torch.no_grad():
        model(z)
    handle.remove()
    assert hooked.count("Router") == 2
    from torch.autograd import forward_ad

    with torch.no_grad(), forward_ad.dual_level(), calls() as made:
        model(pixel_values=forward_ad.make_dual(z, torch.randn_like(z)))
    assert made == []


def test_outputs_that_others_hold_stay_as_they_are() -> None:
    class Same(torch.nn.Identity):
        pass

    z = torch.randn(1, 6, 24)
    for expert in (Same(), torch.nn.Linear(24, 24)):
        one = block("sequence")
        one.experts = torch.nn.ModuleList([expert] + [torch.nn.Linear(24, 24) for _ in range(3)])
        one.router.vectors.data[0], one.router.vectors.data[1:] = z.mean((0, 1)), -z.mean((0, 1))
        one.router.blend.data.fill_(20.0)  # type: ignore[union-attr]
        held: list[Any] = []
        expert.register_forward_hook(lambda _, given, output, held=held: held.append((output, output.clone())))
        before = z.clone()
        with torch.no_grad(), passes.passing(passes.Pass(core=True)):
            one(z)
        assert len(held) == 1 and torch.equal(*held[0]) and torch.equal(z, before)


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_hook_may_ask_another_block_meanwhile(tokens: int) -> None:
    """To see what it would say to this expert's output: its weights must not become this block's."""
    first, second, z = block("sequence"), block("sequence"), torch.randn(1, tokens, 24)
    for one in (first, second):  # one expert for all tokens
        one.router.blend.data.fill_(20.0)  # type: ignore[union-attr]
    second.router.vectors.data *= 0.01
    with torch.no_grad(), calls() as made, passes.passing(passes.Pass(core=True)):
        expected, seen = first(z), []
        for expert in first.experts:
            expert.register_forward_hook(
                lambda _, given, output: seen.append((tuple(given[0].shape), second(output[None]).shape))
            )
        assert torch.equal(first(z), expected)
    assert made == ["sequence"] * 3 and seen == [((tokens, 24), (1, tokens, 24))]


def test_other_defaults_of_precision_and_device_change_nothing() -> None:
    model, ids = unified("BertModel"), words(3, 9)
    with torch.no_grad():
        expected = model(input_ids=ids).last_hidden_state
        try:
            torch.set_default_dtype(torch.float64)
            assert torch.equal(model(input_ids=ids).last_hidden_state, expected)
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.device("meta"):
            assert torch.equal(model(input_ids=ids).last_hidden_state, expected)
