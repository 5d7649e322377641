"""How a round begins: the seed and the public examples are measured, the recipe is made and the invitation signed."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from cloister import storage
from cloister.unify.keys import Key

from . import recipe as recipes
from .coordinator import Coordinator
from .state import now
from .steps import Steps


def begin(
    folder: Path,
    seed: Path,
    public: Path,
    invited: Sequence[recipes.Owner],
    *,
    key: Key,
    steps: Steps,
    task: recipes.Task,
    terms: Mapping[str, Any],
    quorum: int,
    days: float = 14,
    title: str = "",
    seed_name: str = "",
    licence: str = "",
    description: str = "",
    round_id: str = "",
) -> Coordinator:
    """Begin a round in `folder`. `seed_name` says that the seed is on the hub and need not travel."""
    made = folder / ".public"
    storage.remove(made)
    storage.private_directory(folder)
    recipe = recipes.make(
        round=round_id or secrets.token_hex(16),
        title=title,
        coordinator=key.public.text,
        terms={
            "task": task,
            "seed": {"fingerprint": steps.fingerprint(seed), "name": seed_name},
            "public": steps.public(public, made, licence=licence, description=description),
            **terms,
        },
        owners=invited,
        quorum=quorum,
        deadline=now() + timedelta(days=days),
    )
    try:
        return Coordinator.invite(folder, recipe, key, public=made, seed=None if seed_name else seed, steps=steps)
    finally:
        storage.remove(made)
