"""The engine through its Python door: both parties as processes, over TLS, against the plain answers."""

from __future__ import annotations

import math
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.crypto import native
from cloister.errors import BrokenManifest, InvalidParameter, UsageError

if not native.available():
    pytest.skip("the Rust core is not installed here", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
from two_processes import fixed, run

from cloister.crypto.engine import Identity, Listener, Party, Settings, Shares, decode, encode

ONE_PLACE = 1 / 4096


def arithmetic(party: Party) -> Any:
    x, y = fixed(1, (4, 50), 50), fixed(2, (4, 50), 50)
    client = party.role == "client"
    a = party.share(x if client else None, owner="client", shape=(4, 50))
    b = party.share(None if client else y, owner="server", shape=(4, 50))
    product = party.truncate(party.multiply(a, b))
    less = party.less_than(a, b)
    masked = party.select(less, a)
    largest = party.maximum(a)
    return [party.reveal(v, to="both") for v in (a + b, -a, a.times(-3), product, masked, largest)]


def test_arithmetic_and_order(tmp_path: Path) -> None:
    got, also = run(arithmetic, tmp_path)
    x, y = fixed(1, (4, 50), 50), fixed(2, (4, 50), 50)
    wanted = [x + y, -x, -3 * x, x * y, np.where(x < y, x, 0), x.max(axis=1)]
    errors = [2, 1, 3, 120, 1, 1]
    for ours, theirs, plain, places in zip(got, also, wanted, errors, strict=True):
        assert (ours == theirs).all()
        assert np.abs(ours - plain).max() <= places * ONE_PLACE


def products(party: Party) -> Any:
    client = party.role == "client"
    x = np.rint(fixed(3, (5, 64), 1000)).astype(np.int64)
    w = np.rint(fixed(4, (64, 24), 3000)).astype(np.int32)
    experts = np.rint(fixed(5, (4, 20, 64), 3000)).astype(np.int16)
    a = party.share_integers(x if client else None, owner="client", shape=x.shape)
    one = party.matmul(a, None if client else w, outputs=24)
    tokens = np.rint(fixed(6, (4, 3, 64), 1000)).astype(np.int64)
    t = party.share_integers(tokens if client else None, owner="client", shape=tokens.shape)
    many = party.batched_matmul(t, None if client else [experts, experts[:, :7]], outputs=[20, 7])
    pair = party.shared_matmul(t, t.transpose(0, 2, 1))
    return [party.reveal_integers(v, to="client") for v in (one, *many, pair)]


def test_products_with_private_weights_and_of_two_shared_matrices(tmp_path: Path) -> None:
    got, nothing = run(products, tmp_path)
    assert all(v is None for v in nothing), "the server learns no result"
    x, w = np.rint(fixed(3, (5, 64), 1000)).astype(np.int64), np.rint(fixed(4, (64, 24), 3000)).astype(np.int64)
    experts = np.rint(fixed(5, (4, 20, 64), 3000)).astype(np.int64)
    tokens = np.rint(fixed(6, (4, 3, 64), 1000)).astype(np.int64)
    assert np.abs(got[0] - x @ w).max() <= 1
    assert (got[1] == tokens @ experts.transpose(0, 2, 1)).all()
    assert (got[2] == tokens @ experts[:, :7].transpose(0, 2, 1)).all()
    assert np.abs(got[3] - tokens @ tokens.transpose(0, 2, 1)).max() <= 2


def routing(party: Party) -> Any:
    scores = fixed(7, (6, 16), 8)
    x = party.share(scores if party.role == "client" else None, owner="client", shape=scores.shape)
    mask = party.bits_to_values(party.top_k_mask(x, 3))
    picked = party.dispatch(x, 4)
    return party.reveal(mask, to="both"), party.reveal(picked, to="both")


def test_top_k_and_dispatch(tmp_path: Path) -> None:
    (mask, picked), _ = run(routing, tmp_path)
    scores = fixed(7, (6, 16), 8)
    order = np.argsort(-np.rint(scores * 4096), axis=1, kind="stable")
    assert (mask.sum(axis=1) == 3).all()
    for row in range(6):
        assert set(np.flatnonzero(mask[row])) == set(order[row, :3])
        assert [int(np.flatnonzero(line)[0]) for line in picked[row]] == list(order[row, :4])


def functions(party: Party) -> Any:
    x = fixed(8, (6, 32), 8)
    a = party.share(x if party.role == "client" else None, owner="client", shape=x.shape)
    positive = party.share(np.abs(x) + 0.5 if party.role == "client" else None, owner="client", shape=x.shape)
    mask = np.tril(np.ones((6, 32), dtype=bool), 10)
    results = [
        party.relu(a),
        party.silu(a),
        party.gelu(a),
        party.exp(-positive),
        party.reciprocal(positive, least=0.5, most=16),
        party.rsqrt(positive, least=0.25, most=16),
        party.softmax(a),
        party.softmax(a, allowed=mask),
        party.rms_norm(a),
        party.layer_norm(a),
    ]
    return [party.reveal(v, to="client") for v in results]


def test_functions(tmp_path: Path) -> None:
    got, _ = run(functions, tmp_path)
    x = fixed(8, (6, 32), 8)
    positive, mask = np.abs(x) + 0.5, np.tril(np.ones((6, 32), dtype=bool), 10)
    logistic = 1 / (1 + np.exp(-x))
    normal = np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)
    power = np.exp(x - x.max(axis=1, keepdims=True))
    some = np.where(mask, power, 0)
    wanted = [
        np.maximum(x, 0), x * logistic, x * normal, np.exp(-positive), 1 / positive, 1 / np.sqrt(positive),
        power / power.sum(axis=1, keepdims=True), some / some.sum(axis=1, keepdims=True),
        x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5),
        (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True),
    ]  # fmt: skip
    for i, (ours, plain) in enumerate(zip(got, wanted, strict=True)):
        assert np.abs(ours - plain).max() < 2**-8, i


def costs(party: Party) -> Any:
    x = party.share(np.ones(100) if party.role == "client" else None, owner="client", shape=(100,))
    party.meet()
    party.reset_costs()
    with party.step("outer"), party.step("inner"):
        party.is_negative(x)
    return {c.step: (c.bytes_sent, c.bytes_received, c.rounds) for c in party.costs()}


def test_both_parties_count_the_same_bytes(tmp_path: Path) -> None:
    ours, theirs = run(costs, tmp_path)
    assert sum(c[0] for c in ours.values()) == sum(c[1] for c in theirs.values()) > 0
    assert sum(c[1] for c in ours.values()) == sum(c[0] for c in theirs.values()) > 0
    assert any(step.startswith("outer/inner") for step in ours)


def test_identities_are_private_files(tmp_path: Path) -> None:
    made = Identity.create(tmp_path / "me")
    assert stat.S_IMODE((tmp_path / "me" / "engine-key.pem").stat().st_mode) == 0o600
    assert Identity.load(tmp_path / "me").fingerprint == made.fingerprint
    assert "PRIVATE" not in repr(made) and len(made.fingerprint) == 64
    with pytest.raises(UsageError, match="already"):
        Identity.create(tmp_path / "me")
    (tmp_path / "me" / "engine-key.pem").chmod(0o644)
    with pytest.raises(BrokenManifest, match="read by others"):
        Identity.load(tmp_path / "me")
    with pytest.raises(BrokenManifest, match="no engine identity"):
        Identity.load(tmp_path / "nobody")


def test_a_session_without_tls_must_be_asked_for() -> None:
    with pytest.raises(InvalidParameter, match="identity"):
        Settings().as_native()


def test_shares_say_nothing_and_refuse_what_does_not_fit() -> None:
    assert repr(Shares(encode(np.ones(3)))) == "Shares(shape=(3,), fraction=12)"
    with pytest.raises(InvalidParameter, match="does not fit"):
        encode(np.array([1e9]))
    with pytest.raises(InvalidParameter, match="NaN"):
        encode(np.array([np.nan]))
    with pytest.raises(InvalidParameter, match="fraction bits"):
        Shares(encode(np.ones(3))) + Shares(encode(np.ones(3)), 24)
    values = fixed(0, (100,), 1000)
    assert np.abs(decode(encode(values)) - values).max() <= ONE_PLACE / 2


def refusals(party: Party) -> Any:
    ones = np.ones((2, 4), dtype=np.int64)
    x = party.share_integers(ones if party.role == "client" else None, owner="client", shape=(2, 4))
    said = []
    for wrong in (
        lambda: party.matmul(x, np.full((4, 3), 0.7), outputs=3),
        lambda: party.matmul(x, np.full((4, 3), 40_000), outputs=3),
        lambda: party.batched_matmul(x.reshape(1, 2, 4), [np.full((1, 3, 4), 40_000)], outputs=[3]),
        lambda: party.share_integers(np.array([2**63], dtype=np.uint64), owner=party.role),
        lambda: party.truncate(x, -1),
        lambda: party.multiply(x, x[:1]),
    ):
        try:
            wrong()
        except InvalidParameter as error:
            said.append(str(error))
    party.meet()  # none of these ended the session
    return said


def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    ours, theirs = run(refusals, tmp_path)
    assert len(ours) == len(theirs) == 6
    assert not any("40000" in text or "0.7" in text for text in ours), "a weight is secret"


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"quiet_seconds": float("nan")}, {"link_bits_per_second": 0.0}, {"quiet_seconds": -1.0}):
        with pytest.raises(InvalidParameter):
            Party.connect("127.0.0.1", 1, Settings(insecure_loopback=True, **wrong))  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter):
        Listener().accept(Settings(insecure_loopback=True), seconds=float("nan"))


def test_a_server_that_is_not_there_is_unreachable() -> None:
    from cloister.errors import PeerUnreachable

    with pytest.raises(PeerUnreachable, match="refused"):
        Party.connect("127.0.0.1", 1, Settings(insecure_loopback=True))


def test_a_listener_that_nobody_calls_gives_up() -> None:
    from cloister.errors import PeerTimeout

    with pytest.raises(PeerTimeout):
        Listener().accept(Settings(insecure_loopback=True), seconds=0.1)
