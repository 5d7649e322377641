"""Selection: seconds beside the whole kernel in one matrix, and time and memory of a pool that no such matrix fits.

The large pool runs in a process of its own (`python -m cloister.bench.unify.selection N M`), so that the memory
measured is its own. The points are drawn from a mixture of clusters; `equal` relevance is the hardest case, because
then no candidate can be left out for its relevance.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.bench import timing
from cloister.bench.schema import Row
from cloister.bench.suites import Options, Workload
from cloister.unify.selection.greedy import Gaussian, greedy

WIDTH = 384
TEMPERING = 0.25


def _points(n: int) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float64]]]:
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(max(n // 20, 1), WIDTH)).astype(np.float32)
    vectors = np.empty((n, WIDTH), dtype=np.float32)
    for start in range(0, n, 4096):  # no large temporaries: they would count as memory of the selection
        part = vectors[start : start + 4096]
        part[:] = centres[draw.integers(len(centres), size=len(part))]
        part += 0.8 * draw.standard_normal(part.shape, dtype=np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    usual = 1 / (1 + np.exp(-draw.normal(1, 1.5, size=n)))
    return vectors, {"usual": usual, "equal": np.ones(n)}


def dense(vectors: NDArray[np.float32], relevance: NDArray[np.float64], count: int) -> list[int]:
    """The published way: the whole kernel, and every candidate's variance at every step."""
    doubles = vectors.astype(np.float64)
    doubles /= np.linalg.norm(doubles, axis=1, keepdims=True)
    kernel, weight = Gaussian()(doubles @ doubles.T), 2 * TEMPERING * np.log(relevance)
    columns, variance = np.empty((count, len(vectors))), np.ones(len(vectors))
    chosen: list[int] = []
    score = weight.copy()
    for step in range(count):
        best = int(np.argmax(score))
        chosen.append(best)
        column = (kernel[best] - columns[:step, best] @ columns[:step]) / np.sqrt(variance[best])
        columns[step] = column
        variance -= column * column
        score = weight + np.log(np.maximum(variance, 1e-300))
        score[chosen] = -np.inf
    return chosen


def _small(options: Options) -> list[Row]:
    n, count = (600, 100) if options.quick else (3000, 500)
    vectors, kinds = _points(n)
    rows = []
    for name, relevance in kinds.items():
        found: dict[str, list[int]] = {}

        def ours(relevance: NDArray[np.float64] = relevance, found: dict[str, list[int]] = found) -> None:
            found["ours"] = greedy(vectors, relevance, count, tempering=TEMPERING).indices

        def theirs(relevance: NDArray[np.float64] = relevance, found: dict[str, list[int]] = found) -> None:
            found["dense"] = dense(vectors, relevance, count)

        both = timing.compare(ours, theirs, pairs=5 if options.quick else 9, warm_up=1)
        same = found["ours"] == found["dense"]
        rows.append(
            Row.measured(
                "selection" if name == "usual" else f"selection-{name}", both.a_median, "s",
                spread=timing.median_spread(both.a), bar=1.0, baseline=f"whole kernel in memory: {both.b_median:.3f} s",
                note=f"{count} of {n}, {name} relevance; {'the same' if same else 'NOT THE SAME'} examples chosen",
                figures={"seconds": both.a_median, "dense_seconds": both.b_median, "same": float(same)},
            )
        )  # fmt: skip
    return rows


def _large(options: Options) -> list[Row]:
    n, count = (6000, 100) if options.quick else (100_000, 1000)
    rows = []
    for name in ("usual", "equal"):
        options.progress.note(f"selection: {count} of {n}, {name} relevance")
        done = subprocess.run(
            [sys.executable, "-m", "cloister.bench.unify.selection", str(n), str(count), name],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        figures: dict[str, float] = json.loads(done.stdout)
        suffix = "" if name == "usual" else f"-{name}"
        note = f"{count} of {n}, {name} relevance; {figures['cpu_seconds']:.1f} s of processor time"
        without = f"whole kernel: {8 * n * n / 1e9:.0f} GB, not possible here" if n > 50_000 else ""
        rows.append(
            Row.measured(
                f"selection-large{suffix}", figures["seconds"], "s", bar=300, note=note, figures=figures,
                baseline=without,
            )
        )  # fmt: skip
        rows.append(
            Row.measured(
                f"selection-large{suffix}-memory", figures["peak_bytes"] / 1e6, "MB", bar=1000,
                note="peak of the whole process, interpreter and vectors included; PyTorch is not loaded in it",
            )
        )  # fmt: skip
    return rows


def _peak_bytes() -> int:
    """The most memory that this process ever held. Not `getrusage`, which counts the parent's before the start too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("the system does not tell a process's peak of memory")


def _alone(n: int, count: int, name: str) -> dict[str, float]:
    vectors, kinds = _points(n)
    wall, processor = time.perf_counter(), time.process_time()
    choice = greedy(vectors, kinds[name], count, tempering=TEMPERING)
    figures = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - processor}
    if len(set(choice.indices)) != count:
        raise RuntimeError(f"{len(set(choice.indices))} different examples instead of {count}: {choice.stopped}")
    return {**figures, "peak_bytes": float(_peak_bytes())}


WORKLOADS = (
    Workload("selection", "500 of 3,000 examples: seconds, beside the whole kernel", _small, "s", 1.0),
    Workload("selection-large", "1,000 of 100,000 examples: seconds, memory", _large, "s", 300),
)

if __name__ == "__main__":
    print(json.dumps(_alone(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
