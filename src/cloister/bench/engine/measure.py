"""The inner loop of the products beside what this processor can do at all, on one core."""

from __future__ import annotations

from cloister.bench.schema import Row
from cloister.bench.suites import Options
from cloister.crypto import native

UNIT = "10^9 a second and core"


def rows(_: Options) -> list[Row]:
    """Multiply-adds of the batched product, the peak of the same instruction, and the IFMA peak where there is one."""
    loop, fused, integer = native.load().inner_loop_throughput()
    share = f"{loop / fused:.0%} of the peak of fused multiply-adds on doubles"
    chains = "independent chains, from registers"
    other = "" if integer is not None else "; no IFMA peak: not on this processor"
    found = [
        Row.measured("inner-loop", loop / 1e9, UNIT, note=share, figures={"inner_loop": loop, "fused_peak": fused}),
        Row.measured("fused-peak", fused / 1e9, UNIT, note=chains + other),
    ]
    if integer is not None:
        found.append(Row.measured("ifma-peak", integer / 1e9, UNIT, note=f"52-bit integer multiply-adds, {chains}"))
    return found
