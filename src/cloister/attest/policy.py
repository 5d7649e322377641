"""What a client expects of a server before it sends anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cloister.attest.evidence import PROVIDERS
from cloister.errors import UsageError

TCB_ORDER = (
    "UpToDate", "SWHardeningNeeded", "ConfigurationNeeded", "ConfigurationAndSWHardeningNeeded", "TDRelaunchAdvised",
    "TDRelaunchAdvisedConfigurationNeeded", "OutOfDate", "OutOfDateConfigurationNeeded", "Revoked",
)  # fmt: skip
"""Intel's statuses from best to worst."""


@dataclass(frozen=True)
class Policy:
    """The expectations. An empty list of measurements accepts no server at all: that is deliberate."""

    provider: str = "simulated"
    measurements: Sequence[Mapping[str, str]] = ()  # any one of them must match; register name -> hex
    max_age: int = 300  # seconds between the server's clock in the evidence and ours, either way
    allow_debug: bool = False
    min_tcb_status: str = "UpToDate"  # TDX and SGX
    min_tcb: Mapping[str, int] = field(default_factory=dict)  # SEV-SNP: bootloader, tee, snp, microcode (and fmc)
    require_gpu: bool = False
    allow_without_tls: bool = False  # loopback trials only: without TLS there is no key to bind to
    collateral: Mapping[str, object] | None = None  # used in place of what the server sends along

    def __post_init__(self) -> None:
        if self.provider not in PROVIDERS:
            raise UsageError(
                f"There is no attestation provider {self.provider!r}.", advice=f"Known: {', '.join(PROVIDERS)}."
            )
        if self.min_tcb_status not in TCB_ORDER:
            raise UsageError(
                f"There is no TCB status {self.min_tcb_status!r}.", advice=f"Known: {', '.join(TCB_ORDER)}."
            )
        if self.max_age <= 0:
            raise UsageError("`max_age` must be positive.")

    def status_is_enough(self, status: str) -> bool:
        """Whether a TCB status is at least the one demanded. An unknown status never is, and neither is Revoked."""
        if status not in TCB_ORDER or status == "Revoked":
            return False
        return TCB_ORDER.index(status) <= TCB_ORDER.index(self.min_tcb_status)


def parse_policy(text: str) -> Policy:
    """From `PROVIDER:MEASUREMENT` to a policy; without `PROVIDER:` it is the simulated one."""
    provider, colon, rest = text.partition(":")
    return Policy(provider if colon else "simulated", measurements=[parse_measurement(rest if colon else text)])


def parse_measurement(text: str) -> dict[str, str]:
    """From `HEX` (the provider's main measurement) or `mr_td=HEX,rt_mr1=HEX` to a mapping for `Policy.measurements`."""
    expected: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().rpartition("=")
        name, value = name or "measurement", value.lower()
        try:
            whole = len(bytes.fromhex(value)) >= 16
        except ValueError:
            whole = False
        if not whole or name in expected:
            raise UsageError(f"{part.strip()!r} is no measurement.", advice="Give HEX, or NAME=HEX,NAME=HEX.")
        expected[name] = value
    return expected
