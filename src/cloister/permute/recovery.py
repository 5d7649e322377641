"""How much of what users send can the server work out? Measured on the protected checkpoint itself.

`cloister protect` builds a `ServerView` (what a server holds and sees, with the truth kept aside for scoring) and a
`Knowledge` (what the attacker has besides), calls `measure` and prints, stores and publishes the `Recovery`. The label
of a protected model follows from the declared base; this figure is what the label means in numbers.

The attacks are those of `cloister.permute.attacks`. They are simple on purpose: every figure is a lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cloister.permute.attacks import equality, frequency, gram, output_vocabulary, sorted_rows, weights
from cloister.permute.attacks.matching import Array, Matches, distinct_rows, percent

DESCRIPTIONS = {
    "sorted_rows": "sorted rows, one forward pass",
    "learned_order": "sorted rows, then the order of the features learned from the matches",
    "norms": "row norms alone",
    "inner_products": "norms and inner products, nothing known",
    "inner_products_known": "norms and inner products with tokens known for free",
    "weights": "the transform computed from the uploaded weights alone",
    "frequency": "token counts of other text",
    "bigrams": "bigram counts of other text",
}


@dataclass(frozen=True, repr=False)
class ServerView:
    """What the server holds and sees, and the truth for scoring. Arrays may be memory maps."""

    rows: Array  # [n, d] transformed embedding rows: the whole table (loop "server") or those sent (loop "token")
    row_ids: Array  # truth: plain token id of each of `rows`
    requests: Sequence[Array] = ()  # per request, in order: sent vectors [len, d], or sent server ids [len] into `rows`
    request_ids: Sequence[Array] = ()  # truth: plain ids of each request
    weights: Mapping[str, Array] = field(
        default_factory=dict
    )  # readers of the residual stream [m, d], rows in any order
    ordered_weights: Mapping[str, Array] = field(default_factory=dict)  # [m, d] in public row order: norms, positions
    head: Array | None = None  # [vocab, d] output head, rows in the server's vocabulary
    head_ids: Array | None = None  # truth: plain id of each row of `head`
    transform: str = ""  # "permutation" or "orthogonal", if known; the attacker knows it too


@dataclass(frozen=True, repr=False)
class Knowledge:
    """What the attacker has. Without `table` the base is secret."""

    table: Array | None = None  # public embedding table [vocab, d], perhaps of an earlier version
    weights: Mapping[str, Array] = field(
        default_factory=dict
    )  # public twins of `ServerView.weights`, norms folded alike
    ordered_weights: Mapping[str, Array] = field(default_factory=dict)
    head: Array | None = None  # public twin of `ServerView.head`; None: the table (tied weights)
    known_tokens: Collection[int] = ()  # ids known for free wherever they stand: first, last, chat template
    corpus: Sequence[Array] = ()  # token ids of other text, one array per piece
    corpus_name: str = ""  # what that text is, for the notes


@dataclass(frozen=True)
class Recovery:
    """The outcome. Percentages are of token occurrences that were not known for free anyway."""

    base: str  # "public" or "secret"
    recovered: Mapping[str, float]  # attack -> percent; see DESCRIPTIONS
    tokens: int  # occurrences counted
    repeated: float  # percent of occurrences whose token occurs more than once
    linked: float  # percent of those that the server sees to be equal
    outputs: float | None = None  # percent of output ids whose plain id the server finds; None: not measured
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> str:
        """The strongest attack, "" if none could be run."""
        return max(self.recovered, key=lambda name: self.recovered[name]) if self.recovered else ""

    @property
    def percent(self) -> float:
        """What the strongest attack recovers."""
        return self.recovered[self.best] if self.best else 0.0

    def sentence(self) -> str:
        """One sentence for people."""
        linked = f"equal tokens are seen to be equal ({self.linked:.1f} % of repeated ones linked)"
        if not self.recovered:
            return f"With a {self.base} base no token was recovered, for want of reference text; {linked}."
        what = f"{self.percent:.1f} % of {self.tokens:,} tokens ({DESCRIPTIONS[self.best]})"
        if self.base == "public":
            return f"A server that knows the public base recovers {what}."
        return f"With a secret base a server recovers {what}, as a lower bound, and {linked}."

    def to_manifest(self) -> dict[str, Any]:
        """Flat and ready for TOML."""
        flat: dict[str, Any] = {
            "base": self.base,
            "percent": round(self.percent, 2),
            "attack": self.best,
            "tokens": self.tokens,
            "repeated_percent": round(self.repeated, 2),
            "linked_percent": round(self.linked, 2),
            "seconds": round(self.seconds, 1),
            "sentence": self.sentence(),
        }
        if self.outputs is not None:
            flat["output_ids_percent"] = round(self.outputs, 2)
        flat.update({f"recovered_{name}": round(value, 2) for name, value in self.recovered.items()})
        if self.notes:
            flat["notes"] = " ".join(self.notes)
        return flat


def measure(
    view: ServerView,
    knowledge: Knowledge,
    *,
    tokens: int = 2000,
    distinct: int = 800,
    seconds: float = 60.0,
    numbers: int = 250_000_000,
    seed: int = 0,
) -> Recovery:
    """Run every attack that fits the view.

    At most `tokens` occurrences of `distinct` different tokens are attacked, among candidates of together at most
    `numbers` float32 values (1 GB by default). No further attack is begun once `seconds` have passed. Both limits are
    reported in the notes where they were met.
    """
    started = time.monotonic()
    random = np.random.default_rng(seed)
    notes: list[str] = []
    sample = _Sample.draw(view, tokens, distinct, frozenset(knowledge.known_tokens), random)
    linked = equality.measure_equality(sample.kinds, sample.truth)
    recovered: dict[str, float] = {}
    outputs: float | None = None

    def attempt(name: str, attack: Callable[[], Array | None]) -> None:
        if time.monotonic() - started > seconds:
            notes.append(f"{name} not run: time limit of {seconds:.0f} s.")
            return
        found = attack()
        if found is not None:
            recovered[name] = sample.score(found)

    if knowledge.table is None:
        _attack_secret(attempt, view, knowledge, sample, notes)
    else:
        base = _PublicBase.limit(knowledge.table, sample, numbers, random, notes)
        alignments: list[weights.Alignment] = []
        if view.transform != "orthogonal":
            _attack_permuted(attempt, sample, base)
        if view.transform != "permutation":
            _attack_rotated(attempt, sample, base)
        attempt("weights", lambda: _attack_weights(view, knowledge, sample, base, alignments))
        if view.transform != "permutation":
            attempt("inner_products", lambda: base.ids(gram.match_blind(sample.rows, base.table)))
        if time.monotonic() - started <= seconds:
            outputs = _attack_outputs(view, knowledge, alignments, random)
    return Recovery(
        base="secret" if knowledge.table is None else "public",
        recovered=recovered,
        tokens=int(np.count_nonzero(sample.counted)),
        repeated=linked.repeated,
        linked=linked.linked,
        outputs=outputs,
        seconds=time.monotonic() - started,
        notes=tuple(notes),
    )


Attempt = Callable[[str, Callable[[], "Array | None"]], None]


def _attack_permuted(attempt: Attempt, sample: _Sample, base: _PublicBase) -> None:
    attempt("sorted_rows", lambda: base.ids(sorted_rows.match_sorted(sample.rows, base.table)))
    attempt("learned_order", lambda: base.ids(sorted_rows.match_and_learn(sample.rows, base.table).matches))


def _attack_rotated(attempt: Attempt, sample: _Sample, base: _PublicBase) -> None:
    attempt("norms", lambda: base.ids(gram.match_norms(sample.rows, base.table)))
    known = np.flatnonzero(sample.known)
    if len(known):
        places = base.places(sample.ids[known])
        attempt(
            "inner_products_known",
            lambda: base.ids(gram.match_known(sample.rows, base.table, sample.rows[known], places, rounds=2)),
        )


def _attack_weights(
    view: ServerView, knowledge: Knowledge, sample: _Sample, base: _PublicBase, alignments: list[weights.Alignment]
) -> Array | None:
    """Tokens through the alignment that explains the most rows. Leaves it in `alignments`."""
    for name in view.ordered_weights.keys() & knowledge.ordered_weights.keys():
        if view.transform != "orthogonal":
            order = weights.align_ordered(view.ordered_weights[name], knowledge.ordered_weights[name])
            # Many columns of a single norm vector may be equal: only a complete order counts.
            if len(np.unique(order)) == len(order):
                alignments.append(weights.Alignment(np.arange(0), np.arange(0), 100.0, order=order))
    pairs = [(view.weights[name], knowledge.weights[name]) for name in view.weights.keys() & knowledge.weights.keys()]
    if not pairs and len(view.rows) == len(base.table):
        pairs = [(view.rows, base.table)]  # the server holds the table: a matrix like any other
    for server, public in pairs:
        if any(alignment.explained > 90 for alignment in alignments):
            break
        if view.transform != "orthogonal":
            alignments.append(weights.align_permuted(server, public))
        if view.transform != "permutation":
            alignments.append(weights.align_rotated(server, public))
    if not alignments:
        return None
    alignments.sort(key=lambda alignment: -alignment.explained)
    return base.ids(alignments[0].match(sample.rows, base.table))


def _attack_outputs(
    view: ServerView, knowledge: Knowledge, alignments: list[weights.Alignment], random: np.random.Generator
) -> float | None:
    public = knowledge.head if knowledge.head is not None else knowledge.table
    if view.head is None or view.head_ids is None or public is None:
        return None
    if not alignments and view.transform == "orthogonal":
        return None
    places = np.sort(random.choice(len(view.head), min(500, len(view.head)), replace=False))
    rows = np.asarray(view.head[places], dtype=np.float32)
    found = output_vocabulary.match_outputs(rows, public, alignments[0] if alignments else None)
    return percent(found.index == view.head_ids[places])


def _attack_secret(attempt: Attempt, view: ServerView, knowledge: Knowledge, sample: _Sample, notes: list[str]) -> None:
    """Counting wants all traffic, not a sample of it; scored on the sample's tokens."""
    if not knowledge.corpus or not view.request_ids:
        return
    requests, truth = list(view.requests), np.concatenate(list(view.request_ids))
    rows = np.concatenate([np.asarray(request) for request in requests])
    kinds = rows.astype(np.int64) if rows.ndim == 1 else equality.kinds_of(rows)
    reference = np.concatenate(list(knowledge.corpus))
    amount = f"{len(kinds):,} tokens seen, {len(reference):,} tokens of reference text"
    notes.append(f"{amount} ({knowledge.corpus_name})." if knowledge.corpus_name else f"{amount}.")

    def score_here(guess: dict[int, int]) -> Array:
        # From all occurrences to the distinct rows of the sample: a kind is read alike everywhere.
        reading = dict(zip(truth.tolist(), frequency.read(kinds, guess).tolist(), strict=True))
        return np.array([reading.get(int(token), -1) for token in sample.ids], dtype=np.int64)

    attempt("frequency", lambda: score_here(frequency.match_counts(kinds, reference)))
    attempt("bigrams", lambda: score_here(frequency.match_bigrams(requests, kinds, knowledge.corpus)))


@dataclass(frozen=True)
class _Sample:
    """The occurrences that are attacked, and their distinct rows."""

    rows: Array  # [k, d] distinct rows, float32
    ids: Array  # [k] truth
    known: Array  # [k] known for free
    kinds: Array  # [n] occurrence -> distinct row
    truth: Array  # [n]
    counted: Array  # [n] occurrences that count

    @classmethod
    def draw(
        cls, view: ServerView, tokens: int, distinct: int, known: frozenset[int], random: np.random.Generator
    ) -> _Sample:
        """Whole requests until there are enough tokens; rows of the table if there are no requests."""
        if len(view.requests):
            chosen: list[int] = []
            size = 0
            for request in random.permutation(len(view.requests)):
                if size >= tokens:
                    break
                chosen.append(int(request))
                size += len(view.requests[request])
            sent = np.concatenate([np.asarray(view.requests[request]) for request in chosen])
            truth = np.concatenate([np.asarray(view.request_ids[request]) for request in chosen]).astype(np.int64)
        else:
            sent = np.sort(random.choice(len(view.rows), min(tokens, len(view.rows)), replace=False))
            truth = np.asarray(view.row_ids)[sent].astype(np.int64)
        first, kinds = distinct_rows(sent)
        first = first[:distinct]
        kept = kinds < len(first)
        ids = truth[first]
        rows = np.asarray(sent[first] if sent.ndim == 2 else view.rows[sent[first]], dtype=np.float32)
        is_known = np.isin(ids, np.array(sorted(known), dtype=np.int64))
        return cls(rows, ids, is_known, kinds[kept], truth[kept], ~is_known[kinds[kept]])

    def score(self, found: Array) -> float:
        """Percent of counted occurrences whose distinct row was read as the right id."""
        return percent((found[self.kinds] == self.truth)[self.counted])


@dataclass(frozen=True)
class _PublicBase:
    """The candidates: the public table, or a part of it that holds all true tokens and is small enough to search."""

    table: Array
    part: Array | None  # plain ids of the rows of `table`; None: all

    @classmethod
    def limit(
        cls, table: Array, sample: _Sample, numbers: int, random: np.random.Generator, notes: list[str]
    ) -> _PublicBase:
        """All of it if it fits `numbers`, else the sample's tokens and as many others as fit."""
        most = max(1, numbers // table.shape[1])
        if len(table) <= most:
            return cls(table, None)
        others = np.setdiff1d(np.arange(len(table)), sample.ids)
        part = np.union1d(sample.ids, random.choice(others, max(0, most - len(sample.ids)), replace=False))
        notes.append(f"Candidates limited to {len(part):,} of {len(table):,} table rows, the true ones among them.")
        return cls(np.asarray(table[part], dtype=np.float32), part)

    def ids(self, matches: Matches) -> Array:
        return matches.index if self.part is None else self.part[matches.index]

    def places(self, ids: Array) -> Array:
        return ids if self.part is None else np.searchsorted(self.part, ids)
