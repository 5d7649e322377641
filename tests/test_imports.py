"""Imports go one way, `import cloister` is light, and nothing is imported that is not declared."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "cloister"
EVERYONE = {"errors", "manifest", "ledger", "modes", "progress", "storage"}
# part -> the parts it may import, besides EVERYONE and itself
MAY_IMPORT = {
    "families": set(),
    "attest": set(),
    "permute": {"families", "unify"},  # to check what it protected, it must load unified models
    "crypto": {"families"},
    "serving": {"permute", "attest", "families", "api", "unify"},
    "bench": {"serving", "permute", "attest", "families", "embedded", "doctor", "crypto", "unify"},
    "doctor": {"families", "crypto"},
    "embedded": set(),
    "unify": set(),
}
HEAVY = {"torch", "transformers"}
MAY_BE_HEAVY = ("families/", "permute/", "serving/server/", "bench/", "demo.py", "crypto/plain/", "unify/")
MODULES = sorted(SOURCE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Full names of everything that the module imports, wherever in the file."""
    package = ".".join(["cloister", *path.relative_to(SOURCE).parent.parts])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], base]).rstrip(".")
            yield from (f"{base}.{name.name}" for name in node.names)


def part_of(name: str) -> str:
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 else ""


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_imports_go_one_way(part: str) -> None:
    folder = SOURCE / part
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{part}.py"]
    for path in files:
        for name in imports(path):
            if name.split(".")[0] == "cloister" and (other := part_of(name)) in {*MAY_IMPORT, "cli", "demo", "api"}:
                assert other == part or other in MAY_IMPORT[part], f"{path.relative_to(ROOT)} imports {name}"


def test_everyone_may_import_these_because_they_import_nobody() -> None:
    for part in EVERYONE:
        for name in imports(SOURCE / f"{part}.py"):
            if name.startswith("cloister."):
                assert part_of(name) in EVERYONE, f"{part}.py imports {name}"


def test_torch_stays_where_models_run() -> None:
    for path in MODULES:
        where = path.relative_to(SOURCE).as_posix()
        if not where.startswith(MAY_BE_HEAVY):
            for name in imports(path):
                assert name.split(".")[0] not in HEAVY, f"{where} imports {name}"


def test_nothing_undeclared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [item for extra in project["optional-dependencies"].values() for item in extra]
    declared = {
        re.split(r"[\[<>=! ]", item)[0].lower().replace("_", "-") for item in [*project["dependencies"], *extras]
    }
    owners = metadata.packages_distributions()
    for path in MODULES:
        for name in imports(path):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in {"cloister", "__future__"}:
                continue
            found = {owner.lower().replace("_", "-") for owner in owners.get(top, [top])}
            assert found & declared, f"{path.relative_to(ROOT)} imports {top}, which pyproject.toml does not name"


def test_nothing_unpickles_or_runs_foreign_code() -> None:
    for path in MODULES:
        tree = ast.parse(path.read_text())
        names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | set(imports(path))
        assert not {name for name in names if name.split(".")[0] in {"pickle", "dill", "joblib"}}, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"torch.load", "eval", "exec"}, f"{path.relative_to(ROOT)}:{node.lineno}"
                for keyword in node.keywords:
                    if keyword.arg == "trust_remote_code":
                        assert ast.unparse(keyword.value) == "False", f"{path.relative_to(ROOT)}:{node.lineno}"


def loaded_by(statement: str) -> set[str]:
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_cloister_is_light() -> None:
    loaded = loaded_by("import cloister")
    assert not loaded & {*HEAVY, "numpy", "httpx", "starlette", "typer", "rich"}


@pytest.mark.parametrize(
    "statement",
    [
        "import cloister; cloister.connect, cloister.protect",
        "import cloister.cli.app",
        "import cloister.serving.gateway, cloister.serving.permute_session, cloister.serving.text",
        "import cloister.doctor, cloister.demo",
    ],
)
def test_the_client_side_needs_no_torch(statement: str) -> None:
    assert not loaded_by(statement) & HEAVY
