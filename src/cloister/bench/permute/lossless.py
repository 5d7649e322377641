"""Every family: does the protected checkpoint compute what the plain one does?"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from cloister.bench.schema import Row
from cloister.bench.suites import Options
from cloister.errors import UnsupportedModel


def run(options: Options) -> list[Row]:
    """One row per architecture and transform; what a family rules out is listed in the last row."""
    from cloister import families
    from cloister.permute import selfcheck

    rows: list[Row] = []
    ruled_out: list[str] = []
    with options.progress.task("Lossless", total=len(selfcheck.TINY) * len(families.TRANSFORMS), unit="models") as task:
        for architecture in selfcheck.TINY:
            for transform in families.TRANSFORMS:
                row = _row(architecture, transform, inputs=50 if options.quick else 1000)
                if row is None:
                    ruled_out.append(f"{architecture} {transform}")
                else:
                    rows.append(row)
                task.advance()
    rows.append(Row.measured("lossless-ruled-out", len(ruled_out), "combinations", note=", ".join(ruled_out)))
    return rows


def _row(architecture: str, transform: str, inputs: int) -> Row | None:
    from cloister.permute import selfcheck

    name = f"lossless-{architecture}-{transform}"
    try:
        with tempfile.TemporaryDirectory(prefix="cloister-bench-") as folder:
            found = selfcheck.check_architecture(architecture, transform, Path(folder), inputs=inputs)
    except UnsupportedModel:
        return None
    except Exception as error:
        return Row.failed(name, "agreement", f"not measured: {type(error).__name__}: {error}", bar=1.0, at_most=False)
    greedy = f"{found.greedy_tokens} greedy tokens {'equal' if found.greedy_equal else 'DIFFER'}, " * bool(
        found.greedy_tokens
    )
    row = Row.measured(
        name,
        found.top1,
        "agreement",
        bar=1.0,
        at_most=False,
        baseline="plain checkpoint, float32",
        note=f"largest difference {found.max_difference:.1e} (outputs' deviation {found.scale:.2g}), {greedy}"
        f"bfloat16 {found.bfloat16_top1:.2%}, plain bfloat16 {found.bfloat16_plain_top1:.2%}, {found.inputs} inputs",
        figures={key: float(value) for key, value in found.as_dict().items() if isinstance(value, int | float)},
    )
    return replace(row, ok=row.ok and found.greedy_equal)
