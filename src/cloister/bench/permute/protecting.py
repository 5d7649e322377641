"""Protecting a large sharded checkpoint: the memory it takes, and its time beside copying the same files."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cloister import storage
from cloister.bench import models
from cloister.bench.schema import Row
from cloister.bench.suites import Options
from cloister.errors import CloisterError

LARGE = models.Size(hidden=2048, layers=37, feed_forward=5632, heads=16, vocabulary=32000)
SMALL = models.Size(hidden=1024, layers=12, feed_forward=2816, heads=8, vocabulary=32000)
TIME_BAR = 2.0
ALLOWANCE_MB = 500
# The child tells its own peak. On Linux that is VmHWM: ru_maxrss begins with the size of the parent that forked it.
CHILD = """
import json, resource, sys, time
from pathlib import Path
options = json.loads(sys.argv[1])
start = time.perf_counter()
if options["whole"]:
    from cloister.cli import main
    code = main(["protect", options["source"], options["out"], "--base", "secret", "--json", "--quiet"])
else:
    from cloister.permute.protect import protect
    protect(options["source"], options["out"], base="secret", measure=False)
    code = 0
seconds = time.perf_counter() - start
status = Path("/proc/self/status")
if status.exists():
    peak = next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"code": code, "peak": peak, "seconds": seconds}), file=sys.stderr)
"""


def run(options: Options) -> list[Row]:
    """Memory and time of the whole command `cloister protect`, and the time of its rewriting alone."""
    size, shard = (SMALL, 100 << 20) if options.quick else (LARGE, 1 << 30)
    with tempfile.TemporaryDirectory(prefix="cloister-bench-") as folder:
        source, out = Path(folder) / "source", Path(folder) / "out"
        with options.progress.task("Writing the synthetic checkpoint"):
            models.write(source, size, dtype="bfloat16", shard_bytes=shard)
        total = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        shards = len(list(source.glob("*.safetensors")))
        copies = [_copy(source, Path(folder) / "copy", options)]
        with options.progress.task("Protecting it: the whole command"):
            whole = _protect(source, out, whole=True)
        copies.append(_copy(source, Path(folder) / "copy", options))
        with options.progress.task("Protecting it: rewriting only"):
            rewriting = _protect(source, out, whole=False)
        copies.append(_copy(source, Path(folder) / "copy", options))
    largest = size.vocabulary * size.hidden * 2
    copying = statistics.median(copies)
    note = f"{storage.gigabytes(total)} in bfloat16, {shards} shards, largest tensor {largest / 1e6:.0f} MB"
    disk: dict[str, Any] = {
        "bar": TIME_BAR,
        "spread": (max(copies) - min(copies)) / copying,
        "baseline": f"copying the same files with fsync, {copying:.1f} s (median of {len(copies)}, between the runs)",
    }
    return [
        Row.measured(
            "protect-memory",
            whole["peak"] / 1e6,
            "MB",
            bar=2 * largest / 1e6 + ALLOWANCE_MB,
            note=f"{note}; peak of the whole process of `cloister protect`, interpreter and attacks included",
            figures={"largest_tensor_mb": largest / 1e6, "rewriting_only_mb": rewriting["peak"] / 1e6},
        ),
        Row.measured(
            "protect-time",
            rewriting["seconds"] / copying,
            "ratio",
            note=f"{note}; reading, rewriting, tagging, writing with fsync; {os.cpu_count()} cores",
            figures={"protect_s": rewriting["seconds"], "copy_s": copying},
            **disk,
        ),
        Row.measured(
            "protect-time-command",
            whole["seconds"] / copying,
            "ratio",
            note="the whole command: with start-up and the attacks that measure recovery",
            figures={"protect_s": whole["seconds"], "copy_s": copying},
            **disk,
        ),
    ]


def _protect(source: Path, out: Path, *, whole: bool) -> dict[str, float]:
    told = json.dumps({"source": str(source), "out": str(out), "whole": whole})
    done = subprocess.run(
        [sys.executable, "-c", CHILD, told], capture_output=True, text=True, timeout=1800, check=False
    )
    storage.remove(out)
    lines = done.stderr.strip().splitlines()
    try:
        found: dict[str, float] = json.loads(lines[-1])
    except (IndexError, ValueError):
        found = {"code": done.returncode}
    if found.get("code") != 0:
        raise CloisterError(f"`cloister protect` ended with {found.get('code')}: {' '.join(lines[-3:])}")
    return found


def _copy(source: Path, target: Path, options: Options) -> float:
    """Seconds to read every file and have it safely on the disk once more."""
    with options.progress.task("Copying it, for comparison"):
        target.mkdir(exist_ok=True)
        start = time.perf_counter()
        for file in sorted(source.iterdir()):
            with file.open("rb") as reader, storage.fresh_file(target / file.name) as writer:
                while chunk := reader.read(8 << 20):
                    writer.write(chunk)
        seconds = time.perf_counter() - start
        storage.remove(target)
    return seconds
