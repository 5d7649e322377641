"""The narrow protocol against a real process: wrong, hostile and dying peers."""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import subprocess
import sys

import numpy as np
import pytest
from enclave_models import HIDDEN, tiny

from cloister.errors import BadTensor, BrokenCheckpoint, NotFound, PeerDied, TooLarge
from cloister.permute.enclave import bundle as bundles
from cloister.permute.enclave import protocol
from cloister.permute.enclave.client import EnclaveConnection, EnclaveProcess
from cloister.permute.enclave.functions import EPS_TOLERANCE, Functions
from cloister.permute.enclave.making import make_bundle


@pytest.fixture
def directory(tmp_path):
    make_bundle(tiny("llama"), np.arange(HIDDEN), np.arange(96)).write(tmp_path / "enclave")
    return tmp_path / "enclave"


@pytest.fixture
def enclave(directory):
    with EnclaveProcess(directory) as process:
        yield process


def ids(batch=1, rows=5):
    return np.arange(batch * rows, dtype=np.int32).reshape(batch, rows)


def test_secrets_are_private_and_not_shown(directory):
    assert stat.S_IMODE((directory / bundles.SECRETS_FILE).stat().st_mode) == 0o600
    assert "tensors" not in repr(bundles.read(directory))


def test_every_request_draws_a_new_scaling(enclave):
    first, second = enclave.embed(ids() + 3)[1], enclave.embed(ids() + 3)[1]
    ratio = (first / second)[..., :1]
    assert np.abs(ratio - 1).min() > 1e-6
    assert np.allclose(first, second * ratio, rtol=1e-4, atol=1e-6)


def test_scaling_is_positive_and_within_range(directory):
    functions = Functions(bundles.read(directory))
    _, session = functions.embed(ids(4, 24) % 96, None)
    assert session.alpha.min() >= 0.25 and session.alpha.max() <= 4
    assert np.unique(session.alpha).size == session.alpha.size


def test_scaling_stays_near_one_where_the_eps_cannot_be_corrected():
    functions = Functions(make_bundle(tiny("gpt2"), np.arange(HIDDEN), np.arange(96)))
    rows, session = functions.embed(ids(2, 30), None)
    power = rows.var(-1) / session.alpha**2
    eps = functions.bundle.entrance_eps
    rest = np.sqrt((power + eps) / (power + eps / session.alpha**2))
    assert np.abs(rest - 1).max() < 1.5 * EPS_TOLERANCE
    assert session.alpha.std() > 0


@pytest.mark.parametrize(
    "values",
    [np.array([[96]], np.int32), np.array([[-1]], np.int32), np.zeros((1, 2), np.float32), np.zeros((2,), np.int32)],
)
def test_bad_token_ids_are_refused_and_the_enclave_lives_on(enclave, values):
    with pytest.raises(BadTensor):
        enclave.embed(values)
    assert enclave.embed(ids())[1].shape == (1, 5, HIDDEN)


def test_scores_of_the_wrong_size(enclave):
    session, _ = enclave.embed(ids())
    with pytest.raises(BadTensor, match="do not fit"):
        enclave.softmax(np.zeros((1, 4, 6, 6), np.float32), session, 1.0)
    with pytest.raises(BadTensor, match="do not fit"):
        enclave.norm(np.zeros((1, 6, HIDDEN), np.float32), session)
    with pytest.raises(BadTensor, match="columns"):
        enclave.invert(np.zeros((1, 5, 7), np.float32), session)


def test_unknown_and_closed_sessions(enclave):
    with pytest.raises(NotFound):
        enclave.leave(np.zeros((1, 5, HIDDEN), np.float32), 99)
    session, _ = enclave.embed(ids())
    enclave.close_session(session)
    with pytest.raises(NotFound):
        enclave.norm(np.zeros((1, 5, HIDDEN), np.float32), session)


def test_too_many_rows(enclave):
    with pytest.raises(TooLarge, match="rows"):
        enclave.embed(np.zeros((2, 600_000), np.int32))


def test_works_without_a_shared_window(directory):
    with EnclaveProcess(directory, window_bytes=0) as plain, EnclaveProcess(directory, window_bytes=4096) as small:
        for enclave in (plain, small):
            session, rows = enclave.embed(ids())
            scores = np.random.default_rng(0).standard_normal((1, 4, 5, 5)).astype(np.float32)
            weights = enclave.softmax(scores, session, 0.5)
            assert weights.shape == scores.shape and np.isfinite(weights).all()
            assert np.all(weights[0, 0][np.triu_indices(5, 1)] == 0)
            assert rows.shape == (1, 5, HIDDEN)


def test_a_dead_enclave_is_a_clear_error(directory):
    enclave = EnclaveProcess(directory)
    os.kill(enclave.process.pid, signal.SIGKILL)
    enclave.process.wait()
    with pytest.raises(PeerDied, match="gone"):
        enclave.embed(ids())
    enclave.close()


def test_the_enclave_exits_with_its_peer(directory):
    enclave = EnclaveProcess(directory)
    process = enclave.process
    enclave.close()
    assert process.returncode == 0


def test_a_missing_bundle_is_a_clear_error(tmp_path, capfd):
    with pytest.raises(PeerDied):
        EnclaveProcess(tmp_path)
    assert "is no enclave bundle" in capfd.readouterr().err


def test_damaged_bundles_are_refused(directory):
    (directory / bundles.SECRETS_FILE).write_bytes(b"\x10" * 64)
    with pytest.raises(BrokenCheckpoint, match="no enclave bundle"):
        bundles.read(directory)


def test_listening_for_one_loopback_peer(directory):
    command = [sys.executable, "-m", "cloister.permute.enclave", "--bundle", str(directory), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline().rpartition(":")[2])
        connection = EnclaveConnection(socket.create_connection(("127.0.0.1", port)))
        assert connection.embed(ids())[1].shape == (1, 5, HIDDEN)
        connection.close()
        assert process.wait(timeout=20) == 0


def test_listening_elsewhere_is_refused(directory):
    command = [sys.executable, "-m", "cloister.permute.enclave", "--bundle", str(directory), "--listen", "0.0.0.0:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "loopback only" in done.stderr


def _header(**changes):
    fields = {
        "magic": b"CLEN", "version": 1, "operation": 2, "status": 0, "code": 2, "place": 0, "session": 0,
        "dims": (1, 4, 0, 0), "start": 0, "scale": 1.0, "length": 16,
    }  # fmt: skip
    fields.update(changes)
    return protocol.HEADER.pack(
        *(fields[n] for n in ("magic", "version", "operation", "status", "code", "place", "session")),
        *fields["dims"], fields["start"], fields["scale"], fields["length"],
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"HTTP"},
        {"version": 2},
        {"operation": 99},
        {"code": 9},
        {"place": 7},
        {"status": 1},
        {"dims": (2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1), "length": 2**63},
        {"dims": (1, 0, 4, 0), "length": 0},
        {"length": 2**40},
        {"length": 17},
        {"scale": float("nan")},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_hostile_headers_are_refused_before_memory_is_taken(directory, changes):
    with pytest.raises((BadTensor, TooLarge)) if changes != {"status": 1} else pytest.raises(BadTensor):
        message, _ = protocol.unpack(_header(**changes))
        if message.status:
            raise BadTensor("requests have no status")
    enclave = EnclaveProcess(directory)
    enclave._stream.sendall(_header(**changes))
    answer, length = protocol.unpack(bytes(protocol.receive_exactly(enclave._stream, protocol.HEADER.size)))
    assert answer.status != 0 and 0 < length <= protocol.MAX_TEXT
    protocol.receive_exactly(enclave._stream, length)
    assert protocol.receive_exactly(enclave._stream, 1) == b""  # it hangs up: there is nothing to resynchronise on
    enclave.close()


def test_a_window_that_is_not_there(directory):
    with EnclaveProcess(directory, window_bytes=0) as enclave:
        enclave._stream.sendall(_header(place=1))
        answer, length = protocol.unpack(bytes(protocol.receive_exactly(enclave._stream, protocol.HEADER.size)))
        assert answer.status == protocol.Status.BAD_TENSOR
        assert b"window" in protocol.receive_exactly(enclave._stream, length)


def test_a_peer_that_dies_in_the_middle_of_a_message():
    ours, theirs = socket.socketpair()
    ours.sendall(struct.pack("<4s", b"CLEN"))
    ours.close()
    with theirs, pytest.raises(PeerDied, match="middle"):
        protocol.receive_exactly(theirs, protocol.HEADER.size)
