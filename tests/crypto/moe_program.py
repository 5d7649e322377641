"""One private program, a small mixture of experts, written once for both backends; and each step once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.crypto.computer import B, Computer, N

TOKENS, COLUMNS, EXPERTS, CHOSEN, SLOTS, INNER, WORDS = 12, 16, 4, 2, 12, 24, 10
QUESTION = 12  # a seed with which no choice of experts hangs on a rounding


def numbers(seed: int, shape: tuple[int, ...], size: float) -> NDArray[np.float64]:
    """The same in every process."""
    return np.random.default_rng(seed).uniform(-size, size, shape)


def integers(seed: int, shape: tuple[int, ...], size: int) -> NDArray[np.int64]:
    """The same in every process."""
    return np.random.default_rng(seed).integers(-size, size + 1, shape)


def layer_weights() -> dict[str, NDArray[np.int64]]:
    """At 12 fraction bits."""
    return {
        "router": integers(11, (COLUMNS, EXPERTS), 4096),
        "gate": integers(12, (EXPERTS, INNER, COLUMNS), 2048),
        "up": integers(13, (EXPERTS, INNER, COLUMNS), 2048),
        "down": integers(14, (EXPERTS, COLUMNS, INNER), 2048),
        "head": integers(15, (COLUMNS, WORDS), 2048),
    }


def mixture(party: Computer[N, B]) -> dict[str, Any]:
    """Norm, router, softmax, the best experts, dispatch, their three products, combination, norm, words."""
    w: dict[str, Any] = layer_weights() if party.plays("server") else dict.fromkeys(layer_weights())
    question = numbers(QUESTION, (TOKENS, COLUMNS), 2) if party.plays("client") else None
    x = party.share(question, owner="client", shape=(TOKENS, COLUMNS))
    with party.step("router"):
        h = party.rms_norm(x)
        shares = party.softmax(party.truncate(party.matmul(h, w["router"], outputs=EXPERTS)))
        chosen = party.top_k_mask(shares, CHOSEN)
        gates = party.select(chosen, shares).transpose(1, 0)
        picked = party.dispatch(gates, SLOTS)
    with party.step("experts"):
        to_slots = picked.reshape(EXPERTS * SLOTS, TOKENS)
        inputs = party.shared_matmul(to_slots, h).reshape(EXPERTS, SLOTS, COLUMNS)
        gate, up = party.batched_matmul(
            inputs, [w["gate"], w["up"]] if party.plays("server") else None, outputs=[INNER, INNER]
        )
        inner = party.multiply(party.silu(party.truncate(gate)), party.truncate(up))
        (out,) = party.batched_matmul(
            party.truncate(inner), [w["down"]] if party.plays("server") else None, outputs=[COLUMNS]
        )
    with party.step("combine"):
        weight = party.shared_matmul(picked, gates.reshape(EXPERTS, TOKENS, 1))[:, :, [0] * COLUMNS]
        weighted = party.truncate(party.multiply(party.truncate(out), weight))
        x = x + party.shared_matmul(to_slots.transpose(1, 0), weighted.reshape(EXPERTS * SLOTS, COLUMNS))
    words = party.truncate(party.matmul(party.rms_norm(x), w["head"], outputs=WORDS))
    return {
        "shares": party.reveal(shares, to="both"),
        "chosen": party.reveal_integers(party.bits_to_values(chosen), to="both"),
        "words": party.reveal(words, to="both"),
        "steps": sorted({cost.step.split("/")[0] for cost in party.costs()} & {"router", "experts", "combine"}),
    }


def mixture_in_the_clear() -> NDArray[np.float64]:
    """The words in floating point."""
    w = {name: value / 4096 for name, value in layer_weights().items()}

    def norm(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)

    x = numbers(QUESTION, (TOKENS, COLUMNS), 2)
    h = norm(x)
    powers = np.exp(h @ w["router"])
    shares = powers / powers.sum(1, keepdims=True)
    for t in range(TOKENS):
        for e in np.argsort(-shares[t])[:CHOSEN]:
            gate = w["gate"][e] @ h[t]
            x[t] += shares[t, e] * (w["down"][e] @ (gate / (1 + np.exp(-gate)) * (w["up"][e] @ h[t])))
    return norm(x) @ w["head"]


# ---- each step of the interface -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A program of one step, which gives numbers or bits, and how far the engine may be from the plain party: in last
    places and relative to the value. Exact where nothing is said."""

    program: Callable[[Any], Any]
    places: float = 0
    relative: float = 0


BORDERS = (2.28125, 4.9375, 9.75, 1.59375, 3.75, 0.0)


def _away(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Moves numbers off the borders of pieces, where a comparison may fall either way."""
    for border in (sign * b for b in BORDERS for sign in (1, -1)):
        x = np.where(np.abs(x - border) < 1 / 16, border + 1 / 8, x)
    return x


def _client(party: Any, values: NDArray[np.float64]) -> Any:
    return party.share(values if party.plays("client") else None, owner="client", shape=values.shape)


def _whole(party: Any, values: NDArray[np.int64], fraction: int = 0) -> Any:
    mine = values if party.plays("server") else None
    return party.share_integers(mine, owner="server", shape=values.shape, fraction=fraction)


def _x(party: Any) -> Any:
    return _client(party, _away(numbers(1, (3, 5, 8), 12)))


def _y(party: Any) -> Any:
    return _client(party, numbers(2, (3, 5, 8), 12))


def _size(party: Any) -> Any:
    return _client(party, np.abs(numbers(3, (4, 7), 7)) + 0.5)


def _scores(party: Any) -> Any:
    """With ties."""
    return _whole(party, integers(4, (6, 20), 9))


def _bits(party: Any, seed: int = 5) -> Any:
    return party.is_negative(_client(party, numbers(seed, (3, 5, 8), 12)))


def _weights(party: Any, *shape: int) -> Any:
    return integers(6, shape, 3000) if party.plays("server") else None


def _batch(party: Any) -> Any:
    x = _whole(party, integers(7, (2, 3, 4, 8), 900))  # two sets for three experts
    return party.batched_matmul(x, [_weights(party, 3, 5, 8)] if party.plays("server") else None, outputs=[5])[0]


ALLOWED = np.tril(np.ones((5, 8), dtype=bool), 1)

CASES: dict[str, Case] = {
    "share": Case(_x),
    "share_integers": Case(lambda p: _whole(p, integers(8, (4, 3), 1 << 38), 3)),
    "reveal": Case(_y),
    "reveal_integers": Case(lambda p: _x(p).transpose(2, 0, 1)[::-1, 0].reshape(-1)),
    "constant": Case(lambda p: _x(p) + p.constant(numbers(9, (5, 8), 3), _x(p)).times(-3)),
    "matmul": Case(lambda p: p.matmul(_x(p), _weights(p, 8, 6), outputs=6), 1),
    "batched_matmul": Case(_batch),
    "shared_matmul": Case(lambda p: p.shared_matmul(_x(p), _y(p).transpose(0, 2, 1)), 2),
    "inner_products": Case(lambda p: p.inner_products(_x(p), _y(p))),
    "truncate": Case(lambda p: p.truncate(_x(p), 5), 1),
    "multiply": Case(lambda p: p.multiply(_x(p), _y(p)).sum(1)),
    "square": Case(lambda p: p.square(_x(p))),
    "select": Case(lambda p: p.select(_bits(p), -_x(p))),
    "relu": Case(lambda p: p.relu(_x(p))),
    "silu": Case(lambda p: p.silu(_x(p)), 1),
    "gelu": Case(lambda p: p.gelu(_x(p)), 1),
    "exp": Case(lambda p: p.exp(-_size(p), fraction=16), 2, 2**-14),
    "reciprocal": Case(lambda p: p.reciprocal(_size(p), least=0.5, most=8, fraction=14), 2, 2**-14),
    "rsqrt": Case(lambda p: p.rsqrt(_size(p), least=0.25, most=8), 2, 2**-14),
    "softmax": Case(lambda p: p.softmax(_x(p), allowed=ALLOWED), 1, 2**-13),
    "rms_norm": Case(lambda p: p.rms_norm(_x(p)), 2, 2**-14),
    "layer_norm": Case(lambda p: p.layer_norm(_x(p)), 2, 2**-14),
    "less_than": Case(lambda p: p.less_than(_x(p), _y(p), bits=20)),
    "is_negative": Case(lambda p: p.is_negative(_x(p) - _y(p))),
    "equal": Case(lambda p: p.equal(_scores(p), _scores(p)[:, ::-1])),
    "logical_and": Case(lambda p: p.logical_and(_bits(p), _bits(p, 6))),
    "logical_or": Case(lambda p: p.logical_or(_bits(p), _bits(p, 6)).transpose(1, 2, 0)),
    "logical_not": Case(lambda p: p.logical_not(_bits(p)) ^ _bits(p, 6)),
    "bits_to_values": Case(lambda p: p.bits_to_values(_bits(p))),
    "one_hot": Case(lambda p: p.one_hot(_whole(p, integers(9, (4, 6), 9) + 9), 19)),
    "maximum": Case(lambda p: p.maximum(_y(p), bits=20)),
    "rank": Case(lambda p: p.rank(_scores(p), bits=10)),
    "top_k_mask": Case(lambda p: p.top_k_mask(_scores(p), 7)),
    "dispatch": Case(lambda p: p.dispatch(_scores(p), 5)),
}


def every_case(party: Computer[Any, Any]) -> dict[str, NDArray[Any]]:
    """What each case gives, revealed."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        out = case.program(party)
        if not hasattr(out, "fraction"):
            out = party.bits_to_values(out)
        found[name] = party.reveal(out, to="both") if name == "reveal" else party.reveal_integers(out, to="both")
    return found
