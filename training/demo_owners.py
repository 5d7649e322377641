"""Cut the small examples of three organisations that ship with the package, for the demo of `unify` and its tests.

    python training/demo_owners.py DATA src/cloister/embedded/owners

DATA holds `banking77` and `clinc150` as CSV files. Bank: twelve intents of Banking77 that are easily mistaken for
each other. Travel and kitchen: one CLINC150 domain each. Public: Wikipedia sentences, and questions of the other
domains and of none, without their labels. The same data gives the same files.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

BANK = (
    "card_arrival", "card_delivery_estimate", "card_not_working", "card_swallowed", "compromised_card",
    "lost_or_stolen_card", "contactless_not_working", "declined_card_payment", "declined_cash_withdrawal",
    "pending_card_payment", "card_payment_fee_charged", "cash_withdrawal_charge",
)  # fmt: skip
TRAIN, TEST = 14, 6  # examples an intent
WIKIPEDIA, QUESTIONS = 450, 350
DOMAINS = {"travel": "travel", "kitchen": "kitchen_and_dining"}
Row = dict[str, str]


def read(path: Path) -> list[Row]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def some(rows: list[Row], count: int, draw: np.random.Generator) -> list[Row]:
    """So many rows of each label, shuffled."""
    by_label: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_label[row["label"]].append(row)
    chosen = [found[i] for _, found in sorted(by_label.items()) for i in draw.permutation(len(found))[:count]]
    return [chosen[i] for i in draw.permutation(len(chosen))]


def write(path: Path, rows: list[Row]) -> None:
    """Write `text,label`."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ("text", "label"), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(data: Path, out: Path) -> None:
    """Write the three owners, their labels and the public examples."""
    draw = np.random.default_rng(7)
    out.mkdir(parents=True, exist_ok=True)
    labels: set[str] = set()
    clinc = {part: read(data / "clinc150" / f"{part}.csv") for part in ("train", "validation", "test")}
    parts = {"train": TRAIN, "test": TEST}
    owners = {
        "bank": {p: [r for r in read(data / "banking77" / f"{p}.csv") if r["label"] in BANK] for p in parts},
        **{name: {p: [r for r in clinc[p] if r["domain"] == d] for p in parts} for name, d in DOMAINS.items()},
    }
    for name, whole in owners.items():
        for part, count in parts.items():
            rows = some(whole[part], count, draw)
            write(out / f"{name}-{part}.csv", rows)
            labels |= {row["label"] for row in rows}
    (out / "labels.txt").write_text("".join(f"{label}\n" for label in sorted(labels)))
    sentences = (data / "clinc150" / "wiki_sentences.txt").read_text().splitlines()
    others = [row["text"] for row in clinc["validation"] if row["domain"] not in DOMAINS.values()]
    public = [("wiki", sentences[i]) for i in draw.permutation(len(sentences))[:WIKIPEDIA]]
    public += [("question", others[i]) for i in draw.permutation(len(others))[:QUESTIONS]]
    with (out / "public.jsonl").open("w") as file:
        for number, (kind, text) in enumerate(public):
            file.write(json.dumps({"id": f"{kind}-{number}", "text": text}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
