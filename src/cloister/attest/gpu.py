"""Where a verifier for confidential GPUs is plugged in. This package brings none.

GPU evidence travels inside `Evidence.gpu` and its digest is part of the CPU quote's report data, so it cannot be
exchanged. What it says has to be judged by the vendor's own verifier:

    gpu.register(my_verifier)      # callable(evidence: dict, nonce: bytes) -> str; raises AttestationFailed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloister.attest.steps import Course
from cloister.errors import NotAvailable

Verifier = Callable[[dict[str, Any], bytes], str]
_registered: list[Verifier] = []


def register(verifier: Verifier | None) -> None:
    """Use `verifier` for GPU evidence from now on; `None` takes it away again."""
    _registered[:] = [] if verifier is None else [verifier]


def appraise(evidence: dict[str, Any] | None, nonce: bytes, course: Course) -> None:
    """Judge the GPU's part of the evidence."""
    course.require(
        "GPU evidence", evidence is not None, "it is there", "the server sent none, and the policy demands it"
    )
    if not _registered:
        raise NotAvailable(
            "No verifier for confidential GPU evidence is registered, and Cloister brings none.",
            advice="Install NVIDIA's attestation package and hand a verifier to cloister.attest.gpu.register "
            "(docs/attestation.md).",
        )
    assert evidence is not None
    course.note("GPU evidence", _registered[0](evidence, nonce))
