"""Batches for training: examples drawn by share, dressed as chats, and packed into full rows.

The batch of a step depends only on the seed, the step number and how often each set has been drawn
(`Cursor`), so a resumed run continues with exactly the batches an uninterrupted run would have seen.
Documents that share a row cannot see each other: `Batch.document` says which tokens belong together.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import corpus
from tokenizing import ASSISTANT_ID, EOS_ID, PAD_ID, SYSTEM_ID, USER_ID

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Predicting the question is useful (it is English too), but the answer is what the model is for.
QUESTION_WEIGHT = 0.3
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a private assistant. Answer in one sentence.",
    "Answer briefly.",
    "You are the assistant of a bank.",
)


@dataclass
class Cursor:
    """How many examples of each set have been drawn; with the seed, all that resuming needs."""

    drawn: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Rows of tokens; `document` is 0 for padding, `weight[i]` is for predicting token i."""

    ids: np.ndarray
    document: np.ndarray
    weight: np.ndarray


def vary(question: str, chance: random.Random) -> str:
    """Write an intent question as another user might: other case, other or no end mark.

    clinc150 is all lower case without marks, banking77 is not; without this the model would learn to
    tell the sets by their spelling instead of reading the question.
    """
    draw = chance.random()
    if draw < 0.25:
        question = question.lower()
    elif draw < 0.5:
        question = question[:1].upper() + question[1:]
    draw = chance.random()
    if draw < 0.2:
        question = question.rstrip("?.! ")
    elif draw < 0.35:
        question = question.rstrip("?.! ") + ("?" if chance.random() < 0.6 else ".")
    elif draw < 0.45:
        question = re.sub(r"[^\w\s]", "", question)
    words = question.split()
    if len(words) > 6 and chance.random() < 0.25:
        # One lost word seldom changes the intent, and it keeps the questions from being memorised.
        del words[chance.randrange(len(words))]
    return " ".join(words) or question


class Mixture:
    """Draws batches from all training sets by their shares."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, root: Path, seed: int, split: corpus.Split = "train"
    ) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.names = [entry.name for entry in corpus.SETS]
        self.examples = {name: corpus.load(name, split, root) for name in self.names}
        shares = []
        for entry in corpus.SETS:
            sample = self.examples[entry.name][:: max(1, len(self.examples[entry.name]) // 200)]
            texts = [(example.question or "") + example.answer for example in sample]
            length = sum(len(ids) for ids in tokenizer(texts)["input_ids"]) / len(texts)
            # Shares are of tokens; dividing by the mean length makes them shares of draws.
            shares.append(entry.share / length)
        self.draws = np.cumsum(np.array(shares) / np.sum(shares))
        self.order: dict[tuple[str, int], np.ndarray] = {}

    def _next(self, name: str, cursor: Cursor) -> corpus.Example:
        """The next example of a set: every pass over a set has its own order."""
        count = cursor.drawn.get(name, 0)
        cursor.drawn[name] = count + 1
        examples = self.examples[name]
        turn, position = divmod(count, len(examples))
        if (name, turn) not in self.order:
            self.order.pop((name, turn - 1), None)
            generator = np.random.default_rng([self.seed, self.names.index(name), turn])
            self.order[name, turn] = generator.permutation(len(examples))
        return examples[self.order[name, turn][position]]

    def _document(self, name: str, cursor: Cursor, chance: random.Random) -> list[tuple[int | None, str]]:
        """One document as (special token, text) parts; plain text has no special token."""
        example = self._next(name, cursor)
        if example.question is None:
            return [(None, example.answer)]
        parts: list[tuple[int | None, str]] = []
        if chance.random() < 0.08:
            parts.append((SYSTEM_ID, chance.choice(SYSTEM_PROMPTS)))
        intent = name in corpus.INTENT_SETS
        question = vary(example.question, chance) if intent else example.question
        parts += [(USER_ID, question), (ASSISTANT_ID, example.answer)]
        while intent and chance.random() < 0.12:
            # Several turns: the answer belongs to the last question, whatever was asked before.
            example = self._next(chance.choice(corpus.INTENT_SETS), cursor)
            parts += [(USER_ID, vary(example.question or "", chance)), (ASSISTANT_ID, example.answer)]
        return parts

    def batch(self, step: int, rows: int, length: int, cursor: Cursor) -> Batch:
        """The batch of one step: first-fit by falling length leaves almost no padding."""
        chance = random.Random(f"{self.seed}/{step}")
        room = rows * length
        documents: list[tuple[list[int], list[float]]] = []
        while room > 0:
            names = [
                self.names[min(int(np.searchsorted(self.draws, chance.random())), len(self.names) - 1)]
                for _ in range(max(1, room // 60))
            ]
            parts = [self._document(name, cursor, chance) for name in names]
            texts = [text for part in parts for _, text in part]
            encoded = iter(self.tokenizer(texts, verbose=False)["input_ids"])
            for part in parts:
                document = _weigh([(special, next(encoded)) for special, _ in part], length)
                if document is not None:
                    documents.append(document)
                    room -= len(document[0])
        return pack(documents, rows, length)[0]


def _weigh(parts: list[tuple[int | None, list[int]]], length: int) -> tuple[list[int], list[float]] | None:
    ids: list[int] = []
    weights: list[float] = []
    for special, tokens in parts:
        if special is None:
            ids, weights = [*tokens, EOS_ID][:length], [1.0] * (len(tokens) + 1)
        elif special == ASSISTANT_ID:
            ids += [special, *tokens, EOS_ID]
            weights += [0.0] + [1.0] * (len(tokens) + 1)
        else:
            ids += [special, *tokens]
            weights += [0.0] + [QUESTION_WEIGHT if special == USER_ID else 0.0] * len(tokens)
    if len(ids) > length:
        return None  # a chat cut in the middle would teach answers without an end
    weights = weights[: len(ids)]
    weights[0] = 0.0  # nothing comes before the first token of a document
    return ids, weights


def pack(
    documents: list[tuple[list[int], list[float]]], rows: int, length: int
) -> tuple[Batch, list[tuple[list[int], list[float]]]]:
    """Fill the rows, longest documents first; also returns the documents that found no room."""
    ids = np.full((rows, length), PAD_ID, dtype=np.int64)
    owner = np.zeros((rows, length), dtype=np.int64)
    weight = np.zeros((rows, length), dtype=np.float32)
    used = [0] * rows
    left = []
    for number, (tokens, weights) in enumerate(sorted(documents, key=lambda item: -len(item[0])), start=1):
        row = next((row for row in range(rows) if used[row] + len(tokens) <= length), None)
        if row is None:
            left.append((tokens, weights))
            continue
        part = slice(used[row], used[row] + len(tokens))
        ids[row, part], owner[row, part], weight[row, part] = tokens, number, weights
        used[row] = part.stop
    return Batch(ids, owner, weight), left
