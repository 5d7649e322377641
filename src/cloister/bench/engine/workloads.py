"""What is computed in the suite `engine`. Both parties run these functions; inputs come from fixed seeds so that each
can check the opened result."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cloister.bench.engine.sides import Ahead, Outcome, timed
from cloister.crypto.engine import ExpertLayer, LinearLayer, Party, Shares

EXPERTS, SLOTS, HIDDEN, INNER = 64, 32, 2048, 1408
ROWS = 24


def _numbers(seed: int, shape: tuple[int, ...], size: float) -> NDArray[np.float64]:
    return np.random.default_rng(seed).uniform(-size, size, shape)


def _integers(seed: int, shape: tuple[int, ...], size: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(-size, size + 1, shape)


def _shared(party: Party, values: NDArray[np.float64]) -> Shares:
    """Proper shares of numbers that both parties know, so that no party's share is the value itself."""
    mask = _integers(99, values.shape, 1 << 30)
    ours = np.rint(values * (1 << party.fraction)).astype(np.int64) - mask
    a = party.share_integers(ours if party.role == "client" else None, owner="client", shape=values.shape)
    b = party.share_integers(mask if party.role == "server" else None, owner="server", shape=values.shape)
    both = a + b
    return Shares(both.data, party.fraction)


def single_product(party: Party, quick: bool) -> Outcome:
    """(24 x 2048) x (2048 x 1408), weights private to the server."""
    columns, outputs = (256, 176) if quick else (HIDDEN, INNER)
    x, w = _integers(1, (ROWS, columns), 1 << 14), _integers(2, (columns, outputs), 1 << 12)
    shares = _shared(party, x / (1 << party.fraction))
    weights = w.astype(np.int32) if party.role == "server" else None
    layer = LinearLayer("product", ROWS, columns, outputs)
    ahead = Ahead(
        [layer],
        None if weights is None else [weights],
        lambda: party.matmul(shares, weights, outputs=outputs, prepared=layer.name),
    )
    outcome, out = timed(
        party, lambda: party.matmul(shares, weights, outputs=outputs), repeats=2 if quick else 5, ahead=ahead
    )
    opened = party.reveal_integers(out, to="both")
    assert opened is not None
    outcome.error = float(np.abs(opened - x @ w).max())
    return outcome


def _layer(
    party: Party, quick: bool, outputs: tuple[int, ...], columns: int, repeats: int, most_bytes: int | None = None
) -> Outcome:
    experts, slots = (16, SLOTS) if quick else (EXPERTS, SLOTS)
    if quick:
        columns, outputs = columns // 8, tuple(o // 8 for o in outputs)
    x = _integers(3, (experts, slots, columns), 1 << 14)
    weights = None
    if party.role == "server":
        weights = [
            np.random.default_rng(4 + i).integers(-(1 << 12), 1 << 12, (experts, out, columns), dtype=np.int16)
            for i, out in enumerate(outputs)
        ]
    shares = _shared(party, x / (1 << party.fraction))
    outcome, out = timed(
        party,
        lambda: party.batched_matmul(shares, weights, outputs=outputs, most_bytes=most_bytes),
        repeats=repeats,
        warm_up=int(quick),
        ahead=Ahead(
            [ExpertLayer("experts", experts, slots, columns, outputs, most_bytes)],
            None if weights is None else [weights],
            lambda: party.batched_matmul(shares, weights, outputs=outputs, most_bytes=most_bytes, prepared="experts"),
        ),
    )
    for i, (share, width) in enumerate(zip(out, outputs, strict=True)):
        opened = party.reveal_integers(share[:2], to="both")
        assert opened is not None
        w = np.random.default_rng(4 + i).integers(-(1 << 12), 1 << 12, (experts, width, columns), dtype=np.int16)
        plain = np.einsum("etc,eoc->eto", x[:2].astype(np.float64), w[:2].astype(np.float64))
        outcome.error = max(outcome.error or 0.0, float(np.abs(opened - plain).max()))
    return outcome


def expert_product(party: Party, quick: bool) -> Outcome:
    """64 experts with different weights, 24 tokens in 32 slots each, 2048 to 1408."""
    return _layer(party, quick, (INNER,), HIDDEN, 1 if quick else 2)


def gate_and_up(party: Party, quick: bool) -> Outcome:
    """The first two products of a layer, on one input."""
    return _layer(party, quick, (INNER, INNER), HIDDEN, 1)


def down(party: Party, quick: bool) -> Outcome:
    """The third product of a layer."""
    return _layer(party, quick, (HIDDEN,), INNER, 1, most_bytes=120_000_000)  # what gate and up leave of 350 MB


def less_than(party: Party, quick: bool) -> Outcome:
    """2^18 exact comparisons."""
    n = 1 << (14 if quick else 18)
    x, y = _numbers(5, (n,), 1e5), _numbers(6, (n,), 1e5)
    a, b = _shared(party, x), _shared(party, y)
    outcome, bits = timed(party, lambda: party.less_than(a, b), repeats=3)
    opened = party.reveal_integers(party.bits_to_values(bits), to="both")
    assert opened is not None
    outcome.error = float((opened != (np.rint(x * 4096) < np.rint(y * 4096))).sum())
    return outcome


def silu(party: Party, quick: bool) -> Outcome:
    """SiLU of 2^20 numbers in [-16, 16]."""
    n = 1 << (14 if quick else 20)
    x = np.linspace(-16, 16, n)
    shares = _shared(party, x)
    outcome, out = timed(party, lambda: party.silu(shares), repeats=1 if not quick else 2, warm_up=int(quick))
    opened = party.reveal(out, to="both")
    assert opened is not None
    outcome.error = float(np.abs(opened - x / (1 + np.exp(-x))).max())
    return outcome


def softmax(party: Party, quick: bool) -> Outcome:
    """Softmax of 128 rows of 64."""
    x = _numbers(7, (128, 64), 4.0)
    shares = _shared(party, x)
    outcome, out = timed(party, lambda: party.softmax(shares), repeats=2 if quick else 5)
    opened = party.reveal(out, to="both")
    assert opened is not None
    plain = np.exp(x - x.max(axis=1, keepdims=True))
    outcome.error = float(np.abs(opened - plain / plain.sum(axis=1, keepdims=True)).max())
    return outcome


def top_k(party: Party, quick: bool) -> Outcome:
    """The mask of the 6 largest of 64, for 128 rows of probabilities."""
    x = np.random.default_rng(8).dirichlet(np.ones(64), 128)
    shares = _shared(party, x)
    outcome, bits = timed(party, lambda: party.top_k_mask(shares, 6), repeats=2 if quick else 5)
    opened = party.reveal_integers(party.bits_to_values(bits), to="both")
    assert opened is not None
    order = np.argsort(-np.rint(x * 4096), axis=1, kind="stable")[:, :6]
    plain = np.zeros_like(opened)
    np.put_along_axis(plain, order, 1, axis=1)
    outcome.error = float((opened != plain).sum())
    return outcome


def dispatch(party: Party, quick: bool) -> Outcome:
    """For 64 experts the 24 best of 128 tokens, as 0/1 matrices."""
    experts = 8 if quick else EXPERTS
    x = np.random.default_rng(9).uniform(0, 1, (experts, 128))
    shares = _shared(party, x)
    outcome, out = timed(party, lambda: party.dispatch(shares, 24, bits=16), repeats=2 if quick else 3)
    opened = party.reveal_integers(out, to="both")
    assert opened is not None
    order = np.argsort(-np.rint(x * 4096), axis=1, kind="stable")[:, :24]
    plain = (order[:, :, None] == np.arange(128)).astype(np.int64)
    outcome.error = float((opened != plain).sum())
    return outcome
