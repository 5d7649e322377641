"""The labels of a unified classifier, as a file beside its weights.

    labels.write(model_folder, ("card_arrival", ...), vectors)
    known = labels.read(folder)
    known.nearest(vectors_of_texts)         # ["card_arrival", ...]

A unified encoder has no head: a text belongs to the label whose name's vector, made by the *seed*, is closest. So who
asks the model needs these vectors and nothing else. `cloister protect` copies the file to the user's side. It holds
nothing private: labels are in the recipe, and the seed is public. No torch is needed to use it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister import storage
from cloister.errors import BrokenCheckpoint, NotFound

FILE = "label_vectors.safetensors"
_MOST_BYTES = 1 << 30
_VECTORS, _LABELS = "vectors", "labels"


@dataclass(frozen=True)
class Labels:
    """Names, and their vectors of length one [labels, hidden]."""

    names: tuple[str, ...]
    vectors: NDArray[np.float32]

    def scores(self, texts: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Cosines of the vectors of texts [n, hidden] with every label [n, labels]."""
        lengths = np.linalg.norm(texts, axis=-1, keepdims=True)
        return np.asarray(texts / np.maximum(lengths, 1e-12) @ self.vectors.T, dtype=np.float32)

    def nearest(self, texts: NDArray[np.floating[Any]]) -> list[str]:
        """The label of each text."""
        return [self.names[int(best)] for best in self.scores(texts).argmax(-1)]


def write(folder: Path, names: Sequence[str], vectors: NDArray[np.float32]) -> None:
    """Write the file."""
    from safetensors.numpy import save

    found = np.ascontiguousarray(vectors, dtype=np.float32)
    if found.ndim != 2 or len(found) != len(names):
        raise ValueError("one vector a label")
    storage.write_bytes(folder / FILE, save({_VECTORS: found}, metadata={_LABELS: json.dumps(list(names))}))


def read(folder: Path) -> Labels:
    """The labels of a unified model or of the client directory that `protect` made of it."""
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.is_file():
        raise NotFound(
            f"{folder} has no {FILE}.", advice="Only models that owners unified for classification have one."
        )
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large")
        with safe_open(str(path), framework="numpy") as file:
            names = json.loads((file.metadata() or {})[_LABELS])
            vectors = file.get_tensor(_VECTORS)
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError("its labels are not a list of names")
        if vectors.dtype != np.float32 or vectors.ndim != 2 or len(vectors) != len(names) or not names:
            raise ValueError("its vectors do not fit its labels")
        if not np.isfinite(vectors).all():
            raise ValueError("its vectors are not finite")
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {error}.", advice="Copy it again.") from None
    return Labels(tuple(names), vectors)
