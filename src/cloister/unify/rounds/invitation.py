"""The invitation: a folder that every invited owner gets, the same for all.

manifest.json     signed by the coordinator
recipe.json       what is agreed on
public/           the public examples
seed/             the checkpoint that all start from, unless the recipe names one on the hub
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from cloister import hub, storage
from cloister.errors import UsageError, WrongKey
from cloister.unify import artefacts
from cloister.unify.artefacts import Expected, Label, Manifest, Refused
from cloister.unify.keys import Key, PublicKey

from . import recipe as recipes
from .recipe import MOST_RECIPE, RECIPE, Recipe

PURPOSE = "invitation"
COORDINATOR = "coordinator"
MOST_SEED = 1 << 41
MOST_PUBLIC = 1 << 36
_SEED_FILES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".md", "LICENSE", "NOTICE")


@dataclass(frozen=True)
class Invitation:
    """An invitation that was checked."""

    folder: Path
    recipe: Recipe
    manifest: Manifest

    @property
    def public(self) -> Path:
        """The public examples."""
        return self.folder / "public"

    def seed(self) -> Path:
        """The checkpoint to start from; one that is only named is fetched from the hub."""
        name = self.recipe.terms.seed.name
        return hub.resolve(name) if name else self.folder / "seed"


def label(recipe: Recipe) -> Label:
    """What an invitation of this round is called."""
    return Label(PURPOSE, recipe.round, recipe.terms.digest(), COORDINATOR)


def write(out: Path, recipe: Recipe, key: Key, *, public: Path, seed: Path | None, replace: bool = False) -> None:
    """Write an invitation. `seed` is left out where the recipe names it."""
    with artefacts.writing(out, label(recipe), key, replace=replace, private=False) as folder:
        recipes.write(folder / RECIPE, recipe)
        _link_files(public, folder / "public", ("",))
        if seed is not None:
            _link_files(seed, folder / "seed", _SEED_FILES)


def _link_files(source: Path, target: Path, endings: tuple[str, ...]) -> None:
    """The same files in another folder: on one disk without a copy of their contents."""
    target.mkdir()
    taken = [path for path in sorted(source.iterdir()) if path.is_file() and path.name.endswith(endings)]
    for path in taken:
        if artefacts.wrong_path(path.name):
            continue
        whole = path.resolve()  # the hub's cache consists of links
        with storage.disk_errors(target):
            try:
                os.link(whole, target / path.name)
            except OSError:
                shutil.copyfile(whole, target / path.name)


def rewrite_recipe(folder: Path, recipe: Recipe, key: Key) -> None:
    """The same invitation with another recipe (one more owner, another deadline), signed anew."""
    seed = folder / "seed"
    write(folder, recipe, key, public=folder / "public", seed=seed if seed.is_dir() else None, replace=True)


def read(folder: Path, *, coordinator: str = "", whole: bool = True) -> Invitation:
    """Check an invitation and say what is in it.

    `coordinator` is the fingerprint that its sender's key must have. `whole=False` looks at the signature only, for a
    folder that was checked before.
    """
    storage.restore(folder)
    manifest, reasons = artefacts.load_manifest(folder)
    if manifest is None:
        raise Refused("The invitation", reasons, advice="Ask the coordinator for it again.")
    recipe = recipes.read(folder / RECIPE)
    key = PublicKey(recipe.coordinator)
    if coordinator and key.fingerprint != coordinator.replace(":", "").lower():
        raise WrongKey(
            f"The invitation is signed by another coordinator: its key has the fingerprint {key.fingerprint}.",
            advice="Ask the coordinator, over a channel that you trust, for the fingerprint of the key.",
        )
    limits = {RECIPE: MOST_RECIPE, "public/": MOST_PUBLIC, "seed/": MOST_SEED}
    expected = Expected(label(recipe), key, limits)
    if whole:
        manifest = artefacts.read(folder, expected, "The invitation")
    elif not key.signed(manifest.message(), manifest.signature):
        raise Refused("The invitation", ["it is not signed by its coordinator"])
    if not recipe.terms.seed.name and not (folder / "seed").is_dir():
        raise UsageError("The invitation has no seed and names none.", advice="Ask the coordinator for it again.")
    return Invitation(folder, recipe, manifest)
