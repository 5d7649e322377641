"""Unified models under `cloister protect`: lossless in both transforms and both loops, and served to the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file  # noqa: E402
from tiny_unified import unified, words  # noqa: E402

import cloister.unify.moe as moe  # noqa: E402
from cloister.errors import UnsupportedModel  # noqa: E402
from cloister.permute import selfcheck  # noqa: E402
from cloister.permute.protect import protect  # noqa: E402

CASES = [
    ("BertModel", "permutation", "server"),
    ("BertForMaskedLM", "permutation", "token"),
    ("LlamaForCausalLM", "permutation", "server"),
    ("LlamaForCausalLM", "orthogonal", "token"),
    ("Qwen2ForCausalLM", "orthogonal", "server"),
    ("ViTForImageClassification", "permutation", "server"),
    ("ViTForImageClassification", "orthogonal", "server"),
]


def plain(kind: str, folder: Path, **options: Any) -> Path:
    """A unified checkpoint on disk, with norms and biases that are not trivial."""
    model = unified(kind, **{"fallback": True, **options})
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.numel() > 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "transform", "loop"), CASES)
def test_protected_unified_models_are_lossless(kind: str, transform: str, loop: str, tmp_path: Path) -> None:
    source = plain(kind, tmp_path / "plain")
    out = tmp_path / "out"
    protect(source, out, base="secret", transform=transform, loop=loop, measure=False)
    found = selfcheck.compare(source, out / "server", out / "client", inputs=100, length=12, greedy=24)
    assert found.architecture == f"Cloister{kind}"
    assert found.max_difference < 1e-4 * max(1.0, found.scale)
    assert found.top1 == 1.0 and found.greedy_equal


def test_the_server_is_not_told_whose_the_experts_are_and_their_order_is_drawn(tmp_path: Path) -> None:
    source = plain("LlamaForCausalLM", tmp_path / "plain", fallback=False)
    orders = set()
    for index in range(6):
        out = tmp_path / f"out{index}"
        protect(source, out, base="public:test", measure=index == 0)
        config = json.loads((out / "server" / "config.json").read_text())
        assert "owner 0" not in json.dumps(config) and config["experts"] == 3 and not config["fallback"]
        before, after = load_file(source / "model.safetensors"), load_file(out / "server" / "model.safetensors")
        sums = [after[f"model.layers.0.mlp.experts.{e}.up_proj.weight"].astype(float).sum() for e in range(3)]
        known = [before[f"model.layers.0.mlp.experts.{e}.up_proj.weight"].astype(float).sum() for e in range(3)]
        orders.add(tuple(min(range(3), key=lambda e: abs(known[e] - found)) for found in sums))
    assert all(sorted(order) == [0, 1, 2] for order in orders) and len(orders) > 1


def test_an_architecture_that_is_not_listed_is_refused_with_its_reasons(tmp_path: Path) -> None:
    unified("GPTNeoXForCausalLM").save_pretrained(tmp_path / "plain")
    with pytest.raises(UnsupportedModel, match="cloister_moe_gpt_neox"):
        protect(tmp_path / "plain", tmp_path / "out", base="secret", measure=False)


# ---- our server -------------------------------------------------------------------------------------------------


def test_many_requests_at_once_get_the_answers_that_each_would_get_alone(tmp_path: Path) -> None:
    """The engine pads on the left and joins rows of different lengths; the running sums follow."""
    from cloister.serving.server.engine import Engine
    from cloister.serving.server.loading import load
    from cloister.serving.server.settings import ServerSettings

    source = plain("LlamaForCausalLM", tmp_path / "plain")
    settings = ServerSettings(directory=source, device="cpu", max_slots=3, prefill_chunk=8)
    served = load(source, settings)
    engine = Engine(served, settings)
    prompts = [words(1, length, length)[0].tolist() for length in (3, 14, 6, 9, 1)]
    answers = _ask(engine, prompts, steps=6)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        alone = served.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        assert answer == alone[0, len(prompt) :].tolist()


def _ask(engine: Any, prompts: list[list[int]], steps: int) -> list[list[int]]:
    import threading

    from cloister.serving.server.requests import CompletionRequest, Sampling

    answers: list[list[int]] = [[] for _ in prompts]
    left = threading.Semaphore(0)

    def sink(index: int) -> Any:
        def take(event: Any) -> None:
            assert event.error is None, event.error
            answers[index].append(event.choice.id)
            if event.last:
                left.release()

        return take

    engine.start()
    try:
        for index, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=steps, temperature=0.0, ignore_eos=True)
            engine.submit(CompletionRequest("tiny", ids=tuple(prompt), rows=None, sampling=sampling), sink(index))
        for _ in prompts:
            assert left.acquire(timeout=120)
    finally:
        engine.stop()
    return answers


def test_the_protected_encoder_is_served(tmp_path: Path) -> None:
    from cloister.serving.server.encoders import pooled
    from cloister.serving.server.loading import load
    from cloister.serving.server.settings import ServerSettings

    source = plain("BertModel", tmp_path / "plain")
    protect(source, tmp_path / "out", base="secret", measure=False)
    served = load(tmp_path / "out" / "server", ServerSettings(directory=tmp_path / "out" / "server", device="cpu"))
    client = load_file(tmp_path / "out" / "client" / "client.safetensors")
    ids = words(1, 7)
    vector = pooled(served, [tuple(client["vocab_to_server"][ids[0].numpy()].tolist())])[0][client["output_order"]]
    model = moe.find("CloisterBertModel").from_pretrained(source).eval()
    with torch.no_grad():
        expected = model(input_ids=ids).last_hidden_state[0].mean(0)
    assert torch.allclose(torch.tensor(vector), expected, atol=1e-5)
