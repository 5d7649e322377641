"""The checks that do not depend on the hardware, and the hook that the gateway holds.

Order: may this provider answer at all, is the quote genuine, does it answer our question (nonce, TLS key, age), is
the code the expected one, is it closed to debuggers, is the platform up to date. Every failure is `AttestationFailed`
with the steps so far.
"""

from __future__ import annotations

import hmac
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cloister.attest import dcap, gpu, simulated, snp
from cloister.attest.evidence import Evidence, new_nonce, parse, spki_of
from cloister.attest.policy import Policy
from cloister.attest.steps import Appraisal, Course, Facts
from cloister.errors import AttestationFailed

GetEvidence = Callable[[str], Any]
"""Takes the nonce in hex, fetches /cloister/v1/attestation?nonce=HEX, gives the body (or an awaitable of it)."""
Check = Callable[..., Awaitable[Appraisal]]


def verify(
    evidence: Evidence,
    policy: Policy,
    *,
    nonce: bytes,
    peer_certificate: bytes | None,
    now: float | None = None,
    snp_roots: Mapping[str, str] | None = None,
) -> Appraisal:
    """Judge evidence against a policy. `peer_certificate` is what the TLS connection itself showed (DER).

    `now` and `snp_roots` are there for recorded quotes and for tests.
    """
    if evidence.provider == "simulated":
        simulated.announce()
    moment = int(time.time() if now is None else now)
    course = Course()
    course.require(
        "provider",
        evidence.provider == policy.provider,
        policy.provider,
        f"the server attests with {evidence.provider!r}, {policy.provider!r} is expected",
    )
    facts = _appraise(evidence, policy, moment, course, snp_roots)
    _binding(evidence, policy, facts, nonce, peer_certificate, moment, course)
    _state(policy, facts, course)
    if policy.require_gpu:
        gpu.appraise(evidence.gpu, nonce, course)
    return Appraisal(
        evidence.provider, facts.registers, facts.tcb_status, evidence.provider != "simulated", course.steps
    )


def make_verifier(policy: Policy, *, clock: Callable[[], float] = time.time) -> Check:
    """The gateway's check, to be awaited before anything else is sent:

    await check(base_url, get_evidence, peer_certificate_der) -> Appraisal
    """
    if policy.provider == "simulated":
        simulated.announce()

    async def check(
        base_url: str, get_evidence: GetEvidence, peer_certificate_der: bytes | None, nonce: bytes | None = None
    ) -> Appraisal:
        question = new_nonce() if nonce is None else nonce
        try:
            answer = get_evidence(question.hex())
            if inspect.isawaitable(answer):
                answer = await answer
            return verify(parse(answer), policy, nonce=question, peer_certificate=peer_certificate_der, now=clock())
        except AttestationFailed as error:
            raise AttestationFailed(f"{base_url}: {error.message}", error.steps, advice=error.advice) from None

    return check


def _appraise(
    evidence: Evidence, policy: Policy, now: int, course: Course, snp_roots: Mapping[str, str] | None
) -> Facts:
    collateral: dict[str, Any] = dict(evidence.collateral if policy.collateral is None else policy.collateral)
    if evidence.provider == "simulated":
        return simulated.appraise(evidence.quote, collateral, now, course)
    if evidence.provider == "snp":
        return snp.appraise(evidence.quote, collateral, now, course, min_tcb=policy.min_tcb, roots=snp_roots)
    return dcap.appraise(evidence.provider, evidence.quote, collateral, now, course)


def _binding(
    evidence: Evidence,
    policy: Policy,
    facts: Facts,
    nonce: bytes,
    peer_certificate: bytes | None,
    now: int,
    course: Course,
) -> None:
    course.require(
        "claims are inside the quote",
        hmac.compare_digest(facts.report_data, evidence.report_data),
        "nonce, TLS key, time and GPU evidence are what the hardware signed",
        "the quote was made for something else: its report data does not fit nonce, TLS key, time and GPU evidence",
    )
    course.require(
        "answers our question",
        hmac.compare_digest(evidence.nonce, nonce),
        "our nonce",
        "it answers another nonce: a quote from an earlier exchange was replayed",
    )
    if peer_certificate is None and not policy.allow_without_tls:
        course.require("TLS key", False, "", "the connection has no TLS, so nothing ties it to the attested machine")
    course.require(
        "TLS key",
        hmac.compare_digest(evidence.spki_sha256, spki_of(peer_certificate)),
        "the key of this connection" if peer_certificate is not None else "none, as the policy allows",
        "the connection's TLS key is not the one in the quote: somebody stands in between",
    )
    age = now - evidence.issued
    course.require(
        "age",
        abs(age) <= policy.max_age,
        f"{age} s",
        f"{age} s old by the server's clock; {policy.max_age} s are allowed",
        advice="Check both clocks. If they are right, the evidence is stale.",
    )


def _state(policy: Policy, facts: Facts, course: Course) -> None:
    matching = any(
        expected and all(facts.registers.get(name, "") == value.lower() for name, value in expected.items())
        for expected in policy.measurements
    )
    told = "is none of the expected ones" if policy.measurements else "was found, but none was given to expect"
    course.require(
        "measurement",
        matching,
        facts.registers["measurement"],
        f"{facts.registers['measurement']} {told}",
        advice="If you built this server yourself, put its measurement into the client's manifest.",
    )
    course.require(
        "debugging is off",
        not facts.debug or policy.allow_debug,
        "on, as the policy allows" if facts.debug else "off",
        "the machine runs in debug mode: its operator can read its memory",
    )
    if facts.tcb_status:
        course.require(
            "platform status",
            policy.status_is_enough(facts.tcb_status),
            facts.tcb_status,
            f"{facts.tcb_status}; at least {policy.min_tcb_status} is demanded",
            advice="The machine's firmware has to be updated.",
        )
