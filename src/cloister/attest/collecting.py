"""The server's side: ask the hardware for a quote over the client's nonce and our TLS key.

On Linux 6.7 and later both TDX and SEV-SNP guests do it through configfs: /sys/kernel/config/tsm/report. The
certificates that the client needs come from the host along with the report, or from a directory that the operator
fills (docs/attestation.md).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloister import __version__
from cloister.attest import simulated
from cloister.attest.evidence import PROVIDERS, Evidence, nonce_from_hex, report_data, spki_of
from cloister.errors import NotAvailable, UsageError

TSM = Path("/sys/kernel/config/tsm/report")
_TSM_NAMES = {"tdx": "tdx_guest", "snp": "sev_guest"}
MAX_OUTPUT = 64 << 10
_TABLE_ENTRIES = {
    uuid.UUID("63da758d-e664-4564-adc5-f4b93be8accd"): "vcek",
    uuid.UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1"): "vlek",
    uuid.UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782"): "ask",
    uuid.UUID("c0b406a4-a803-4952-9743-3fb6014cd0ae"): "ark",
}


class Collector:
    """Makes evidence for one server. Give it the TLS certificate that the server really uses."""

    def __init__(
        self,
        provider: str = "simulated",
        *,
        certificate_der: bytes | None = None,
        measurement: str = "",
        collateral: Path | str | None = None,
        gpu: Callable[[bytes], dict[str, Any]] | None = None,
        tsm: Path = TSM,
    ) -> None:
        if provider not in PROVIDERS:
            raise UsageError(
                f"There is no attestation provider {provider!r}.", advice=f"Known: {', '.join(PROVIDERS)}."
            )
        if provider == "sgx":
            raise NotAvailable(
                "A whole server inside SGX is not offered; SGX quotes can be verified, not made, here.",
                advice="Use a TDX or SEV-SNP guest (docs/attestation.md).",
            )
        self.provider = provider
        self.measurement = measurement or hashlib.sha256(f"cloister {__version__}".encode()).hexdigest()
        self._spki = spki_of(certificate_der)
        self._collateral = None if collateral is None else Path(collateral)
        self._gpu = gpu
        self._tsm = tsm
        self._lock = threading.Lock()
        if provider == "simulated":
            simulated.announce()
        else:
            _check_tsm(tsm, provider)

    def collect(self, nonce: bytes) -> Evidence:
        """Evidence for one nonce."""
        issued = int(time.time())
        gpu = None if self._gpu is None else self._gpu(nonce)
        data = report_data(nonce, self._spki, issued, gpu)
        collateral = read_collateral(self._collateral) if self._collateral is not None else {}
        if self.provider == "simulated":
            quote = simulated.quote(data, self.measurement)
        else:
            with self._lock:  # one hardware report at a time
                quote, extra = _report(self._tsm, self.provider, data)
            if self.provider == "snp":
                collateral = certificates_from_table(extra) | collateral
        return Evidence(self.provider, quote, nonce, self._spki, issued, collateral, gpu)

    def respond(self, nonce_hex: str) -> str:
        """The JSON body for GET /cloister/v1/attestation?nonce=HEX."""
        return self.collect(nonce_from_hex(nonce_hex)).to_json()


def read_collateral(path: Path) -> dict[str, Any]:
    """A JSON file as dcap-qvl writes it (TDX), or a directory with vcek.der, ask.der and ark.der (SEV-SNP)."""
    try:
        if path.is_dir():
            found = {name: path / f"{name}.der" for name in _TABLE_ENTRIES.values()}
            return {name: base64.b64encode(file.read_bytes()).decode() for name, file in found.items() if file.exists()}
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"The collateral at {path} cannot be read: {error}.") from None
    if not isinstance(raw, dict):
        raise UsageError(f"The collateral at {path} is no JSON object.")
    return raw


def certificates_from_table(table: bytes) -> dict[str, str]:
    """The certificates that an SEV-SNP host passes along (GHCB certificate table), as base64 of DER."""
    found: dict[str, str] = {}
    for position in range(0, len(table) - 23, 24):
        guid, offset, length = (
            uuid.UUID(bytes=table[position : position + 16]),
            *struct.unpack_from("<II", table, position + 16),
        )
        if guid.int == 0:
            break
        name = _TABLE_ENTRIES.get(guid)
        if name and length and offset + length <= len(table):
            found[name] = base64.b64encode(table[offset : offset + length]).decode()
    return found


def _check_tsm(tsm: Path, provider: str) -> None:
    if not tsm.is_dir():
        raise NotAvailable(
            f"This machine cannot make {provider} quotes: {tsm} does not exist.",
            advice="It needs a confidential guest with Linux 6.7 or later, configfs mounted, and the module "
            f"{_TSM_NAMES[provider].replace('_', '-')} loaded (docs/attestation.md).",
        )
    if not os.access(tsm, os.W_OK):
        raise NotAvailable(
            f"{tsm} is not writable for this user.", advice="Let the service's user create entries there."
        )


def _report(tsm: Path, provider: str, data: bytes) -> tuple[bytes, bytes]:
    entry = tsm / f"cloister-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        entry.mkdir()
        try:
            found = (entry / "provider").read_text().strip()
            if found != _TSM_NAMES[provider]:
                raise NotAvailable(f"This guest's attestation comes from {found!r}, not from {provider}.")
            (entry / "inblob").write_bytes(data)
            quote = _read(entry / "outblob")
            extra = _read(entry / "auxblob") if provider == "snp" and (entry / "auxblob").exists() else b""
        finally:
            entry.rmdir()
    except OSError as error:
        raise NotAvailable(f"The guest's kernel gave no {provider} quote: {error}.") from None
    return quote, extra


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_OUTPUT)
