"""Real quotes, recorded on real hardware and published by others (recorded/NOTICE.md)."""

from __future__ import annotations

import base64
import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cloister.attest import Policy, dcap, evidence, snp, verify
from cloister.attest.steps import Course
from cloister.errors import AttestationFailed, NotAvailable

RECORDED = Path(__file__).parent / "recorded"
INTEL_TIME = int(datetime(2025, 6, 25, tzinfo=UTC).timestamp())
SNP_TIME = int(datetime(2025, 6, 25, tzinfo=UTC).timestamp())


def intel(kind):
    pytest.importorskip("dcap_qvl")
    quote = (RECORDED / f"{kind}_quote.bin").read_bytes()
    return quote, json.loads((RECORDED / f"{kind}_quote_collateral.json").read_text())


def amd():
    names = {"vcek": "snp_vcek_milan.der", "ask": "snp_ask_milan.der", "ark": "snp_ark_milan.der"}
    collateral = {key: base64.b64encode((RECORDED / name).read_bytes()).decode() for key, name in names.items()}
    return (RECORDED / "snp_report_milan.bin").read_bytes(), collateral


def fails(step, appraise):
    with pytest.raises(AttestationFailed) as caught:
        appraise()
    assert caught.value.steps[-1]["step"] == step and caught.value.steps[-1]["ok"] is False
    return caught.value


def test_tdx_quote_is_genuine_and_its_registers_are_read():
    quote, collateral = intel("tdx")
    course = Course()
    facts = dcap.appraise("tdx", quote, collateral, INTEL_TIME, course)
    assert facts.tcb_status == "UpToDate" and not facts.debug
    assert facts.registers["mr_td"].startswith("91eb2b44d141d4ece09f0c75c2c53d24")
    assert facts.registers["rt_mr3"] == "00" * 48
    assert facts.report_data.hex().startswith("9a9d48e7f6799642")
    names = ["collateral can be read", "quote signature and collateral", "kind of quote"]
    assert [step.step for step in course.steps] == names


def test_tdx_collateral_that_has_expired_is_refused():
    quote, collateral = intel("tdx")
    late = int(datetime(2025, 8, 1, tzinfo=UTC).timestamp())
    error = fails("quote signature and collateral", lambda: dcap.appraise("tdx", quote, collateral, late, Course()))
    assert "fresh collateral" in error.advice


@pytest.mark.parametrize("position", [150, 300, 520, 700, 1000])
def test_tampered_tdx_quote_is_refused(position):
    quote, collateral = intel("tdx")
    changed = quote[:position] + bytes([quote[position] ^ 1]) + quote[position + 1 :]
    fails("quote signature and collateral", lambda: dcap.appraise("tdx", changed, collateral, INTEL_TIME, Course()))


def test_truncated_tdx_quote_and_broken_collateral_are_refused():
    quote, collateral = intel("tdx")
    fails("quote signature and collateral", lambda: dcap.appraise("tdx", quote[:600], collateral, INTEL_TIME, Course()))
    fails("collateral can be read", lambda: dcap.appraise("tdx", quote, {}, INTEL_TIME, Course()))
    other = {**collateral, "tcb_info": collateral["tcb_info"].replace('"UpToDate"', '"Revoked"')}
    fails("quote signature and collateral", lambda: dcap.appraise("tdx", quote, other, INTEL_TIME, Course()))


def test_debug_attribute_of_a_tdx_quote_is_seen():
    dcap_qvl = pytest.importorskip("dcap_qvl")
    quote, _ = intel("tdx")
    attributes = dcap_qvl.parse_quote(quote).report.td_attributes
    position = quote.index(attributes + b"\xe7\x02\x06")  # the attributes stand before XFAM
    debugging = quote[:position] + b"\x01" + quote[position + 1 :]
    assert dcap.facts_of(dcap_qvl.parse_quote(debugging)).debug
    assert not dcap.facts_of(dcap_qvl.parse_quote(quote)).debug


def test_recorded_tdx_quote_as_evidence_is_a_replay():
    """Everything about it is genuine, but it was made for somebody else's question and key."""
    quote, collateral = intel("tdx")
    nonce = evidence.new_nonce()
    found = evidence.Evidence("tdx", quote, nonce, evidence.spki_of(None), INTEL_TIME, collateral)
    policy = Policy("tdx", allow_without_tls=True)
    error = fails(
        "claims are inside the quote",
        lambda: verify(found, policy, nonce=nonce, peer_certificate=None, now=INTEL_TIME),
    )
    assert [step["ok"] for step in error.steps] == [True, True, True, True, False]


def test_policy_over_a_recorded_tdx_quote(monkeypatch):
    """Measurement and status against the genuine quote; the binding, which no recording can have, is taken as given."""
    quote, collateral = intel("tdx")
    data = dcap.appraise("tdx", quote, collateral, INTEL_TIME, Course()).report_data
    monkeypatch.setattr(evidence.Evidence, "report_data", property(lambda _self: data))
    found = evidence.Evidence("tdx", quote, b"n" * 32, evidence.spki_of(None), INTEL_TIME, collateral)
    td = "91eb2b44d141d4ece09f0c75c2c53d247a3c68edd7fafe8a3520c942a604a407de03ae6dc5f87f27428b2538873118b7"
    expected = {"mr_td": td}
    policy = Policy("tdx", measurements=[{"mr_td": "00" * 48}, expected], allow_without_tls=True)

    def judge(policy):
        return verify(found, policy, nonce=b"n" * 32, peer_certificate=None, now=INTEL_TIME)

    appraisal = judge(policy)
    assert appraisal.protects and appraisal.tcb_status == "UpToDate"
    whole = [{"measurement": appraisal.registers["measurement"]}]
    assert judge(dataclasses.replace(policy, measurements=whole)).steps[-1].step == "platform status"
    fails("measurement", lambda: judge(dataclasses.replace(policy, measurements=[{**expected, "rt_mr0": "00" * 48}])))
    fails("measurement", lambda: judge(dataclasses.replace(policy, measurements=[{**expected, "no_such": "00" * 48}])))


def test_platform_status_of_a_recorded_sgx_quote(monkeypatch):
    quote, collateral = intel("sgx")
    facts = dcap.appraise("sgx", quote, collateral, INTEL_TIME, Course())
    assert facts.tcb_status == "ConfigurationAndSWHardeningNeeded" and not facts.debug
    fails("kind of quote", lambda: dcap.appraise("tdx", quote, collateral, INTEL_TIME, Course()))
    monkeypatch.setattr(evidence.Evidence, "report_data", property(lambda _self: facts.report_data))
    found = evidence.Evidence("sgx", quote, b"n" * 32, evidence.spki_of(None), INTEL_TIME, collateral)
    policy = Policy("sgx", measurements=[{"mr_enclave": facts.registers["mr_enclave"]}], allow_without_tls=True)

    def judge(policy):
        return verify(found, policy, nonce=b"n" * 32, peer_certificate=None, now=INTEL_TIME)

    fails("platform status", lambda: judge(policy))
    lenient = dataclasses.replace(policy, min_tcb_status="ConfigurationAndSWHardeningNeeded")
    assert any(step.detail == "INTEL-SA-00289, INTEL-SA-00615" for step in judge(lenient).steps)


def test_missing_library_is_a_clear_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dcap_qvl", None)
    with pytest.raises(NotAvailable, match="dcap-qvl"):
        dcap.appraise("tdx", b"", {}, 0, Course())


def test_revoked_is_never_enough():
    assert not Policy("tdx", min_tcb_status="Revoked").status_is_enough("Revoked")
    assert not Policy("tdx", min_tcb_status="Revoked").status_is_enough("SomethingNew")
    assert Policy("tdx", min_tcb_status="OutOfDate").status_is_enough("SWHardeningNeeded")


def test_snp_report_is_genuine_and_its_fields_are_read():
    raw, collateral = amd()
    course = Course()
    facts = snp.appraise(raw, collateral, SNP_TIME, course)
    assert not facts.debug
    assert facts.registers["measurement"].startswith("7a1e5c266c0108db")
    assert facts.report_data.hex().startswith("d447b55d197491bf")
    assert [step.step for step in course.steps] == [
        "root certificate",
        "certificates in date",
        "certificate chain",
        "quote signature",
        "certificate is for these firmware versions",
        "certificate is for this chip",
        "firmware versions",
    ]
    assert course.steps[-1].detail == "bootloader 3, tee 0, snp 8, microcode 115"


@pytest.mark.parametrize("position", [0x08, 0x50, 0x90, 0x180, 0x1A0, 0x29F, 0x2A0, 0x2E8])
def test_tampered_snp_report_is_refused(position):
    raw, collateral = amd()
    changed = raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :]
    fails("quote signature", lambda: snp.appraise(changed, collateral, SNP_TIME, Course()))


def test_debug_bit_of_an_snp_policy_is_seen():
    raw, _ = amd()
    debugging = bytearray(raw)
    debugging[0x0A] |= 0x08  # bit 19 of the guest policy
    assert snp.parse(bytes(debugging)).debug and not snp.parse(raw).debug


def test_old_snp_firmware_is_refused():
    raw, collateral = amd()
    error = fails(
        "firmware versions",
        lambda: snp.appraise(raw, collateral, SNP_TIME, Course(), min_tcb={"microcode": 200, "snp": 8}),
    )
    assert "microcode is 115, 200 is demanded" in str(error)
    assert snp.appraise(raw, collateral, SNP_TIME, Course(), min_tcb={"microcode": 115})


def test_snp_certificates_out_of_date_or_missing_or_foreign_are_refused():
    raw, collateral = amd()
    late = int(datetime(2031, 1, 1, tzinfo=UTC).timestamp())
    fails("certificates in date", lambda: snp.appraise(raw, collateral, late, Course()))
    fails("collateral can be read", lambda: snp.appraise(raw, {}, SNP_TIME, Course()))
    swapped = {**collateral, "ark": collateral["ask"]}
    fails("root certificate", lambda: snp.appraise(raw, swapped, SNP_TIME, Course()))
    mixed = {**collateral, "ask": collateral["ark"]}
    fails("certificate chain", lambda: snp.appraise(raw, mixed, SNP_TIME, Course()))


@pytest.mark.parametrize("raw", [b"", bytes(1184), bytes(1183), b"\x02" + bytes(2000)])
def test_what_is_no_snp_report_is_refused(raw):
    _, collateral = amd()
    with pytest.raises(AttestationFailed):
        snp.appraise(raw, collateral, SNP_TIME, Course())


def test_recorded_snp_report_as_evidence_is_a_replay():
    raw, collateral = amd()
    nonce = evidence.new_nonce()
    found = evidence.Evidence("snp", raw, nonce, evidence.spki_of(None), SNP_TIME, collateral)
    policy = Policy("snp", allow_without_tls=True)
    fails(
        "claims are inside the quote",
        lambda: verify(found, policy, nonce=nonce, peer_certificate=None, now=SNP_TIME),
    )
