"""Every error is documented, its code is unique, and its exit code stands in the help of the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cloister import errors
from cloister.cli.app import EPILOG

PAGE = (Path(__file__).parent.parent / "docs" / "errors.md").read_text()


def tree(kind: type[errors.CloisterError]) -> list[type[errors.CloisterError]]:
    below = [found for child in kind.__subclasses__() if child.__module__ == errors.__name__ for found in tree(child)]
    return [kind, *below]


ALL = tree(errors.CloisterError)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_an_entry(kind: type[errors.CloisterError]) -> None:
    entry = re.search(rf"^## {kind.code}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert entry, f"docs/errors.md has no entry for {kind.code}"
    for part in ("**What happened:**", "**Why:**", "**What to do:**"):
        assert part in entry[1]
    assert kind.__doc__


def test_no_entry_without_an_error() -> None:
    assert set(re.findall(r"^## (.+)$", PAGE, re.MULTILINE)) == {kind.code for kind in ALL}


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in ALL]
    assert len(codes) == len(set(codes))


def test_every_exit_code_is_documented() -> None:
    documented = {int(number) for number in re.findall(r"^  (\d+) ", EPILOG, re.MULTILINE)}
    assert {kind.exit_code for kind in ALL} <= documented
    assert documented >= {0, 130}


def test_the_tree_in_the_docstring_is_complete() -> None:
    drawn = set(re.findall(r"-- (\w+)", errors.__doc__ or "")) | {"CloisterError"}
    assert drawn == {kind.__name__ for kind in ALL}


def test_a_list_of_reasons_is_kept() -> None:
    error = errors.UnsupportedModel("It cannot be:", ["too old", "too new"], advice="Take another.")
    assert error.reasons == ["too old", "too new"]
    assert str(error).endswith("Take another.") and "- too new" in str(error)
