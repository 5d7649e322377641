"""The engine alone: many requests at once answer exactly as each would alone."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import tiny_causal_lm  # noqa: E402

from cloister.errors import BadTensor, CloisterError, InvalidParameter, NotFound, TooBusy, TooLarge  # noqa: E402
from cloister.modes import Sampling  # noqa: E402
from cloister.serving.server.engine import Engine, Event, Generation  # noqa: E402
from cloister.serving.server.loading import load, routers_in_float32  # noqa: E402
from cloister.serving.server.requests import CompletionRequest, SessionWish  # noqa: E402
from cloister.serving.server.settings import ServerSettings  # noqa: E402

KINDS = ["GPT2", "Llama", "Mistral", "Qwen2", "Qwen3"]
KINDS += ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "DeepseekV2", "DeepseekV3"]


class Call:
    """One request to an engine, and its events."""

    def __init__(
        self,
        engine: Engine,
        ids: list[int] | None = None,
        rows: Any = None,
        session: Any = None,
        owner: str = "",
        **sampling: Any,
    ):
        self.inbox: queue.Queue[Event] = queue.Queue()
        request = CompletionRequest(
            "",
            tuple(ids) if ids else None,
            rows,
            Sampling(**sampling),
            session=SessionWish(session) if session else None,
        )
        self.generation: Generation = engine.submit(request, self.inbox.put, owner=owner)

    def events(self) -> Iterator[Event]:
        while True:
            event = self.inbox.get(timeout=60)
            if event.error is not None:
                raise event.error
            yield event
            if event.last:
                return

    def ids(self) -> list[int]:
        return [event.choice.id for event in self.events() if event.choice is not None]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """`make(kind, **settings)` -> a started engine whose `served.model` is the model."""
    engines: list[Engine] = []

    def build(kind: str, **options: Any) -> Engine:
        path = tmp_path_factory.mktemp(kind)
        tiny_causal_lm(kind).save_pretrained(path)
        settings = ServerSettings(path, **{"max_slots": 5, "max_sessions": 3, "prefill_chunk": 6, **options})
        engine = Engine(load(path, settings), settings)
        engine.start()
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="module")
def llama(make: Callable[..., Engine]) -> Engine:
    return make("Llama")


def alone(engine: Engine, ids: list[int], count: int) -> list[int]:
    prompt = torch.tensor([ids])
    made = engine.served.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return made[0, len(ids) :].tolist()


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 2, 5, 9, 17, 30, 3, 7, 12, 6, 13, 1, 8, 40, 2, 21]
    return [torch.randint(1, 101, (lengths[at % 16],), generator=generator).tolist() for at in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_batched_greedy_equals_generate_alone(make: Callable[..., Engine], kind: str) -> None:
    engine = make(kind)
    asked = [(ids, 6 + at * 2) for at, ids in enumerate(prompts(9))]
    calls = [Call(engine, ids, max_tokens=count) for ids, count in asked]
    answers = [call.ids() for call in calls]
    assert answers == [alone(engine, ids, count) for ids, count in asked]
    assert len({token for answer in answers for token in answer}) > 10  # the model does not say one thing for ever
    assert engine.load()["running"] == engine.load()["waiting"] == 0


def test_vectors_give_the_same_answer_as_ids(llama: Engine) -> None:
    ids = prompts(6)[5]
    rows = llama.served.model.get_input_embeddings()(torch.tensor(ids)).numpy()
    assert Call(llama, rows=rows, max_tokens=8).ids() == Call(llama, ids, max_tokens=8).ids() == alone(llama, ids, 8)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "DeepseekV2", "DeepseekV3"])
def test_routers_compute_in_float32_when_the_model_does_not(make: Callable[..., Engine], kind: str) -> None:
    engine = make(kind, dtype="bfloat16")
    model = engine.served.model
    routers = [(name, module) for name, module in model.named_modules() if name.endswith("mlp.gate")]
    assert routers and all(parameter.dtype == torch.float32 for _, m in routers for parameter in m.parameters())
    assert model.lm_head.weight.dtype == torch.bfloat16
    seen: list[Any] = []
    hook = routers[0][1].register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
    answer = Call(engine, [5, 6, 7], max_tokens=3).ids()
    hook.remove()
    assert len(answer) == 3 and seen
    for hidden, logits in seen:
        assert hidden.dtype == logits.dtype == torch.float32


def test_routers_are_found_by_their_kind() -> None:
    assert routers_in_float32(tiny_causal_lm("Olmoe")) == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert routers_in_float32(tiny_causal_lm("Qwen2Moe")) == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert routers_in_float32(tiny_causal_lm("Llama")) == []


def test_a_seed_gives_the_same_answer_whoever_else_is_in_the_batch(llama: Engine) -> None:
    wish = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 7}
    first = Call(llama, [3, 4, 5], **wish).ids()
    others = [Call(llama, ids, max_tokens=20, temperature=1.0) for ids in prompts(4)]
    again = Call(llama, [3, 4, 5], **wish)
    assert again.ids() == first
    assert len({tuple(Call(llama, [3, 4, 5], **{**wish, "seed": seed}).ids()) for seed in range(5)}) > 1
    for other in others:
        other.ids()


def test_repetition_penalty_counts_the_prompt_as_generate_does(llama: Engine) -> None:
    ids = [5, 6, 7, 8, 9, 10]
    prompt = torch.tensor([ids])
    made = llama.served.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0,
        repetition_penalty=1.7,
    )  # fmt: skip
    assert Call(llama, ids, max_tokens=12, repetition_penalty=1.7).ids() == made[0, 6:].tolist()


def test_stop_tokens_end_the_answer_and_are_reported(llama: Engine) -> None:
    full = alone(llama, [9, 8, 7], 12)
    stop = full[4]
    cut = full.index(stop) + 1
    events = list(Call(llama, [9, 8, 7], max_tokens=12, stop_token_ids=(stop,)).events())
    assert [event.choice.id for event in events if event.choice] == full[:cut]
    assert events[-1].finish == "stop" and events[-1].stop_id == stop
    longer = Call(llama, [9, 8, 7], max_tokens=12, stop_token_ids=(stop,), min_tokens=cut + 1).ids()
    assert stop not in longer[: cut + 1] and len(longer) > cut


def test_end_of_sequence_and_ignoring_it(make: Callable[..., Engine]) -> None:
    engine = make("Llama")
    full = alone(engine, [9, 8, 7], 12)
    engine.served.end_ids = frozenset([full[3]])
    events = list(Call(engine, [9, 8, 7], max_tokens=12).events())
    assert events[-1].finish == "stop" and events[-1].stop_id is None and len(events) == full.index(full[3]) + 1
    events = list(Call(engine, [9, 8, 7], max_tokens=12, ignore_eos=True).events())
    assert [event.choice.id for event in events if event.choice] == full and events[-1].finish == "length"


def test_log_probabilities_are_those_of_the_model(llama: Engine) -> None:
    ids = [4, 5, 6]
    events = list(Call(llama, ids, max_tokens=4, logprobs=3, logit_bias={50: 100.0}).events())
    for event in events:
        logits = llama.served.model(torch.tensor([ids])).logits[0, -1]
        expected = torch.log_softmax(logits, -1)
        choice = event.choice
        assert choice is not None and choice.id == 50 and choice.logprob == pytest.approx(float(expected[50]), abs=1e-4)
        assert [token for token, _ in choice.top] == expected.topk(3).indices.tolist()
        ids.append(50)


# Sessions -------------------------------------------------------------------------------------------------------------


def test_a_session_continues_where_it_stopped(llama: Engine) -> None:
    ids = prompts(6)[5]
    expected = alone(llama, ids, 10)
    table = llama.served.model.get_input_embeddings().weight
    answer, inputs, session = [], ids, "new"
    for _ in range(10):
        call = Call(llama, rows=table[torch.tensor(inputs)].numpy(), session=session, max_tokens=1)
        answer += call.ids()
        inputs, session = answer[-1:], call.generation.session_id
    assert answer == expected
    llama.close_session(session, "")
    with pytest.raises(NotFound):
        Call(llama, [1], session=session, max_tokens=1)


def test_penalties_and_seed_in_a_session_are_those_of_one_answer(llama: Engine) -> None:
    wish = {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.7, "presence_penalty": 0.3}
    expected = Call(llama, [3, 4, 5], max_tokens=10, **wish).ids()
    answer: list[int] = []
    inputs, session = [3, 4, 5], "new"
    for _ in range(10):
        call = Call(llama, inputs, session=session, max_tokens=1, **wish)
        answer += call.ids()
        inputs, session = answer[-1:], call.generation.session_id
    llama.close_session(session, "")
    assert answer == expected


def test_sessions_are_bounded_and_belong_to_their_owner(llama: Engine) -> None:
    calls = [Call(llama, [1, 2], session="new", max_tokens=1) for _ in range(3)]
    for call in calls:
        call.ids()
    identities = [call.generation.session_id for call in calls]
    assert len(set(identities)) == 3 and min(map(len, identities)) >= 32
    with pytest.raises(TooBusy, match="sessions"):
        Call(llama, [1], session="new", max_tokens=1).ids()
    with pytest.raises(NotFound):
        llama.close_session(identities[0], "somebody else")
    with pytest.raises(NotFound):  # and not TooLarge, which would tell a stranger how long the session is
        Call(llama, [1] * llama.max_len, session=identities[0], max_tokens=1, owner="somebody else")
    for identity in identities:
        llama.close_session(identity, "")
    call = Call(llama, [1, 2], session="new", max_tokens=1)
    call.ids()
    llama.close_session(call.generation.session_id, "")


def test_idle_sessions_expire(make: Callable[..., Engine]) -> None:
    engine = make("Llama", session_idle_seconds=0.0)
    call = Call(engine, [1, 2], session="new", max_tokens=1)
    call.ids()
    Call(engine, [3], max_tokens=2).ids()  # makes the worker look
    Call(engine, [3], max_tokens=2).ids()
    assert engine.load()["sessions"] == 0
    with pytest.raises(NotFound, match="expired"):
        Call(engine, [1], session=call.generation.session_id, max_tokens=1)


# Bounds and faults ----------------------------------------------------------------------------------------------------


def test_cancelling_frees_the_row(llama: Engine) -> None:
    calls = [Call(llama, [1, 2, 3], max_tokens=100) for _ in range(5)]
    for call in calls:
        next(call.events())
        call.generation.cancel()
        call.generation.cancel()
    assert Call(llama, [4, 5, 6], max_tokens=5).ids() == alone(llama, [4, 5, 6], 5)
    assert llama.load()["running"] == 0


def test_a_row_is_wiped_for_its_next_user(llama: Engine) -> None:
    Call(llama, [1, 2, 3], max_tokens=20).ids()
    Call(llama, [1], max_tokens=1).ids()
    assert all(float(layer.keys[: llama.slots].abs().sum()) == 0 for layer in llama._cache.layers)


def test_bad_numbers_of_one_request_do_not_reach_another(make: Callable[..., Engine]) -> None:
    engine = make("GPT2", max_slots=2)
    overflowing = torch.full((4, 32), 3e38).numpy()  # finite, but not its variance
    good = Call(engine, [4, 5, 6], max_tokens=30)
    for _ in range(3):
        with pytest.raises(BadTensor, match="not finite"):
            Call(engine, rows=overflowing, max_tokens=5).ids()
    assert good.ids() == alone(engine, [4, 5, 6], 30)
    again = [Call(engine, ids, max_tokens=10) for ids in ([7, 8], [1, 2, 3, 4, 5, 6, 7])]
    assert [call.ids() for call in again] == [alone(engine, ids, 10) for ids in ([7, 8], [1, 2, 3, 4, 5, 6, 7])]


def test_lengths_are_checked_before_anything_is_computed(llama: Engine) -> None:
    with pytest.raises(TooLarge, match="127"):
        Call(llama, [1] * 128, max_tokens=1)
    with pytest.raises(InvalidParameter, match="at most 28 tokens"):
        Call(llama, [1] * 100, max_tokens=29)
    assert len(Call(llama, [1] * 100, max_tokens=28).ids()) == 28


def test_the_queue_is_bounded(make: Callable[..., Engine]) -> None:
    engine = make("Llama", max_slots=1, max_waiting=2)
    calls = []
    with pytest.raises(TooBusy):
        for _ in range(50):
            calls.append(Call(engine, [1, 2, 3], max_tokens=100))
    for call in calls:
        call.generation.cancel()
    assert 2 <= len(calls) < 50


def test_a_request_over_its_time_gets_an_error(make: Callable[..., Engine]) -> None:
    engine = make("Llama", request_seconds=0.0)
    with pytest.raises(CloisterError, match="longer than"):
        Call(engine, [1, 2, 3], max_tokens=100).ids()
    assert engine.load()["running"] == 0


def test_cache_memory_is_bounded_by_the_budget(make: Callable[..., Engine]) -> None:
    row = 2 * 2 * 2 * 8 * 4 * 128  # keys and values, layers, heads, size, bytes, positions
    engine = make("Llama", kv_cache_bytes=4 * row + 5, max_slots=64, max_sessions=64)
    assert engine.slots + engine.session_rows == 4
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in engine._cache.layers) == 4 * row
    with pytest.raises(TooLarge, match="--max-model-len"):
        make("Llama", kv_cache_bytes=row - 1)


def test_stopping_ends_every_request_with_an_error(make: Callable[..., Engine]) -> None:
    engine = make("Llama", max_slots=1)
    calls = [Call(engine, [1, 2, 3], max_tokens=120) for _ in range(3)]
    engine.stop()
    for call in calls:
        with pytest.raises(TooBusy, match="going down"):
            call.ids()
    with pytest.raises(TooBusy):
        Call(engine, [1], max_tokens=1)


def test_a_checkpoint_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from cloister.errors import BrokenCheckpoint

    tiny_causal_lm("Llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = load_file(weights)
    save_file({name: whole[name] for name in whole if "layers.1.mlp" not in name}, weights, {"format": "pt"})
    with pytest.raises(BrokenCheckpoint, match=r"missing: model\.layers\.1\.mlp"):
        load(tmp_path, ServerSettings(tmp_path))
    save_file({**whole, "model.surprise": torch.ones(2)}, weights, {"format": "pt"})
    with pytest.raises(BrokenCheckpoint, match=r"unknown: model\.surprise"):
        load(tmp_path, ServerSettings(tmp_path))
    weights.write_bytes(b"\x10")
    with pytest.raises(BrokenCheckpoint):
        load(tmp_path, ServerSettings(tmp_path))
