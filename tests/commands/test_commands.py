"""Whole runs of `cloister`, written as text: arguments, exit code, and what stdout and stderr must and must not hold.

Each `*.toml` beside this file is a list of cases. `{tmp}` is an empty directory, `{model}` the embedded model.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cloister import embedded

HERE = Path(__file__).parent
CASES = [
    pytest.param(case, id=f"{file.stem}-{case['name']}")
    for file in sorted(HERE.glob("*.toml"))
    for case in tomllib.loads(file.read_text())["case"]
]


def run(case: dict[str, Any], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    names = {"{tmp}": str(tmp_path), "{model}": str(embedded.path())}

    def fill(text: str) -> str:
        for name, value in names.items():
            text = text.replace(name, value)
        return text

    for name, text in case.get("files", {}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CLOISTER_")}
    environment |= {"COLUMNS": "100", **{key: fill(value) for key, value in case.get("env", {}).items()}}
    return subprocess.run(
        [sys.executable, "-m", "cloister", *map(fill, case["args"])],
        input=case.get("stdin", ""),
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("case", CASES)
def test_command(case: dict[str, Any], tmp_path: Path) -> None:
    done = run(case, tmp_path)
    shown = f"stdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode == case["exit"], shown
    for stream, text in (("stdout", done.stdout), ("stderr", done.stderr)):
        for pattern in case.get(stream, []):
            assert re.search(pattern, text, re.MULTILINE), f"{stream} lacks {pattern!r}\n{shown}"
        for pattern in case.get(f"not_{stream}", []):
            assert not re.search(pattern, text, re.MULTILINE), f"{stream} has {pattern!r}\n{shown}"
    if case.get("json"):
        json.loads(done.stdout)
    assert "Traceback" not in done.stderr and "\x1b" not in done.stdout + done.stderr, shown
    if done.returncode not in (0, 2) or case.get("error"):
        assert re.search(r"^error: .", done.stderr, re.MULTILINE), shown
    for name in case.get("exists", []):
        assert (tmp_path / name).exists(), name
    for name in case.get("absent", []):
        assert not (tmp_path / name).exists(), name
