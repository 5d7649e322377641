"""The contribution: the folder that leaves an owner, and the checks by which the coordinator takes it.

    manifest.json         signed by the owner
    proxies.json          ids of the public examples that it chose, best first
    expert.safetensors    its feed-forward weights, or the LoRA factors that make them
    routing.safetensors   only where the terms ask for private routing vectors
    report.json           what all this reveals, for people

The number of private examples is in none of these, and no number here is a function of it alone: steps, losses and
times stay at home. How far the weights have moved from the seed tells it roughly, unless the recipe fixes the steps.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloister.unify import artefacts, tensors
from cloister.unify.artefacts import Expected, Label, Refused, read_json, shown, write_json
from cloister.unify.keys import Key, PublicKey

from .recipe import Owner, Recipe
from .steps import SAME_FOR_ALL, Received, Shapes

PURPOSE = "contribution"
PROXIES, EXPERT, ROUTING, REPORT = "proxies.json", "expert.safetensors", "routing.safetensors", "report.json"
PROXIES_SCHEMA, REPORT_SCHEMA = "cloister.unify.proxies/1", "cloister.unify.report/1"
MOST_REPORT = 1 << 20
_MOST_ID = 200  # characters; JSON may take twelve bytes for one


def label(recipe: Recipe, name: str) -> Label:
    """What a contribution of this owner to this round is called."""
    return Label(PURPOSE, recipe.round, recipe.terms.digest(), name)


def write(
    out: Path,
    recipe: Recipe,
    name: str,
    key: Key,
    *,
    proxies: Sequence[str],
    expert: Path,
    report: Mapping[str, Any],
    routing: Path | None = None,
) -> None:
    """Write a contribution, complete and signed or not at all."""
    with artefacts.writing(out, label(recipe, name), key, replace=True) as folder:
        write_json(folder / PROXIES, {"schema": PROXIES_SCHEMA, "ids": list(proxies)})
        write_json(folder / REPORT, {**report, "schema": REPORT_SCHEMA, "agreed": _agreed(recipe)})
        shutil.copyfile(expert, folder / EXPERT)
        if routing is not None:
            shutil.copyfile(routing, folder / ROUTING)


def expected(recipe: Recipe, owner: Owner, shapes: Shapes, routing: Shapes) -> Expected:
    """What the recipe implies of a contribution: files, their largest sizes, the key."""
    files = {
        PROXIES: 4096 + recipe.terms.selection.count * (12 * _MOST_ID + 16),
        EXPERT: tensors.most_bytes(shapes),
        REPORT: MOST_REPORT,
    }
    if recipe.terms.router.vectors == "private":
        files[ROUTING] = tensors.most_bytes(routing)
    return Expected(label(recipe, owner.name), PublicKey(owner.key), files)


def check(
    folder: Path,
    recipe: Recipe,
    owner: Owner,
    shapes: Shapes,
    routing: Shapes,
    public_ids: Sequence[str],
    unusable: Callable[[Received], Sequence[str]],
) -> Received:
    """A contribution that may be used; otherwise `Refused` with every reason. `unusable` computes with it, once
    everything that can be seen without computing is as agreed."""
    what = f"The contribution of {owner.name}"
    wanted = expected(recipe, owner, shapes, routing)
    manifest, reasons = artefacts.inspect(folder, wanted)
    if manifest is None:
        raise Refused(what, reasons)
    known = {name: file for name, file in manifest.files.items() if file.size <= wanted.files.get(name, -1)}
    proxies: list[str] = []
    if PROXIES in known:
        proxies, found = _proxies(folder, recipe, frozenset(public_ids), wanted.files[PROXIES])
        reasons += found
    if EXPERT in known:
        reasons += tensors.wrong(folder, EXPERT, shapes)
    if ROUTING in known:
        reasons += tensors.wrong(folder, ROUTING, routing)
    if REPORT in known:
        reasons += _report(folder, recipe)
    place = folder / ROUTING if ROUTING in manifest.files else None
    received = Received(owner.name, tuple(proxies), folder / EXPERT, place, manifest.digest())
    if reasons or (reasons := list(unusable(received))):
        raise Refused(what, reasons, advice="It may be mended and sent again before the deadline.")
    return received


def _proxies(folder: Path, recipe: Recipe, public: frozenset[str], most: int) -> tuple[list[str], list[str]]:
    try:
        raw = read_json(folder / PROXIES, most)
    except ValueError as error:
        return [], [f"{PROXIES}: {error}"]
    if not isinstance(raw, dict) or set(raw) != {"schema", "ids"} or raw["schema"] != PROXIES_SCHEMA:
        return [], [f"{PROXIES} is not of schema {PROXIES_SCHEMA}"]
    ids = raw["ids"]
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        return [], [f"{PROXIES}: ids is not a list of texts"]
    reasons = []
    count = recipe.terms.selection.count
    if not 1 <= len(ids) <= count:
        reasons.append(f"{PROXIES} has {len(ids)} ids, 1 to {count} were agreed")
    unknown = [name for name in ids if name not in public]
    if unknown:
        reasons.append(f"{PROXIES}: {len(unknown)} ids are not in the public set, the first is {shown(unknown[0])!r}")
    if doubled := len(ids) - len(set(ids)):
        reasons.append(f"{PROXIES}: {doubled} ids are named again")
    return ids, reasons


def _report(folder: Path, recipe: Recipe) -> list[str]:
    try:
        raw = read_json(folder / REPORT, MOST_REPORT)
    except ValueError as error:
        return [f"{REPORT}: {error}"]
    if not isinstance(raw, dict) or raw.get("schema") != REPORT_SCHEMA:
        return [f"{REPORT} is not {REPORT_SCHEMA}"]
    return [] if raw.get("agreed") == _agreed(recipe) else [f"{REPORT} names other terms or public examples"]


def _agreed(recipe: Recipe) -> dict[str, str]:
    """By what an owner's people see that other owners have got the same."""
    return {"terms": recipe.terms.digest(), "public": recipe.terms.public, "note": SAME_FOR_ALL}


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a contribution that was checked."""
    found = read_json(folder / REPORT, MOST_REPORT)
    return found if isinstance(found, dict) else {}


def agreed_on(folder: Path) -> dict[str, str]:
    """What the report of a contribution that was checked says of the terms and the public examples: their digests."""
    return {name: str(value) for name, value in read_report(folder)["agreed"].items()}
