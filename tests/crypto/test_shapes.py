"""Shapes at the edges, the same on both backends: single numbers, fancy indices, announced shapes, empty products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cloister_native")
pytest.importorskip("torch")

from two_processes import run

from cloister.crypto import plain
from cloister.crypto.engine import LinearLayer
from cloister.errors import InvalidParameter


def single_numbers(party: Any) -> list[Any]:
    mine = party.plays("client")
    x = party.share_integers(np.array([1, 2, 3]) if mine else None, owner="client", shape=(3,))
    y = party.share_integers(np.arange(24).reshape(2, 3, 4) if mine else None, owner="client", shape=(2, 3, 4))
    results = [
        x[1],
        party.bits_to_values(party.is_negative(x)[1]),
        party.square(x.sum(0)),
        party.maximum(x),
        party.inner_products(x, x) + x[0],
        party.share(5 if mine else None, owner="client", shape=()),
        y[0, :, [1, 3]],
        x[np.array([0, 1, 1, 0], dtype=np.uint8)],
        x[[[0, 1], [2, 1]]],
    ]
    return [party.reveal(value, to="both").tolist() for value in results]


def refusals(party: Any) -> float:
    """What either party refuses before anything is sent; the session goes on."""
    mine = party.plays("client")
    if mine:
        with pytest.raises(InvalidParameter, match="announced"):
            party.share(np.zeros((3, 2)), owner="client", shape=(2, 3))
    layer = LinearLayer("a", 1, 2, 3)
    if party.plays("server"):
        with pytest.raises(InvalidParameter, match="must lie"):
            party.prepare([layer], [np.full((2, 3), 1 << 20)])
        with pytest.raises(InvalidParameter, match="with its weights"):
            party.prepare([layer])
    x = party.share_integers(np.ones((1, 2), dtype=int) if mine else None, owner="client", shape=(1, 2))
    for empty in (x[:0], x[:, :0]):
        with pytest.raises(InvalidParameter, match="at least one"):
            party.matmul(empty, None, outputs=3)
    below = party.truncate(x.times(32), 4)
    return float(party.reveal(below, to="both").sum())


EXPECTED = [2, 0, 36, 3, 15, 5.0, [[1, 5, 9], [3, 7, 11]], [1, 2, 2, 1], [[1, 2], [3, 2]]]


def test_single_numbers_and_fancy_indices_are_the_same_on_both(tmp_path: Path) -> None:
    ours, theirs = run(single_numbers, tmp_path)
    assert ours == theirs == single_numbers(plain.Party()) == EXPECTED


def test_what_is_refused_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    ours, theirs = run(refusals, tmp_path)
    assert ours == theirs and 32 <= ours <= 96
    assert 32 <= refusals(plain.Party()) <= 96
