"""The documentation keeps its word: links lead somewhere, generated pages are fresh, cited paths exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts" / "docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_lead_somewhere(docs: ModuleType) -> None:
    assert docs.broken_links() == []


def test_generated_pages_are_fresh(docs: ModuleType) -> None:
    stale = [path.name for path, text in docs.pages().items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run `make docs`"


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    missing = [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and page.name not in index
    ]
    assert missing == []


def test_cited_paths_exist() -> None:
    pattern = re.compile(r"`((?:src|docs|tests|scripts|training)/[\w./-]+)`")
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for path in pattern.findall(page.read_text()):
            assert (ROOT / path).exists(), f"{page.name} cites {path}"


def test_every_dependency_is_explained() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    page = (ROOT / "docs" / "dependencies.md").read_text().lower()
    for requirement in wanted:
        name = re.split(r"[\[<>=! ]", requirement)[0].lower()
        assert name == "cloister" or re.search(rf"\b{re.escape(name)}\b", page), (
            f"{name} is not in docs/dependencies.md"
        )


def test_targets_of_the_makefile_are_described() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony
    for target in phony[1].split():
        assert re.search(rf"^{target}:.*## \w", makefile, re.MULTILINE), target


def test_commands_of_unify_run_as_they_are_written() -> None:
    """Every command line in the pages has the arguments that it needs, and no option that is not there."""
    import shlex

    import click
    from typer.main import get_command

    from cloister.cli.unify import app

    group = get_command(app)
    assert isinstance(group, click.Group)
    seen, wrong = set(), []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for line in re.findall(r"^ {4,}.*?\bcloister unify (\w.*)$", text, re.MULTILINE):
            name, *words = shlex.split(re.split(r"  ->|\.\.\.|  +then |  +reads ", line)[0], comments=True)
            seen.add(name)
            try:
                group.commands[name].make_context(name, words, resilient_parsing="..." in line)
            except (KeyError, click.ClickException) as error:
                wrong.append(f"{page.name}: cloister unify {line}: {error}")
    assert wrong == []
    assert seen >= {"key", "invite", "contribute", "build", "coordinator", "join", "simulate", "evaluate", "status"}
