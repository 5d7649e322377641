"""What a unified model was made of, in `cloister-unify.json` beside it. Public; the same for the same contributions.

Every owner can compare its contribution's digest with the one that is named here. So none is named whose expert is not
inside: a model that is enlarged must have been made of the same contributions, under the same terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloister.errors import UsageError
from cloister.unify.artefacts import read_json, shown

from .recipe import Terms
from .steps import Received

PROVENANCE = "cloister-unify.json"
SCHEMA = "cloister.unify.provenance/1"
_MOST = 16 << 20

Provenance = Mapping[str, Any]


def provenance_of(terms: Terms, received: Sequence[Received], onto: Provenance | None = None) -> Provenance:
    """Of a model that is made of these; `onto` is that of the model that it enlarges."""
    return {
        "schema": SCHEMA,
        "terms": terms.digest(),
        "task": terms.task.model_dump(mode="json"),
        "seed": terms.seed.fingerprint,
        "public": terms.public,
        "share": terms.settled().router.share,  # of every owner's changes in the others' experts
        "owners": {found.name: found.digest for found in received},
        "removed": {} if onto is None else onto["removed"],
    }


def read_provenance(model: Path) -> Provenance:
    """What `build` wrote beside a model."""
    try:
        found = read_json(model / PROVENANCE, _MOST)
    except (ValueError, OSError):
        found = None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise UsageError(f"{model} is not a unified model: it has no {PROVENANCE}.", advice="Name what `build` wrote.")
    found = {"removed": {}, **found}
    if not all(_is_texts(found.get(name)) for name in ("owners", "removed")):
        raise UsageError(f"{model / PROVENANCE} is damaged.", advice="Build the model again.")
    return found


def is_made_of(model: Path, terms: Terms, owners: Mapping[str, str]) -> bool:
    """Whether `model` was built of exactly these contributions, digests by owner's name, under these terms."""
    try:
        found = read_provenance(model)
    except UsageError:
        return False
    return (found.get("terms"), found["owners"]) == (terms.digest(), owners)


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def without(made: Provenance, owner: str) -> Provenance:
    """Of the model without this owner's expert. Its contribution stays named under `removed`, since the others' experts
    and the router were trained beside it."""
    owners = dict(made["owners"])
    return {**made, "removed": {**made["removed"], owners.pop(owner): owner}, "owners": owners}


def must_enlarge(model: Path, made: Provenance, wanted: Provenance) -> None:
    """A model of which `made` was written can become one of `wanted` by adding experts alone; else `UsageError`."""
    for what in ("seed", "public", "terms"):
        if made.get(what) != wanted[what]:
            raise UsageError(
                f"{model} was not made in a round like this: the digest of its {what} is {shown(made.get(what))}, here "
                f"it is {wanted[what]}.",
                advice="Build without --onto.",
            )
    old, new = made["owners"], wanted["owners"]
    if gone := sorted(set(old) - set(new)):
        raise UsageError(
            f"{model} has an expert of {shown(', '.join(gone))}, of whom no contribution is here.",
            advice="Take them out first: cloister unify remove MODEL OWNER --out OUT",
        )
    if changed := sorted(name for name in old if old[name] != new[name]):
        raise UsageError(
            f"{model} has an expert of {', '.join(changed)} that was made of another contribution than the one here.",
            advice=f"Build without --onto: nothing of the old one stays then. Or take it out first: cloister unify "
            f"remove MODEL {changed[0]} --out SMALLER, then build with --onto SMALLER.",
        )
