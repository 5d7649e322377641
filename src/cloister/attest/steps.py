"""The course of a verification: every step, whether it held, and what was seen."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cloister.errors import AttestationFailed


@dataclass(frozen=True)
class Step:
    """One check. `detail` says what was found; it holds no secret."""

    step: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Facts:
    """What the hardware's signature covers, as a provider found it."""

    report_data: bytes
    registers: dict[str, str]  # "measurement" and the provider's own registers, hex
    debug: bool
    tcb_status: str = ""


@dataclass(frozen=True)
class Appraisal:
    """The result of a verification that held."""

    provider: str
    registers: dict[str, str]
    tcb_status: str
    protects: bool  # False for the simulated provider
    steps: list[Step] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


class Course:
    """Collects the steps of one verification; `require` ends it at the first that does not hold."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def note(self, step: str, detail: str) -> None:
        """A step that held."""
        self.steps.append(Step(step, True, detail))

    def require(self, step: str, held: bool, good: str, bad: str, *, advice: str = "") -> None:
        """Write down the step; raise `AttestationFailed` with everything so far if it did not hold."""
        self.steps.append(Step(step, held, good if held else bad))
        if not held:
            raise self.failure(f"Attestation failed at {step!r}: {bad}", advice)

    def failure(self, message: str, advice: str = "") -> AttestationFailed:
        """The error that carries this course."""
        advice = advice or "Nothing was sent to the server. Do not use it until you know why."
        return AttestationFailed(message, [asdict(step) for step in self.steps], advice=advice)
