"""The small Mixture-of-Experts model that ships with the package, and small data, for demos and tests.

It lets `cloister` show everything it does without a download. What the model is, what it was trained on
and how to train it again: docs/default-model.md.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["owners", "path"]


def path() -> Path:
    """The folder of the embedded model, a plain transformers checkpoint."""
    return Path(__file__).resolve().parent / "olmoe"


def owners() -> Path:
    """A folder with the examples of three organisations and public ones, for the demo of `unify`: see its README."""
    return Path(__file__).resolve().parent / "owners"
