"""The register of suites, and how one is run: every row apart, so that one that fails leaves the others standing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from cloister import __version__
from cloister.bench.schema import Report, Row
from cloister.errors import CloisterError, UsageError
from cloister.progress import SILENT, Progress

_SUITES = {
    "permute": "cloister.bench.permute",
    "engine": "cloister.bench.engine",
    "unify": "cloister.bench.unify.suite",
}
_VERSIONS = ("torch", "transformers", "numpy", "safetensors", "starlette", "uvicorn", "httpx")


@dataclass(frozen=True)
class Options:
    """What a workload is told."""

    quick: bool
    progress: Progress


@dataclass(frozen=True)
class Workload:
    """One thing that is measured; it may give several rows. `unit` is what its row shows if it fails."""

    name: str
    summary: str
    run: Callable[[Options], list[Row]]
    unit: str = "ratio"
    bar: float | None = None
    paper: str = ""


@dataclass(frozen=True)
class Suite:
    """Workloads that belong together."""

    name: str
    rows: tuple[Workload, ...]
    pictures: tuple[Callable[[Report, Path], list[Path]], ...] = ()  # beside the one of figures and bars


def get(name: str) -> Suite:
    """The suite called `name`."""
    if name not in _SUITES:
        raise UsageError(f"There is no suite {name!r}.", advice=f"Available: {', '.join(_SUITES)}.")
    suite: Suite = import_module(_SUITES[name]).SUITE
    return suite


def run(suite: Suite, *, only: Sequence[str] = (), quick: bool = False, progress: Progress = SILENT) -> Report:
    """Run the suite, or the workloads whose names begin with one of `only`."""
    for wanted in only:
        if not any(workload.name.startswith(wanted) for workload in suite.rows):
            raise UsageError(
                f"Suite {suite.name} has no row {wanted!r}.", advice=f"Rows: {', '.join(w.name for w in suite.rows)}."
            )
    _hush()
    chosen = [w for w in suite.rows if not only or any(w.name.startswith(wanted) for wanted in only)]
    started, clock = datetime.now(UTC), time.perf_counter()
    rows: list[Row] = []
    options = Options(quick=quick, progress=progress)
    with progress.task(f"Suite {suite.name}", total=len(chosen), unit="rows") as task:
        for workload in chosen:
            task.describe(f"Suite {suite.name}: {workload.name}")
            rows += attempt(workload, options)
            task.advance()
    return Report(
        suite=suite.name,
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - clock, 1),
        machine=machine(),
        commit=commit(),
        versions=versions(),
        quick=quick,
        rows=tuple(rows),
    )


def _hush() -> None:
    """The libraries' own bars and warnings would drown the progress of the suite."""
    if find_spec("transformers") is not None:
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()


def attempt(workload: Workload, options: Options) -> list[Row]:
    """The workload's rows; if it fails, one row that says so."""
    try:
        return workload.run(options)
    except Exception as error:
        why = error.message if isinstance(error, CloisterError) else f"{type(error).__name__}: {error}"
        return [
            Row.failed(workload.name, workload.unit, f"not measured: {why}", bar=workload.bar, paper=workload.paper)
        ]


def machine() -> dict[str, object]:
    """Where this is measured, without anything that names the machine or its owner."""
    from cloister import doctor

    found = doctor.machine()
    return {
        "system": found.system,
        "processor": _processor(),
        "cores": found.cores,
        "memory_bytes": found.memory_bytes,
        "gpu": found.gpu,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def versions() -> dict[str, str]:
    """What was measured."""
    import platform

    found = {"cloister": __version__, "python": platform.python_version()}
    for package in _VERSIONS:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str:
    """The commit of the checkout this runs from, "+" if it was changed, "" outside a checkout."""
    here = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name.stdout.strip() + ("+" if changed.stdout.strip() else "")
