"""Attestation: proof of what runs on the server, bound to the TLS key that the client talks to.

    evidence.py   the quote, what it claims, and how nonce and TLS key are bound into it
    policy.py     what a client expects of a server
    steps.py      the course of a verification, readable by people and machines
    verifying.py  the provider-independent checks; `make_verifier` is what the gateway holds
    simulated.py  a provider that protects nothing, the default
    dcap.py       Intel TDX and SGX, verified with the library dcap-qvl
    snp.py        AMD SEV-SNP, verified here on `cryptography`
    gpu.py        where a verifier for confidential GPUs is plugged in
    collecting.py the server's side: asks the hardware for a quote

Nothing here opens a connection; the caller brings the evidence. See docs/attestation.md.
"""

from cloister.attest.collecting import Collector
from cloister.attest.evidence import Evidence, new_nonce, spki_of
from cloister.attest.policy import Policy, parse_policy
from cloister.attest.steps import Appraisal, Step
from cloister.attest.verifying import make_verifier, verify

__all__ = [
    "Appraisal",
    "Collector",
    "Evidence",
    "Policy",
    "Step",
    "make_verifier",
    "new_nonce",
    "parse_policy",
    "spki_of",
    "verify",
]
