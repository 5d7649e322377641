"""What makes no sense is refused with an error of ours that names the argument, and the session stands after it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.crypto import native
from cloister.errors import BrokenManifest, InvalidParameter, PeerError, SessionOver, UsageError

if not native.available():
    pytest.skip("the Rust core is not installed here", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
from two_processes import run

from cloister.crypto.engine import (
    Bits,
    Demand,
    ExpertLayer,
    Identity,
    LinearLayer,
    Listener,
    Party,
    Settings,
    Shares,
    Store,
    decode,
    encode,
)

DIGEST = bytes(range(32))


def test_shares_are_taken_times_integers_only() -> None:
    x = Shares(encode(np.ones(3)))
    for factor in (1.5, 1.0, np.float64(2), "2", None, True, 2**22, -(2**22), np.int32(-(2**31))):
        with pytest.raises(InvalidParameter, match="integer"):
            x.times(factor)  # type: ignore[arg-type]
    for factor in (3, np.int32(3), np.uint8(3)):
        assert (decode(x.times(factor).data) == 3).all()  # type: ignore[arg-type]
    assert (decode(x.times(np.int64(-3)).data) == -3).all()  # type: ignore[arg-type]


ONES = Shares(encode(np.ones((2, 4))))
FLAGS = Bits(np.zeros((2, 4), dtype=np.uint8))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ONES + Shares(encode(np.ones((3, 4)))),
        lambda: ONES - Shares(encode(np.ones(3))),
        lambda: ONES + 1,
        lambda: ONES.sum(7),
        lambda: ONES.sum(-3),
        lambda: ONES.sum(0.5),  # type: ignore[arg-type]
        lambda: ONES.reshape(3, 3),
        lambda: ONES.transpose(0, 5),
        lambda: FLAGS ^ Bits(np.zeros(3, dtype=np.uint8)),
        lambda: FLAGS ^ 1,
        lambda: encode(np.ones(3) * 1j),
        lambda: encode(["a"]),
        lambda: encode([[1], [1, 2]]),
        lambda: encode(np.ones(3), -1),
        lambda: Demand(1) * 1.5,  # type: ignore[operator]
        lambda: Demand(1) * -1,
        lambda: Demand(-1),
        lambda: Demand(1) + 2,
        lambda: LinearLayer("a", 1, -2, 3).as_native(),
        lambda: LinearLayer("", 1, 2, 3).as_native(),
        lambda: ExpertLayer("a", 1, 2, 3, 4).as_native(),  # type: ignore[arg-type]
        lambda: Listener(port=-1),
        lambda: Listener(None),  # type: ignore[arg-type]
        lambda: Party.connect(None, 7000, Settings(insecure_loopback=True)),  # type: ignore[arg-type]
        lambda: Party.connect("127.0.0.1", 70_000, Settings(insecure_loopback=True)),
    ],
)
def test_local_refusals(wrong: Callable[[], Any]) -> None:
    with pytest.raises(InvalidParameter):
        wrong()


@pytest.mark.parametrize(
    "given",
    [
        {"model": b"abc"},
        {"model": "0" * 32},
        {"store": "folder"},
        {"store": Store("/proc/nope/x"), "model": DIGEST},
        {"store": Store(Path(__file__) / "below" / "it"), "model": DIGEST},
        {"store": Store(Path(__file__)), "model": DIGEST},
        {"store": Store(5), "model": DIGEST},  # type: ignore[arg-type]
        {"fraction": 12.5},
        {"fraction": 99},
        {"fraction": 300},
        {"fraction": -1},
        {"transfers": "fast"},
        {"threads": -1},
        {"cores": 0},
        {"quiet_seconds": "60"},
        {"link_delay_seconds": 0.1},
        {"link_bits_per_second": 1e9, "link_delay_seconds": -1.0},
    ],
)
def test_settings_are_checked_before_anything_is_opened(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        Settings(insecure_loopback=True, **given).as_native()


def test_a_store_needs_the_digest_of_the_weights(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="digest of the model") as told:
        Settings(insecure_loopback=True, store=Store(tmp_path / "store")).as_native()
    assert "Settings.model" in told.value.advice
    assert (
        Settings(insecure_loopback=True, store=Store(tmp_path / "store"), model=DIGEST).as_native()["model"] == DIGEST
    )


def test_identities_that_are_not_text_or_cannot_be_written(tmp_path: Path) -> None:
    Identity.create(tmp_path / "me")
    (tmp_path / "me" / "engine-certificate.pem").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(BrokenManifest, match="not text"):
        Identity.load(tmp_path / "me")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="No identity can be written"):
        Identity.create(tmp_path / "file")


def wrong_calls(party: Party, x: Shares) -> list[Callable[[], Any]]:
    own: Any = party.role
    other: Any = "server" if own == "client" else "client"
    n: Any = None
    tall, scalar = Shares(encode(np.ones((2, 8)))), Shares(encode(np.ones(())))
    return [
        lambda: party.share(["a"], owner=own),  # type: ignore[arg-type]
        lambda: party.share(np.ones(3) * 1j, owner=own),  # type: ignore[arg-type]
        lambda: party.share(n, owner=other),
        lambda: party.share(n, owner=other, shape=5),  # type: ignore[arg-type]
        lambda: party.share(n, owner=other, shape=(1.5,)),  # type: ignore[arg-type]
        lambda: party.share(n, owner=other, shape=(-1,)),
        lambda: party.share(n, owner=other, shape=(2**33, 2**33)),
        lambda: party.share(n, owner="nobody", shape=(1,)),  # type: ignore[arg-type]
        lambda: party.share_integers(np.ones(3), owner=own),  # type: ignore[arg-type]
        lambda: party.reveal(x, to="all"),  # type: ignore[arg-type]
        lambda: party.constant(np.ones(3), x),
        lambda: party.softmax(x, allowed=np.ones((3, 3), dtype=bool)),
        lambda: party.softmax(x, allowed=np.full((2, 4), 0.5)),  # type: ignore[arg-type]
        lambda: party.softmax(scalar),
        lambda: party.maximum(scalar),
        lambda: party.rms_norm(x, rms_below=0),
        lambda: party.rms_norm(x, rms_below=-1),
        lambda: party.rms_norm(x, rms_below=float("inf")),
        lambda: party.layer_norm(x, epsilon=float("nan")),
        lambda: party.layer_norm(x, epsilon=-1e-5),
        lambda: party.reciprocal(x, least=0.5, most=float("inf")),
        lambda: party.reciprocal(x, least=2**-20, most=1),
        lambda: party.rsqrt(x, least=-1, most=2),
        lambda: party.exp(x, octaves=-1),
        lambda: party.shared_matmul(x[0], x[0]),
        lambda: party.shared_matmul(scalar, scalar),
        lambda: party.shared_matmul(x, tall),
        lambda: party.batched_matmul(x.reshape(1, 2, 4), n, outputs=3),  # type: ignore[arg-type]
        lambda: party.batched_matmul(x.reshape(1, 2, 4), n, outputs=[-3]),
        lambda: party.matmul(x, n, outputs=-3),
        lambda: party.matmul(x, n, outputs=2.0),  # type: ignore[arg-type]
        lambda: party.matmul(x, n, outputs=2, weight_bits=-1),
        lambda: party.prepare([LinearLayer("a", 1, 2, 3)], n, passes=1.5),  # type: ignore[arg-type]
        lambda: party.prepare([("a", 1, 2, 3)], n),  # type: ignore[list-item]
        lambda: party.preprocess((1, 2)),  # type: ignore[arg-type]
        lambda: party.reserve((1, 2, 3, 4, 5)),  # type: ignore[arg-type]
        lambda: party.truncate(x, -1),
        lambda: party.less_than(x, x, bits=-1),
        lambda: party.is_negative(x, drop_bits=1.5),  # type: ignore[arg-type]
        lambda: party.top_k_mask(x, 0),
        lambda: party.top_k_mask(x, 5),
        lambda: party.top_k_mask(x, -1),
        lambda: party.dispatch(x, 0),
        lambda: party.dispatch(x, 5),
    ]


def refusals(party: Party) -> Any:
    x = party.share(np.ones((2, 4)) if party.role == "client" else None, owner="client", shape=(2, 4))
    wrong, said = wrong_calls(party, x), []
    for number, call in enumerate(wrong):
        try:
            call()
            said.append(f"call {number} was taken")
        except InvalidParameter as error:
            if "negative int" in str(error):
                said.append(f"call {number}: {error}")
        except Exception as error:
            said.append(f"call {number}: {error!r}")
    party.meet()  # none of these sent anything or ended the session
    return said


def test_wrong_calls_are_refused_by_name_and_the_session_stands(tmp_path: Path) -> None:
    assert run(refusals, tmp_path) == ([], [])


def never_prepared(party: Party) -> Any:
    x = party.share_integers(
        np.ones((1, 4), dtype=int) if party.role == "client" else None, owner="client", shape=(1, 4)
    )
    weights = np.full((4, 3), 7) if party.role == "server" else None
    result = party.reveal_integers(party.matmul(x, weights, outputs=3, prepared="nosuch"), to="both")
    return result, [c.phase for c in party.costs() if c.step.startswith("made now") and c.bytes]


def test_a_layer_that_was_never_prepared_is_counted_as_made_now(tmp_path: Path) -> None:
    for result, phases in run(never_prepared, tmp_path):
        assert np.abs(result - 28).max() <= 1
        assert phases and set(phases) == {"online"}


def died(party: Party) -> Any:
    if party.role == "server":
        party._native.abandon()
        party.close()
        return "closed twice"
    x = Shares(encode(np.ones(4)))
    with party:
        try:
            party.reveal(x, to="both")
        except PeerError as error:
            first = type(error).__name__
    party.close()
    try:
        party.meet()
    except SessionOver:
        return first
    return "the session stands"


def test_closing_a_session_that_died_says_nothing(tmp_path: Path) -> None:
    assert run(died, tmp_path) == ("PeerDied", "closed twice")
