"""What the gateway refuses, each case by name, with the simulated provider standing in for hardware."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from cloister.attest import Collector, Policy, evidence, gpu, make_verifier, new_nonce, parse_policy, simulated, verify
from cloister.attest.policy import parse_measurement
from cloister.errors import AttestationFailed, InvalidParameter, NotAvailable, UsageError

MEASUREMENT = "ab" * 32
EXPECTED = Policy(measurements=[{"measurement": MEASUREMENT}])


def certificate() -> bytes:
    """A self-signed certificate with a key of its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - timedelta(days=1))
    builder = builder.not_valid_after(now + timedelta(days=1))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


CERTIFICATE = certificate()


def server(**changes) -> Collector:
    return Collector(**{"certificate_der": CERTIFICATE, "measurement": MEASUREMENT, **changes})


def check(found, nonce, policy=EXPECTED, peer=CERTIFICATE, **more):
    return verify(evidence.parse(found.to_json()), policy, nonce=nonce, peer_certificate=peer, **more)


def refused(step, *arguments, **more):
    """Run `check`, expect it to fail at `step`, and look at the course that the error carries."""
    with pytest.raises(AttestationFailed) as caught:
        check(*arguments, **more)
    steps = caught.value.steps
    assert [entry["ok"] for entry in steps] == [True] * (len(steps) - 1) + [False]
    assert steps[-1]["step"] == step and steps[-1]["detail"]
    json.dumps(steps)
    return caught.value


def test_expected_server_is_accepted_with_every_step():
    nonce = new_nonce()
    appraisal = check(server().collect(nonce), nonce)
    assert not appraisal.protects
    assert appraisal.registers["measurement"] == MEASUREMENT
    names = ["provider", "quote signature", "claims are inside the quote", "answers our question", "TLS key", "age"]
    assert [step.step for step in appraisal.steps] == [*names, "measurement", "debugging is off"]
    assert all(step.ok for step in appraisal.steps)
    json.dumps(appraisal.as_dict())


def test_unexpected_measurement_is_refused():
    nonce = new_nonce()
    refused("measurement", server(measurement="cd" * 32).collect(nonce), nonce)


def test_without_any_expected_measurement_every_server_is_refused():
    nonce = new_nonce()
    error = refused("measurement", server().collect(nonce), nonce, policy=Policy())
    assert "none was given to expect" in str(error)


def test_an_empty_expectation_matches_nothing():
    nonce = new_nonce()
    refused("measurement", server().collect(nonce), nonce, policy=Policy(measurements=[{}]))


def test_stale_evidence_is_refused():
    nonce = new_nonce()
    found = server().collect(nonce)
    refused("age", found, nonce, now=found.issued + 301)
    refused("age", found, nonce, now=found.issued - 301)
    assert check(found, nonce, now=found.issued + 299).steps


def test_replayed_quote_is_refused():
    found = server().collect(new_nonce())
    refused("answers our question", found, new_nonce())


def test_replayed_quote_with_a_changed_nonce_claim_is_refused():
    nonce = new_nonce()
    found = dataclasses.replace(server().collect(new_nonce()), nonce=nonce)
    refused("claims are inside the quote", found, nonce)


def test_refreshed_time_claim_is_refused():
    nonce = new_nonce()
    found = server().collect(nonce)
    refused("claims are inside the quote", dataclasses.replace(found, issued=found.issued + 1), nonce)


def test_debug_enabled_server_is_refused():
    nonce = new_nonce()
    found = server().collect(nonce)
    debugging = dataclasses.replace(found, quote=simulated.quote(found.report_data, MEASUREMENT, debug=True))
    refused("debugging is off", debugging, nonce)
    assert check(debugging, nonce, policy=dataclasses.replace(EXPECTED, allow_debug=True))


def test_tls_key_that_is_not_the_one_in_the_quote_is_refused():
    nonce = new_nonce()
    refused("TLS key", server().collect(nonce), nonce, peer=certificate())


def test_tls_key_claim_that_is_not_in_the_quote_is_refused():
    nonce, other = new_nonce(), certificate()
    found = dataclasses.replace(server().collect(nonce), spki_sha256=evidence.spki_of(other))
    refused("claims are inside the quote", found, nonce, peer=other)


def test_connection_without_tls_is_refused_unless_allowed():
    nonce = new_nonce()
    found = server(certificate_der=None).collect(nonce)
    refused("TLS key", found, nonce, peer=None)
    assert check(found, nonce, policy=dataclasses.replace(EXPECTED, allow_without_tls=True), peer=None)


def test_tampered_quote_is_refused():
    nonce = new_nonce()
    found = server().collect(nonce)
    changed = found.quote.replace(MEASUREMENT.encode(), b"cd" * 32)
    refused("quote signature", dataclasses.replace(found, quote=changed), nonce)


def test_wrong_provider_is_refused():
    nonce = new_nonce()
    refused("provider", server().collect(nonce), nonce, policy=Policy("tdx", measurements=EXPECTED.measurements))


def test_same_key_in_a_renewed_certificate_is_accepted():
    """The key is bound, not the certificate: renewing it does not break clients."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    made = [
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(number)
        .not_valid_before(datetime(2026, 1, 1)).not_valid_after(datetime(2027, 1, 1)).sign(key, hashes.SHA256())
        .public_bytes(Encoding.DER) for number in (1, 2)
    ]  # fmt: skip
    nonce = new_nonce()
    assert check(server(certificate_der=made[0]).collect(nonce), nonce, peer=made[1])


def malformed(**changes):
    fields = {"format": 1, "provider": "simulated", "quote": "AA==", "nonce": "", "spki_sha256": "00" * 32, "issued": 0}
    return json.dumps({**fields, "collateral": {}, **changes}).encode()


MALFORMED = {
    "empty": b"",
    "a list": b"[]",
    "an empty object": b"{}",
    "no json": b"not json",
    "no text": b"\xff\xfe",
    "deep": b"[" * 5000,
    "too large": b" " * (evidence.MAX_JSON_BYTES + 1),
    "quote is no base64": malformed(quote="!!"),
    "no quote": malformed(quote=""),
    "giant quote": malformed(quote="A" * 100_000),
    "other format": malformed(format=2),
    "short key": malformed(spki_sha256="00"),
    "time is no number": malformed(issued=True),
    "negative time": malformed(issued=-1),
    "long nonce": malformed(nonce="00" * 65),
    "gpu is no object": malformed(gpu=[]),
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_malformed_evidence_is_refused(raw):
    with pytest.raises(AttestationFailed, match="cannot be read") as caught:
        evidence.parse(raw)
    assert caught.value.steps[0]["ok"] is False


@pytest.mark.parametrize("nonce", ["", "00" * 15, "00" * 65, "zz" * 16, "0" * 33, "00" * 1000])
def test_bad_nonces_are_refused_by_the_server(nonce):
    with pytest.raises(InvalidParameter, match="nonce"):
        server().respond(nonce)


def test_gateway_hook_asks_checks_and_names_the_server():
    collector, asked = server(), []

    async def fetch(nonce):
        asked.append(nonce)
        return collector.respond(nonce)

    hook = make_verifier(EXPECTED)
    appraisal = asyncio.run(hook("https://example", fetch, CERTIFICATE))
    assert appraisal.steps and len(asked) == 1
    asyncio.run(hook("https://example", collector.respond, CERTIFICATE))  # a plain function will do as well
    again = lambda _nonce: collector.respond(asked[0])  # noqa: E731
    asyncio.run(hook("https://example", again, CERTIFICATE, bytes.fromhex(asked[0])))
    with pytest.raises(AttestationFailed, match=r"https://example.*replayed") as caught:
        asyncio.run(hook("https://example", again, CERTIFICATE))
    assert caught.value.steps and caught.value.exit_code == 4


def test_simulation_says_loudly_at_every_start_that_it_protects_nothing(caplog):
    with caplog.at_level(logging.WARNING, "cloister.attest"):
        server()
        server()
        make_verifier(EXPECTED)
        nonce = new_nonce()
        check(server().collect(nonce), nonce)
    assert [record.message for record in caplog.records] == [simulated.WARNING] * 5
    assert "protects nothing" in simulated.WARNING


def test_gpu_evidence_is_bound_and_judged_by_the_registered_verifier():
    nonce, policy = new_nonce(), dataclasses.replace(EXPECTED, require_gpu=True)
    refused("GPU evidence", server().collect(nonce), nonce, policy=policy)
    found = server(gpu=lambda nonce: {"report": nonce.hex()}).collect(nonce)
    with pytest.raises(NotAvailable, match="No verifier for confidential GPU"):
        check(found, nonce, policy=policy)
    refused("claims are inside the quote", dataclasses.replace(found, gpu={"report": "other"}), nonce, policy=policy)
    gpu.register(lambda report, asked: f"judged {report['report'] == asked.hex()}")
    try:
        assert check(found, nonce, policy=policy).steps[-1].detail == "judged True"
    finally:
        gpu.register(None)


@pytest.mark.parametrize("provider", ["tdx", "snp"])
def test_a_machine_without_the_hardware_says_what_is_missing(provider, tmp_path):
    with pytest.raises(NotAvailable, match=f"cannot make {provider} quotes") as caught:
        Collector(provider, tsm=tmp_path / "absent")
    assert "Linux 6.7" in caught.value.advice


def test_the_kernels_report_interface(tmp_path, monkeypatch):
    """Against a stand-in for configfs: a directory that fills itself when it is made."""
    made, real_mkdir = [], Path.mkdir

    def mkdir(path, *arguments, **options):
        real_mkdir(path, *arguments, **options)
        if path.parent == tmp_path:
            made.append(path)
            (path / "provider").write_text("tdx_guest\n")
            (path / "outblob").write_bytes(b"the quote")

    inputs = []

    def rmdir(path):
        inputs.append((path / "inblob").read_bytes() if (path / "inblob").exists() else b"")
        shutil.rmtree(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", rmdir)
    found = Collector("tdx", certificate_der=CERTIFICATE, tsm=tmp_path).collect(b"n" * 32)
    assert found.quote == b"the quote" and inputs == [found.report_data]
    with pytest.raises(NotAvailable, match="comes from 'tdx_guest', not from snp"):
        Collector("snp", tsm=tmp_path).collect(b"n" * 32)
    assert len(made) == 2 and not any(path.exists() for path in made)


def test_unknown_settings_are_refused():
    with pytest.raises(UsageError):
        Policy("nitro")
    with pytest.raises(UsageError):
        Policy(min_tcb_status="Fine")
    with pytest.raises(UsageError):
        Policy(max_age=0)
    with pytest.raises(UsageError):
        Collector("nitro")


def test_policies_as_text():
    assert parse_policy("ab" * 32) == EXPECTED
    assert parse_policy(f"tdx:mr_td={'01' * 48}") == Policy("tdx", measurements=[{"mr_td": "01" * 48}])
    with pytest.raises(UsageError):
        parse_policy(f"nitro:{'01' * 48}")


def test_measurements_as_text():
    assert parse_measurement("AB" * 48) == {"measurement": "ab" * 48}
    assert parse_measurement(f"mr_td={'01' * 48}, rt_mr1={'02' * 48}") == {"mr_td": "01" * 48, "rt_mr1": "02" * 48}
    for bad in ("", "abc", "mr_td=", "ab", f"a={'01' * 48},a={'01' * 48}"):
        with pytest.raises(UsageError):
            parse_measurement(bad)
