"""The recipe: everything that the parties of a round must agree on before anybody computes.

`Terms` is what the result depends on (task, seed, public examples, selection, experts, router); a contribution is
bound to its digest. `Recipe` adds who is invited, until when, and how many must come. Inviting one more owner changes
the recipe but not the terms, so what others have made stays good.

`Recipe.model_json_schema()` is the JSON schema of `recipe.json`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from cloister.errors import BrokenManifest, FormatVersion, InvalidParameter
from cloister.unify.artefacts import NAME, read_json, shown, write_json
from cloister.unify.keys import PublicKey
from cloister.unify.selection.looks import BY_KIND, Look

SCHEMA: Literal["cloister.unify.recipe/2"] = "cloister.unify.recipe/2"
RECIPE = "recipe.json"
MOST_RECIPE = 4 << 20
MOST_OWNERS = 1000
SEED_FOR = {"classify": "encoder", "choose": "encoder", "language": "decoder", "images": "vision"}

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Label = Annotated[str, Field(min_length=1, max_length=1000)]


def _name(text: str) -> str:
    if NAME.fullmatch(text) is None or ".." in text:
        raise ValueError("a name has 1 to 48 small letters, digits, dots, dashes and underscores")
    return text


def _key(text: str) -> str:
    try:
        return PublicKey.parse(text).text
    except InvalidParameter as error:
        raise ValueError(error.message) from None


PartyName = Annotated[str, AfterValidator(_name)]
KeyText = Annotated[str, Field(max_length=1000), AfterValidator(_key)]


class Part(BaseModel):
    """A part of the recipe: unknown fields are refused and nothing is changed after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Task(Part):
    """What the model is trained for."""

    kind: Literal["classify", "choose", "language", "images"]
    labels: tuple[Label, ...] = Field(default=(), max_length=100_000)  # of all owners together; names of classes
    block: int = Field(default=128, ge=8, le=1 << 20)  # tokens of one example, `language` only

    @model_validator(mode="after")
    def _labels_where_needed(self) -> Task:
        if (self.kind in ("classify", "images")) != bool(self.labels):
            raise ValueError("classify and images need the labels of all owners together; other tasks have none")
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("a label is named twice")
        return self


class Seed(Part):
    """The checkpoint that everybody starts from. Without a name it travels in the invitation."""

    fingerprint: Sha256  # over its tensors
    name: str = Field(default="", max_length=200)  # ORGANISATION/NAME on the hub


class Selection(Part):
    """How an owner chooses its proxies. Noise on top of it is the owner's own decision."""

    method: Literal["dpp", "relevance", "random"] = "dpp"
    pool: int = Field(default=3000, ge=1, le=10_000_000)
    count: int = Field(default=500, ge=1, le=1_000_000)
    tempering: float = Field(default=0.25, ge=0, le=10)
    gamma: float = Field(default=2.0, gt=0, le=1000)
    kernel: Literal["gaussian", "cosine"] = "gaussian"
    look: Look | None = None  # what is compared; None: by the kind of seed, see `views`
    folds: int = Field(default=5, ge=2, le=100)
    negatives: int = Field(default=10_000, ge=1, le=10_000_000)
    seed_for_folds: int = Field(default=0, ge=0, lt=1 << 31)

    @model_validator(mode="after")
    def _pool_holds_them(self) -> Selection:
        if self.method == "dpp" and self.pool < self.count:
            raise ValueError(f"{self.count} proxies cannot be chosen from a pool of {self.pool}")
        return self


class Expert(Part):
    """How an owner trains its expert. With `epochs` the number of steps follows from the owner's data, and how far its
    weights have moved tells roughly how many examples it has; `steps` is the same for every owner."""

    method: Literal["lora", "full"] = "lora"
    rank: int = Field(default=16, ge=1, le=4096)
    alpha: float = Field(default=32, gt=0, le=1e6)
    epochs: int = Field(default=3, ge=1, le=1000)
    steps: int | None = Field(default=None, ge=1, le=1 << 24)  # instead of `epochs`
    lr: float = Field(default=1e-3, gt=0, le=10)
    batch: int = Field(default=32, ge=1, le=1 << 20)
    proxy_batch: int = Field(default=16, ge=0, le=1 << 20)  # proxies a step, beside `batch` private examples
    proxy_weight: float | None = Field(default=None, ge=0, le=1000)  # None: by the kind of seed, see `Terms.settled`
    seed_for_order: int = Field(default=0, ge=0, lt=1 << 31)


class Router(Part):
    """The unified model's router, and the training of router and experts on the union of the proxies."""

    top_k: int = Field(default=1, ge=1, le=1000)
    context: Literal["auto", "sequence", "prefix", "none"] = "auto"  # auto: sequence for encoders, prefix for decoders
    fallback: bool = False
    vectors: Literal["proxies", "private"] = "proxies"  # private: clipped and noised by the owner
    # None: what is best for the kind of seed; see `Terms.settled`.
    start: Literal["fit", "inside", "mean"] | None = None  # of vectors from proxies
    blend: float | None = Field(default=None, gt=0, lt=1)  # the context's share in the scores at the start
    share: float | None = Field(default=None, ge=0, le=1)  # of what the others learned in each expert
    public_weight: float | None = Field(default=None, ge=0, le=1000)  # of what public examples teach, beside experts
    epochs: float | None = Field(default=None, ge=0, le=1000)  # 0: no joint training
    lr: float = Field(default=5e-5, gt=0, le=10)
    router_lr: float = Field(default=2e-5, gt=0, le=10)
    batch: int = Field(default=24, ge=1, le=1 << 20)
    seed_for_order: int = Field(default=0, ge=0, lt=1 << 31)


# Measured on held-out training data. Texts are told by their subjects: sharing helps, and vectors fitted on the seed
# route as well as those fitted layer by layer, at a seventh of the time. For images and decoders it is the other way,
# and their experts are held back by much weight on public examples, which keep the vectors that the seed gives them.
_ROUTERS: dict[str, dict[str, Any]] = {
    "encoder": {"start": "fit", "blend": 0.9, "share": 0.4, "public_weight": 0.1, "epochs": 0.2},
    "decoder": {"start": "inside", "blend": 0.9, "share": 0.0, "public_weight": 0.1, "epochs": 1.0},
    "vision": {"start": "inside", "blend": 0.97, "share": 0.0, "public_weight": 0.0, "epochs": 1.0},
}
_EXPERTS = {
    "encoder": {"proxy_weight": 0.15}, "decoder": {"proxy_weight": 0.05}, "vision": {"proxy_weight": 0.02},
}  # fmt: skip


class Terms(Part):
    """What the result depends on, besides the owners themselves."""

    task: Task
    seed: Seed
    public: Sha256  # of the public examples' file
    selection: Selection = Selection()
    expert: Expert = Expert()
    router: Router = Router()

    def settled(self) -> Terms:
        """The same with everything decided that was left to the kind of seed."""

        def filled(part: Part, usual: dict[str, Any]) -> Part:
            return part.model_copy(update={n: v for n, v in usual.items() if getattr(part, n) is None})

        kind = SEED_FOR[self.task.kind]
        return self.model_copy(
            update={
                "selection": filled(self.selection, {"look": BY_KIND[kind]}),
                "expert": filled(self.expert, _EXPERTS[kind]),
                "router": filled(self.router, _ROUTERS[kind]),
            }
        )

    def digest(self) -> str:
        """By this the terms are known; it stands in every manifest."""
        plain = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(plain.encode()).hexdigest()


class Owner(Part):
    """One invited organisation."""

    name: PartyName
    key: KeyText  # its public key
    deadline: AwareDatetime | None = None  # [default: the round's]
    task: Task | None = None  # what its expert is trained for [default: the terms']

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its key."""
        return PublicKey(self.key).fingerprint


class Recipe(Part):
    """The whole agreement."""

    schema_: Literal["cloister.unify.recipe/2"] = Field(default=SCHEMA, alias="schema")
    round: str = Field(pattern=r"^[0-9a-f]{32}$")
    title: str = Field(default="", max_length=200)
    coordinator: KeyText
    terms: Terms
    owners: tuple[Owner, ...] = Field(min_length=1, max_length=MOST_OWNERS)
    quorum: int = Field(ge=1)
    deadline: AwareDatetime

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        names = [owner.name for owner in self.owners]
        if len(set(names)) != len(names):
            raise ValueError("an owner is invited twice")
        keys = [owner.key for owner in self.owners] + [self.coordinator]
        if len(set(keys)) != len(keys):
            raise ValueError("two parties have the same key")
        if "coordinator" in names:
            raise ValueError("an owner cannot be called coordinator")
        for owner in self.owners:
            if owner.task is not None and SEED_FOR[owner.task.kind] != SEED_FOR[self.terms.task.kind]:
                raise ValueError(
                    f"{owner.name} has the task {owner.task.kind}, which needs another kind of seed than"
                    f" {self.terms.task.kind}"
                )
        if self.quorum > len(names):
            raise ValueError(f"the quorum is {self.quorum} of {len(names)} owners")
        if self.terms.router.top_k > self.quorum + self.terms.router.fallback:
            raise ValueError(f"top_k {self.terms.router.top_k} needs as many experts; the quorum is {self.quorum}")
        return self

    def owner(self, name: str) -> Owner | None:
        """The invited owner of that name."""
        return next((owner for owner in self.owners if owner.name == name), None)

    def terms_of(self, owner: Owner) -> Terms:
        """The terms, with the owner's own task where it has one."""
        return self.terms if owner.task is None else self.terms.model_copy(update={"task": owner.task})

    def terms_of_all(self, names: Collection[str]) -> Terms:
        """The terms with the labels of these owners too, those of owners with tasks of their own behind the others.
        Labels of an owner that is not among them, because it never came for instance, are not in it."""
        tasks = [
            self.terms.task,
            *(owner.task for owner in self.owners if owner.task is not None and owner.name in names),
        ]
        labels = tuple(dict.fromkeys(label for task in tasks for label in task.labels))
        if labels == self.terms.task.labels:
            return self.terms
        kind = next(task.kind for task in tasks if task.labels)
        return self.terms.model_copy(update={"task": Task(kind=kind, labels=labels)})

    def deadline_of(self, owner: Owner) -> datetime:
        """Until when its contribution must be here."""
        return (owner.deadline or self.deadline).astimezone(UTC)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return self.model_dump(mode="json", by_alias=True)


def make(**fields: Any) -> Recipe:
    """A recipe, or `InvalidParameter` that lists everything that does not fit."""
    try:
        found = Recipe(**fields)
        # Written out, so that the digest covers it and another version with other tables computes the same.
        return found.model_copy(update={"terms": found.terms.settled()})
    except ValidationError as error:
        raise InvalidParameter(
            "The recipe does not fit together:\n  - " + "\n  - ".join(_reasons(error)),
            advice="Change these options of `cloister unify invite`.",
        ) from None


def write(path: Path, recipe: Recipe) -> None:
    """Write `recipe.json`."""
    write_json(path, recipe.plain())


def read(path: Path) -> Recipe:
    """Read `recipe.json` of another party."""
    try:
        raw = read_json(path, MOST_RECIPE)
    except ValueError as error:
        raise BrokenManifest(f"{path} cannot be read: {error}.", advice="Ask for the invitation again.") from None
    found = raw.get("schema") if isinstance(raw, dict) else None
    if found != SCHEMA:
        raise FormatVersion(
            f"{path} has schema {shown(found)}, this Cloister reads {SCHEMA}.",
            advice="All parties of a round need the same version of Cloister.",
        )
    try:
        return Recipe.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        reasons = "\n  - ".join(_reasons(error))
        raise BrokenManifest(
            f"{path} is not a recipe:\n  - {reasons}", advice="Ask for the invitation again."
        ) from None


def _reasons(error: ValidationError) -> list[str]:
    """Where and why, without the values, which come from somebody else."""
    return [
        f"{shown('.'.join(str(part) for part in found['loc'])) or 'the whole'}: {shown(found['msg'], 200)}"
        for found in error.errors(include_url=False, include_input=False, include_context=False)
    ]
