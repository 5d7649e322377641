"""Progress is told in the way that suits where it goes."""

from __future__ import annotations

import io

import pytest

from cloister.progress import SILENT, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_plain_lines() -> None:
    stream = io.StringIO()
    with Progress(stream=stream, interval=0).task("Converting", total=3, unit="files") as task:
        for _ in range(3):
            task.advance()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Converting ..."
    assert lines[-1].startswith("Converting: 3/3 files")
    assert len(lines) == len(set(lines)) and "\x1b" not in stream.getvalue()


def test_a_failure_is_told() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), Progress(stream=stream).task("Converting", total=3):
        raise RuntimeError
    assert "not finished" in stream.getvalue()


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with SILENT.task("Converting", total=1) as task:
        task.advance()
    SILENT.note("done")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(stream=stream)
    with progress.task("Outer", total=2, unit="rows") as outer, progress.task("Inner", total=4) as inner:
        inner.advance(4)
        outer.advance(2)
        progress.note("halfway")
    assert "Outer" in stream.getvalue() and "2/2" in stream.getvalue() and "halfway" in stream.getvalue()
