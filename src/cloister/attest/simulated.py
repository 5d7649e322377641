"""The simulated provider: it has the shape of an attestation and protects NOTHING.

The signing key is public, written below. Anybody, the server's operator first of all, can sign any measurement with it.
It is there so that the path can be built, tested and tried on machines without the hardware.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.attest.steps import Course, Facts

WARNING = (
    "SIMULATED ATTESTATION: this protects nothing. The signing key is public; anyone can claim any measurement. "
    "Use a confidential virtual machine and the provider tdx or snp (docs/attestation.md)."
)
_KEY = Ed25519PrivateKey.from_private_bytes(
    hashlib.sha256(b"cloister simulated attestation: a public key pair").digest()
)
_log = logging.getLogger("cloister.attest")


def announce() -> None:
    """Say it, every time the provider is started on either side."""
    _log.warning(WARNING)


def quote(report_data: bytes, measurement: str, *, debug: bool = False) -> bytes:
    """A signed JSON object: 64 bytes of Ed25519 signature, then the body."""
    body = {"kind": "simulated", "report_data": report_data.hex(), "measurement": measurement, "debug": debug}
    encoded = json.dumps(body, sort_keys=True).encode()
    return _KEY.sign(encoded) + encoded


def appraise(raw: bytes, _collateral: dict[str, Any], _now: int, course: Course) -> Facts:
    """Check the signature and take the body apart."""
    signature, body = raw[:64], raw[64:]
    try:
        _KEY.public_key().verify(signature, body)
        held = True
    except InvalidSignature:
        held = False
    course.require(
        "quote signature", held, "signed with the public simulation key, which proves nothing", "the quote was changed"
    )
    try:
        found = json.loads(body)
        facts = Facts(bytes.fromhex(found["report_data"]), {"measurement": found["measurement"]}, bool(found["debug"]))
    except (ValueError, KeyError, TypeError):
        raise course.failure("The simulated quote cannot be read.") from None
    return facts
