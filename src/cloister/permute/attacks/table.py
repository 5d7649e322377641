"""The measured threat model of `permute`: every attack on a real embedding table, real weights and real texts.

    python -m cloister.permute.attacks.table --data DIR [--json FILE] [--plot FILE]

Prints docs/permute-leakage.md's tables as Markdown. Figures marked as control are attacks that must lose, because
what they attack is not what they are made for: they show that a figure near 100 % is no artefact of the scoring.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister.permute import recovery
from cloister.permute.attacks import (
    contexts,
    distance_correlation,
    equality,
    frequency,
    gram,
    known_rows,
    noise,
    row_scaling,
    scenarios,
    sorted_rows,
    weights,
)
from cloister.permute.attacks.matching import Array, percent, round_bfloat16, unit_rows


@dataclass(frozen=True)
class Row:
    """One measured figure."""

    section: str
    setting: str
    attack: str
    value: float
    unit: str = "%"
    control: bool = False  # must lose


@dataclass(frozen=True)
class Material:
    """The model, the texts and how much of them."""

    model: scenarios.Model
    data: Path
    tokens: int
    seed: int

    def random(self) -> np.random.Generator:
        """A fresh generator: sections do not depend on each other's draws."""
        return np.random.default_rng(self.seed)

    def requests(self, name: str, *, tokens: int = 0, reference: bool = False) -> list[Array]:
        """Requests of one data set."""
        texts = scenarios.read_texts(self.data, name, reference=reference)
        return scenarios.requests_from(self.model, texts, tokens=tokens or self.tokens, seed=self.seed)

    def content(self, requests: list[Array]) -> tuple[Array, Array]:
        """Distinct ids of all texts' tokens that nobody knows for free, and how often each occurs."""
        ids, counts = np.unique(np.concatenate(requests), return_counts=True)
        kept = ~np.isin(ids, self.model.known_tokens)
        return ids[kept], counts[kept]

    def share(self, found: Array, ids: Array, counts: Array) -> float:
        """Percent of occurrences read correctly."""
        return 100.0 * float(counts[found == ids].sum() / counts.sum())


def public_base(material: Material) -> Iterator[Row]:
    """Tokens recovered by a server that knows the public base: the figures that `protect` prints."""
    model = material.model
    for name in scenarios.TEXTS:
        requests = material.requests(name)
        for kind in scenarios.TRANSFORMS:
            for dtype in ("float32", "bfloat16"):
                random = material.random()
                transform = scenarios.draw_transform(kind, model.table.shape[1], random)
                sent = [transform(model.table[request], dtype) for request in requests]
                view = recovery.ServerView(
                    rows=np.concatenate(sent),
                    row_ids=np.concatenate(requests),
                    requests=sent,
                    request_ids=requests,
                    weights={"feed_forward": scenarios.shuffled(model.reader, transform, random)[0]},
                    transform=kind,
                )
                base = recovery.Knowledge(model.table, {"feed_forward": model.reader}, known_tokens=model.known_tokens)
                measured = recovery.measure(view, base, tokens=material.tokens, seed=material.seed, seconds=600)
                for attack, value in measured.recovered.items():
                    yield Row("Public base", f"{name}, {kind}, {dtype}", attack, value)


def public_base_controls(material: Material) -> Iterator[Row]:
    """The same attacks where they must lose: a table that nobody knows, a fresh matrix for every row."""
    model, random = material.model, material.random()
    ids, counts = material.content(material.requests("banking77"))
    secret = random.standard_normal(model.table.shape, dtype=np.float32) * model.table.std()
    width = model.table.shape[1]
    permuted = scenarios.draw_transform("permutation", width, random)(secret[ids])
    rotated = scenarios.draw_transform("orthogonal", width, random)(secret[ids], "bfloat16")
    fresh = np.stack([scenarios.draw_transform("orthogonal", width, random)(model.table[[i]])[0] for i in ids])
    found = sorted_rows.match_sorted(permuted, model.table).index
    yield Row("Controls", "unrelated secret table", "sorted_rows", material.share(found, ids, counts), control=True)
    found = gram.match_blind(rotated, model.table).index
    yield Row("Controls", "unrelated secret table", "inner_products", material.share(found, ids, counts), control=True)
    found = sorted_rows.match_sorted(fresh, model.table).index
    yield Row(
        "Controls", "orthogonal, fresh for each row", "sorted_rows", material.share(found, ids, counts), control=True
    )
    found = gram.match_blind(round_bfloat16(fresh), model.table).index
    yield Row(
        "Controls", "orthogonal, fresh for each row", "inner_products", material.share(found, ids, counts), control=True
    )


def one_request(material: Material) -> Iterator[Row]:
    """Orthogonal, from a single request and its own first and last token; mean over requests."""
    model, random = material.model, material.random()
    transform = scenarios.draw_transform("orthogonal", model.table.shape[1], random)
    requests = material.requests("pii_presidio", tokens=min(1000, material.tokens))
    known = np.array(model.known_tokens)
    for dtype in ("float32", "bfloat16"):
        hits = []
        for request in requests:
            inner = request[1:-1]
            sent = transform(model.table[inner], dtype)
            found = gram.match_known(sent, model.table, transform(model.table[known], dtype), known).index
            hits.append(found == inner)
        yield Row("One request", f"orthogonal, {dtype}", "inner_products_known", percent(np.concatenate(hits)))


def drift(material: Material) -> Iterator[Row]:
    """The served table and weights differ from the public ones by isotropic noise, a stand-in for fine-tuning."""
    model = material.model
    ids, counts = material.content(material.requests("banking77"))
    known = np.array(model.known_tokens)
    for strength in (0.1, 0.2, 0.3, 0.5):
        random = material.random()
        table = noise.add_noise(model.table, strength, random)
        reader = noise.add_noise(model.reader, strength, random)
        for kind in scenarios.TRANSFORMS:
            transform = scenarios.draw_transform(kind, model.table.shape[1], random)
            sent = transform(table[ids], "bfloat16")
            held, _ = scenarios.shuffled(reader, transform, random)
            setting = f"{kind}, drift {strength}"
            if kind == "permutation":
                found = sorted_rows.match_sorted(sent, model.table).index
                yield Row("Drift", setting, "sorted_rows", material.share(found, ids, counts))
                found = sorted_rows.match_and_learn(sent, model.table).matches.index
                yield Row("Drift", setting, "learned_order", material.share(found, ids, counts))
                aligned = weights.align_permuted(held, model.reader)
            else:
                anchors = transform(table[known], "bfloat16")
                found = gram.match_known(sent, model.table, anchors, known, rounds=4).index
                yield Row("Drift", setting, "inner_products_known", material.share(found, ids, counts))
                aligned = weights.align_rotated(held, model.reader)
            found = aligned.match(sent, model.table).index
            yield Row("Drift", setting, "weights", material.share(found, ids, counts))


def secret_base(material: Material) -> Iterator[Row]:
    """Neither table nor model known: equality, counts and bigrams, with reference text of the same or another kind."""
    model = material.model
    pairs = [(name, name) for name in scenarios.TEXTS] + [("banking77", "wikitext2"), ("pii_presidio", "wikitext2")]
    server_ids = material.random().permutation(len(model.table))
    for name, other in pairs:
        for amount in (5_000, 40_000) if name == other else (40_000,):
            requests = material.requests(name, tokens=amount)
            corpus = material.requests(other, tokens=200_000, reference=True)
            truth = np.concatenate(requests)
            kinds = server_ids[truth]
            counted = ~np.isin(truth, model.known_tokens)
            setting = f"{name}, {amount:,} tokens seen, reference {other}"
            if name == other:
                equal = equality.measure_equality(kinds, truth)
                yield Row("Secret base", setting, "repeated", equal.repeated)
                yield Row("Secret base", setting, "linked", equal.linked)
            counts = frequency.match_counts(kinds, np.concatenate(corpus))
            yield Row("Secret base", setting, "frequency", percent((frequency.read(kinds, counts) == truth)[counted]))
            bigrams = frequency.match_bigrams(requests, kinds, corpus)
            yield Row("Secret base", setting, "bigrams", percent((frequency.read(kinds, bigrams) == truth)[counted]))
            if name == other == "banking77" and amount == 40_000:
                names = material.random().permutation(len(model.table))
                renamed = [names[piece] for piece in corpus]
                guess = frequency.match_bigrams(requests, kinds, renamed)
                lost = percent((frequency.read(kinds, guess) == truth)[counted])
                yield Row(
                    "Secret base", "banking77, reference with tokens renamed at random", "bigrams", lost, control=True
                )


def linked_contexts(material: Material) -> Iterator[Row]:
    """Two deployments with fresh transforms, the base unknown: rows of the first feed-forward layer that are linked."""
    model, random = material.model, material.random()
    for kind in scenarios.TRANSFORMS:
        first, second = (
            scenarios.shuffled(model.reader, scenarios.draw_transform(kind, model.reader.shape[1], random), random)[0]
            for _ in range(2)
        )
        yield Row("Two contexts", kind, "contexts", contexts.link_contexts({"m": first}, {"m": second}))
        stranger = random.standard_normal(model.reader.shape, dtype=np.float32)
        yield Row(
            "Two contexts",
            f"{kind}, unrelated models",
            "contexts",
            contexts.link_contexts({"m": first}, {"m": stranger}),
            control=True,
        )


def known_plaintext(material: Material) -> Iterator[Row]:
    """Rows whose tokens the server knows; and a user account of its own."""
    model, random = material.model, material.random()
    width = model.table.shape[1]
    for dtype, rounding in (("float32", np.asarray), ("bfloat16", round_bfloat16)):
        for count in (1, 2, 3):
            draws = [
                known_rows.settled_features(rounding(model.table[random.choice(len(model.table), count)]))
                for _ in range(20)
            ]
            yield Row(
                "Known plaintext", f"{dtype}, {count} known rows", "places of features fixed", float(np.mean(draws))
            )
    transform = scenarios.draw_transform("orthogonal", width, random)
    assert transform.rotation is not None
    for count in (width // 4, width // 2, width):
        rows = model.table[random.choice(len(model.table), count, replace=False)].astype(np.float64)
        error = known_rows.rotation_error(rows @ transform.rotation, rows, transform.rotation)
        yield Row("Known plaintext", f"orthogonal, {count} known rows", "relative error of the matrix", 100 * error)
    ids, counts = material.content(material.requests("banking77"))
    found = known_rows.read_with_client(transform(model.table[ids], "bfloat16"), transform(model.table, "bfloat16"))
    yield Row(
        "Known plaintext", "server holds one client directory", "any user's tokens", material.share(found, ids, counts)
    )


def sold_noise(material: Material) -> Iterator[Row]:
    """Gaussian noise on embeddings, alone and on top of a permutation."""
    model = material.model
    ids, counts = material.content(material.requests("banking77"))
    for strength in (0.1, 0.5, 1.0, 2.0):
        random = material.random()
        noisy = noise.add_noise(model.table[ids], strength, random)
        found = noise.match_noisy(noisy, model.table).index
        yield Row("Noise", f"noise {strength}, no transform", "nearest row", material.share(found, ids, counts))
        permuted = scenarios.draw_transform("permutation", model.table.shape[1], random)
        found = sorted_rows.match_and_learn(permuted(noisy), model.table).matches.index
        yield Row("Noise", f"noise {strength}, permutation", "learned_order", material.share(found, ids, counts))


def row_scalings(material: Material) -> Iterator[Row]:
    """The enclave path's secret factor per token."""
    model, random = material.model, material.random()
    ids, counts = material.content(material.requests("banking77"))
    factors = random.lognormal(size=(len(ids), 1)).astype(np.float32)
    sent = factors * scenarios.draw_transform("permutation", model.table.shape[1], random)(model.table[ids])
    found = sorted_rows.match_sorted(sent, model.table, ignore_scale=True).index
    yield Row(
        "Row scaling", "permutation and a factor per token", "sorted unit rows", material.share(found, ids, counts)
    )
    found = sorted_rows.match_sorted(sent, model.table).index
    yield Row(
        "Row scaling",
        "permutation and a factor per token",
        "sorted_rows",
        material.share(found, ids, counts),
        control=True,
    )
    errors = []
    for _ in range(50):
        size = int(random.integers(8, 40))
        scores = np.exp(2 * random.standard_normal((12, size, size)))
        attention = scores / scores.sum(axis=2, keepdims=True)
        alpha = random.lognormal(size=size)
        handed_out = (alpha[:, None] * attention / alpha).astype(np.float32)
        errors.append(row_scaling.scaling_error(row_scaling.recover_row_scaling(handed_out), alpha))
    yield Row(
        "Row scaling",
        "factors from the enclave's float32 output, 50 draws",
        "worst relative error",
        max(errors),
        unit="",
    )


def correlations(material: Material) -> Iterator[Row]:
    """The paper's measure beside the real distance correlation, for transforms of which all tokens are recovered."""
    model, random = material.model, material.random()
    rows = model.table[random.choice(len(model.table), 600, replace=False)]
    for kind in scenarios.TRANSFORMS:
        seen = scenarios.draw_transform(kind, rows.shape[1], random)(rows)
        one = float(np.mean([distance_correlation.paper_correlation(a, b) for a, b in zip(rows, seen, strict=True)]))
        yield Row("Correlation", kind, "the paper's measure, mean over rows", one, unit="")
        both = distance_correlation.distance_correlation(rows, seen)
        yield Row("Correlation", kind, "distance correlation over 600 tokens", both, unit="")
    unrelated = random.standard_normal(rows.shape)
    value = distance_correlation.distance_correlation(rows, unrelated)
    yield Row("Correlation", "unrelated data", "distance correlation over 600 tokens", value, unit="")
    unit = unit_rows(rows)
    one = float(np.mean([distance_correlation.paper_correlation(a, b) for a, b in zip(unit, unrelated, strict=True)]))
    yield Row("Correlation", "unrelated data", "the paper's measure, mean over rows", one, unit="")


SECTIONS: tuple[Callable[[Material], Iterator[Row]], ...] = (
    public_base,
    public_base_controls,
    one_request,
    drift,
    secret_base,
    linked_contexts,
    known_plaintext,
    sold_noise,
    row_scalings,
    correlations,
)


def to_markdown(rows: list[Row]) -> str:
    """One table per section: settings down, attacks across."""
    lines: list[str] = []
    for section in dict.fromkeys(row.section for row in rows):
        here = [row for row in rows if row.section == section]
        attacks = list(dict.fromkeys(row.attack for row in here))
        lines += [f"### {section}", ""]
        lines.append("| setting | " + " | ".join(attack.replace("_", " ") for attack in attacks) + " |")
        lines.append("|---|" + "---:|" * len(attacks))
        for setting in dict.fromkeys(row.setting for row in here):
            cells = {row.attack: _cell(row) for row in here if row.setting == setting}
            lines.append(f"| {setting} | " + " | ".join(cells.get(attack, "") for attack in attacks) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    value = f"{row.value:.1f} %" if row.unit == "%" else f"{row.value:.2g}"
    return f"{value} (control)" if row.control else value


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m cloister.permute.attacks.table", description="Run all attacks.")
    parser.add_argument("--data", help="directory with banking77, pii_presidio and wikitext2")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens per text set and attack (default 2000)")
    parser.add_argument("--insecure-seed", type=int, default=0, help="seed of every draw (default 0)")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--plot", type=Path, help="write a bar chart here (PNG; needs matplotlib)")
    options = parser.parse_args(arguments)
    material = Material(
        scenarios.load_minilm(), scenarios.data_directory(options.data), options.tokens, options.insecure_seed
    )
    rows: list[Row] = []
    for section in SECTIONS:
        started = time.monotonic()
        rows += section(material)
        print(f"{section.__name__}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    print(to_markdown(rows))
    if options.json:
        content: dict[str, Any] = {"tokens": options.tokens, "seed": options.insecure_seed}
        content["rows"] = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.plot:
        from cloister.permute.attacks.plot import draw

        draw(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
