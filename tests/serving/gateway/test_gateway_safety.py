"""Pages of other sites, rebound names, other machines and missing keys are kept out."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_dirs import write_client
from parties import Gateway, StandIn

ROUTES = ["/", "/v1/models", "/ledger", "/ledger/events", "/metrics", "/health", "/page.js", "/nothing"]
ASK = {"prompt": "x", "max_tokens": 3, "temperature": 0}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8421", "127.0.0.1.evil.example", "localhost@evil.example", ""]
)
def test_a_rebound_name_is_refused_on_every_route(pair: tuple[Gateway, StandIn], route: str, host: str) -> None:
    gateway, _ = pair
    response = httpx.get(gateway.url + route, headers={"host": host})
    assert response.status_code in (400, 403) and set(response.json()) == {"error"}


def test_two_host_headers_are_refused(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    with socket.create_connection(("127.0.0.1", gateway.port)) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert b" 400 " in raw.recv(200) or b" 403 " in raw.recv(200)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1"])
def test_a_foreign_origin_is_refused_on_every_route(pair: tuple[Gateway, StandIn], route: str, origin: str) -> None:
    gateway, _ = pair
    response = httpx.get(gateway.url + route, headers={"origin": origin})
    assert response.status_code == 403
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_its_own_page_may_ask(pair: tuple[Gateway, StandIn], name: str) -> None:
    gateway, _ = pair
    own = f"{name}:{gateway.port}"
    headers = {"host": own, "origin": f"http://{own}", "sec-fetch-site": "same-origin"}
    assert httpx.post(f"{gateway.url}/v1/completions", json=ASK, headers=headers).status_code == 200


def test_images_and_forms_of_other_sites_are_refused(pair: tuple[Gateway, StandIn]) -> None:
    gateway, standin = pair
    for site in ("cross-site", "same-site"):
        headers = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
        assert httpx.get(f"{gateway.url}/ledger", headers=headers).status_code == 403
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert httpx.get(gateway.url, headers=link).status_code == 200
    assert httpx.get(f"{gateway.url}/ledger", headers=link).status_code == 403
    form = httpx.post(
        f"{gateway.url}/v1/completions", content=b'{"prompt":"x"}', headers={"content-type": "text/plain"}
    )
    assert form.status_code == 415 and not standin.seen()


def test_the_page_is_locked_down(pair: tuple[Gateway, StandIn]) -> None:
    gateway, _ = pair
    response = httpx.get(gateway.url)
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    for text in (response.text, httpx.get(f"{gateway.url}/page.js").text, httpx.get(f"{gateway.url}/page.css").text):
        assert "innerHTML" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text


def test_keys_and_an_allowed_origin(
    tmp_path: Path, tiny_client: Path, tiny_order: Any,
    start_standin: Callable[..., StandIn], start_gateway: Callable[..., Gateway],
) -> None:  # fmt: skip
    keys = tmp_path / "keys"
    keys.write_text("# alice\nsesame\n")
    keys.chmod(0o600)
    site = "https://app.example"
    gateway = start_gateway(tiny_client, start_standin(tiny_order).url, "--api-keys", str(keys), "--allow-origin", site)
    for key in ("", "Bearer wrong", "Basic sesame"):
        response = httpx.get(f"{gateway.url}/v1/models", headers={"authorization": key} if key else {})
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{gateway.url}/ledger").status_code == 401
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    headers = {"authorization": "Bearer sesame", "origin": site}
    allowed = httpx.get(f"{gateway.url}/v1/models", headers=headers)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == site
    preflight = httpx.options(f"{gateway.url}/v1/completions", headers={"origin": site})
    assert preflight.status_code == 204 and "authorization" in preflight.headers["access-control-allow-headers"]
    assert httpx.options(f"{gateway.url}/v1/completions", headers={"origin": "https://b.example"}).status_code == 403


def test_other_machines_are_not_served_by_accident(
    tmp_path: Path, tiny_client: Path, start_gateway: Callable[..., Gateway]
) -> None:
    with pytest.raises(AssertionError, match="--allow-remote"):
        start_gateway(tiny_client, "http://127.0.0.1:9", "--host", "0.0.0.0")
    with pytest.raises(AssertionError, match="--api-keys"):
        start_gateway(tiny_client, "http://127.0.0.1:9", "--host", "0.0.0.0", "--allow-remote")
    loose = tmp_path / "keys"
    loose.write_text("sesame")
    loose.chmod(0o644)
    with pytest.raises(AssertionError, match="chmod 600"):
        start_gateway(tiny_client, "http://127.0.0.1:9", "--api-keys", str(loose))
    with pytest.raises(AssertionError, match="insecure_plain_http"):
        start_gateway(tiny_client, "http://server.example")


def test_the_start_prints_lines_that_work(pair: tuple[Gateway, StandIn], tmp_path: Path) -> None:
    import subprocess

    gateway, _ = pair
    lines = gateway.output.read_text().splitlines()
    assert f"export OPENAI_BASE_URL={gateway.url}/v1" in lines and "export OPENAI_API_KEY=local" in lines
    assert any("ubstitution cipher" in line and "12.3 %" in line for line in lines)
    curl = next(line for line in lines if line.startswith("curl "))
    done = subprocess.run(
        ["sh", "-c", curl.replace("curl ", "curl -s ", 1)], capture_output=True, text=True, check=False
    )
    assert '"object":"chat.completion"' in done.stdout


def test_the_gateway_process_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    import subprocess
    import sys

    write_client(tmp_path / "client")
    code = (
        "import sys, time; began = time.perf_counter(); import cloister; spent = time.perf_counter() - began;"
        "assert 'torch' not in sys.modules;"
        "import cloister.api, cloister.serving.gateway.running as r, cloister.serving.permute_mode as m;"
        f"s = m.PermuteMode().connect({str(tmp_path / 'client')!r}, 'http://127.0.0.1:9');"
        "from cloister.serving.gateway import Hosted, create_gateway, GatewaySettings;"
        f"create_gateway(GatewaySettings(), [Hosted.load({str(tmp_path / 'client')!r}, s)], s.ledger);"
        "assert not {'torch', 'transformers', 'openai'} & set(sys.modules), 'something heavy was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_prompt_in_the_log(
    tiny_client: Path, tiny_order: Any, start_standin: Callable[..., StandIn], start_gateway: Callable[..., Gateway]
) -> None:
    gateway = start_gateway(tiny_client, start_standin(tiny_order, cut_after=3).url, "--log-level", "debug")
    secret = "the-secret-words"
    httpx.post(f"{gateway.url}/v1/completions", json=ASK | {"prompt": secret, "max_tokens": 50, secret: 1})
    httpx.post(f"{gateway.url}/v1/completions?{secret}", json={"prompt": 5})
    log = gateway.output.read_text()
    assert log.count("/v1/completions") >= 2
    assert secret not in log.replace(f"ignored unknown parameters: {secret}", "")
