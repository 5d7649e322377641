"""A self-signed key pair for TLS, made at the first start, and the fingerprint that clients pin."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cloister.errors import DataError

_DAYS = 825


def self_signed(folder: Path, host: str) -> tuple[Path, Path]:
    """The certificate and key in `folder`; both are made if they are not there. The key file is 0600."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    if certificate.exists() and key.exists():
        return certificate, key
    if certificate.exists() or key.exists():
        raise DataError(f"{folder} has only one of cert.pem and key.pem.", advice="Remove it, or bring the other back.")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cloister")])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName(_names(host)), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
    certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    return certificate, key


def fingerprint(certificate: Path) -> str:
    """SHA-256 of the (first) certificate in the file, in hex: `identity.tls_fingerprint` of the clients' manifests."""
    try:
        text = certificate.read_text()
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        first = begin + text.split(begin, 1)[1].split(end, 1)[0] + end
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first + "\n")).hexdigest()
    except (OSError, ValueError, IndexError):
        raise DataError(f"{certificate} is not a PEM certificate.", advice="Check --ssl-certfile.") from None


def _names(host: str) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.IPAddress(ipaddress.ip_address("::1")),
    ]
    try:
        address = ipaddress.ip_address(host)
        if not address.is_unspecified and not address.is_loopback:
            names.append(x509.IPAddress(address))
    except ValueError:
        if host != "localhost":
            names.append(x509.DNSName(host))
    return names
