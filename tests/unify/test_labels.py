"""Labels beside a unified classifier: what is written is read, and a broken file is called so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from cloister.errors import BrokenCheckpoint, NotFound
from cloister.unify import labels


def test_the_nearest_label_whatever_the_length_of_the_vector(tmp_path: Path) -> None:
    labels.write(tmp_path, ("left", "up"), np.eye(2, dtype=np.float32))
    known = labels.read(tmp_path)
    assert known.names == ("left", "up")
    assert known.nearest(np.array([[9.0, 1.0], [0.001, 0.002]])) == ["left", "up"]
    assert known.scores(np.zeros((1, 2))).tolist() == [[0.0, 0.0]]


def test_a_model_without_labels_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="has no label_vectors"):
        labels.read(tmp_path)


@pytest.mark.parametrize(
    ("vectors", "names"),
    [
        (np.eye(3, dtype=np.float32), ["a", "b"]),
        (np.eye(2, dtype=np.float64), ["a", "b"]),
        (np.full((2, 2), np.nan, dtype=np.float32), ["a", "b"]),
        (np.eye(2, dtype=np.float32), {"a": 1, "b": 2}),
        (np.eye(2, dtype=np.float32), ["a", 2]),
        (np.zeros((0, 2), dtype=np.float32), []),
    ],
)
def test_a_broken_file_is_called_so(tmp_path: Path, vectors: np.ndarray, names: object) -> None:
    (tmp_path / labels.FILE).write_bytes(save({"vectors": vectors}, metadata={"labels": json.dumps(names)}))
    with pytest.raises(BrokenCheckpoint):
        labels.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not safetensors", save({"vectors": np.eye(2, dtype=np.float32)})])
def test_something_else_under_that_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / labels.FILE).write_bytes(content)
    with pytest.raises(BrokenCheckpoint):
        labels.read(tmp_path)
