"""Put the measured figures into docs/default-model.md and into the model card.

Both documents have regions between `<!-- figures: NAME -->` and `<!-- end -->`; only these are replaced, so
the prose is written by hand and the numbers never are. Run with `python training/report.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import corpus

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "training" / "results"
DOCUMENTS = (
    REPOSITORY / "docs" / "default-model.md",
    REPOSITORY / "src" / "cloister" / "embedded" / "olmoe" / "README.md",
)
SOURCES = {
    "banking77": ("bank customers' questions, 77 intents", "PolyAI-LDN/task-specific-datasets"),
    "clinc150": ("assistant questions, 150 intents and out of scope", "clinc/oos-eval"),
    "wiki_sentences": ("Wikipedia sentences in lower case", "clinc/oos-eval"),
    "wikitext2": ("Wikipedia articles", "pytorch/examples"),
    "tinyshakespeare": ("plays", "karpathy/char-rnn"),
    "hellaswag": ("short descriptions with their right ending", "klosax/hellaswag_text_data"),
    "commonsense_qa": ("multiple choice", "vivekg-cmu/Commonsense-QA"),
    "arc_easy": ("multiple choice, science", "AGI-Edgerunners/LLM-Adapters"),
    "arc_challenge": ("multiple choice, science", "AGI-Edgerunners/LLM-Adapters"),
    "boolq": ("yes/no questions", "THUDM/P-tuning, AGI-Edgerunners/LLM-Adapters"),
    "gsm8k": ("short arithmetic problems", "openai/grade-school-math"),
    "piqa": ("goals with their right solution", "ybisk/ybisk.github.io"),
    "winogrande": ("sentences to complete", "zhang-edward/WinoGrande"),
    "pii_presidio": ("made-up texts with personal data", "microsoft/presidio-research"),
}


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _data() -> str:
    rows = []
    total = sum(entry.share for entry in corpus.SETS)
    for entry in corpus.SETS:
        what, source = SOURCES[entry.name]
        rows.append(
            (f"`{entry.name}`", what, source, entry.licence, f"{100 * entry.share / total:.1f} %", entry.heldout)
        )
    return _table(("set", "what it is", "source", "stated licence", "share of tokens", "held out"), rows)


def _training(log: Path) -> str:
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    trained = [row for row in rows if "tokens" in row][-1]
    losses = [row["heldout"] for row in rows if "heldout" in row]
    return (
        f"{rows[-1]['seconds'] / 60:.0f} minutes on one core of a shared server processor, {rows[-1]['step']:,} steps, "
        f"about {trained['tokens'] / 1e6:.1f} million tokens "
        f"({trained['tokens'] / trained['seconds']:,.0f} tokens per second). "
        f"Held-out loss (the weighted training loss, on held-out text) {losses[0]:.2f} after three minutes, "
        f"{losses[-1]:.2f} at the end."
    )


def _perplexity(figures: dict[str, Any]) -> str:
    rows = []
    for name, values in figures["perplexity"].items():
        question, bits = values.get("question_perplexity", "–"), values.get("bits_per_byte", "–")
        rows.append((f"`{name}`", values["examples"], f"{values['tokens']:,}", values["perplexity"], question, bits))
    head = ("set", "examples", "tokens scored", "perplexity of text or answer", "of the question", "bits per byte")
    return _table(head, rows)


def _accuracy(figures: dict[str, Any]) -> str:
    rows = []
    for name, values in figures["intents"].items():
        rows.append(
            (f"`{name}`", f"{values['questions']:,}", f"{values['accuracy']:.1%}", "exact sentence of the intent")
        )
        if "out_of_scope_recall" in values:
            count, recall = values["out_of_scope_questions"], values["out_of_scope_recall"]
            rows.append((f"`{name}`, out of scope", f"{count:,}", f"{recall:.1%}", "recognised as out of scope"))
    measure = {"gsm8k": "final answer right", "boolq": "yes or no right"}
    for name, values in figures["exact_match"].items():
        kind = measure.get(name, "right choice, options in the question")
        rows.append((f"`{name}`", f"{values['questions']:,}", f"{values['exact']:.1%}", kind))
    return _table(("held-out set", "questions", "right", "what counts as right"), rows)


def _clean(figures: dict[str, Any]) -> str:
    parts = [
        f"`{name}`: {values['ended_by_itself']:.2%} of the answers end by themselves, "
        f"{values['a_known_sentence']:.2%} are one of the sentences of the intents"
        for name, values in figures["intents"].items()
    ]
    return "; ".join(parts) + "."


def _routing(figures: dict[str, Any]) -> str:
    rows = []
    for layer in figures["routing"]:
        rows.append(
            (
                layer["layer"],
                f"{layer['normalised_entropy']:.3f}",
                f"{layer['least_load']:.1%}",
                f"{layer['most_load']:.1%}",
                f"{layer['top_pair'][0]} and {layer['top_pair'][1]} ({layer['top_pair_share']:.1%})",
                f"{layer['pairs_used']} of 120",
            )
        )
    return _table(("layer", "entropy (1 is even)", "least load", "most load", "most frequent pair", "pairs used"), rows)


def _samples(figures: dict[str, Any]) -> str:
    rows = []
    for sample in figures["samples"]:
        answer = sample["answer"].replace("\n", " / ").replace("|", "\\|")
        rows.append((sample["question"], answer + ("" if sample["ended_by_itself"] else " … (cut off)")))
    return _table(("question", "greedy answer"), rows)


def write(figures: dict[str, Any], log: Path) -> None:
    """Replace every figures region of the documents."""
    regions = {
        "data": _data(),
        "training": _training(log),
        "perplexity": _perplexity(figures),
        "accuracy": _accuracy(figures),
        "clean": _clean(figures),
        "routing": _routing(figures),
        "samples": _samples(figures),
    }
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for name, content in regions.items():
            pattern = re.compile(rf"(<!-- figures: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
            text = pattern.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
        document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(json.loads((RESULTS / "evaluation.json").read_text(encoding="utf-8")), RESULTS / "log.jsonl")
