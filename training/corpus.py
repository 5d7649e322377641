"""Training and held-out text of the embedded default model.

Every data set is turned into `Example`s: either plain text, or a chat of user and assistant turns.
Only sets whose stated licence allows a derived model to be redistributed are listed in `SETS`; the
list, with licences, is printed by `python training/corpus.py`. Held-out text never enters training:
official test or validation parts where a set has one, otherwise a fixed tenth or the end of the file.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import intents

Split = Literal["train", "heldout"]

# Long texts are cut into pieces of about this many characters, so that a piece fits a training row.
PIECE_CHARS = 1100
PASSAGE_WORDS = 130


@dataclass(frozen=True, slots=True)
class Example:
    """Plain text (`question` is None) or one user question with its answer."""

    question: str | None
    answer: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class DataSet:
    """How one data set is read, how much of the training mix it gets, and what its licence says."""

    name: str
    share: float
    licence: str
    read: Callable[[Path, Split], list[Example]]
    heldout: str


def data_root(argument: str | Path | None = None) -> Path:
    """The data folder: the argument, else CLOISTER_DATA, else `../shared/data` beside the checkout."""
    chosen = argument or os.environ.get("CLOISTER_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(chosen)
    if not root.is_dir():
        raise SystemExit(f"No data folder at {root}: pass --data or set CLOISTER_DATA.")
    return root


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    packed = path.with_name(path.name + ".gz")
    with gzip.open(packed, "rt", encoding="utf-8") if packed.exists() else path.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def _csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def _plain(text: str) -> Example:
    return Example(None, text.strip())


def _pieces(paragraphs: list[str], joint: str) -> list[Example]:
    """Join neighbouring paragraphs to pieces of at most about PIECE_CHARS characters."""
    result: list[Example] = []
    current = ""
    for paragraph in paragraphs:
        if current and len(current) + len(paragraph) > PIECE_CHARS:
            result.append(_plain(current))
            current = ""
        current = current + joint + paragraph if current else paragraph
    if current:
        result.append(_plain(current))
    return result


def _every_tenth(rows: list[Any], split: Split) -> list[Any]:
    """A fixed tenth is held out where a set has no official test part."""
    return [row for index, row in enumerate(rows) if (index % 10 == 9) == (split == "heldout")]


def _banking77(root: Path, split: Split) -> list[Example]:
    rows = _csv_rows(root / "banking77" / ("train.csv" if split == "train" else "test.csv"))
    return [Example(row["text"].strip(), intents.BANKING77[row["label"]], row["label"]) for row in rows]


def _clinc150(root: Path, split: Split) -> list[Example]:
    rows = _csv_rows(root / "clinc150" / ("train.csv" if split == "train" else "test.csv"))
    return [Example(row["text"].strip(), intents.CLINC150[row["label"]], row["label"]) for row in rows]


def _wiki_sentences(root: Path, split: Split) -> list[Example]:
    lines = (root / "clinc150" / "wiki_sentences.txt").read_text(encoding="utf-8").splitlines()
    return [_plain(line) for line in _every_tenth([line for line in lines if line.strip()], split)]


def _undo_wikitext(line: str) -> str:
    """Undo WikiText's word-level spacing, so that the model sees ordinary English punctuation."""
    text = re.sub(r" @([-,.])@ ", r"\1", line.strip())
    text = re.sub(r" ([,.;:!?%)\]]|'s|'t|n't|'re|'ve|'ll|'m)(?= |$)", r"\1", text)
    text = re.sub(r"([(\[$£]) ", r"\1", text)
    return re.sub(r'" ([^"]*?) "', r'"\1"', text)


def _wikitext2(root: Path, split: Split) -> list[Example]:
    lines = (root / "wikitext2" / ("valid.txt" if split == "train" else "test.txt")).read_text(encoding="utf-8")
    paragraphs = []
    for line in lines.splitlines():
        # Headings are dropped, and sentences with an unknown word: "<unk>" is no English.
        if not line.strip() or line.strip().startswith("="):
            continue
        sentences = [part for part in re.split(r"(?<= [.!?]) ", line.strip()) if "<unk>" not in part]
        if sentences:
            paragraphs.append(_undo_wikitext(" ".join(sentences)))
    return _pieces(paragraphs, "\n")


def _shakespeare(root: Path, split: Split) -> list[Example]:
    text = (root / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    border = text.rindex("\n\n", 0, int(len(text) * 0.95))
    part = text[:border] if split == "train" else text[border:]
    return _pieces([block for block in part.split("\n\n") if block.strip()], "\n\n")


def _hellaswag(root: Path, split: Split) -> list[Example]:
    rows = _every_tenth(list(_json_lines(root / "hellaswag" / "validation.jsonl")), split)
    return [_plain(f"{row['question']} {row['choices'][row['answer']]}") for row in rows]


def _choice_question(row: dict[str, Any], index: int) -> Example:
    """Half of the questions list their choices; the others must be answered from memory."""
    question = row["question"].strip()
    if index % 2 == 0:
        question += " Options: " + "; ".join(row["choices"]) + "."
    answer = row["choices"][row["answer"]].strip().rstrip(".")
    return Example(question, answer[:1].upper() + answer[1:] + ".")


def _commonsense_qa(root: Path, split: Split) -> list[Example]:
    name = "train.jsonl" if split == "train" else "validation.jsonl"
    return [_choice_question(row, i) for i, row in enumerate(_json_lines(root / "commonsense_qa" / name))]


def _arc(folder: str) -> Callable[[Path, Split], list[Example]]:
    def read(root: Path, split: Split) -> list[Example]:
        name = "train.jsonl" if split == "train" else "test.jsonl"
        return [_choice_question(row, i) for i, row in enumerate(_json_lines(root / folder / name))]

    return read


def _boolq(root: Path, split: Split) -> list[Example]:
    result = []
    for row in _every_tenth(list(_json_lines(root / "boolq" / "validation.jsonl")), split):
        passage = " ".join(row["context"].split()[:PASSAGE_WORDS])
        result.append(Example(f"{passage}\n{row['question']}", "Yes." if row["answer"] else "No."))
    if split == "train":
        for row in _json_lines(root / "boolq" / "train_question_only.jsonl"):
            result.append(Example(row["question"], "Yes." if row["answer"] else "No."))
    return result


def _gsm8k(root: Path, split: Split) -> list[Example]:
    result = []
    for row in _json_lines(root / "gsm8k" / ("train.jsonl" if split == "train" else "test.jsonl")):
        solution = re.sub(r"<<.*?>>", "", row["solution"]).strip()
        # Long solutions are far beyond this model and would crowd out everything else.
        if solution.count("\n") < 4 and len(row["question"]) + len(solution) < 600:
            result.append(Example(row["question"].strip(), f"{solution}\nThe answer is {row['answer']}."))
    return result


def _piqa(root: Path, split: Split) -> list[Example]:
    rows = _every_tenth(list(_json_lines(root / "piqa" / "validation.jsonl")), split)
    return [Example(row["question"].strip(), row["choices"][row["answer"]].strip()) for row in rows]


def _winogrande(root: Path, split: Split) -> list[Example]:
    result = []
    name = "train_l.jsonl" if split == "train" else "validation.jsonl"
    for row in _json_lines(root / "winogrande" / name):
        before, after = row["question"].split("_", 1)
        word = row["choices"][row["answer"]]
        # "Complete the sentence" in chat form: the answer is the blank and what follows it.
        result.append(Example(f"Complete the sentence: {before.strip()}", f"{word}{after}".strip()))
    return result


def _presidio(root: Path, split: Split) -> list[Example]:
    result = []
    for name in ("synth_v2.jsonl", "generated_large.jsonl"):
        for row in _json_lines(root / "pii_presidio" / name):
            # Rows of one template are nearly the same text, so a template stays on one side.
            if (row["template_id"] % 10 == 9) == (split == "heldout"):
                result.append(_plain(row["text"]))
    return result


OFFICIAL = "official test part"
TENTH = "every tenth row"
SETS: tuple[DataSet, ...] = (
    DataSet("banking77", 0.21, "CC BY 4.0", _banking77, OFFICIAL),
    DataSet("clinc150", 0.21, "CC BY 3.0", _clinc150, OFFICIAL),
    DataSet("wiki_sentences", 0.06, "CC BY 3.0", _wiki_sentences, TENTH),
    DataSet("wikitext2", 0.05, "CC BY-SA", _wikitext2, "test.txt (valid.txt is trained on)"),
    DataSet("tinyshakespeare", 0.04, "public domain", _shakespeare, "last 5 % of the text"),
    DataSet("hellaswag", 0.13, "MIT", _hellaswag, TENTH),
    DataSet("commonsense_qa", 0.07, "MIT", _commonsense_qa, "validation part"),
    DataSet("arc_easy", 0.025, "CC BY-SA 4.0", _arc("arc_easy"), OFFICIAL),
    DataSet("arc_challenge", 0.015, "CC BY-SA 4.0", _arc("arc_challenge"), OFFICIAL),
    DataSet("boolq", 0.05, "CC BY-SA 3.0", _boolq, "every tenth row of the part with passages"),
    DataSet("gsm8k", 0.04, "MIT", _gsm8k, OFFICIAL),
    DataSet("piqa", 0.02, "AFL 3.0", _piqa, TENTH),
    DataSet("winogrande", 0.05, "CC BY", _winogrande, "validation part"),
    DataSet("pii_presidio", 0.01, "MIT; identities CC BY-SA 3.0 US", _presidio, "every tenth template"),
)
INTENT_SETS = ("banking77", "clinc150")


def load(name: str, split: Split, root: Path) -> list[Example]:
    """All examples of one set; unknown names raise KeyError.

    Held-out examples whose question or text also occurs in the training part are left out: they would
    flatter the figures.
    """
    read = {entry.name: entry for entry in SETS}[name].read
    examples = read(root, split)
    if split == "train":
        return examples
    trained = {(example.question or example.answer).lower() for example in read(root, "train")}
    return [example for example in examples if (example.question or example.answer).lower() not in trained]


def main() -> None:
    root = data_root()
    print(f"{'set':16} {'share':>6} {'train':>7} {'held out':>8}  licence")
    for entry in SETS:
        train, heldout = load(entry.name, "train", root), load(entry.name, "heldout", root)
        print(f"{entry.name:16} {entry.share:6.3f} {len(train):7} {len(heldout):8}  {entry.licence}")


if __name__ == "__main__":
    main()
