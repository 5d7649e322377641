"""Theorem 2 on every family that it can hold for, and the reasons for the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from enclave_models import MODELS, tiny

from cloister.errors import UnsupportedModel
from cloister.permute.enclave.host import biases_are_zero, form_of_model
from cloister.permute.enclave.theorem import form_of, theorem2_holds


@pytest.mark.parametrize("name", MODELS)
def test_enclave_path_gives_the_plain_answer(serving, name):
    served = serving(name)
    values = served.values()
    found, _ = served.wired.forward(values)
    expected = served.expected(values)
    assert found.shape == expected.shape
    assert expected.std() > 0.05
    assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", MODELS)
def test_verdict_agrees(name):
    model = tiny(name)
    zero = name.startswith("bert") and biases_are_zero(model)
    holds, reasons = theorem2_holds(model.config, biases_are_zero=zero)
    assert holds and reasons
    assert theorem2_holds(model.config.to_dict(), biases_are_zero=zero) == (holds, reasons)


def test_bert_with_biases_is_refused_with_every_reason():
    model = tiny("bert")
    holds, reasons = theorem2_holds(model.config)
    assert not holds
    for part, reason in zip(("query", "key", "value", "attention output"), reasons, strict=True):
        assert f"the {part} projection" in reason
    with pytest.raises(UnsupportedModel, match="has a bias") as caught:
        form_of_model(model)
    assert len(caught.value.reasons) == 4


def test_bert_heads_are_refused_even_without_biases():
    config = transformers.BertConfig(architectures=["BertForSequenceClassification"])
    holds, reasons = theorem2_holds(config, biases_are_zero=True)
    assert not holds and "non-linear parts behind the last norm" in reasons[0]


def test_unknown_architecture_is_refused():
    assert theorem2_holds(transformers.MambaConfig())[0] is False
    with pytest.raises(UnsupportedModel, match="mamba"):
        form_of(transformers.MambaConfig())


def test_papers_formula_is_wrong_for_pre_norm_models(serving, tmp_path):
    """The printed softmax, alpha softmax(A / (alpha alpha^T) + M) / alpha, where the norm has already dropped alpha."""
    served = serving("llama")
    values = served.values()
    session = served.wired.open(values)
    functions, state = _functions(served, values)
    scores = np.random.default_rng(0).standard_normal((2, 4, 9, 9)).astype(np.float32) * 5
    right = np.empty_like(scores)
    functions.softmax(scores, state, 1.0, right)
    state.rest = state.alpha  # what the paper divides by
    wrong = np.empty_like(scores)
    functions.softmax(scores, state, 1.0, wrong)
    plain = torch.softmax(torch.from_numpy(scores) + torch.full((9, 9), float("-inf")).triu(1), -1).numpy()
    alpha = state.alpha[:, None, :, None]
    assert np.abs(right / alpha - plain).max() < 5e-2  # r is within eps of one
    assert np.abs(wrong / alpha - plain).max() > 0.5
    served.enclave.close_session(session)


def _functions(served, values):
    from cloister.permute.enclave.functions import Functions

    functions = Functions(served.bundle)
    _, state = functions.embed(values, None)
    return functions, state


@pytest.mark.parametrize("name", ["llama", "gpt2", "olmoe", "mistral", "deepseek_v3"])
def test_greedy_generation_with_a_cache(serving, name):
    served = serving(name)
    prompt = served.values(batch=1, rows=6)
    with torch.inference_mode():
        plain = served.plain.generate(
            torch.from_numpy(prompt).long(), max_new_tokens=16, min_new_tokens=16, do_sample=False, pad_token_id=0
        )[0, 6:]
    cache = transformers.DynamicCache(config=served.server.config)
    outputs, session = served.wired.forward(prompt, cache=cache, last_only=True)
    found = []
    for _ in range(16):
        scores = outputs[:, -1].clone()
        scores[:, 2] = -torch.inf  # min_new_tokens forbids the end token
        token = scores.argmax(-1)
        found.append(int(token))
        outputs, _ = served.wired.forward(
            token[:, None].numpy().astype(np.int32), cache=cache, session=session, last_only=True
        )
    assert found == plain.tolist()
    served.wired.close_session(session)


@pytest.mark.parametrize("name", ["bert without biases", "llama"])
def test_right_padded_batch(serving, name):
    served = serving(name)
    values = served.values()
    lengths = np.array([9, 4], np.int32)
    found, _ = served.wired.forward(values, lengths=lengths)
    alone = served.expected(values[1:, :4])
    assert (found[1, :4] - alone[0]).abs().max() < 1e-4 * max(1.0, float(alone.abs().max()))


def test_the_model_is_given_back_unchanged(serving):
    served = serving("llama")
    values = served.values()
    served.wired.forward(values)
    with torch.inference_mode():
        rows = torch.from_numpy(np.array(served.bundle.tensors["embedding"]))[torch.from_numpy(values).long()]
        before = served.server.model.layers[0].self_attn.config._attn_implementation
        served.wired.close()
        after = served.server(inputs_embeds=rows).logits[
            ..., torch.as_tensor(np.array(served.bundle.tensors["output_order"])).long()
        ]
    assert before == "cloister_enclave"
    assert (after - served.expected(values)).abs().max() < 1e-4
    served.wired.__init__(served.server, served.enclave)  # the fixture closes it again
