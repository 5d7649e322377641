"""Readers, their bounds, and the public set of an invitation."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.errors import DataError, FormatVersion, TooLarge, UsageError
from cloister.unify import examples
from cloister.unify.examples import Choice, Examples


def test_every_form_is_read(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"one, two",x\nthree,y\n')
    (tmp_path / "b.jsonl").write_text(
        '{"id": "q", "question": "why", "choices": ["a", "b"], "answer": 1}\n{"prompt": "p", "answer": "r"}\n\n'
        '{"id": 7, "text": "t"}\n{"question": "so", "context": "First.", "choices": ["a", "b"], "answer": 0}\n'
    )
    (tmp_path / "c.txt").write_text("eins\n\nzwei\n")
    with gzip.open(tmp_path / "d.txt.gz", "wt") as file:
        file.write("drei\n")
    csv, jsonl = examples.read(tmp_path / "a.csv"), examples.read(tmp_path / "b.jsonl")
    assert csv.inputs == ("one, two", "three") and csv.targets == ("x", "y") and csv.labels() == ("x", "y")
    assert jsonl.ids == ("q", "2", "7", "5") and jsonl.inputs == ("why", "p", "t", "First. so")
    assert jsonl.targets == (Choice(("a", "b"), 1), "r", None, Choice(("a", "b"), 0))
    assert examples.read(tmp_path / "c.txt").ids == ("1", "3")
    assert examples.read(tmp_path / "d.txt.gz").inputs == ("drei",)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", "words,label\na,b\n", "line 1: there is no column `text`"),
        ("a.csv", "text,label\na\n", "line 2: it has another number of columns"),
        ("a.csv", "text,label\na,b,c\n", "line 2"),
        ("a.csv", "text,label\n ,b\n", "line 2: `text` is not a text, or empty"),
        ("a.jsonl", '{"text": "a"}\n{', "line 2: not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1"),
        ("a.jsonl", "[1]", "line 1: not a JSON object"),
        ("a.jsonl", '{"words": 1}', "line 1: neither"),
        ("a.jsonl", '{"question": "a", "choices": ["b"], "answer": 0}', "line 1: `choices`"),
        ("a.jsonl", '{"question": "a", "choices": ["b", "c"], "answer": 2}', "line 1: `answer`"),
        ("a.jsonl", '{"question": "a", "choices": ["b", "c"], "answer": true}', "line 1: `answer`"),
        ("a.jsonl", '{"id": [], "text": "a"}', "line 1: `id`"),
        ("a.jsonl", '{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', "'1' is given to two"),
        ("a.txt", "", "no examples"),
        ("a.txt", b"\xff\xfe\xff", "UTF-8"),
        ("a.txt.gz", b"not gzip", "line 1"),
        ("a.safetensors", b"1234567890", "not a safetensors file"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=says):
        examples.read(path)


def test_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "MOST_CHARACTERS", 10)
    monkeypatch.setattr(examples, "MOST_EXAMPLES", 3)
    (tmp_path / "long.txt").write_text("x" * 11)
    (tmp_path / "longer.txt").write_text("x" * 1000)
    (tmp_path / "many.txt").write_text("a\n" * 4)
    for name in ("long.txt", "longer.txt", "many.txt"):
        with pytest.raises(TooLarge):
            examples.read(tmp_path / name)
    with pytest.raises(UsageError):
        (tmp_path / "a.pkl").write_text("")
        examples.read(tmp_path / "a.pkl")


text = st.text(min_size=1, max_size=30).filter(lambda t: t.strip() and "\x00" not in t)
targets = st.one_of(st.none(), text, st.builds(lambda c: Choice(tuple(c), 0), st.lists(text, min_size=2, max_size=4)))


@given(st.lists(st.tuples(text, targets), min_size=1, max_size=5))
def test_what_is_written_is_read_again(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("set") / "examples.jsonl"
    found = tuple(target for _, target in rows)
    given_ = Examples("text", tuple(map(str, range(len(rows)))), tuple(t for t, _ in rows),
                      found if any(t is not None for t in found) else None)  # fmt: skip
    examples.write(path, given_)
    again = examples.read(path)
    assert again == given_ and again.digest() == given_.digest()


def test_images_and_public_sets(tmp_path):
    pixels = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 1, 4, 4)
    given_ = Examples("image", ("0", "1", "2"), pixels, ("seven", None, "one"))
    examples.write_public_set(tmp_path / "out", given_, licence="CC0", description="digits")
    held = examples.public_set(tmp_path / "out")
    assert held.licence == "CC0" and held.examples.targets == given_.targets
    assert (held.examples.pixels() == pixels).all() and held.examples.digest() == given_.digest()
    about = json.loads((tmp_path / "out" / "public.json").read_text())
    (tmp_path / "out" / "public.json").write_text(json.dumps(about | {"sha256": "0" * 64}))
    with pytest.raises(DataError, match=r"not what public\.json says"):
        examples.public_set(tmp_path / "out")
    (tmp_path / "out" / "public.json").write_text(json.dumps(about | {"schema": 2}))
    with pytest.raises(FormatVersion):
        examples.public_set(tmp_path / "out")
    with pytest.raises(DataError):
        examples.public_set(tmp_path)


def test_hostile_images(tmp_path):
    from safetensors.numpy import save_file

    pixels = np.zeros((2, 1, 4, 4), dtype=np.uint8)
    for name, tensors in {
        "float": {"pixels": pixels.astype(np.float32)},
        "flat": {"pixels": pixels[0]},
        "channels": {"pixels": np.zeros((2, 2, 4, 4), dtype=np.uint8)},
        "stranger": {"pixels": pixels, "other": pixels},
        "labels": {"pixels": pixels, "label": np.array([0])},
        "float-labels": {"pixels": pixels, "label": np.array([0.0, 1.0])},
        "negative": {"pixels": pixels, "label": np.array([0, -2])},
    }.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        with pytest.raises((DataError, TooLarge)):
            examples.read(tmp_path / f"{name}.safetensors")


def test_rows_concat_and_ids():
    a, b = Examples("text", ("1", "2"), ("x", "y")), Examples("text", ("2", "3"), ("z", "w"), ("l", None))
    both = examples.concat([a, b])
    assert both.inputs == ("x", "y", "z", "w") and both.targets == (None, None, "l", None) and len(set(both.ids)) == 4
    assert both.rows([2, 0]).inputs == ("z", "x") and b.by_id(["3"]).inputs == ("w",)
    with pytest.raises(DataError, match="no example 'q'"):
        a.by_id(["1", "q"])
    with pytest.raises(DataError):
        a.rows([0, 0])
    with pytest.raises(UsageError):
        a.pixels()
