"""How far a long step has come, told on stderr in the way that suits it.

A terminal gets a bar; a log file gets a plain line every few seconds; `-q` gets nothing. Code that does long work takes
a `Progress` and never asks which of the three it is:

    def convert(files: list[Path], progress: Progress = SILENT) -> None:
        with progress.task("Converting", total=len(files), unit="files") as task:
            for file in files:
                ...
                task.advance()
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Task:
    """One long step. Threads may advance it."""

    def __init__(self, description: str, total: float | None, unit: str) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.done = 0.0
        self.started = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, amount: float = 1) -> None:
        """Say that `amount` more units are done."""
        with self._lock:
            self.done += amount
        self._show()

    def describe(self, description: str) -> None:
        """Change the text in front of the figures, for instance to name the file at hand."""
        self.description = description
        self._show()

    def line(self) -> str:
        """The state as one plain line."""
        count = f"{self.done:.0f}" + (f"/{self.total:.0f}" if self.total is not None else "")
        return f"{self.description}: {count} {self.unit}".rstrip() + f", {time.monotonic() - self.started:.0f} s"

    def _show(self) -> None:
        """Silent by default."""


class _LineTask(Task):
    """Plain lines, at most one every `interval` seconds, so that a log stays readable."""

    def __init__(self, description: str, total: float | None, unit: str, stream: TextIO, interval: float) -> None:
        super().__init__(description, total, unit)
        self._stream = stream
        self._interval = interval
        self._last_shown = self.started
        self._last_done = -1.0

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._last_shown >= self._interval:
            self._last_shown = now
            self.print()

    def print(self) -> None:
        """Tell the state now, unless the last line told the same."""
        if self.done == self._last_done:
            return
        self._last_done = self.done
        print(self.line(), file=self._stream, flush=True)


class _BarTask(Task):
    def __init__(self, description: str, total: float | None, unit: str, bars: RichProgress) -> None:
        super().__init__(description, total, unit)
        self._bars = bars
        self.id: TaskID = bars.add_task(description, total=total, unit=unit)

    def _show(self) -> None:
        self._bars.update(self.id, completed=self.done, description=self.description)


class Progress:
    """Where progress is told. Hold one per command and pass it down."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None, interval: float = 5.0) -> None:
        self._quiet = quiet
        self._stream = stream if stream is not None else sys.stderr
        self._interval = interval
        self._bars: RichProgress | None = None
        self._open = 0
        self._lock = threading.Lock()

    @contextmanager
    def task(self, description: str, total: float | None = None, unit: str = "") -> Iterator[Task]:
        """A step of `total` units (None: nobody knows) that lasts as long as the block."""
        if self._quiet:
            yield Task(description, total, unit)
        elif self._on_terminal():
            yield from self._bar(description, total, unit)
        else:
            yield from self._lines(description, total, unit)

    def note(self, text: str) -> None:
        """One line that stays, above any bar."""
        if self._quiet:
            return
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def _on_terminal(self) -> bool:
        return self._stream.isatty() and os.environ.get("TERM") != "dumb"

    def _lines(self, description: str, total: float | None, unit: str) -> Iterator[Task]:
        task = _LineTask(description, total, unit, self._stream, self._interval)
        print(f"{description} ...", file=self._stream, flush=True)
        try:
            yield task
        except BaseException:
            print(f"{task.line()}, not finished", file=self._stream, flush=True)
            raise
        task.print()

    def _bar(self, description: str, total: float | None, unit: str) -> Iterator[Task]:
        bars = self._start_bars()
        try:
            yield _BarTask(description, total, unit, bars)
        finally:
            self._stop_bars()

    def _start_bars(self) -> RichProgress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        with self._lock:
            if self._bars is None:
                self._bars = RichProgress(
                    TextColumn("{task.description}", markup=False),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[unit]}", markup=False),
                    TimeElapsedColumn(),
                    TimeRemainingColumn(),
                    console=Console(file=self._stream),
                )
                self._bars.start()
            self._open += 1
            return self._bars

    def _stop_bars(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0 and self._bars is not None:
                self._bars.stop()
                self._bars = None


SILENT = Progress(quiet=True)
