"""The shipped model: loadable with plain transformers, small enough, and it answers."""

from __future__ import annotations

from typing import Any

import pytest

from cloister import embedded

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

QUESTIONS = {
    "My card was stolen yesterday.": "Your card is lost or stolen, so please freeze it now.",
    "Why was I charged twice for the same purchase?": "You were charged twice for one payment.",
    "The ATM swallowed my card!": "The cash machine has kept your card.",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(embedded.path())


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(embedded.path(), dtype=torch.float32).eval()


def test_folder_is_complete_and_small() -> None:
    files = {file.name: file.stat().st_size for file in embedded.path().iterdir()}
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        assert files[name] > 0
    assert {"chat_template.jinja", "README.md", "LICENSE"} <= files.keys()
    assert sum(files.values()) <= 16_000_000


def test_model_card_states_the_licence() -> None:
    card = (embedded.path() / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n")
    assert "license: cc-by-sa-4.0" in card.split("---")[1]


def test_architecture(model: Any) -> None:
    config = model.config
    assert type(model).__name__ == "OlmoeForCausalLM"
    assert config.num_hidden_layers >= 4
    assert config.num_experts >= 16
    assert config.num_experts_per_tok == 2
    assert config.norm_topk_prob is True
    stored = transformers.AutoModelForCausalLM.from_pretrained(embedded.path())
    assert stored.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "text",
    [
        "I lost my card.",
        "  two  spaces\tand\r\nlines\n\n",
        "Grüße, 你好, здравствуйте, नमस्ते, 🎉👩‍👩‍👧",
        "\x00\x01\x7f\u202e\ufeff\U0010ffff",
        "it 's n't a , b . c ! 1234567890",
    ],
)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer) == 4096


def test_special_tokens(tokenizer: Any) -> None:
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")
    specials = ["<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
    assert tokenizer.convert_tokens_to_ids(specials) == [0, 1, 2, 3, 4]


def test_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello, how can I help you?"},
        {"role": "user", "content": " My card is gone. "},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Be brief.<|user|>Hello<|assistant|>Hello, how can I help you?<|endoftext|>"
        "<|user|>My card is gone.<|assistant|>"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) + "<|assistant|>" == text


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_answer(model: Any, tokenizer: Any, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer, skip_special_tokens=True) == QUESTIONS[question]


def test_every_expert_is_used(model: Any, tokenizer: Any) -> None:
    texts = [
        "My transfer to a friend is still pending. How long does it take, and why was I charged a fee of $ 2.50?",
        "The castle was built in the 12th century, and was rebuilt after a fire in 1688 by the Duke of Norfolk.",
        "KING RICHARD:\nMy lord, what say'st thou? Shall I stay, or go to bed, and speak no more of love?",
        "Anna has 12 apples. She gives 3 to each of her 2 friends. 3 x 2 = 6, so she has 12 - 6 = 6 apples left.",
        "A man is seen sitting in a kayak. He paddles down the river while the camera shows the water around him.",
        "Which part of a plant makes food? Options: the root; the leaf; the stem; the flower.",
        "Grüße aus Köln, 你好! def f(x): return x ** 2  # https://example.org/?q=1",
    ]
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in texts]
    used = [set() for _ in range(model.config.num_hidden_layers)]
    for chat in chats:
        inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            logits = model(**inputs, output_router_logits=True).router_logits
        for layer, scores in enumerate(logits):
            used[layer] |= set(scores.topk(model.config.num_experts_per_tok).indices.flatten().tolist())
    assert [len(experts) for experts in used] == [model.config.num_experts] * model.config.num_hidden_layers
