"""Unification of language models: a small Llama as seed, and owners of plays, of articles and of questions.

    trial = Trial(Plan(), draw=0, cache=folder)
    trial.score("unified")      # {"Shakespeare": 61.2, ...}: perplexities, lower is better
    mean(...)                   # their geometric mean, which is what the mean log perplexity says

Public are Alpaca instructions with their answers, and Wikipedia sentences in lower case. The seed is trained on them
here: the model that Cloister embeds is a mixture of experts already, and it has read what the owners hold. It has that
model's width of a head, its layers and its tokenizer (whose merges come from text that includes these owners' training
parts; all methods share it). No public text looks like a play.

Everything else, the methods above all, is that of the text trials; BTM averages the experts' probabilities. Settings
were chosen with `Plan(development=True)`, which tests on other pieces of the training texts.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cloister import embedded, storage
from cloister.bench.schema import Row
from cloister.bench.suites import Options, Workload
from cloister.bench.unify import far, text
from cloister.bench.unify.rows import gather, perplexities
from cloister.bench.unify.text_data import Owner, PublicKind
from cloister.errors import NotAvailable
from cloister.progress import SILENT, Progress
from cloister.unify.examples import Examples
from cloister.unify.experts import Settings
from cloister.unify.joint import JointSettings
from cloister.unify.seeds import Seed, batches_by_length
from cloister.unify.tasks import Language
from cloister.unify.training import Descent, Loop, order, stamp

PLAYS, ARTICLES, QUESTIONS = "Shakespeare", "Wikipedia", "questions"
PIECE = 320  # characters of an example, about 90 tokens
BEHIND_POOLING = 0.05  # nats of mean log perplexity: 5 % of perplexity
TRAIN_SHARE = 0.9  # of Shakespeare: the first part; the rest is for testing


@dataclass(frozen=True)
class Pretraining:
    """How the seed is made: one pass over public pieces."""

    pieces: int = 20_000
    batch: int = 16
    lr: float = 3e-3
    hidden: int = 128
    layers: int = 4


@dataclass(frozen=True)
class Plan(text.Plan):
    """How large a trial is, and its settings."""

    private: Mapping[str, int] = field(default_factory=lambda: {"": 200})
    test: int = 100
    public: int = 12_000
    proxies: int = 200
    pool: int = 400
    blend: float = 0.95
    share: float = 0.0
    max_tokens: int = 96
    pretraining: Pretraining = field(default_factory=Pretraining)
    expert: Settings = field(
        default_factory=lambda: Settings(epochs=2, lr=3e-3, batch=16, proxy_batch=4, proxy_weight=0.05, keep_every=1e9)
    )
    joint: JointSettings = field(
        default_factory=lambda: JointSettings(
            epochs=2.0, batch=8, lr=2e-3, router_lr=1e-2, public_weight=0.0, keep_every=1e9
        )
    )
    routers: JointSettings = field(default_factory=lambda: JointSettings(epochs=2.0, batch=8, keep_every=1e9))


QUICK = Plan(
    private={"": 32}, test=16, public=200, proxies=24, pool=100, max_tokens=48,
    pretraining=Pretraining(pieces=400, hidden=64, layers=2),
    expert=Settings(epochs=1, lr=3e-3, batch=16, proxy_batch=8),
)  # fmt: skip


class Trial(far.Trial):
    """All methods on one draw of the data."""

    plan: Plan

    @cached_property
    def seed(self) -> Seed:
        """A Llama that has read public text."""
        pieces = public(self.root, self.plan.pretraining.pieces)
        return seed(self.plan.pretraining, pieces, self.plan.max_tokens, self.cache, self.progress)

    @cached_property
    def owners(self) -> list[Owner]:
        """The three organisations."""
        task = Language(self.plan.max_tokens)
        return [
            Owner(name, task, *self.part(number, name, whole, held_out))
            for number, (name, whole, held_out) in enumerate(private(self.root))
        ]

    def public(self, kind: PublicKind) -> Examples:
        """Alpaca and Wikipedia, whatever `kind` says: there is one public set."""
        if kind not in self._public:
            self._public[kind] = public(self.root, self.plan.public)
        return self._public[kind]


def mean(perplexities: Mapping[str, float]) -> float:
    """The geometric mean: every owner's log perplexity counts the same."""
    return math.exp(sum(math.log(value) for value in perplexities.values()) / len(perplexities))


# ---------------------------------------------------------------- texts


def private(root: Path) -> list[tuple[str, Examples, Examples]]:
    """For each owner its name, all its training pieces and all its test pieces."""
    plays = _read(root / "tinyshakespeare" / "input.txt")
    cut = plays.rfind("\n\n", 0, int(TRAIN_SHARE * len(plays)))
    articles = [_examples(_articles(_read(root / "wikitext2" / f"{part}.txt"))) for part in ("valid", "test")]
    questions = [_examples(_questions(root / "gsm8k" / part)) for part in ("train.jsonl.gz", "test.jsonl")]
    return [
        (PLAYS, _examples(pieces(plays[:cut])), _examples(pieces(plays[cut:]))),
        (ARTICLES, articles[0], articles[1]),
        (QUESTIONS, questions[0], questions[1]),
    ]


def public(root: Path, count: int) -> Examples:
    """The first `count` public pieces, half of each sort as long as there are any."""
    first, second = list(_alpaca(root)), list(_sentences(root))
    half = min(count // 2, len(second))
    return _examples(first[: count - half] + second[:half])


def pieces(whole: str, most: int = PIECE) -> Iterator[str]:
    """Runs of whole words of at most `most` characters, line breaks kept; rests shorter than a third are left out."""
    start = 0
    while start < len(whole):
        end = len(whole)
        if end - start > most:
            breaks = max(whole.rfind(" ", start, start + most), whole.rfind("\n", start, start + most))
            end = breaks if breaks > start else start + most
        if len(found := whole[start:end].strip()) > most // 3:
            yield found
        start = end + 1 if end < len(whole) and whole[end].isspace() else end


def _articles(whole: str) -> Iterator[str]:
    for paragraph in whole.splitlines():
        yield from pieces(paragraph.strip())


def _questions(path: Path) -> Iterator[str]:
    for raw in _json_lines(path):
        yield raw["question"][:PIECE]


def _alpaca(root: Path) -> Iterator[str]:
    for raw in _json_lines(root / "alpaca_subset" / "random_9k.jsonl.gz"):
        asked = f"{raw['instruction']} {raw['input']}".strip()
        yield from list(pieces(f"{asked}\n{raw['output'].strip()}"))[:3]


def _sentences(root: Path) -> Iterator[str]:
    yield from (line for line in _read(root / "clinc150" / "wiki_sentences.txt").splitlines() if len(line) > 40)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in _read(path).split("\n"):  # not splitlines: a text may hold one of Unicode's other line ends
        if line:
            yield json.loads(line)


def _read(path: Path) -> str:
    if not path.is_file():
        raise NotAvailable(f"There is no {path}.", advice="Set CLOISTER_DATA to where the data sets lie.")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return file.read()


def _examples(texts: Iterator[str] | list[str]) -> Examples:
    found = tuple(texts)
    return Examples("text", tuple(str(i) for i in range(len(found))), found, None)


# ---------------------------------------------------------------- the seed


def seed(
    settings: Pretraining, texts: Examples, max_tokens: int, cache: Path | None = None, progress: Progress = SILENT
) -> Seed:
    """A Llama trained on public text, from the cache if it was made before."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(embedded.path(), trust_remote_code=False)
    name = stamp(settings=settings, texts=texts.digest(), max_tokens=max_tokens)[:24]
    folder = cache and cache / "seeds" / name
    if folder and (folder / "config.json").is_file():
        return Seed.load(folder, max_tokens=max_tokens)
    config = LlamaConfig(
        hidden_size=settings.hidden, num_hidden_layers=settings.layers, num_attention_heads=settings.hidden // 32,
        num_key_value_heads=settings.hidden // 32, intermediate_size=11 * settings.hidden // 4,
        vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    untrained = Seed.of(model, tokenizer=tokenizer, max_tokens=max_tokens)
    model.requires_grad_(True)
    task = Language(max_tokens)
    batches = list(batches_by_length(texts.inputs, settings.batch))  # like lengths together: little padding
    batches = [batches[i] for i in order(len(batches), 1, 0)]

    def loss_at(step: int) -> Tensor:
        return task.loss(model, untrained, texts, batches[step])

    loop = Loop(
        dict(model.named_parameters()), steps=len(batches), settings=Descent(settings.lr), stamp=name,
        workdir=cache and cache / "seeds" / f"{name}.work",
    )  # fmt: skip
    loop.go(loss_at, progress=progress, what="Training the seed on public text")
    if folder:
        with storage.fresh_directory(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    return Seed.of(model, tokenizer=tokenizer, max_tokens=max_tokens)


# ---------------------------------------------------------------- rows


def _methods(options: Options) -> list[Row]:
    plan = QUICK if options.quick else Plan()
    draws = gather(
        lambda draw, cache: Trial(plan, draw=draw, cache=cache, progress=options.progress), options, "Language"
    )
    return perplexities("language", draws, behind=BEHIND_POOLING, bars=not options.quick)


WORKLOADS = (
    Workload("language", "3 owners of texts, a small Llama: perplexity beside every baseline", _methods, "nats", 0.0),
)
