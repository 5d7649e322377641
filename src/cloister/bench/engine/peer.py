"""The peer system that the engine is measured against: SecretFlow SPU with its Cheetah protocol, on this machine, in
the same run.

It needs a Python of its own (SPU pins old versions of its dependencies) and the script that drives it. Neither is part
of Cloister; where one is missing the rows say how to get it and stay unmeasured.

    CLOISTER_SPU_SCRIPT=FILE    the script (default: ../shared/peers/spu_bench.py beside the checkout)
    CLOISTER_SPU_PYTHON=FILE    a Python 3.11 with `spu`; without it one is made in the user's cache, once
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from cloister.errors import NotAvailable, PeerDied
from cloister.progress import Progress

PACKAGES = ("spu==0.9.5", "jax==0.4.34", "jaxlib==0.4.34", "numpy==1.26.4")
CASE_SECONDS = 900


@dataclass(frozen=True)
class PeerFigure:
    """One operation of the peer, warm: median seconds of the slower party, bytes of both parties, messages of one."""

    seconds: float
    spread: float
    bytes: float
    messages: float
    error: float | None


_MEASURED: dict[str, PeerFigure] = {}  # a case that serves two rows is run once


def measure(case: str, progress: Progress, *, repeats: int = 3) -> PeerFigure:
    """Run one case of the peer's script."""
    if case not in _MEASURED:
        _MEASURED[case] = _run(case, progress, repeats)
    return _MEASURED[case]


def _run(case: str, progress: Progress, repeats: int) -> PeerFigure:
    script, python = _script(), _python(progress)
    with progress.task(f"Peer system: {case}", total=None, unit="runs"):
        done = subprocess.run(
            [python, str(script), "--only", case, "--reps", str(repeats)],
            capture_output=True,
            text=True,
            timeout=CASE_SECONDS,
            check=False,
        )
    for line in done.stdout.splitlines():
        record = json.loads(line)
        if record.get("op") != case:
            continue
        if "error" in record:
            raise PeerDied(f"The peer system failed at {case}: {record['error'][-300:]}")
        warm = record["warm"]
        return PeerFigure(
            seconds=warm["wall_s"],
            spread=(warm["wall_max_s"] - warm["wall_min_s"]) / 2,
            bytes=float(sum(warm["sent_mean_bytes"])),
            messages=float(max(warm["sent_mean_msgs"])),
            error=record.get("check", {}).get("max_abs_err"),
        )
    raise PeerDied(f"The peer system gave no figure for {case}: {done.stderr[-300:]}")


def _script() -> Path:
    given = os.environ.get("CLOISTER_SPU_SCRIPT")
    path = Path(given) if given else Path(__file__).parents[5] / "shared" / "peers" / "spu_bench.py"
    if not path.is_file():
        raise NotAvailable(
            f"The script that drives the peer system is not at {path}.", advice="Set CLOISTER_SPU_SCRIPT to it."
        )
    return path


def _python(progress: Progress) -> str:
    if given := os.environ.get("CLOISTER_SPU_PYTHON"):
        return given
    folder = user_cache_path("cloister") / "spu-0.9.5"
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        if sys.version_info[:2] != (3, 11):
            raise NotAvailable(
                "SPU 0.9.5 has builds for Python 3.11, and this is another one.",
                advice=f"Make an environment with Python 3.11 and {' '.join(PACKAGES)}; set CLOISTER_SPU_PYTHON to it.",
            )
        with progress.task("Installing the peer system (SPU), once", total=None, unit="packages"):
            for command in (
                [sys.executable, "-m", "venv", str(folder)],
                [str(python), "-m", "pip", "install", "--quiet", *PACKAGES],
            ):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    raise NotAvailable(
                        f"SPU could not be installed: {done.stderr[-300:]}",
                        advice=f"Install {' '.join(PACKAGES)} by hand and set CLOISTER_SPU_PYTHON.",
                    )
        ready.touch()
    return str(python)
