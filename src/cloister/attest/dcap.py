"""Intel TDX and SGX quotes, verified with the library `dcap-qvl` against Intel's root, offline.

The collateral (TCB information, QE identity, revocation lists) is signed by Intel, so it may come from the server
itself; the library refuses what is expired at the time of verification.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cloister.attest.steps import Course, Facts
from cloister.errors import NotAvailable

REGISTERS = ("mr_td", "rt_mr0", "rt_mr1", "rt_mr2", "rt_mr3")
_TDX_DEBUG = 0x01  # TD attributes, byte 0
_SGX_DEBUG = 0x02  # enclave attributes, flags byte 0


def appraise(kind: str, raw: bytes, collateral: Mapping[str, Any], now: int, course: Course) -> Facts:
    """Verify signature chain, revocation and TCB with dcap-qvl, then read the registers. `kind`: tdx or sgx."""
    library = _library()
    try:
        lists = library.QuoteCollateralV3.from_json(json.dumps(dict(collateral)))
    except (ValueError, TypeError) as error:
        course.require("collateral can be read", False, "", f"it cannot: {error}")
        raise AssertionError from error
    course.note("collateral can be read", "TCB information, QE identity and revocation lists are there")
    try:
        verified = library.verify(raw, lists, now)
    except ValueError as error:
        bad = f"dcap-qvl refused it: {error}"
        course.require("quote signature and collateral", False, "", bad, advice=_advice(str(error)))
        raise AssertionError from error
    course.note("quote signature and collateral", "valid up to Intel's root, nothing expired or revoked")
    parsed = library.parse_quote(raw)
    course.require("kind of quote", parsed.quote_type() == kind.upper(), kind, f"it is a {parsed.quote_type()} quote")
    facts = facts_of(parsed, verified.status)
    if verified.advisory_ids:
        course.note("security advisories", ", ".join(verified.advisory_ids))
    return facts


def facts_of(parsed: Any, status: str = "") -> Facts:
    """The registers of a parsed quote. For TDX `measurement` is SHA-384 over MRTD and RTMR 0 to 3."""
    report = parsed.report
    if parsed.is_tdx():
        registers = {name: getattr(report, name).hex() for name in REGISTERS}
        registers["measurement"] = combined({name: registers[name] for name in REGISTERS})
        registers["mr_config_id"] = report.mr_config_id.hex()
        return Facts(report.report_data, registers, bool(report.td_attributes[0] & _TDX_DEBUG), status)
    registers = {
        "measurement": report.mr_enclave.hex(),
        "mr_enclave": report.mr_enclave.hex(),
        "mr_signer": report.mr_signer.hex(),
    }
    return Facts(report.report_data, registers, bool(report.attributes[0] & _SGX_DEBUG), status)


def combined(registers: Mapping[str, str]) -> str:
    """One hex string for all of a TD's registers."""
    return hashlib.sha384(b"".join(bytes.fromhex(registers[name]) for name in REGISTERS)).hexdigest()


def _library() -> Any:
    try:
        import dcap_qvl
    except ImportError:
        raise NotAvailable(
            "Verifying Intel quotes needs the package dcap-qvl.", advice="Install it: pip install 'cloister[attest]'."
        ) from None
    return dcap_qvl


def _advice(reason: str) -> str:
    if "expire" in reason.lower() or "next_update" in reason.lower() or "nextupdate" in reason.lower():
        return "The server must fetch fresh collateral from Intel's service (or its cache), then ask again."
    return ""
