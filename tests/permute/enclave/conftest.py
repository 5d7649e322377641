"""The fixture that starts a server with its enclave process and stops both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from enclave_models import Served, serve


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[[str], Served]]:
    """Start a family's server with its enclave; everything is stopped afterwards."""
    started: list[Served] = []

    def start(name: str) -> Served:
        started.append(serve(name, tmp_path / name))
        return started[-1]

    yield start
    for served in started:
        served.wired.close()
        served.enclave.close()
