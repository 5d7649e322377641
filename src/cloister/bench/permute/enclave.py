"""The enclave path beside the same protected model without it."""

from __future__ import annotations

from typing import Any

from cloister.bench.schema import Row
from cloister.bench.suites import Options

BAR = 1.10


def run(options: Options) -> list[Row]:
    """Latency of one forward pass with the simulated enclave in another process, over the same pass without."""
    from cloister.permute.enclave.measure import measure_overhead

    quick: dict[str, Any] = {"shape": "llama-512x8", "batch": 2, "tokens": 50, "rounds": 3}
    found = measure_overhead(**quick) if options.quick else measure_overhead(rounds=9)
    return [
        Row.measured(
            "enclave",
            found.ratio,
            "ratio",
            spread=found.spread,
            bar=BAR,
            paper="1.03 to 1.09",
            baseline=f"without the enclave, {1e3 * found.without_s:.0f} ms",
            note=f"{found.shape}, {found.batch} x {found.tokens} tokens; simulated: a process, not a protected one",
            figures={"with_s": found.with_s, "without_s": found.without_s, "max_difference": found.max_difference},
        )
    ]
