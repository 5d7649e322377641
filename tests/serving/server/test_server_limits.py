"""What protects the server: bounds on size, time and number, tokens, TLS, and a clean end."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cloister.errors import DataError, InvalidParameter


@pytest.fixture(scope="module")
def guarded(start_server: Any, tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with tokens, TLS, two places and short patience."""
    from cloister.serving.server import create_token

    folder = tmp_path_factory.mktemp("guarded")
    tokens = {name: create_token(folder / "tokens", name) for name in ("alice", "bob")}
    server = start_server(
        tiny_llama_dir,
        tokens=folder / "tokens",
        tls_self_signed=folder / "tls",
        max_slots=2,
        max_sessions=2,
        head_seconds=1,
        body_idle_seconds=1,
        stalled_reader_seconds=1,
    )
    server.tokens, server.folder = tokens, folder
    return server


@pytest.fixture
def alice(guarded: Any) -> Any:
    with httpx.Client(base_url=str(guarded), verify=_trust(guarded), headers=_bearer(guarded, "alice")) as client:
        client.timeout = httpx.Timeout(60)
        yield client


def _trust(server: Any) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(server.folder / "tls" / "cert.pem"))


def _bearer(server: Any, name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {server.tokens[name]}"}


def _raw(server: Any) -> socket.socket:
    host, port = server.removeprefix("http://").removeprefix("https://").split(":")
    plain = socket.create_connection((host, int(port)), timeout=30)
    return _trust(server).wrap_socket(plain, server_hostname=host) if server.startswith("https") else plain


def _until_closed(connection: socket.socket) -> bytes:
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except (ConnectionResetError, ssl.SSLError):
        pass
    return received


# Size -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
def test_a_gigabyte_body_is_refused_without_memory(server: Any, chunked: bool) -> None:
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    block = b" " * 2**20
    headers = {} if chunked else {"content-length": str(2**30)}
    response = httpx.post(f"{server}/v1/completions", content=(block for _ in range(1024)), headers=headers, timeout=60)
    assert response.status_code == 413 and response.json()["error"]["code"] == "too_large"
    assert process.memory_info().rss - before < 40 * 2**20


def test_a_small_body_that_would_grow_large_is_refused(server: Any) -> None:
    body = b'{"prompt":' + b"[" * 1_040_000  # under the limit in bytes, over it in items
    response = httpx.post(f"{server}/v1/completions", content=body, timeout=60)
    assert response.status_code == 413 and "items" in response.json()["error"]["message"]


def test_a_false_content_length_is_refused(server: Any) -> None:
    with _raw(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n")
        assert b" 400 " in _until_closed(connection).split(b"\r\n")[0]


def test_what_is_not_http_gets_the_common_error(server: Any) -> None:
    with _raw(server) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = _until_closed(connection).partition(b"\r\n\r\n")
    assert b" 400 " in head and json.loads(body)["error"]["code"] == "invalid_request"


# Time -----------------------------------------------------------------------------------------------------------------


def test_a_body_that_stops_arriving_gets_a_408(guarded: Any) -> None:
    with _raw(guarded) as connection:
        token = guarded.tokens["alice"].encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token
        connection.sendall(head + b"\r\nContent-Length: 100\r\n\r\n{")
        answer = _until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b'"peer_timeout"' in answer


def test_a_head_that_does_not_arrive_ends_the_connection(guarded: Any) -> None:
    with _raw(guarded) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        assert _until_closed(connection) == b""


def test_a_client_that_stops_reading_is_dropped(guarded: Any, alice: httpx.Client) -> None:
    # The answer must be larger than the buffers of both systems: log probabilities of 20 alternatives do that.
    token = guarded.tokens["alice"].encode()
    body = json.dumps({"prompt": [1], "max_tokens": 120, "stream": True, "logprobs": 20, "temperature": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token
    request = head + b"\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    connections = []
    host, port = guarded.removeprefix("https://").split(":")
    for _ in range(3):
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        plain.connect((host, int(port)))
        connection = _trust(guarded).wrap_socket(plain, server_hostname=host)
        connection.sendall(request)
        connections.append(connection)
    answer = alice.post("/v1/completions", json={"prompt": [1], "max_tokens": 3})  # there are only two places
    assert answer.status_code == 200
    deadline = time.monotonic() + 60
    while 'cloister_running{model="' in (text := alice.get("/metrics").text) and time.monotonic() < deadline:
        if any(line.startswith("cloister_running") and line.endswith(" 0.0") for line in text.splitlines()):
            break
        time.sleep(0.05)
    else:
        pytest.fail("a place is still taken")
    for connection in connections:
        connection.close()


# Who may come in ------------------------------------------------------------------------------------------------------


def test_everything_but_health_needs_a_token(guarded: Any, alice: httpx.Client) -> None:
    with httpx.Client(base_url=str(guarded), verify=_trust(guarded)) as stranger:
        assert stranger.get("/health").status_code == 200
        for path in (
            "/v1/models",
            "/metrics",
            "/version",
            "/cloister/v1/attestation",
            "/nothing",
            "/health/../metrics",
        ):
            response = stranger.get(path)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for wrong in (
            "Bearer x",
            "Basic abc",
            guarded.tokens["alice"],
            f"Bearer {guarded.tokens['alice']}x",
        ):
            assert stranger.get("/v1/models", headers={"authorization": wrong}).status_code == 401
    assert alice.get("/v1/models").status_code == 200


def test_a_session_belongs_to_the_token_that_opened_it(guarded: Any, alice: httpx.Client) -> None:
    opened = alice.post("/v1/completions", json={"prompt": [1], "max_tokens": 1, "cloister": {"session": "new"}}).json()
    wish = {"prompt": [1], "max_tokens": 1, "cloister": opened["cloister"]}
    stolen = httpx.post(
        f"{guarded}/v1/completions", json=wish, verify=_trust(guarded), headers=_bearer(guarded, "bob"), timeout=60
    )
    assert stolen.status_code == 404
    assert alice.post("/v1/completions", json=wish).status_code == 200
    assert alice.post("/v1/completions", json={"cloister": {**opened["cloister"], "close": True}}).status_code == 200


def test_the_token_file_holds_hashes_only(guarded: Any) -> None:
    path = guarded.folder / "tokens"
    text = path.read_text()
    for name, token in guarded.tokens.items():
        assert f"{name} {hashlib.sha256(token.encode()).hexdigest()}" in text and token not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not any(token in guarded.log.read_text() for token in guarded.tokens.values())


def test_damaged_token_files_are_refused(tmp_path: Path) -> None:
    from cloister.serving.server.tokens import create_token, read_tokens

    path = tmp_path / "tokens"
    with pytest.raises(DataError, match="cannot be read"):
        read_tokens(path)
    for content in ("", "alice secret-in-plain\n", "# only a comment\n"):
        path.write_text(content)
        with pytest.raises(DataError):
            read_tokens(path)
    with pytest.raises(InvalidParameter):
        create_token(path, "two words")


# TLS ------------------------------------------------------------------------------------------------------------------


def test_the_certificate_is_the_one_that_was_announced(guarded: Any) -> None:
    with _raw(guarded) as connection:
        assert isinstance(connection, ssl.SSLSocket)
        presented = hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()
    assert presented in guarded.log.read_text()
    assert stat.S_IMODE((guarded.folder / "tls" / "key.pem").stat().st_mode) == 0o600
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{guarded}/health")  # the system's trust store does not know it


def test_the_key_pair_is_made_once(tmp_path: Path) -> None:
    from cloister.serving.server.tls import fingerprint, self_signed

    certificate, key = self_signed(tmp_path / "tls", "example.org")
    first = (fingerprint(certificate), key.read_bytes())
    assert self_signed(tmp_path / "tls", "example.org") == (certificate, key)
    assert (fingerprint(certificate), key.read_bytes()) == first
    key.unlink()
    with pytest.raises(DataError, match="only one"):
        self_signed(tmp_path / "tls", "example.org")


# Start and end --------------------------------------------------------------------------------------------------------


def test_running_streams_end_before_the_server_does(start_server: Any, tiny_llama_dir: Path) -> None:
    server = start_server(tiny_llama_dir)
    body = {"prompt": [1], "max_tokens": 100, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        received = [next(lines)]
        server.process.terminate()
        received += list(lines)
    assert received[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in received
    server.process.wait(timeout=30)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server}/health")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["{dir}/nowhere"], 2, "is not a directory"),
        (["{dir}"], 3, "config.json"),
        (["{dir}", "--tokens", "{dir}/missing"], 3, "token file"),
    ],
)
def test_start_errors_are_a_sentence_and_an_exit_code(
    tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    command = [sys.executable, "-m", "cloister.serving.server", *(text.format(dir=tmp_path) for text in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == code and says in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.startswith("error: ")
