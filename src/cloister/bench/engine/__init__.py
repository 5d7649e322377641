"""The suite `engine`: the building blocks of two-party inference beside SPU's Cheetah in the same run.

The peer runs first, alone; then ours, both parties on this machine, over TLS. Ratios are peer / ours, so larger is
better; bytes are both directions. Each operation is timed as a whole (`total`) and once more with everything that does
not need its input made ahead and stored (`online`).
"""

from __future__ import annotations

from cloister.bench.engine import measure, peer, sides, workloads
from cloister.bench.schema import Row
from cloister.bench.suites import Options, Suite, Workload

SILU_PEER = 1 << 15
SILU_OURS = 1 << 20


def _figures(outcome: sides.Outcome) -> dict[str, float]:
    return {
        "seconds": outcome.median,
        "online_seconds": outcome.online_seconds,
        "ahead_seconds": outcome.ahead_seconds,
        "megabytes": outcome.bytes / 1e6,
        "online_megabytes": outcome.online_bytes / 1e6,
        "ahead_megabytes": outcome.ahead_costs.total.bytes / 1e6,
        "rounds": outcome.rounds,
        "online_rounds": float(outcome.online_costs.online.rounds),
        "error": outcome.error if outcome.error is not None else -1.0,
    }


def _both(outcome: sides.Outcome) -> str:
    """The whole, and what is left of it when everything that does not need the input was made ahead and stored."""
    whole = f"{outcome.median:.3f} s, {outcome.bytes / 1e6:.1f} MB"
    return f"total {whole}; online {outcome.online_seconds:.3f} s, {outcome.online_bytes / 1e6:.2f} MB"


def _faster(
    name: str, case: str, outcome: sides.Outcome, options: Options, bar: float, *, units: float = 1.0, note: str = ""
) -> tuple[Row, peer.PeerFigure | None]:
    """The ratio of the peer's seconds to ours; `units` of ours make one of the peer's."""
    figures = _figures(outcome)
    try:
        theirs = peer.measure(case, options.progress)
    except Exception as error:
        why = f"ours took {outcome.median:.3f} s, {outcome.bytes / 1e6:.1f} MB; the peer was not measured: {error}"
        return Row.failed(name, "times faster", why, bar=bar, at_most=False, figures=figures), None
    figures |= {"peer_seconds": theirs.seconds, "peer_megabytes": theirs.bytes / 1e6, "peer_messages": theirs.messages}
    ratio = theirs.seconds / (outcome.median / units)
    spread = ratio * (theirs.spread / theirs.seconds + outcome.spread / outcome.median)
    row = Row.measured(
        name, ratio, "times faster", spread=spread, bar=bar, at_most=False,
        baseline=f"SPU Cheetah {theirs.seconds:.2f} s, {theirs.bytes / 1e6:.1f} MB", note=note, figures=figures,
    )  # fmt: skip
    return row, theirs


def _single(options: Options) -> list[Row]:
    outcome = sides.measure(workloads.single_product, quick=options.quick)
    case = "matmul_priv_24x512x352" if options.quick else "matmul_priv_24x2048x1408"
    note = f"{_both(outcome)}, largest error {outcome.error:.0f} before truncation"
    return [_faster("product", case, outcome, options, 20, note=note)[0]]


def _experts(options: Options) -> list[Row]:
    outcome = sides.measure(workloads.expert_product, quick=options.quick)
    experts = 16 if options.quick else workloads.EXPERTS
    case = "matmul_priv_24x512x352" if options.quick else "matmul_priv_24x2048x1408"
    note = f"{experts} experts: {_both(outcome)}, error {outcome.error:.0f}"
    return [_faster("product-per-expert", case, outcome, options, 60, units=experts, note=note)[0]]


def _layer(options: Options) -> list[Row]:
    first = sides.measure(workloads.gate_and_up, quick=options.quick)
    second = sides.measure(workloads.down, quick=options.quick)
    note = f"gate and up: {_both(first)}; down: {_both(second)}; errors {first.error:.0f}, {second.error:.0f}"
    figures = {**_figures(first), **{f"down_{name}": value for name, value in _figures(second).items()}}
    return [
        Row.measured("layer-seconds", first.median + second.median, "s", bar=20, note=note, figures=figures,
                     paper="132 s for the whole layer, 48 cores"),
        Row.measured("layer-bytes", (first.bytes + second.bytes) / 1e6, "MB", bar=350, note="all three products"),
    ]  # fmt: skip


def _less(options: Options) -> list[Row]:
    outcome = sides.measure(workloads.less_than, quick=options.quick)
    n = 1 << (14 if options.quick else 18)
    case = "less_16" if options.quick else "less_18"
    units = 1 / 4 if options.quick else 1.0
    note = f"{_both(outcome)}, {outcome.bytes / n:.1f} bytes each, {outcome.error:.0f} wrong"
    row, theirs = _faster("less-than", case, outcome, options, 5, units=units, note=note)
    if theirs is None:
        return [row]
    ratio = outcome.bytes / (theirs.bytes * units)
    return [row, Row.measured("less-than-bytes", ratio, "ratio", bar=1.0, baseline="SPU Cheetah's bytes", note=note)]


def _silu(options: Options) -> list[Row]:
    outcome = sides.measure(workloads.silu, quick=options.quick)
    n = 1 << (14 if options.quick else 20)
    note = f"{1e6 * outcome.median / n:.2f} us an element; {n} of them: {_both(outcome)}"
    row, _ = _faster("silu", "silu_15", outcome, options, 10, units=n / SILU_PEER, note=note)
    return [
        row,
        Row.measured("silu-error", outcome.error or 0.0, "absolute", bar=2**-9, note="on [-16, 16]"),
        Row.measured("silu-bytes", outcome.bytes / n, "bytes an element", bar=300, note="correlations included"),
    ]


def _softmax(options: Options) -> list[Row]:
    outcome = sides.measure(workloads.softmax, quick=options.quick)
    note = f"{_both(outcome)}, {outcome.rounds:.0f} rounds, error {outcome.error:.5f}"
    return [_faster("softmax", "softmax_128x64", outcome, options, 5, note=note)[0]]


def _top_k(options: Options) -> list[Row]:
    outcome = sides.measure(workloads.top_k, quick=options.quick)
    note = f"{_both(outcome)}, {outcome.error:.0f} wrong"
    row, _ = _faster("top-k", "topk_route_128x64_k6", outcome, options, 5, note=note)
    return [row, Row.measured("top-k-rounds", outcome.rounds, "rounds", bar=40, note="top 6 of 64, 128 rows")]


def _dispatch(options: Options) -> list[Row]:
    outcome = sides.measure(workloads.dispatch, quick=options.quick)
    experts = 8 if options.quick else workloads.EXPERTS
    what = f"top 24 of 128 for {experts} experts: {_both(outcome)}, {outcome.error:.0f} wrong"
    figures = _figures(outcome)
    return [
        Row.measured("dispatch-seconds", outcome.median, "s", spread=outcome.spread, bar=3, note=what, figures=figures),
        Row.measured("dispatch-rounds", outcome.rounds, "rounds", bar=60),
        Row.measured("dispatch-bytes", outcome.bytes / 1e6, "MB", bar=60),
    ]


SUITE = Suite(
    "engine",
    (
        Workload("product", "(24 x 2048) x (2048 x 1408), weights private to the server", _single, "times faster", 20),
        Workload("product-per-expert", "64 experts with different weights, per expert", _experts, "times faster", 60),
        Workload("layer", "the three expert products of a DeepSeekMoE layer: seconds, bytes", _layer, "s", 20),
        Workload("less-than", "2^18 comparisons: time and bytes", _less, "times faster", 5),
        Workload("silu", "SiLU of 2^20 numbers: time, error, bytes", _silu, "times faster", 10),
        Workload("softmax", "softmax of 128 rows of 64", _softmax, "times faster", 5),
        Workload("top-k", "the 6 largest of 64 for 128 rows: time, rounds", _top_k, "times faster", 5),
        Workload("dispatch", "the 24 best of 128 tokens for 64 experts: time, rounds, bytes", _dispatch, "s", 3),
        Workload("inner-loop", "the products' inner loop beside the processor's peaks", measure.rows, measure.UNIT),
    ),
)
