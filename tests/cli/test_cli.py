"""What the command line does with errors, signals, terminals and the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cloister import embedded
from cloister.cli import app, main
from cloister.errors import CloisterError, DiskFull, WrongKey


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def raising(*_: object, **__: object) -> None:
        secret = "the-prompt"
        raise error from ValueError(secret)

    monkeypatch.setattr("cloister.doctor.machine", raising)


@pytest.mark.parametrize("kind", [WrongKey, DiskFull, CloisterError])
def test_errors_are_sentences(
    kind: type[CloisterError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, kind("It broke.", advice="Mend it."))
    assert main(["doctor"]) == kind.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["error: It broke.", "what to do: Mend it.", f"more: docs/errors.md#{kind.code}"]


def test_verbose_shows_places_and_no_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, WrongKey("It broke."))
    assert main(["-v", "doctor"]) == 4
    err = capsys.readouterr().err
    assert "  at " in err and "in raising" in err and "the-prompt" not in err


def test_unforeseen_errors_keep_their_text_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ValueError("could not parse the-prompt"))
    assert main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert "ValueError" in err and "the-prompt" not in err and "#internal_error" in err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert main(["doctor"]) == 2
    assert "pip install" in capsys.readouterr().err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert main(["doctor"]) == app.INTERRUPTED
    assert capsys.readouterr().err == "error: Stopped.\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_protect_leaves_no_output(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-m", "cloister", "protect", str(embedded.path()), str(out), "--base", "secret"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stderr
        first = process.stderr.readline()  # "Protecting ...": it has begun
        assert first.startswith("Protecting")
        process.send_signal(number)
        rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130, rest
    assert not out.exists()


def test_help_is_quick_to_import() -> None:
    code = "import sys; from cloister.cli import main; main(['--help']); print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("'torch'", "'transformers'", "'numpy'", "'starlette'", "'httpx'", "'matplotlib'"):
        assert heavy not in shown


def test_no_colour_in_a_pipe() -> None:
    done = subprocess.run([sys.executable, "-m", "cloister", "doctor"], capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "cloister", "doctor", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(60) == 0 and b"Traceback" not in error, error
