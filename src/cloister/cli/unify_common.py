"""What the commands of `cloister unify` have in common: options, how a round is opened, how it is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloister.cli import console
from cloister.errors import InvalidParameter, UsageError

if TYPE_CHECKING:
    from cloister.unify.rounds.coordinator import Coordinator
    from cloister.unify.rounds.recipe import Owner, Recipe
    from cloister.unify.rounds.state import Book


MOST_DAYS = 3650


class Kind(StrEnum):
    """What the model is trained for."""

    CLASSIFY = "classify"
    CHOOSE = "choose"
    LANGUAGE = "language"
    IMAGES = "images"


class Choosing(StrEnum):
    """How owners choose public examples."""

    DPP = "dpp"
    RELEVANCE = "relevance"
    RANDOM = "random"


class Vectors(StrEnum):
    """Where the router starts from."""

    PROXIES = "proxies"
    PRIVATE = "private"


class Sight(StrEnum):
    """What the router sees beside a token."""

    AUTO = "auto"
    NONE = "none"


class Method(StrEnum):
    """Which weights of the feed-forward blocks move."""

    LORA = "lora"
    FULL = "full"


Round = Annotated[Path, typer.Argument(metavar="ROUND", help="The coordinator's folder, which `invite` made.")]
SeedSource = Annotated[
    str, typer.Argument(metavar="SEED", help="The checkpoint to start from: a directory, or ORG/NAME.")
]
PublicSource = Annotated[
    Path, typer.Argument(metavar="PUBLIC", help="Public examples: .jsonl, .csv, .txt or .safetensors (images).")
]
KeyFolder = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FOLDER",
        help="Folder of your key, from `cloister unify key`. [default: ROUND/key or MINE/key]",
    ),
]
TaskKind = Annotated[Kind, typer.Option("--task", help="What the model is trained for.")]
Labels = Annotated[
    Path | None, typer.Option(metavar="FILE", help="All owners' labels, one a line (classify and images).")
]
Quorum = Annotated[int | None, typer.Option(min=1, help="How many owners must come. [default: all]")]
Count = Annotated[int, typer.Option(min=1, help="Public examples that each owner chooses.")]
SelectionOption = Annotated[Choosing, typer.Option("--selection", help="How they are chosen.")]
MethodOption = Annotated[Method, typer.Option("--method", help="LoRA factors, or the blocks in full.")]
Rank = Annotated[int, typer.Option(min=1, help="Rank of the LoRA factors.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs of each expert. [default: 3]")]
FixedSteps = Annotated[
    int | None,
    typer.Option(
        "--steps", min=1,
        help="Instead: training steps, the same for every owner, so that how far its weights have moved does not tell "
        "how many examples it has.",
    ),
]  # fmt: skip
MoreSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE",
        help="A setting without an option of its own, such as expert.lr=0.002, selection.tempering=1, router.share=0. "
        "docs/unify-rounds.md lists them. Repeat it.",
    ),
]  # fmt: skip
TopK = Annotated[int, typer.Option(min=1, help="Experts a token goes through.")]
Context = Annotated[
    Sight,
    typer.Option(
        "--context",
        help="What the router sees beside a token. auto: its sequence, or what came before. none: for `export`.",
    ),
]
Fallback = Annotated[bool, typer.Option("--fallback", help="Keep the seed's own block as an expert of its own.")]
RoutingVectors = Annotated[
    Vectors,
    typer.Option(
        "--routing-vectors",
        help="Start the router at the owners' public choices, or at noisy means of their private examples "
        "(each needs --dp-routing-epsilon).",
    ),
]
Pin = Annotated[
    str, typer.Option("--coordinator-key", metavar="FINGERPRINT", help="Accept an invitation with this key only.")
]
Reconsider = Annotated[
    bool,
    typer.Option(
        "--reconsider", help="Begin anew: your examples have changed, or your decisions on privacy or --learning-rate."
    ),
]
Certificate = Annotated[Path, typer.Option(metavar="FILE", help="The coordinator's tls-certificate.pem.")]


def steps() -> Any:
    """The real steps of a coordinator; an owner's are made by `unify_privacy`."""
    from cloister.unify.rounds import real

    return real.RealSteps()


@contextmanager
def opened(folder: Path) -> Iterator[Coordinator]:
    """The coordinator's folder, with nobody else working in it."""
    from cloister.unify.rounds.coordinator import Coordinator
    from cloister.unify.rounds.state import STATE, Book, alone

    if not (folder / STATE).exists():
        Book.load(folder)  # says what is wrong
    with alone(folder):
        yield Coordinator(folder, steps())


def pairs(texts: list[str], shape: str, *, option: str = "--owner") -> dict[str, Path]:
    """NAME=PATH, several times."""
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in found:
            raise InvalidParameter(
                f"{option} {text!r} is not {shape}, or {name} is named twice.",
                advice=f"For example {option} bank=bank.csv {option} clinic=clinic.csv.",
            )
        found[name] = Path(path)
    return found


def invited(name: str, key: Path, deadline: datetime | None = None) -> Owner:
    """An owner of `--owner NAME=KEY`."""
    from pydantic import ValidationError

    from cloister.unify.keys import PublicKey
    from cloister.unify.rounds.recipe import Owner

    text = PublicKey.read(key).text
    try:
        return Owner(name=name, key=text, deadline=deadline)
    except ValidationError as error:
        raise InvalidParameter(
            f"{name!r} cannot be an owner's name: "
            + str(error.errors(include_url=False)[0]["msg"]).removeprefix("Value error, ")
            + ".",
            advice="For example --owner bank=bank.pub.",
        ) from None


def task_of(kind: Kind, labels: Path | None) -> Any:
    """The task of the options `--task` and `--labels`."""
    from pydantic import ValidationError

    from cloister.unify.rounds.recipe import Task

    names: tuple[str, ...] = ()
    if labels is not None:
        try:
            names = tuple(line.strip() for line in labels.read_text().splitlines() if line.strip())
        except (OSError, UnicodeDecodeError):
            raise UsageError(f"{labels} cannot be read.", advice="It holds one label a line.") from None
    try:
        return Task.model_validate({"kind": kind.value, "labels": names})
    except ValidationError as error:
        raise InvalidParameter(
            str(error.errors(include_url=False)[0]["msg"]).removeprefix("Value error, ") + ".",
            advice="--labels FILE names all owners' labels, one a line, for --task classify and images only.",
        ) from None


def terms_of(
    count: int,
    selection: Choosing,
    method: Method,
    rank: int,
    epochs: int | None,
    fixed_steps: int | None,
    top_k: int,
    fallback: bool,
    vectors: Vectors,
    context: Sight,
    more: list[str] | None,
) -> dict[str, Any]:
    """The recipe's parts that options say."""
    if epochs and fixed_steps:
        raise InvalidParameter("--epochs and --steps say the same thing in two ways.", advice="Give one of them.")
    long = {"steps": fixed_steps} if fixed_steps else {"epochs": epochs or 3}
    found: dict[str, Any] = {
        "selection": {"count": count, "pool": max(3000, count), "method": selection.value},
        "expert": {"method": method.value, "rank": rank, **long},
        "router": {"top_k": top_k, "fallback": fallback, "vectors": vectors.value, "context": context.value},
    }
    _add(found, more or [])
    return found


_BY_OPTION = {
    "selection.count",
    "selection.method",
    "expert.method",
    "expert.rank",
    "expert.epochs",
    "expert.steps",
} | {f"router.{name}" for name in ("top_k", "fallback", "vectors", "context")}


def _add(found: dict[str, Any], more: list[str]) -> None:
    """Put the settings of `--set` in."""
    from cloister.unify.rounds import recipe

    known = {
        f"{part}.{name}"
        for part, kind in (("selection", recipe.Selection), ("expert", recipe.Expert), ("router", recipe.Router))
        for name in kind.model_fields
    } - _BY_OPTION
    for one in more:
        name, given, value = one.partition("=")
        if name in _BY_OPTION:
            raise InvalidParameter(f"{name} has an option of its own.", advice="See --help.")
        if not given or name not in known:
            raise InvalidParameter(
                f"{one!r} sets nothing.", advice=f"Write NAME=VALUE. Names: {', '.join(sorted(known))}."
            )
        part, _, field = name.partition(".")
        if field in found[part] and name != "selection.pool":
            raise InvalidParameter(f"{name} is set twice.", advice="Give it once.")
        try:
            found[part][field] = json.loads(value)
        except ValueError:
            found[part][field] = value


def rows(book: Book, recipe: Recipe | None) -> dict[str, Any]:
    """Where everybody stands, as JSON. `recipe` is the coordinator's; an owner's folder has none to show."""
    state, owners = book.state, []
    for name, entry in sorted(state.owners.items()):
        row: dict[str, Any] = {"owner": name, "state": entry.stage, "says": entry.sentence(), "since": entry.since}
        if entry.reasons:
            row["reasons"] = list(entry.reasons)
        if recipe is not None and (invited := recipe.owner(name)) is not None:
            row |= {"deadline": recipe.deadline_of(invited).isoformat(), "key": invited.fingerprint}
        owners.append(row)
    found: dict[str, Any] = {"party": state.party, "round": state.round, "owners": owners}
    if recipe is not None:
        found |= {"quorum": recipe.quorum, "strangers": list(state.strangers)}
    return found


def table(book: Book, recipe: Recipe | None) -> None:
    """Where everybody stands, for people."""
    from rich.table import Table
    from rich.text import Text

    from cloister.unify.rounds.coordinator import standing_of

    found = Table("owner", "state", "since", *(("deadline", "key") if recipe else ()))
    for row in rows(book, recipe)["owners"]:
        reasons = row.get("reasons", [])
        says = "\n".join([row["state"], *(f"- {reason}" for reason in reasons)]) if reasons else row["says"]
        cells = [row["owner"], says, _minute(row["since"])]
        if recipe is not None:
            cells += [_minute(row.get("deadline", "")), row.get("key", "")[:16]]
        found.add_row(*(Text(cell) for cell in cells))
    console.show(found)
    if recipe is not None:
        standing = standing_of(recipe, book)
        print(f"{len(standing.taken)} taken, quorum {standing.quorum}, {len(standing.awaited)} awaited. Times are UTC.")
        for stranger in book.state.strangers:
            console.note(f"sent away: {stranger}")


def _minute(text: str) -> str:
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M") if text else ""
