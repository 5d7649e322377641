"""The plain backend's numbers: exact, in range, and rounded as two shares round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloister.crypto import plain

WIDE = st.integers(-plain.BOUND + 1, plain.BOUND - 1)


def test_numbers_go_in_and_out() -> None:
    x = torch.tensor([0.0, 1.0, -1.5, 0.00013, 1e6])
    assert plain.decode(plain.encode(x)).sub(x.double()).abs().max() <= 2**-13
    assert plain.encode(torch.tensor([0.25]), 20).tolist() == [1 << 18]


def test_a_value_that_shares_cannot_hold_is_refused_with_its_place() -> None:
    for wrong in (plain.BOUND, -plain.BOUND):
        with pytest.raises(plain.OutOfRange, match=r"scores: element 3 of \(2, 2\) is"):
            plain.check(torch.tensor([[0, 1], [2, wrong]]), "scores")
    with pytest.raises(plain.OutOfRange, match="encode"):
        plain.encode(torch.tensor([2.0**28]))
    assert plain.check(torch.tensor([plain.BOUND - 1, 1 - plain.BOUND]), "edge").shape == (2,)
    assert plain.check(torch.zeros(0, dtype=torch.int64), "nothing").numel() == 0


@given(st.lists(WIDE, min_size=1, max_size=50), st.integers(1, 14))
def test_truncation_is_to_nearest_and_shares_are_within_one(values: list[int], f: int) -> None:
    x = torch.tensor(values)
    near = plain.truncate(x, f)
    assert near.tolist() == [(v + (1 << f >> 1)) >> f for v in values]
    client, server = plain.share(x)
    by_shares = plain.truncate_shares(client, server, f)
    assert bool(((by_shares - (x >> f) >= 0) & (by_shares - (x >> f) <= 1)).all())
    assert int((by_shares - near).abs().max()) <= 1


def test_truncation_by_shares_has_no_bias() -> None:
    x = torch.full((1 << 16,), 5 * 4096 + 1024)
    mean = plain.truncate_shares(*plain.share(x, torch.Generator().manual_seed(1)), 12).double().mean()
    assert abs(float(mean) - 5.25) < 0.01


def test_nothing_to_truncate() -> None:
    x = torch.tensor([5, -7])
    assert plain.truncate_shares(*plain.share(x), 0).tolist() == [5, -7]
    assert plain.truncate(x, 0).tolist() == [5, -7]


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 6), st.integers(1, 32), st.data())
def test_matrix_products_are_those_of_integers(
    rows: int, inner: int, columns: int, bits: int, data: st.DataObject
) -> None:
    room = 38 - bits - inner.bit_length()
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    x = torch.randint(-(1 << bits) + 1, 1 << bits, (2, rows, inner), generator=draw)
    y = torch.randint(-(1 << room), (1 << room) + 1, (2, inner, columns), generator=draw)
    truth = (x.unsqueeze(-1) * y.unsqueeze(-3)).sum(-2)
    assert torch.equal(plain.matmul(x, y), truth)


def test_a_product_that_leaves_the_range_is_refused() -> None:
    big = torch.full((1, 4), 1 << 30)
    with pytest.raises(plain.OutOfRange, match="scores"):
        plain.matmul(big, big.T, "scores")
    # 2^36 * 2^36 * 4 is 0 modulo 2^64: only the rough sum sees it.
    big = torch.full((1, 4), 1 << 36)
    with pytest.raises(plain.OutOfRange):
        plain.matmul(big, big.T)
    for size in (1 << 20, 1 << 32, 1 << 38):
        with pytest.raises(plain.OutOfRange):
            plain.multiply(torch.tensor([size]), torch.tensor([size]))


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20), st.data())
def test_order(values: list[int], data: st.DataObject) -> None:
    x = torch.tensor([values])
    ranks = plain.rank(x)[0].tolist()
    assert ranks == [sum(w > v or (w == v and j < i) for j, w in enumerate(values)) for i, v in enumerate(values)]
    k = data.draw(st.integers(0, len(values)))
    mask = plain.top_k_mask(x, k)[0]
    assert int(mask.sum()) == k
    slots = plain.dispatch(x, k)[0]
    assert slots.shape == (k, len(values)) and slots.sum(0).tolist() == mask.tolist()
    assert (slots @ x[0]).tolist() == sorted(values, reverse=True)[:k]
    assert int(plain.maximum(x)) == max(values)


def test_bits() -> None:
    x, y = torch.tensor([1, 2, 3]), torch.tensor([2, 2, 2])
    assert plain.less_than(x, y).tolist() == [1, 0, 0]
    assert plain.equal(x, y).tolist() == [0, 1, 0]
    assert plain.select(plain.less_than(x, y), y).tolist() == [2, 0, 0]
    assert plain.one_hot(torch.tensor([2, 5]), 4).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
