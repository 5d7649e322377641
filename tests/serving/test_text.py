"""Text and tokens on the user's machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from client_dirs import END, byte_tokenizer, write_client
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from cloister.errors import BrokenManifest, InvalidParameter, UsageError
from cloister.serving.text import StopScanner, TextCodec


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    directory = tmp_path_factory.mktemp("client")
    write_client(directory)
    return TextCodec(directory)


def directory_with(tmp_path: Path, template: str | None = None, **config: Any) -> Path:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


@settings(max_examples=60, deadline=None)
@given(prompt=st.text(max_size=8), text=st.text(max_size=40))
def test_streamed_pieces_are_the_text_and_never_half_a_character(codec: TextCodec, prompt: str, text: str) -> None:
    writer = codec.writer(codec.encode(prompt))
    pieces = [writer.push(token) for token in codec.encode(text)]
    assert "".join(pieces) + writer.finish() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_bytes_that_are_no_character_are_written_in_the_end(codec: TextCodec) -> None:
    half = codec.encode("😀")[:2]
    writer = codec.writer()
    assert [writer.push(token) for token in half] == ["", ""]
    assert writer.finish() == "\ufffd"
    endless = codec.writer()
    assert "\ufffd" in "".join(endless.push(half[1]) for _ in range(300))  # held for a while, not for ever


def test_special_tokens_are_not_text(codec: TextCodec) -> None:
    writer = codec.writer()
    assert writer.push(codec.encode("a")[0]) + writer.push(END) + writer.push(codec.encode("b")[0]) == "ab"
    assert codec.decode([END], special=True) == "<|end|>"
    assert codec.eos_ids == (END,)


def test_spaces_between_words_survive_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    vocabulary = {
        "<unk>": 0,
        "<s>": 1,
        "▁Hello": 2,
        "▁world": 3,
        **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)},
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    writer = codec.writer([1, 2])
    assert [writer.push(token) for token in (3, 2)] == [" world", " Hello"]
    cat = [4 + byte for byte in "猫".encode()]
    assert [writer.push(token) for token in (*cat, 3)] == ["", "", "猫", " world"]
    assert codec.token_bytes(cat[0]) == "猫".encode()[:1]


@pytest.mark.parametrize("wanted", [True, False, None])
@pytest.mark.parametrize("processor", [True, False])
def test_the_beginning_of_text_token(tmp_path: Path, wanted: bool | None, processor: bool) -> None:
    config = {"bos_token": {"content": "<|system|>"}} | ({} if wanted is None else {"add_bos_token": wanted})
    directory = directory_with(tmp_path, **config)
    if processor:
        tokenizer = byte_tokenizer()
        bos = tokenizer.token_to_id("<|system|>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|system|> $A", special_tokens=[("<|system|>", bos)]
        )
        tokenizer.save(str(directory / "tokenizer.json"))
    codec = TextCodec(directory)
    bos = byte_tokenizer().token_to_id("<|system|>")
    starts = codec.encode("x")[0] == bos
    assert starts == (processor if wanted is None else wanted)
    assert codec.encode("x", special=False)[0] != bos


TRANSFORMERS_LIKE = """{%- for message in messages %}
    {%- if loop.first %}{{ bos_token }}{% endif %}
    {%- generation %}{{ message | tojson }}{% endgeneration %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ eos_token }}{% endif %}{{ strftime_now('%%') }}"""


def test_a_template_sees_what_transformers_gives_it(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, TRANSFORMERS_LIKE, bos_token="<|user|>", eos_token="<|end|>")
    codec = TextCodec(directory)
    messages = [{"role": "user", "content": "<ö>"}] * 5
    one = '{"role": "user", "content": "<ö>"}'
    assert codec.render_chat(messages) == f"<|user|>{one * 3}<|end|>%"
    transformers: Any = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    rendered = theirs.apply_chat_template(
        messages, chat_template=TRANSFORMERS_LIKE, tokenize=False, add_generation_prompt=True
    )
    assert codec.render_chat(messages) == rendered


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    assert TextCodec(directory_with(tmp_path, chat_template=named)).render_chat([]) == "yes"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 100000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ nothing.at.all }}",
        "{{ raise_exception('a reason') }}",
    ],
)
def test_a_template_cannot_do_harm(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        TextCodec(directory_with(tmp_path, template)).render_chat([{"role": "user", "content": "private"}])
    assert error.value.param == "messages" and "private" not in str(error.value)
    assert ("a reason" in str(error.value)) == ("a reason" in template)


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenManifest, match=r"no tokenizer\.json"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BrokenManifest, match="cannot be read"):
        TextCodec(tmp_path)
    codec = TextCodec(directory_with(tmp_path))
    with pytest.raises(UsageError, match="no chat template"):
        codec.render_chat([])
    with pytest.raises(BrokenManifest, match="chat template"):
        TextCodec(directory_with(tmp_path, "{% if %}"))


def test_lone_surrogates_do_not_break_anything(codec: TextCodec) -> None:
    assert codec.decode(codec.encode("a\ud800b")) == "a?b"


def cut(pieces: Sequence[str], stops: Sequence[str]) -> str:
    scanner, text = StopScanner(stops), ""
    for piece in pieces:
        safe, stopped = scanner.push(piece)
        text += safe
        if stopped:
            return text
    return text + scanner.finish()


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_are_found_across_pieces(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    shown = cut(pieces, stops)
    # Whatever is shown first must be the text before the stop string that is complete first.
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert shown == text
    else:
        assert text.startswith(shown) and not any(stop in shown for stop in stops)
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
