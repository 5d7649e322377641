"""What a server sends as proof, and how the client's nonce and the server's TLS key are bound into it.

    report_data = SHA-512( "cloister attestation v1" || issued || SHA-256(TLS public key) || nonce length || nonce
                           || SHA-256(GPU evidence or nothing) )

`report_data` are the 64 bytes that the hardware signs together with the measurements. A quote made for another nonce,
another TLS key or other GPU evidence has other report data.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import secrets
import struct
from dataclasses import dataclass, field
from typing import Any

from cloister.errors import AttestationFailed, InvalidParameter

DOMAIN = b"cloister attestation v1"
FORMAT = 1
MAX_JSON_BYTES = 1 << 20
MAX_QUOTE_BYTES = 64 << 10
NONCE_BYTES = 32
PROVIDERS = ("simulated", "tdx", "sgx", "snp")


@dataclass(frozen=True)
class Evidence:
    """One proof. Everything but `quote` is a claim until the verifier has found it inside the quote."""

    provider: str
    quote: bytes
    nonce: bytes
    spki_sha256: bytes  # of the TLS certificate's public key; of nothing without TLS
    issued: int  # seconds since 1970, by the server's clock
    collateral: dict[str, Any] = field(default_factory=dict)  # certificates and lists that the quote is checked with
    gpu: dict[str, Any] | None = None

    def to_json(self) -> str:
        """The wire form: one JSON object."""
        fields = {
            "format": FORMAT,
            "provider": self.provider,
            "quote": base64.b64encode(self.quote).decode(),
            "nonce": self.nonce.hex(),
            "spki_sha256": self.spki_sha256.hex(),
            "issued": self.issued,
            "collateral": self.collateral,
            "gpu": self.gpu,
        }
        return json.dumps(fields)

    @property
    def report_data(self) -> bytes:
        """What the quote must hold for these claims to be true."""
        return report_data(self.nonce, self.spki_sha256, self.issued, self.gpu)


def parse(raw: bytes | str | dict[str, Any]) -> Evidence:
    """Read the wire form; `AttestationFailed` for anything malformed, before memory is taken."""
    try:
        if not isinstance(raw, dict):
            if len(raw) > MAX_JSON_BYTES:
                raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
            raw = json.loads(raw)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError("unknown format")
        quote = base64.b64decode(_of(raw, "quote", str), validate=True)
        if not 0 < len(quote) <= MAX_QUOTE_BYTES:
            raise ValueError("quote of a bad size")
        nonce, spki = bytes.fromhex(_of(raw, "nonce", str)), bytes.fromhex(_of(raw, "spki_sha256", str))
        if len(spki) != 32 or len(nonce) > 64:
            raise ValueError("claims of a bad size")
        issued, gpu = _of(raw, "issued", int), raw.get("gpu")
        if not 0 <= issued < 2**63 or not (gpu is None or isinstance(gpu, dict)):
            raise ValueError("claims of a bad type")
        return Evidence(_of(raw, "provider", str), quote, nonce, spki, issued, _of(raw, "collateral", dict), gpu)
    except (ValueError, RecursionError, binascii.Error) as error:
        reason = str(error) or type(error).__name__
        steps: list[dict[str, object]] = [{"step": "evidence can be read", "ok": False, "detail": reason}]
        raise AttestationFailed(
            "The server's evidence cannot be read.", steps, advice="Is that a Cloister server?"
        ) from None


def report_data(nonce: bytes, spki_sha256: bytes, issued: int, gpu: dict[str, Any] | None = None) -> bytes:
    """The 64 bytes that tie a quote to one client's question and to one TLS key."""
    described = b"" if gpu is None else json.dumps(gpu, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha512(
        DOMAIN
        + struct.pack(">Q", issued)
        + spki_sha256
        + struct.pack(">H", len(nonce))
        + nonce
        + hashlib.sha256(described).digest()
    ).digest()


def new_nonce() -> bytes:
    """A fresh question."""
    return secrets.token_bytes(NONCE_BYTES)


def nonce_from_hex(text: str) -> bytes:
    """The nonce of a request, 16 to 64 bytes of hex; `InvalidParameter` otherwise."""
    try:
        nonce = bytes.fromhex(text) if len(text) <= 128 else b""
    except ValueError:
        nonce = b""
    if not 16 <= len(nonce) <= 64:
        raise InvalidParameter("`nonce` must be 16 to 64 bytes in hexadecimal.", param="nonce")
    return nonce


def spki_of(certificate_der: bytes | None) -> bytes:
    """SHA-256 of the certificate's public key (SubjectPublicKeyInfo); of nothing where there is no TLS."""
    if certificate_der is None:
        return hashlib.sha256(b"").digest()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    try:
        key = x509.load_der_x509_certificate(certificate_der).public_key()
    except ValueError:
        raise InvalidParameter("That is no DER certificate.") from None
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def _of(raw: dict[str, Any], name: str, kind: type[Any]) -> Any:
    value = raw.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"`{name}` is missing or has the wrong type")
    return value
