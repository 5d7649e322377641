"""Evidence fetched over a real TLS connection, from the attested server and from somebody in between."""

from __future__ import annotations

import asyncio
import http.server
import ssl
import threading
import urllib.parse
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from cloister.attest import Collector, Policy, make_verifier, new_nonce
from cloister.errors import AttestationFailed

POLICY = Policy(measurements=[{"measurement": "ab" * 32}])


def make_certificate(directory):
    """A self-signed certificate for 127.0.0.1; returns the PEM file and the DER bytes."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(7)
        .not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1)).sign(key, hashes.SHA256())
    )  # fmt: skip
    path = directory / "server.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(private + made.public_bytes(Encoding.PEM))
    return path, made.public_bytes(Encoding.DER)


def start(pem, respond):
    """A TLS server on a free loopback port that answers every GET with `respond(nonce)`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            nonce = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)["nonce"][0]
            body = respond(nonce).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def ask(port):
    """What a session does: fetch the evidence, look at the very same connection's certificate, judge."""

    async def run():
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the attestation names the key, not a CA
        base, seen = f"https://127.0.0.1:{port}", {}
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:

            async def fetch(nonce):
                async with client.stream("GET", f"{base}/cloister/v1/attestation", params={"nonce": nonce}) as answer:
                    stream = answer.extensions["network_stream"]
                    seen["certificate"] = stream.get_extra_info("ssl_object").getpeercert(binary_form=True)
                    return await answer.aread()

            question = new_nonce()
            body = await fetch(question.hex())
            return await make_verifier(POLICY)(base, lambda _nonce: body, seen["certificate"], question)

    return asyncio.run(run())


@pytest.fixture
def servers():
    started = []
    yield started.append
    for server in started:
        server.shutdown()
        server.server_close()


def test_attested_server_over_tls(tmp_path, servers):
    pem, der = make_certificate(tmp_path)
    server = start(pem, Collector(certificate_der=der, measurement="ab" * 32).respond)
    servers(server)
    assert ask(server.server_port).registers == {"measurement": "ab" * 32}


def test_somebody_in_between_is_refused(tmp_path, servers):
    """He passes our question on and gives us the genuine server's fresh answer, over a TLS key of his own."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, der = make_certificate(tmp_path / "a")
    genuine = Collector(certificate_der=der, measurement="ab" * 32)
    pem, _ = make_certificate(tmp_path / "b")
    between = start(pem, genuine.respond)
    servers(between)
    with pytest.raises(AttestationFailed, match="somebody stands in between") as caught:
        ask(between.server_port)
    assert caught.value.steps[-1]["step"] == "TLS key"
