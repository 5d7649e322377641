"""AMD SEV-SNP attestation reports, verified here on `cryptography`.

No Python library for this is well kept today (the good ones are in Rust and Go), and the check is small: the report's
ECDSA P-384 signature by the chip's key, that key's certificate up to AMD's root (three known ones, pinned by their
public keys), and the agreement of the certificate's chip and firmware versions with the report's. Layout: AMD 56860,
"SEV Secure Nested Paging Firmware ABI", table "ATTESTATION_REPORT"; certificates: AMD 57230.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.utils import CryptographyDeprecationWarning

from cloister.attest.steps import Course, Facts

REPORT_BYTES = 1184
SIGNED_BYTES = 0x2A0
_ECDSA_P384_SHA384 = 1
_DEBUG_BIT = 1 << 19
AMD_ROOTS = {
    "9f056bee44377e29308cb5ffa895bdfb62d18881fa6bed8d6f075b0204089cb9": "Milan",
    "429a69c9422aa258ee4d8db5fcda9c6470ef15f8cd5a9cebd6cbc7d90b863831": "Genoa",
    "4f125410563a2ab9a50356f9243f6fe0b6f73de98603f53f90339c70e9d7ad08": "Turin",
}
"""SHA-256 of the public keys (SubjectPublicKeyInfo) of AMD's root certificates ARK."""
_EXTENSION = "1.3.6.1.4.1.3704.1"
_VERSION_EXTENSIONS = {"bootloader": "3.1", "tee": "3.2", "snp": "3.3", "microcode": "3.8", "fmc": "3.9"}


@dataclass(frozen=True)
class Report:
    """The fields that are looked at."""

    version: int
    policy: int
    vmpl: int
    signature_algorithm: int
    current_tcb: bytes
    key_flags: int
    report_data: bytes
    measurement: bytes
    host_data: bytes
    id_key_digest: bytes
    reported_tcb: bytes
    chip_id: bytes
    signature: tuple[int, int]

    @property
    def debug(self) -> bool:
        """Whether the guest's policy lets the host read its memory."""
        return bool(self.policy & _DEBUG_BIT)

    @property
    def signing_key(self) -> str:
        """Which kind of key signed: the chip's (VCEK) or the provider's (VLEK)."""
        return {0: "VCEK", 1: "VLEK"}.get(self.key_flags >> 2 & 7, "none")


def parse(raw: bytes) -> Report:
    """Take a report apart; `ValueError` if it cannot be one."""
    if len(raw) != REPORT_BYTES:
        raise ValueError(f"a report has {REPORT_BYTES} bytes, not {len(raw)}")
    version, policy = struct.unpack_from("<I4xQ", raw, 0)
    vmpl, algorithm = struct.unpack_from("<II", raw, 0x30)
    if not 2 <= version <= 5:
        raise ValueError(f"report version {version} is unknown")
    numbers = (int.from_bytes(raw[0x2A0:0x2E8], "little"), int.from_bytes(raw[0x2E8:0x330], "little"))
    return Report(
        version, policy, vmpl, algorithm, raw[0x38:0x40], struct.unpack_from("<I", raw, 0x48)[0], raw[0x50:0x90],
        raw[0x90:0xC0], raw[0xC0:0xE0], raw[0xE0:0x110], raw[0x180:0x188], raw[0x1A0:0x1E0], numbers,
    )  # fmt: skip


def versions(tcb: bytes, product: str) -> dict[str, int]:
    """The firmware versions in a TCB field; Turin orders them differently."""
    if product == "Turin":
        return {"fmc": tcb[0], "bootloader": tcb[1], "tee": tcb[2], "snp": tcb[3], "microcode": tcb[7]}
    return {"bootloader": tcb[0], "tee": tcb[1], "snp": tcb[6], "microcode": tcb[7]}


def appraise(
    raw: bytes,
    collateral: Mapping[str, Any],
    now: int,
    course: Course,
    *,
    min_tcb: Mapping[str, int] | None = None,
    roots: Mapping[str, str] | None = None,
) -> Facts:
    """Verify a report. `collateral` holds `vcek` (or `vlek`), `ask` and `ark` as base64 of DER. `roots`: for tests."""
    try:
        report = parse(raw)
    except ValueError as error:
        raise course.failure(f"The SEV-SNP report cannot be read: {error}.") from None
    leaf, ask, ark = (_certificate(collateral, names, course) for names in (("vcek", "vlek"), ("ask",), ("ark",)))
    product = _chain(leaf, ask, ark, datetime.fromtimestamp(now, UTC), course, AMD_ROOTS if roots is None else roots)
    _signature(raw, report, leaf, course)
    _same_chip(report, leaf, product, course)
    found = versions(report.reported_tcb, product)
    low = {name: least for name, least in (min_tcb or {}).items() if found.get(name, -1) < least}
    course.require(
        "firmware versions",
        not low,
        ", ".join(f"{name} {value}" for name, value in found.items()),
        ", ".join(f"{name} is {found.get(name)}, {least} is demanded" for name, least in low.items()),
        advice="The machine's firmware has to be updated.",
    )
    registers = {
        "measurement": report.measurement.hex(),
        "host_data": report.host_data.hex(),
        "id_key_digest": report.id_key_digest.hex(),
    }
    return Facts(report.report_data, registers, report.debug)


def _chain(
    leaf: x509.Certificate,
    ask: x509.Certificate,
    ark: x509.Certificate,
    now: datetime,
    course: Course,
    roots: Mapping[str, str],
) -> str:
    known = hashlib.sha256(ark.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
    product = roots.get(known, "")
    course.require("root certificate", bool(product), f"AMD's root for {product}", "it is none of AMD's roots")
    expired = [
        name
        for name, certificate in (("chip key", leaf), ("ASK", ask), ("ARK", ark))
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
    ]
    course.require("certificates in date", not expired, "all three", f"expired or not yet valid: {', '.join(expired)}")
    try:
        ark.verify_directly_issued_by(ark)
        ask.verify_directly_issued_by(ark)
        leaf.verify_directly_issued_by(ask)
        held, reason = True, ""
    except (InvalidSignature, ValueError, TypeError) as error:
        held, reason = False, type(error).__name__
    course.require("certificate chain", held, "chip key, ASK, ARK", f"it does not hold ({reason})")
    return product


def _signature(raw: bytes, report: Report, leaf: x509.Certificate, course: Course) -> None:
    key = leaf.public_key()
    held = False
    if (
        isinstance(key, ec.EllipticCurvePublicKey)
        and isinstance(key.curve, ec.SECP384R1)
        and report.signature_algorithm == _ECDSA_P384_SHA384
        and all(report.signature)
    ):
        try:
            key.verify(utils.encode_dss_signature(*report.signature), raw[:SIGNED_BYTES], ec.ECDSA(SHA384()))
            held = True
        except InvalidSignature:
            held = False
    course.require(
        "quote signature", held, "ECDSA P-384 by the chip's key", "the report was not signed by this chip's key"
    )


def _same_chip(report: Report, leaf: x509.Certificate, product: str, course: Course) -> None:
    found = versions(report.reported_tcb, product)
    named = {name: _integer(leaf, f"{_EXTENSION}.{oid}") for name, oid in _VERSION_EXTENSIONS.items() if name in found}
    different = [name for name, value in found.items() if named[name] != value]
    course.require(
        "certificate is for these firmware versions",
        not different,
        "they agree",
        f"the certificate was issued for other versions of: {', '.join(different)}",
    )
    if report.signing_key == "VCEK":
        chip = _octets(leaf, f"{_EXTENSION}.4")
        same = bool(chip) and report.chip_id[: len(chip)] == chip
        course.require("certificate is for this chip", same, "they agree", "the certificate belongs to another chip")


def _certificate(collateral: Mapping[str, Any], names: tuple[str, ...], course: Course) -> x509.Certificate:
    text = next((collateral[name] for name in names if name in collateral), None)
    try:
        with warnings.catch_warnings():
            # AMD gives its chip certificates the serial number 0, which `cryptography` complains about.
            warnings.simplefilter("ignore", CryptographyDeprecationWarning)
            return x509.load_der_x509_certificate(base64.b64decode(str(text or ""), validate=True))
    except ValueError:
        course.require(
            "collateral can be read", False, "", f"certificate {names[0]!r} is missing or damaged",
            advice="The server must send the chip's certificate chain along (docs/attestation.md).",
        )  # fmt: skip
        raise AssertionError from None


def _extension(certificate: x509.Certificate, oid: str) -> bytes:
    try:
        value = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(oid)).value
    except (x509.ExtensionNotFound, ValueError):
        return b""
    return value.value if isinstance(value, x509.UnrecognizedExtension) else b""


def _integer(certificate: x509.Certificate, oid: str) -> int:
    encoded = _extension(certificate, oid)  # DER INTEGER of one or two bytes
    if len(encoded) not in (3, 4) or encoded[0] != 2 or encoded[1] != len(encoded) - 2:
        return -1
    return int.from_bytes(encoded[2:], "big", signed=True)


def _octets(certificate: x509.Certificate, oid: str) -> bytes:
    encoded = _extension(certificate, oid)  # bare bytes, or a DER OCTET STRING around them
    return encoded[2:] if len(encoded) > 2 and encoded[0] == 4 and encoded[1] == len(encoded) - 2 else encoded
