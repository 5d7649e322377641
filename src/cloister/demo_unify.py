"""The demo's part about `unify`: three organisations, one model, and what the coordinator saw of each.

The data ships with the package (`cloister.embedded.owners`). Every party works through the same files as if it were far
away. The finished model is then protected, served and asked like any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cloister import embedded, modes
from cloister.progress import Progress

OWNERS = ("bank", "travel", "kitchen")
QUESTION = "the machine at the station has eaten my card"
TERMS: dict[str, Any] = {
    "selection": {"count": 60, "pool": 400, "folds": 3},
    "expert": {"epochs": 3, "lr": 1e-3, "proxy_batch": 8},
    "router": {"epochs": 0},
}
SHOWN = 3  # proxies of each owner


def run(folder: Path, minilm: Path, progress: Progress) -> dict[str, Any]:
    """Make the model, measure it beside its seed, and ask it through a gateway."""
    from cloister.unify.evaluation import evaluate
    from cloister.unify.rounds import recipe, simulate
    from cloister.unify.rounds.real import RealSteps

    home = embedded.owners()
    names = (home / "labels.txt").read_text().split()
    private = {name: home / f"{name}-train.csv" for name in OWNERS}
    tests = {name: home / f"{name}-test.csv" for name in OWNERS}
    steps = RealSteps(measure=False)
    round_ = simulate.prepare(
        folder, minilm, home / "public.jsonl", private,
        steps=steps, terms=TERMS, task=recipe.Task(kind="classify", labels=tuple(names)),
    )  # fmt: skip
    model = folder / simulate.MODEL
    told = simulate.run(folder, round_, private, model, steps=steps, progress=progress)
    found = evaluate(model, tests, progress=progress)
    return {
        "owners": told,
        "seed": _of_the_seed(minilm, names, tests),
        "unified": {name: one.score.value for name, one in found.items()},
        "routes": {name: one.routes for name, one in found.items()},
        "seen": {name: _seen(round_.folder / "received" / name, home / "public.jsonl") for name in OWNERS},
        "asked": _ask(folder, model, progress),
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """For people."""
    shown = []
    for name in OWNERS:
        seen = found["seen"][name]
        examples = "; ".join(f'"{text}"' for text in seen["chosen"])
        shown.append(
            (
                f"{name}",
                f"right {found['seed'][name]:.0%} with the public seed, {found['unified'][name]:.0%} with the unified "
                f"model; {found['routes'][name][name]:.0%} of its tokens go to its own expert",
            )
        )
        shown.append(
            (
                "  the coordinator saw",
                f"{seen['bytes'] / 1e6:.1f} MB of weights and {seen['count']} ids of public examples: {examples}",
            )
        )
    asked = found["asked"]
    shown += [
        ("never left an owner", "its examples, gradients, losses"),
        ("so", "ids tell the subject, weights about how many; they can be tested for single examples (docs/unify.md)"),
        ("you ask the model", f'"{asked["question"]}", protected and through a gateway'),
        ("it answers", f"{asked['label']} (the plain model: {asked['plain']})"),
    ]
    return shown


def _seen(received: Path, public: Path) -> dict[str, Any]:
    """What the coordinator holds of an owner."""
    texts = {row["id"]: row["text"] for row in map(json.loads, public.read_text().splitlines())}
    ids = json.loads((received / "proxies.json").read_text())["ids"]
    size = (received / "expert.safetensors").stat().st_size
    return {"count": len(ids), "bytes": size, "chosen": [texts[one] for one in ids[:SHOWN]]}


def _of_the_seed(minilm: Path, names: list[str], tests: dict[str, Path]) -> dict[str, float]:
    from cloister.unify import examples
    from cloister.unify.seeds import Seed
    from cloister.unify.tasks import Classify

    seed, task = Seed.load(minilm), Classify(tuple(names))
    return {name: task.evaluate(seed.model, seed, examples.read(path)).value for name, path in tests.items()}


def _ask(folder: Path, model: Path, progress: Progress) -> dict[str, Any]:
    """The label of the question, by the protected model through server and gateway, and by the plain one."""
    from cloister.bench.parties import Parties
    from cloister.demo import embed
    from cloister.unify import labels
    from cloister.unify.seeds import Seed

    out = folder / "protected"
    made = modes.get("permute").protect(model, out, base="secret", progress=progress)
    with Parties(folder) as parties, progress.task("Asking the unified model"):
        vectors = embed(
            parties.gateway(out / "client", parties.serve(out / "server", "--dtype", "float32")), [QUESTION]
        )
    seed = Seed.load(model)
    plain = seed.encode_all(seed.model, [QUESTION]).numpy()
    return {
        "question": QUESTION,
        "label": labels.read(out / "client").nearest(vectors)[0],
        "plain": labels.read(model).nearest(plain)[0],
        "max_difference": float(np.abs(vectors - plain).max()),
        "worth": made.protection.label,
    }
