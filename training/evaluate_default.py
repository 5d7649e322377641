"""Measure the embedded default model on held-out text and write the figures as JSON and pictures.

Held-out perplexity of every set, intent accuracy by greedy generation (the whole sentence must match),
exact match on the other question sets, and how evenly the experts are used.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  python training/evaluate_default.py                               # the model in the package, everything
  python training/evaluate_default.py --samples 200                 # quick: 200 examples a set
  python training/evaluate_default.py --model build/default-model/model --log build/default-model/log.jsonl
"""
REPOSITORY = Path(__file__).resolve().parents[1]
PERPLEXITY_EXAMPLES = 400
MATCH_EXAMPLES = 200
BATCH = 64
SAMPLE_QUESTIONS = (
    "I lost my card on holiday, what now?",
    "My card was stolen yesterday.",
    "Why was I charged twice for the same purchase?",
    "How long does a transfer to France take?",
    "The ATM swallowed my card!",
    "please wake me up at seven tomorrow",
    "what's the weather like in Boston",
    "who made you?",
    "Do I need a visa to travel to Japan?",
    "What do plants need to make food? Options: sunlight; sand; plastic; iron.",
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "What is the capital of France?",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    package = REPOSITORY / "src" / "cloister" / "embedded" / "olmoe"
    results = REPOSITORY / "training" / "results"
    parser.add_argument("--model", type=Path, default=package, help="model folder (the one in the package)")
    parser.add_argument("--data", type=Path, default=None, help="data folder (CLOISTER_DATA or ../shared/data)")
    parser.add_argument("--samples", type=int, default=0, help="at most so many intent questions a set (0: all)")
    parser.add_argument("--threads", type=int, default=1, help="processor threads (1)")
    parser.add_argument("--log", type=Path, default=results / "log.jsonl", help="training log for the loss curve")
    parser.add_argument("--json", type=Path, default=results / "evaluation.json", help="where the figures go")
    parser.add_argument("--images", type=Path, default=REPOSITORY / "docs" / "images", help="where pictures go")
    parser.add_argument("--write-docs", action="store_true", help="put the figures into the documents")
    return parser.parse_args()


# Threads must be chosen before torch starts them, hence the imports below the parser.
if __name__ == "__main__":
    options = arguments()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import corpus  # noqa: E402
import fastolmoe  # noqa: E402
import plots  # noqa: E402
import report  # noqa: E402
from packing import pack  # noqa: E402
from tokenizing import ASSISTANT_ID, CONTEXT, EOS_ID, USER_ID  # noqa: E402


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Evaluation:
    """The model under test and its held-out data."""

    def __init__(self, model: Path, data: Path | None) -> None:
        self.root = corpus.data_root(data)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        # The stored numbers are bfloat16; computing with them in float32 is quicker on a processor.
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def _documents(self, examples: list[corpus.Example]) -> list[tuple[list[int], list[float]]]:
        """Token ids with 1 for what is scored as text or answer, 2 for what is scored as question."""
        result = []
        for example in examples:
            answer = [*self.tokenizer(example.answer, verbose=False)["input_ids"], EOS_ID]
            if example.question is None:
                ids, kinds = answer, [0.0] + [1.0] * (len(answer) - 1)
            else:
                question = self.tokenizer(example.question)["input_ids"]
                ids = [USER_ID, *question, ASSISTANT_ID, *answer]
                kinds = [0.0] + [2.0] * len(question) + [0.0] + [1.0] * len(answer)
            if example.question is None or len(ids) <= CONTEXT:
                result.append((ids[:CONTEXT], kinds[:CONTEXT]))
        return result

    @torch.no_grad()
    def perplexity(self, name: str) -> tuple[dict[str, float], list[torch.Tensor]]:
        """Perplexities of one held-out set, and the experts chosen for each of its tokens by layer."""
        examples = corpus.load(name, "heldout", self.root)
        examples = examples[:: max(1, len(examples) // PERPLEXITY_EXAMPLES)][:PERPLEXITY_EXAMPLES]
        documents = self._documents(examples)
        scored = [self.tokenizer.decode(ids[1:], skip_special_tokens=True) for ids, _ in documents]
        sums = {1.0: 0.0, 2.0: 0.0}
        counts = {1.0: 0, 2.0: 0}
        chosen: list[list[torch.Tensor]] = [[] for _ in range(self.model.config.num_hidden_layers)]
        while documents:
            batch, documents = pack(documents, 8, CONTEXT)
            ids, owner = torch.from_numpy(batch.ids), torch.from_numpy(batch.document)
            states, routing = fastolmoe.hidden_states(self.model, ids, fastolmoe.document_mask(owner))
            logits = F.linear(states[:, :-1].flatten(0, 1), self.model.lm_head.weight)
            losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
            kinds = torch.from_numpy(batch.weight)[:, 1:].flatten()
            for kind in sums:
                sums[kind] += losses[kinds == kind].sum().item()
                counts[kind] += int((kinds == kind).sum())
            real = owner.flatten() > 0
            for layer, (_, experts) in enumerate(routing):
                chosen[layer].append(experts[real])
        figures: dict[str, float] = {"examples": len(examples), "tokens": counts[1.0]}
        figures["perplexity"] = round(math.exp(sums[1.0] / counts[1.0]), 2)
        if counts[2.0]:
            figures["question_perplexity"] = round(math.exp(sums[2.0] / counts[2.0]), 2)
        else:
            # Only what was scored: long texts are cut at the context.
            size = sum(len(text.encode()) for text in scored)
            figures["bits_per_byte"] = round(sums[1.0] / math.log(2) / size, 3)
        return figures, [torch.cat(parts) for parts in chosen]

    @torch.no_grad()
    def answers(self, questions: list[str], new_tokens: int = 40) -> list[tuple[str, bool]]:
        """Greedy answers in the order of the questions, each with whether it ended by itself."""
        result: list[tuple[str, bool]] = [("", False)] * len(questions)
        order = sorted(range(len(questions)), key=lambda index: len(questions[index]))
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            chats = [[{"role": "user", "content": questions[index]}] for index in part]
            inputs = self.tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )
            output = self.model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
            for index, row in zip(part, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                ended = EOS_ID in row
                text = self.tokenizer.decode(row[: row.index(EOS_ID)] if ended else row, skip_special_tokens=True)
                result[index] = (text, ended)
        return result

    def intents(self, name: str, limit: int) -> dict[str, Any]:
        """Exact-sentence accuracy of one intent set."""
        examples = corpus.load(name, "heldout", self.root)
        if limit and len(examples) > limit:
            examples = examples[:: len(examples) // limit][:limit]
        known = {example.answer for example in corpus.load(name, "train", self.root)}
        found = self.answers([example.question or "" for example in examples], new_tokens=24)
        right = [text == example.answer for (text, _), example in zip(found, examples, strict=True)]
        inside = [ok for ok, example in zip(right, examples, strict=True) if example.label != "oos"]
        outside = [ok for ok, example in zip(right, examples, strict=True) if example.label == "oos"]
        figures = {
            "questions": len(inside),
            "accuracy": round(sum(inside) / len(inside), 4),
            "ended_by_itself": round(sum(ended for _, ended in found) / len(found), 4),
            "a_known_sentence": round(sum(text in known for text, _ in found) / len(found), 4),
        }
        if outside:
            figures |= {"out_of_scope_questions": len(outside)}
            figures |= {"out_of_scope_recall": round(sum(outside) / len(outside), 4)}
        return figures

    def match(self, name: str) -> dict[str, Any]:
        """Share of exactly right greedy answers on a few held-out examples of a question set."""
        examples = corpus.load(name, "heldout", self.root)
        if name in ("commonsense_qa", "arc_easy", "arc_challenge"):
            examples = [example for example in examples if " Options: " in (example.question or "")]
        examples = examples[:: max(1, len(examples) // MATCH_EXAMPLES)][:MATCH_EXAMPLES]
        found = self.answers([e.question or "" for e in examples], new_tokens=160 if name == "gsm8k" else 32)
        if name == "gsm8k":
            right = [a[0].split("\n")[-1] == e.answer.split("\n")[-1] for a, e in zip(found, examples, strict=True)]
        else:
            right = [a[0] == e.answer for a, e in zip(found, examples, strict=True)]
        ended = sum(ended for _, ended in found) / len(found)
        return {"questions": len(right), "exact": round(sum(right) / len(right), 4), "ended_by_itself": round(ended, 4)}


def routing_figures(chosen: list[torch.Tensor], weight: torch.Tensor, experts: int) -> list[dict[str, Any]]:
    """Load, entropy and favourite pair of every layer; `chosen[layer]` is (tokens, 2).

    `weight` of the tokens gives every set its share of the training mix, however much of it was read here.
    """
    result = []
    for layer, pairs in enumerate(chosen):
        load = torch.bincount(pairs.flatten(), weight.repeat_interleave(pairs.shape[1]), minlength=experts)
        load = load / load.sum()
        entropy = -(load[load > 0] * load[load > 0].log()).sum() / math.log(experts)
        ordered = pairs.sort(dim=1).values
        codes = torch.bincount(ordered[:, 0] * experts + ordered[:, 1], weight, minlength=experts**2)
        best = int(codes.argmax())
        result.append(
            {
                "layer": layer,
                "load": [round(value, 4) for value in load.tolist()],
                "normalised_entropy": round(entropy.item(), 4),
                "least_load": round(load.min().item(), 4),
                "most_load": round(load.max().item(), 4),
                "top_pair": [best // experts, best % experts],
                "top_pair_share": round((codes[best] / weight.sum()).item(), 4),
                "pairs_used": int((codes > 0).sum()),
            }
        )
    return result


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    evaluation = Evaluation(options.model, options.data)
    experts = evaluation.model.config.num_experts
    figures: dict[str, Any] = {"perplexity": {}, "intents": {}, "exact_match": {}}
    chosen: list[list[torch.Tensor]] = [[] for _ in range(evaluation.model.config.num_hidden_layers)]
    weights: list[torch.Tensor] = []
    by_set: dict[str, np.ndarray] = {}
    for entry in corpus.SETS:
        start = time.monotonic()
        figures["perplexity"][entry.name], layers = evaluation.perplexity(entry.name)
        for layer, part in enumerate(layers):
            chosen[layer].append(part)
        weights.append(torch.full((len(layers[0]),), entry.share / len(layers[0]), dtype=torch.float64))
        by_set[entry.name] = np.array([torch.bincount(part.flatten(), minlength=experts).numpy() for part in layers])
        _log(f"{entry.name}: {figures['perplexity'][entry.name]} {time.monotonic() - start:.0f} s")
    figures["routing"] = routing_figures([torch.cat(parts) for parts in chosen], torch.cat(weights), experts)
    figures["samples"] = [
        {"question": question, "answer": text, "ended_by_itself": ended}
        for question, (text, ended) in zip(
            SAMPLE_QUESTIONS, evaluation.answers(list(SAMPLE_QUESTIONS), 100), strict=True
        )
    ]
    for sample in figures["samples"]:
        _log(f"{sample['question']} -> {sample['answer']!r}")
    for name in corpus.INTENT_SETS:
        figures["intents"][name] = evaluation.intents(name, options.samples)
        _log(f"{name}: {figures['intents'][name]}")
    for name in ("commonsense_qa", "arc_easy", "arc_challenge", "boolq", "gsm8k"):
        figures["exact_match"][name] = evaluation.match(name)
        _log(f"{name}: {figures['exact_match'][name]}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    options.images.mkdir(parents=True, exist_ok=True)
    load = np.array([layer["load"] for layer in figures["routing"]])
    plots.expert_load(load, by_set, options.images / "default-model-experts.png")
    if options.log.exists():
        plots.loss_curve(options.log, options.images / "default-model-loss.png")
    if options.write_docs:
        report.write(figures, options.log)


if __name__ == "__main__":
    main(options)
