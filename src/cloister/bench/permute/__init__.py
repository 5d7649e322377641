"""The suite `permute`: what the mode costs, each time beside the same thing without it."""

from __future__ import annotations

from cloister.bench.permute import concurrency, device, enclave, endtoend, lossless, protecting, steps
from cloister.bench.suites import Suite, Workload

SUITE = Suite(
    "permute",
    (
        Workload(
            "server-step",
            "server time per token, protected / plain checkpoint, same engine",
            steps.run,
            bar=1.02,
            paper="about 1.0",
        ),
        Workload(
            "end-to-end-token",
            "per token through gateway and server / plain server, loop token",
            endtoend.token,
            bar=1.10,
            paper="1.12",
        ),
        Workload(
            "end-to-end-server",
            "per token through gateway and server / plain server, loop server",
            endtoend.server,
            bar=1.03,
        ),
        Workload(
            "device-token",
            "the user's machine per generated token, d = 4096, vocabulary 32,000",
            device.run,
            unit="ms",
            bar=2.0,
            paper="1.7 ms",
        ),
        Workload(
            "concurrency",
            "64 streams at once, every answer checked against the plain model",
            concurrency.run,
            unit="failures",
            bar=0.0,
            paper="10 contexts",
        ),
        Workload(
            "enclave", "latency of the enclave path / without, simulated", enclave.run, bar=1.10, paper="1.03 to 1.09"
        ),
        Workload(
            "protect",
            "protecting a sharded checkpoint of 4 GB: peak memory, and time / copying it",
            protecting.run,
            unit="MB",
        ),
        Workload(
            "lossless",
            "every family: difference, top-1 agreement, greedy continuation",
            lossless.run,
            unit="agreement",
            bar=1.0,
        ),
    ),
)
