"""The plain party: the engine's programs, unchanged, on the engine's integers; whole data sets; and what it refuses."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cloister.crypto import engine, native, plain
from cloister.crypto.ahead import Demand, LinearLayer
from cloister.crypto.computer import Computer
from cloister.crypto.plain import OutOfRange, Party, Values, arithmetic, functions, rows
from cloister.errors import InvalidParameter

sys.path.insert(0, str(Path(__file__).parent))
from moe_program import ALLOWED, CASES, CHOSEN, every_case, layer_weights, mixture, mixture_in_the_clear, numbers

two_parties = pytest.mark.skipif(not native.available(), reason="the Rust core is not installed here")
PLACE = 2.0**-12
# What surrounds the steps; the rest must be in CASES.
SESSION = {
    "plays", "close", "step", "costs", "reset_costs", "meet", "demand", "stored", "started_over", "preprocess",
    "reserve", "prepare", "prepared",
}  # fmt: skip


def public(of: type) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


# ---- one interface ------------------------------------------------------------------------------------------------


def test_both_parties_have_the_same_methods_with_the_same_signatures() -> None:
    interface = public(Computer) - {"fraction"}
    assert interface == {*CASES, *SESSION}, "a method without a comparison"
    assert public(Party) - public(Computer) == set()
    assert public(engine.Party) - public(Computer) == {"connect"}
    assert not Party.__abstractmethods__ and not engine.Party.__abstractmethods__
    for name in interface - {"started_over"}:
        wanted = inspect.signature(getattr(Computer, name))
        for party in (Party, engine.Party):
            found = inspect.signature(getattr(party, name))
            assert found.parameters == wanted.parameters, f"{party.__name__}.{name}"


def test_both_kinds_of_value_have_the_same_operators() -> None:
    operators = {"__add__", "__sub__", "__neg__", "__getitem__", "__xor__"}
    for ours, theirs in ((plain.Values, engine.Shares), (plain.Bits, engine.Bits)):
        assert public(ours) == public(theirs)
        assert operators & set(dir(ours)) == operators & set(dir(theirs))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """What each case gives: at the plain party, the client and the server."""
    from two_processes import run

    return every_case(Party()), *run(every_case, tmp_path_factory.mktemp("parties"))


@two_parties
@pytest.mark.parametrize("name", CASES)
def test_each_step_is_the_engines(name: str, compared: tuple[Any, Any, Any]) -> None:
    ours, client, server = (found[name] for found in compared)
    assert ours.dtype == client.dtype and ours.shape == client.shape
    assert (client == server).all()
    bound = CASES[name].places + CASES[name].relative * np.abs(ours)
    assert (np.abs(ours - client) <= bound).all(), np.abs(ours - client).max()
    assert np.unique(ours).size > 1, "a comparison of constants says nothing"


@two_parties
def test_one_program_runs_on_both(tmp_path: Path) -> None:
    from two_processes import run

    ours = mixture(Party())
    client, server = run(mixture, tmp_path)
    assert ours["steps"] == client["steps"] == server["steps"] == ["combine", "experts", "router"]
    ordered = np.sort(ours["shares"], axis=1)[:, ::-1]
    assert (ordered[:, CHOSEN - 1] - ordered[:, CHOSEN]).min() > 16 * PLACE, "the choice would hang on a rounding"
    assert (ours["chosen"] == client["chosen"]).all() and (ours["chosen"].sum(1) == CHOSEN).all()
    assert np.abs(ours["shares"] - client["shares"]).max() <= 8 * PLACE
    assert (client["words"] == server["words"]).all()
    assert np.abs(ours["words"] - client["words"]).max() <= 16 * PLACE
    for words in (ours["words"], client["words"], mixture(Party(truncation="shares", insecure_seed=1))["words"]):
        assert np.abs(words - mixture_in_the_clear()).max() <= 16 * PLACE


# ---- whole data sets ----------------------------------------------------------------------------------------------


def test_thousands_of_rows_in_one_call_are_what_each_would_be_alone() -> None:
    party, w = Party(), layer_weights()

    def scores(x: Any) -> np.ndarray:
        h = party.rms_norm(party.share(x, owner="client"))
        shares = party.softmax(party.truncate(party.matmul(h, w["router"], outputs=4)))
        chosen = party.top_k_mask(shares, 2)
        gates = party.select(chosen, shares)
        (up,) = party.batched_matmul(h, [w["up"]], outputs=[24])
        return party.reveal_integers(gates, to="client"), party.reveal_integers(party.truncate(up), to="client")

    x = numbers(1, (3000, 4, 6, 16), 2)  # 3000 sets of four experts with six tokens
    gates, up = scores(x)
    assert gates.shape == (3000, 4, 6, 4) and up.shape == (3000, 4, 6, 24)
    for row in (0, 1, 1777, 2999):
        alone = scores(torch.from_numpy(x[row]))
        assert (gates[row] == alone[0]).all() and (up[row] == alone[1]).all()


# ---- rounding -----------------------------------------------------------------------------------------------------


def test_every_truncation_follows_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    nearest = every_case(Party())
    for module in (arithmetic, functions, rows):
        monkeypatch.delattr(module, "truncate")  # who rounds to nearest by itself fails now
    by_shares, again, other = (every_case(Party(truncation="shares", insecure_seed=seed)) for seed in (1, 1, 2))
    changed = set()
    for name, case in CASES.items():
        assert (by_shares[name] == again[name]).all(), "the same seed"
        if not case.places or name in ("matmul", "shared_matmul"):
            assert (by_shares[name] == nearest[name]).all(), "nothing is truncated"
        elif (by_shares[name] != nearest[name]).any() and (by_shares[name] != other[name]).any():
            changed.add(name)
        assert (np.abs(by_shares[name] - nearest[name]) <= case.places + case.relative * np.abs(nearest[name])).all()
    assert changed == {
        "truncate", "silu", "gelu", "exp", "reciprocal", "rsqrt", "softmax", "rms_norm", "layer_norm",
    }  # fmt: skip


def test_shares_decide_without_bias() -> None:
    party = Party(truncation="shares", insecure_seed=3)
    x = party.share_integers(np.full(1 << 16, 5 * 4096 + 1024), owner="client", fraction=24)
    opened = party.reveal_integers(party.truncate(x), to="client")
    assert opened is not None
    assert set(opened.tolist()) == {5, 6} and abs(opened.mean() - 5.25) < 0.01


# ---- what it refuses ----------------------------------------------------------------------------------------------


def test_values_of_either_owner_are_needed() -> None:
    party = Party()
    x = party.share(np.ones((2, 3)), owner="client")
    for call in (
        lambda: party.share(None, owner="client", shape=(3,)),
        lambda: party.share_integers(None, owner="server", shape=(3,)),
        lambda: party.matmul(x, None, outputs=2),
        lambda: party.batched_matmul(x.reshape(1, 2, 3), None, outputs=[2]),
    ):
        with pytest.raises(InvalidParameter, match="plays both roles"):
            call()


BIG = 1 << 38


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda p, x: x + x, "addition: element 1 "),
        (lambda p, x: x - (-x), "subtraction: "),
        (lambda p, x: x.times(-3), "times: "),
        (lambda p, x: x[[1, 1, 1]].sum(0), "sum: "),
        (lambda p, x: p.multiply(x, x), "multiply: "),
        (lambda p, x: p.square(x), "square: "),
        (lambda p, x: p.inner_products(x, x), "inner_products: "),
        (lambda p, x: p.shared_matmul(x.reshape(1, 2), x.reshape(2, 1)), "shared_matmul: "),
        (lambda p, x: p.matmul(x, [[9], [9]], outputs=1), "matmul: "),
        (lambda p, x: p.silu(x), "silu: "),
        (lambda p, x: p.exp(-x), "exp: "),
        (lambda p, x: p.exp(p.share([3.0, 1.0], owner="client")), "exp: "),
        (lambda p, x: p.softmax(x), "softmax: "),
        (lambda p, x: p.rms_norm(p.share([90.0, 1.0], owner="client")), "norm: "),
        (lambda p, x: p.reciprocal(x[1:], least=1, most=8), "reciprocal: "),
        (lambda p, x: p.rsqrt(x[:1], least=0.5, most=8), "rsqrt: "),
        (lambda p, x: p.less_than(x, x[[1, 0]], bits=20), "less_than with 20 bits: "),
        (lambda p, x: p.is_negative(x, bits=20, drop_bits=2), "is_negative with 20 bits: "),
        (lambda p, x: p.maximum(x, bits=20), "maximum with 20 bits: "),
        (lambda p, x: p.rank(x), "rank with 20 bits: "),
        (lambda p, x: p.top_k_mask(x, 1), "top_k_mask with 20 bits: "),
        (lambda p, x: p.dispatch(x, 1), "dispatch with 20 bits: "),
        (lambda p, x: p.one_hot(p.share_integers([3, 4], owner="client"), 4), "one_hot: element 1 "),
        (lambda p, x: p.truncate(p.share_integers([-plain.BOUND], owner="client")), "share: "),
    ],
)
def test_what_shares_could_not_hold_says_its_step(call: Callable[[Any, Any], Any], place: str) -> None:
    party = Party()
    x = party.share_integers([1, BIG], owner="client", fraction=12)
    with pytest.raises(OutOfRange) as told, party.step("layer 1"), party.step("scores"):
        call(party, x)
    assert told.value.message.startswith(f"layer 1/scores/{place}")


def test_the_ends_of_a_comparisons_range() -> None:
    party = Party()

    def pair(low: int, high: int) -> Values:
        return party.share_integers([low, high], owner="client", fraction=12)

    for bits, drop in ((8, 0), (8, 4), (20, 3)):
        sign = ((1 << bits - 1) - 1 << drop) - (1 if drop else 0)
        party.is_negative(pair(-sign, sign), bits=bits, drop_bits=drop)
        gap = ((1 << bits - 1) - (2 if drop else 0) << drop) - 1
        party.rank(pair(-5, gap - 5), bits=bits, drop_bits=drop)
        with pytest.raises(OutOfRange):
            party.is_negative(pair(0, sign + 1), bits=bits, drop_bits=drop)
        with pytest.raises(OutOfRange):
            party.top_k_mask(pair(-5, gap - 4), 1, bits=bits, drop_bits=drop)
    party.is_negative(pair(1 - plain.BOUND, plain.BOUND - 1))
    party.rank(pair(1 - plain.BOUND, plain.BOUND - 1), bits=40)


# Both parties check alike, and before they compute: the engine's needs no session for this.
PARTIES = {
    "plain": lambda: (Party(), Values(torch.ones(2, 2, dtype=torch.int64), 12), plain.Bits(torch.ones(2, 2))),
    "engine": lambda: (
        engine.Party(None, "client", engine.Settings(insecure_loopback=True)),
        engine.Shares(np.ones((2, 2), dtype=np.uint64), 12),
        engine.Bits(np.ones((2, 2), dtype=np.uint8)),
    ),
}
TAKE_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "reveal": lambda p, x: p.reveal(x, to="both"),
    "reveal_integers": lambda p, x: p.reveal_integers(x, to="both"),
    "constant": lambda p, x: p.constant(1.0, x),
    "matmul": lambda p, x: p.matmul(x, None, outputs=1),
    "batched_matmul": lambda p, x: p.batched_matmul(x, None, outputs=[1]),
    "exp": lambda p, x: p.exp(x),
    "reciprocal": lambda p, x: p.reciprocal(x, least=1, most=2),
    "rsqrt": lambda p, x: p.rsqrt(x, least=1, most=2),
    "softmax": lambda p, x: p.softmax(x, allowed=ALLOWED),
    "one_hot": lambda p, x: p.one_hot(x, 2),
    "top_k_mask": lambda p, x: p.top_k_mask(x, 1),
    "dispatch": lambda p, x: p.dispatch(x, 1),
    **{name: lambda p, x, name=name: getattr(p, name)(x) for name in (
        "truncate", "square", "relu", "silu", "gelu", "rms_norm", "layer_norm", "is_negative", "maximum", "rank",
    )},
}  # fmt: skip
TAKE_BITS = ("logical_not", "bits_to_values")
TAKE_PAIRS = ("shared_matmul", "inner_products", "multiply", "less_than", "equal")


@pytest.mark.parametrize("kind", PARTIES)
def test_arrays_and_values_of_the_other_backend_are_no_values(kind: str) -> None:
    party, x, bits = PARTIES[kind]()
    _, foreign, foreign_bits = PARTIES["engine" if kind == "plain" else "plain"]()
    wanted = f"must be {type(x).__name__} of cloister.crypto.{kind}"
    assert {*TAKE_NUMBERS, *TAKE_BITS, *TAKE_PAIRS, "select", "logical_and", "logical_or"} | {
        "share",
        "share_integers",
    } == set(CASES)
    for wrong in (np.ones((2, 2)), np.ones((2, 2), dtype=np.uint64), torch.ones(2, 2), [1], None, foreign, bits):
        for name, call in TAKE_NUMBERS.items():
            with pytest.raises(InvalidParameter, match=f"`(x|like)` {wanted}, not"):
                call(party, wrong)
                pytest.fail(f"{name} took {type(wrong)}")
        for name in TAKE_PAIRS:
            for pair in ((wrong, x), (x, wrong)):
                with pytest.raises(InvalidParameter, match=f"`(x|y)` {wanted}, not"):
                    getattr(party, name)(*pair)
        with pytest.raises(InvalidParameter, match=f"`x` {wanted}, not"):
            party.select(bits, wrong)
        with pytest.raises(InvalidParameter):
            x + wrong
    wanted = f"must be Bits of cloister.crypto.{kind}"
    for wrong in (np.ones((2, 2), dtype=np.uint8), torch.ones(2, 2), None, foreign_bits, x):
        for name in TAKE_BITS:
            with pytest.raises(InvalidParameter, match=f"`a` {wanted}, not"):
                getattr(party, name)(wrong)
        for name in ("logical_and", "logical_or"):
            for pair in ((wrong, bits), (bits, wrong)):
                with pytest.raises(InvalidParameter, match=f"`(a|b)` {wanted}, not"):
                    getattr(party, name)(*pair)
        with pytest.raises(InvalidParameter, match=f"`bits` {wanted}, not"):
            party.select(wrong, x)


@pytest.mark.parametrize("kind", PARTIES)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, x: p.plays("nobody"),
        lambda p, x: p.share(["a"], owner="client"),
        lambda p, x: p.share(torch.ones(2) * 1j, owner="client"),
        lambda p, x: p.share([float("nan")], owner="client"),
        lambda p, x: p.share([1e9], owner="client"),
        lambda p, x: p.share([1.0], owner="nobody"),
        lambda p, x: p.share_integers([0.5], owner="client"),
        lambda p, x: p.share_integers([1 << 40], owner="client"),
        lambda p, x: p.constant([1.0, 2.0, 3.0], x),
        lambda p, x: p.matmul(x, [[1], [1 << 15]], outputs=1),
        lambda p, x: p.matmul(x, [[1.0], [1.0]], outputs=1),
        lambda p, x: p.matmul(x, [[1, 1]], outputs=1),
        lambda p, x: p.batched_matmul(x.reshape(1, 2, 2), 7, outputs=[1]),
        lambda p, x: p.batched_matmul(x.reshape(1, 2, 2), [[[[1, 1]]], [[[1, 1]]]], outputs=[1]),
        lambda p, x: p.inner_products(x, x[:1]),
        lambda p, x: p.one_hot(x, 4),
        lambda p, x: p.rank(x, bits=1),
        lambda p, x: p.rank(x[0][[0] * 4097]),
        lambda p, x: p.rank(x, bits=41, drop_bits=1),
        lambda p, x: p.less_than(x, p._numbers(x.data, 24)),
        lambda p, x: p.truncate(x, 33),
        lambda p, x: p.prepare([("a", 1, 2, 3)]),
        lambda p, x: p.prepare([LinearLayer("a", 1, 2, 3)], []),
        lambda p, x: p.preprocess((1, 2)),
        lambda p, x: p.step(""). __enter__(),
    ],
)  # fmt: skip
def test_both_refuse_the_same_arguments(kind: str, wrong: Callable[[Any, Any], Any]) -> None:
    party, x, _ = PARTIES[kind]()
    with pytest.raises(InvalidParameter):
        wrong(party, x)


def test_settings_of_the_plain_party() -> None:
    for wrong in ({"fraction": 25}, {"truncation": "up"}, {"insecure_seed": 1}, {"insecure_seed": -1}):
        with pytest.raises(InvalidParameter):
            Party(**wrong)  # type: ignore[arg-type]


# ---- values and session -------------------------------------------------------------------------------------------


def test_values_come_from_arrays_and_tensors_and_are_shown_by_shape_only() -> None:
    party = Party()
    for values in (np.array([0.5, -2.0]), [0.5, -2.0], torch.tensor([0.5, -2.0], requires_grad=True)):
        x = party.share(values, owner="client")
        assert x.data.tolist() == [2048, -8192] and x.data.dtype == torch.int64
    for whole in (np.array([3, -4], dtype=np.int8), torch.tensor([3, -4], dtype=torch.int32)):
        assert party.share_integers(whole, owner="client").data.tolist() == [3, -4]
    assert repr(x) == "Values(shape=(2,), fraction=12)"
    opened = party.reveal(x, to="server")
    assert isinstance(opened, np.ndarray) and opened.tolist() == [0.5, -2.0]


@pytest.mark.parametrize(
    "index", [0, -1, slice(None, None, -2), (..., 1), (slice(None), [0, 0, 2]), None, np.array([True, False, True])]
)
def test_indexing_is_numpys(index: Any) -> None:
    numbers = np.arange(24).reshape(3, 4, 2)
    assert Values(torch.from_numpy(numbers))[index].data.tolist() == numbers[index].tolist()
    shares = engine.Shares(numbers.astype(np.uint64))[index]
    assert shares.data.tolist() == numbers[index].tolist() and shares.data.flags.c_contiguous
    assert engine.Shares(numbers[0, 0].astype(np.uint64))[1].shape == ()


def test_a_session_of_one() -> None:
    with Party() as party:
        assert party.plays("client") and party.plays("server")
        party.meet()
        party.preprocess(Demand(triples=10))
        party.reserve(Demand(triples=10))
        layer = LinearLayer("words", 2, 3, 4)
        party.prepare([layer], [np.ones((3, 4), dtype=int)], passes=2)
        assert party.prepared(layer) == 0 and party.stored() == party.demand() == Demand()
        assert party.started_over is None
        with party.step("outer"), party.step("inner"):
            x = party.share(np.ones((2, 3)), owner="client")
            party.matmul(x, np.ones((3, 4), dtype=int), outputs=4, prepared="words")
        costs = party.costs()
        assert {cost.step for cost in costs} == {"outer", "outer/inner"}
        assert costs.online.bytes == costs.online.rounds == 0 < costs.online.seconds == costs.total.seconds
        party.reset_costs()
        assert party.costs() == ()
