"""What `serve --attest` and `gateway --attestation-policy` build from their options.

A policy file is TOML with the fields of `cloister.attest.Policy`; a measurement is written as HEX, or as
`register=HEX,register=HEX`:

    provider = "tdx"
    measurements = ["mr_td=91eb...,rt_mr1=0a3c..."]
"""

from __future__ import annotations

import ssl
import tomllib
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from cloister.errors import DataError


def collector(provider: str, certificate: Path | None) -> Callable[[bytes], dict[str, Any]]:
    """Nonce -> evidence, bound to the TLS certificate that the server uses."""
    from cloister.attest import Collector

    der = None
    if certificate is not None:
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        try:
            first = certificate.read_text().split(begin, 1)[1].split(end, 1)[0]
            der = ssl.PEM_cert_to_DER_cert(f"{begin}{first}{end}\n")
        except (OSError, ValueError, IndexError):
            raise DataError(f"{certificate} is not a PEM certificate.", advice="Check --ssl-certfile.") from None
    found = Collector(provider, certificate_der=der)

    def evidence(nonce: bytes) -> dict[str, Any]:
        import json

        answer: dict[str, Any] = json.loads(found.respond(nonce.hex()))
        return answer

    return evidence


def verifier(file: Path) -> Callable[..., Awaitable[Any]]:
    """The check that a session makes before anything else is sent."""
    from cloister.attest import Policy, make_verifier
    from cloister.attest.policy import parse_measurement

    try:
        raw = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"The policy {file} cannot be read: {error}.", advice="See docs/attestation.md.") from None
    known = {field.name for field in fields(Policy)}
    if unknown := sorted(set(raw) - known):
        raise DataError(
            f"The policy {file} has unknown entries: {', '.join(unknown)}.",
            advice=f"Known: {', '.join(sorted(known))}.",
        )
    raw["measurements"] = [parse_measurement(text) for text in raw.get("measurements", [])]
    return make_verifier(Policy(**raw))
