"""SEV-SNP reports made here, with a chain of our own: our binding, debug, another chip."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import struct
import time
import uuid
from datetime import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from cloister.attest import Policy, evidence, snp, verify
from cloister.attest.collecting import certificates_from_table
from cloister.errors import AttestationFailed

CHIP = bytes(range(64))
MEASUREMENT = "5a" * 48
TCB = {"bootloader": 3, "tee": 0, "snp": 8, "microcode": 115}
PSS = padding.PSS(mgf=padding.MGF1(hashes.SHA384()), salt_length=48)


def certificate(subject, key, issuer, issuer_key, extensions=()):
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, issuer)]
    builder = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1]).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(datetime(2020, 1, 1)).not_valid_after(datetime(2045, 1, 1))
    for oid, value in extensions:
        builder = builder.add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value), critical=False)
    return builder.sign(issuer_key, hashes.SHA384(), rsa_padding=PSS)


@pytest.fixture(scope="module")
def chain():
    """Keys and certificates of a made-up AMD."""
    ark, ask = (rsa.generate_private_key(65537, 2048) for _ in range(2))
    chip = ec.generate_private_key(ec.SECP384R1())
    numbers = [(f"1.3.6.1.4.1.3704.1.3.{oid}", bytes([2, 1, TCB[name]])) for name, oid in
               (("bootloader", 1), ("tee", 2), ("snp", 3), ("microcode", 8))]  # fmt: skip
    made = {
        "ark": certificate("ARK", ark, "ARK", ark),
        "ask": certificate("ASK", ask, "ARK", ark),
        "vcek": certificate("VCEK", chip, "ASK", ask, [*numbers, ("1.3.6.1.4.1.3704.1.4", CHIP)]),
    }
    public = ark.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return made, chip, {hashlib.sha256(public).hexdigest(): "Milan"}


def report(chip, data, *, debug=False, chip_id=CHIP, signing_key=0, tcb=TCB):
    raw = bytearray(snp.REPORT_BYTES)
    struct.pack_into("<I4xQ", raw, 0, 2, 0x30000 | (1 << 19 if debug else 0))
    struct.pack_into("<I", raw, 0x34, 1)
    struct.pack_into("<I", raw, 0x48, signing_key << 2)
    raw[0x50:0x90], raw[0x90:0xC0] = data, bytes.fromhex(MEASUREMENT)
    raw[0x180:0x188] = bytes([tcb["bootloader"], tcb["tee"], 0, 0, 0, 0, tcb["snp"], tcb["microcode"]])
    raw[0x1A0:0x1E0] = chip_id
    r, s = utils.decode_dss_signature(chip.sign(bytes(raw[: snp.SIGNED_BYTES]), ec.ECDSA(hashes.SHA384())))
    raw[0x2A0:0x2E8], raw[0x2E8:0x330] = r.to_bytes(72, "little"), s.to_bytes(72, "little")
    return bytes(raw)


def judge(chain, *, policy=None, leaf="vcek", **changes):
    made, chip, roots = chain
    nonce, issued = evidence.new_nonce(), int(time.time())
    spki = evidence.spki_of(None)
    collateral = {name: base64.b64encode(made[name].public_bytes(Encoding.DER)).decode() for name in made}
    collateral[leaf] = collateral.pop("vcek")
    raw = report(chip, evidence.report_data(nonce, spki, issued), **changes)
    found = evidence.Evidence("snp", raw, nonce, spki, issued, collateral)
    policy = policy or Policy("snp", measurements=[{"measurement": MEASUREMENT}], allow_without_tls=True)
    return verify(evidence.parse(found.to_json()), policy, nonce=nonce, peer_certificate=None, snp_roots=roots)


def test_report_that_binds_our_nonce_is_accepted(chain):
    appraisal = judge(chain)
    assert appraisal.protects and appraisal.registers["measurement"] == MEASUREMENT


def test_debug_guest_is_refused(chain):
    with pytest.raises(AttestationFailed, match="debug mode"):
        judge(chain, debug=True)


def test_report_of_another_chip_is_refused(chain):
    with pytest.raises(AttestationFailed, match="another chip"):
        judge(chain, chip_id=CHIP[::-1])


def test_report_with_other_firmware_than_its_certificate_is_refused(chain):
    with pytest.raises(AttestationFailed, match="other versions of: microcode"):
        judge(chain, tcb={**TCB, "microcode": 200})


def test_providers_key_has_no_chip(chain):
    assert judge(chain, leaf="vlek", signing_key=1, chip_id=bytes(64)).protects


def test_root_that_is_not_amds_is_refused(chain):
    made, chip, _ = chain
    with pytest.raises(AttestationFailed, match="none of AMD's roots"):
        judge((made, chip, None))


def test_unexpected_measurement_is_refused(chain):
    policy = Policy("snp", measurements=[{"measurement": "00" * 48}], allow_without_tls=True)
    with pytest.raises(AttestationFailed, match="none of the expected ones"):
        judge(chain, policy=policy)
    assert judge(chain, policy=dataclasses.replace(policy, measurements=[{"measurement": MEASUREMENT.upper()}]))


def test_certificates_that_the_host_passes_along_are_found():
    names = {"vcek": "63da758d-e664-4564-adc5-f4b93be8accd", "ask": "4ab7b379-bbac-4fe4-a02f-05aef327c782"}
    blobs = {name: os.urandom(50) for name in names}
    head, body = b"", b""
    for name, guid in names.items():
        head += uuid.UUID(guid).bytes + struct.pack("<II", 24 * 3 + len(body), 50)
        body += blobs[name]
    found = certificates_from_table(head + bytes(24) + body)
    assert {name: base64.b64decode(text) for name, text in found.items()} == blobs
    assert certificates_from_table(b"") == {} == certificates_from_table(os.urandom(100))
    beyond = uuid.UUID(names["vcek"]).bytes + struct.pack("<II", 2**31, 2**31)
    assert certificates_from_table(beyond + bytes(24)) == {}


def test_turin_orders_its_versions_differently():
    tcb = bytes([1, 2, 3, 4, 0, 0, 5, 6])
    assert snp.versions(tcb, "Turin") == {"fmc": 1, "bootloader": 2, "tee": 3, "snp": 4, "microcode": 6}
    assert snp.versions(tcb, "Genoa") == {"bootloader": 1, "tee": 2, "snp": 5, "microcode": 6}
