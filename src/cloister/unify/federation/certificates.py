"""The coordinator's TLS certificate: made once, given to the owners with the invitation's fingerprint."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cloister import storage

CERTIFICATE, KEY = "tls-certificate.pem", "tls-key.pem"
_DAYS = 825


def ensure(folder: Path, names: Sequence[str]) -> tuple[Path, Path]:
    """Certificate and key in `folder`, for these host names and addresses beside this machine itself."""
    certificate, key = folder / CERTIFICATE, folder / KEY
    wanted = sorted({"localhost", "127.0.0.1", *(name for name in names if name not in ("", "0.0.0.0", "::"))})
    if not (key.exists() and certificate.exists() and set(wanted) <= set(_names(certificate))):
        storage.private_directory(folder)
        public, secret = _make(wanted)
        storage.write_secret(key, secret)
        storage.write_bytes(certificate, public)
    return certificate, key


def _names(certificate: Path) -> list[str]:
    from cryptography import x509

    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    if found.not_valid_after_utc < datetime.now(UTC) + timedelta(days=1):
        return []
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def _make(names: Sequence[str]) -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Cloister coordinator")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(True, False, False, False, False, True, False, False, False),  # signs itself and handshakes
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM), secret


def _general(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
