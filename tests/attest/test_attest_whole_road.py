"""The road of docs/attestation.md with both parties as processes: `serve --attest`, `gateway --attestation-policy`."""

from __future__ import annotations

import base64
import json
import re
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cloister import embedded
from cloister import manifest as manifests
from cloister.manifest import Identity
from cloister.permute.protect import protect


@pytest.fixture(scope="module")
def attested(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, str]]:
    """(URL, client directory that pins the certificate, measurement) of a server with TLS and simulated attestation."""
    folder = tmp_path_factory.mktemp("attested")
    protect(embedded.path(), folder / "out", base="secret", measure=False)
    port = folder / "port"
    command = [sys.executable, "-m", "cloister", "serve", str(folder / "out" / "server"), "--port", "0"]
    command += ["--port-file", str(port), "--tls", "self-signed", "--attest", "simulated"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            deadline = time.monotonic() + 120
            while not (port.exists() and port.read_text().strip()):
                assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.2)
            url = f"https://127.0.0.1:{port.read_text().strip().rsplit(':', 1)[-1].strip('/')}"
            text = (folder / "log").read_text()
            assert "protects nothing" in text
            fingerprint = text.split("SHA-256 ", 1)[1].split()[0]
            client = folder / "out" / "client"
            manifest = manifests.read(client)
            replace(manifest, identity=Identity(tls_fingerprint=fingerprint)).write(client)
            yield url, client, measurement_of(url)
        finally:
            server.terminate()


def measurement_of(url: str) -> str:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(f"{url}/cloister/v1/attestation?nonce={'00' * 32}", context=trusting) as answer:
        quote = base64.b64decode(json.load(answer)["quote"])
    found = re.search(rb'"measurement": "([0-9a-f]+)"', quote)
    assert found is not None
    return found[1].decode()


def gateway(client: Path, url: str, policy: str, folder: Path) -> tuple[int | None, str]:
    """Start a gateway; (None, what it printed) if it began to serve."""
    file, port = folder / "policy.toml", folder / "gateway-port"
    file.write_text(policy)
    command = [sys.executable, "-m", "cloister", "gateway", str(client), "--server", url, "--port", "0"]
    command += ["--port-file", str(port), "--attestation-policy", str(file)]
    with (folder / "gateway-log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and not port.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        code = process.poll()
        process.terminate()
    return code, (folder / "gateway-log").read_text()


def test_the_expected_measurement_is_served(attested: tuple[str, Path, str], tmp_path: Path) -> None:
    url, client, measurement = attested
    code, printed = gateway(client, url, f'provider = "simulated"\nmeasurements = ["{measurement}"]\n', tmp_path)
    assert code is None, printed
    assert "OPENAI_BASE_URL" in printed


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ('provider = "simulated"\nmeasurements = ["' + "ab" * 32 + '"]\n', "none of the expected"),
        ('provider = "simulated"\n', "none was given to expect"),
        ('provider = "tdx"\nmeasurements = ["MEASUREMENT"]\n', "provider"),
        ('provider = "simulated"\nmeasurements = ["MEASUREMENT"]\nrequire_gpu = true\n', "GPU"),
    ],
)
def test_other_servers_are_refused(attested: tuple[str, Path, str], policy: str, reason: str, tmp_path: Path) -> None:
    url, client, measurement = attested
    code, printed = gateway(client, url, policy.replace("MEASUREMENT", measurement), tmp_path)
    assert code == 4, printed
    assert reason in printed
    assert "Traceback" not in printed
