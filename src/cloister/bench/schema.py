"""The one schema of every benchmark: a report of rows, each a figure beside the bar it should meet.

A missed bar stays in the report with `ok` false. A row that could not be measured has no value, `ok` false and a note
that says why. Nothing is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cloister.errors import DataError

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One figure.

    `spread` is in the unit of `value`: half the width of a 95 % interval of the median where `timing` made it.
    `baseline` says what the figure is compared with, and that thing's own figure. `figures` holds the raw numbers that
    `value` was made from.
    """

    name: str
    value: float | None
    unit: str
    spread: float | None = None
    baseline: str = ""
    bar: float | None = None
    at_most: bool = True  # whether `bar` is an upper limit
    ok: bool = False
    paper: str = ""
    note: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def measured(
        name: str, value: float, unit: str, *, bar: float | None = None, at_most: bool = True, **rest: Any
    ) -> Row:
        """A row whose `ok` follows from its bar; without a bar it is information and `ok`."""
        met = bar is None or (value <= bar if at_most else value >= bar)
        return Row(name, value, unit, bar=bar, at_most=at_most, ok=met and math.isfinite(value), **rest)

    @staticmethod
    def failed(name: str, unit: str, note: str, **rest: Any) -> Row:
        """A row that could not be measured."""
        return Row(name, None, unit, ok=False, note=note, **rest)

    def bar_text(self) -> str:
        """The bar as people write it."""
        return "" if self.bar is None else f"{'at most' if self.at_most else 'at least'} {self.bar:g}"


@dataclass(frozen=True)
class Report:
    """All rows of one run, and where they were measured."""

    suite: str
    started: str  # ISO 8601, UTC
    seconds: float
    machine: dict[str, Any]
    commit: str
    versions: dict[str, str]
    quick: bool
    rows: tuple[Row, ...]
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}

    def write(self, path: Path | str) -> None:
        """Write the report as JSON."""
        from cloister import storage

        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        storage.write_text(path, json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n")

    @staticmethod
    def from_dict(raw: Any) -> Report:
        """Read a report back; `DataError` names the first thing that does not fit."""
        if not isinstance(raw, Mapping):
            raise _broken("it is not an object")
        if raw.get("schema") != SCHEMA:
            raise _broken(f"schema {raw.get('schema')!r}, this Cloister reads {SCHEMA}")
        rows = raw.get("rows")
        if not isinstance(rows, list):
            raise _broken("`rows` is not a list")
        return Report(**{**_checked(Report, raw, "report"), "rows": tuple(_row(row) for row in rows)})

    @staticmethod
    def read(path: Path | str) -> Report:
        """Read a report file."""
        try:
            raw = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise _broken(f"{path}: {error}") from None
        return Report.from_dict(raw)


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
}


def _row(raw: Any) -> Row:
    if not isinstance(raw, Mapping):
        raise _broken("a row is not an object")
    row = Row(**_checked(Row, raw, f"row {raw.get('name')!r}"))
    if row.value is None and (row.ok or not row.note):
        raise _broken(f"row {row.name!r} has no value: it must not be ok and must say why")
    if row.value is not None and row.bar is not None:
        met = row.value <= row.bar if row.at_most else row.value >= row.bar
        if row.ok and not met:
            raise _broken(f"row {row.name!r} is called ok but misses its bar")
    return row


def _checked(kind: type[Any], raw: Mapping[str, Any], what: str) -> dict[str, Any]:
    known = {f.name: str(f.type) for f in fields(kind)}
    if unknown := set(raw) - set(known):
        raise _broken(f"{what} has unknown fields {', '.join(sorted(unknown))}")
    if missing := set(known) - set(raw):
        raise _broken(f"{what} lacks {', '.join(sorted(missing))}")
    for name, value in raw.items():
        wanted = _KINDS.get(known[name])
        if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
            raise _broken(f"{what}: {name} is {value!r}, expected {known[name]}")
        if isinstance(value, float) and not math.isfinite(value):
            raise _broken(f"{what}: {name} is not finite")
    return dict(raw)


def _broken(why: str) -> DataError:
    return DataError(
        f"This is not a benchmark report: {why}.", advice="Make one with `cloister bench SUITE --json FILE`."
    )
