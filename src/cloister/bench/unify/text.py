"""Unification of texts: MiniLM as seed, five CLINC150 domains, Banking77 and OpenBookQA as owners.

    trial = Trial(Plan(), draw=0, cache=folder)
    trial.score("unified")      # {"travel": 0.97, ...}
    trial.score("FlexOlmo")

Every owner's test set is answered with its own candidates, by every method. `draw` decides what an owner trains on and
the orders of training. All methods get the same seed, private data, public data, count of proxies and count of steps of
the router; BTM, ModelSoup, BTX and FlexOlmo share their experts.

Settings were chosen on other rows of the training data (`Plan(development=True)`), never on test sets; for the
baselines too, see `Plan.routers` and `Plan.sharpness`.

What is expensive is kept in `cache` under a name that says all it depends on, so that a run which was stopped goes on
and ablations share experts. Without `cache` nothing is written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from cloister import __version__, storage
from cloister.bench.unify import text_data
from cloister.bench.unify.text_data import BANKING, COMMONSENSE, Owner, PublicKind
from cloister.errors import UsageError
from cloister.progress import SILENT, Progress
from cloister.unify import baselines, joint
from cloister.unify.baselines import Predictor
from cloister.unify.examples import Examples
from cloister.unify.experts import Settings, apply_delta, train_expert
from cloister.unify.joint import JointSettings
from cloister.unify.seeds import Seed
from cloister.unify.selection.looks import BY_KIND
from cloister.unify.training import stamp
from cloister.unify.views import view

OURS = "unified"
NO_PRIVACY = ("unrestricted", "pooled")
Vectors = NDArray[np.float32]
State = dict[str, torch.Tensor]
Scores = dict[str, float]  # owner -> accuracy


@dataclass(frozen=True)
class Variant:
    """How a unified model is made; the ablations change one of these."""

    selection: Literal["dpp", "relevance", "random"] = "dpp"
    aligned: bool = True  # experts see proxies too
    context: Literal["sequence", "none"] = "sequence"
    start: Literal["fit", "mean"] = "fit"
    shared: bool = True  # experts have a part of what the others learned
    public: PublicKind = "alpaca and wikipedia"


ABLATIONS = {
    "relevance only": Variant(selection="relevance"),
    "random proxies": Variant(selection="random"),
    "router by token": Variant(context="none"),
    "router starts at means": Variant(start="mean"),
    "nothing shared": Variant(shared=False),
    "experts not aligned": Variant(aligned=False),
    "other public data": Variant(public="questions and stories"),
    "no shared subjects": Variant(public="no shared subjects"),
}


@dataclass(frozen=True)
class Plan:
    """How large a trial is, and its settings."""

    private: Mapping[str, int] = field(default_factory=lambda: {"": 300, BANKING: 800, COMMONSENSE: 600})
    test: int = 200
    development: bool = False
    public: int = 6000
    proxies: int = 500
    pool: int = 3000
    max_tokens: int = 32
    share: float = 0.4  # of the others' changes in each expert
    blend: float = 0.9  # the context's share in the router at the start
    sharpness: float = 3.0  # FlexOlmo's means are multiplied by this
    domains: tuple[str, ...] = text_data.DOMAINS
    expert: Settings = field(
        default_factory=lambda: Settings(epochs=2, lr=2e-3, batch=12, proxy_batch=4, proxy_weight=0.15, keep_every=1e9)
    )
    rates: Mapping[str, float] = field(default_factory=lambda: {COMMONSENSE: 5e-4})  # where `expert.lr` is too much
    joint: JointSettings = field(default_factory=lambda: JointSettings(epochs=0.2, keep_every=1e9))
    routers: JointSettings = field(
        default_factory=lambda: JointSettings(epochs=0.2, router_lr=5e-3, keep_every=1e9)
    )  # of BTX and FlexOlmo
    together: JointSettings = field(
        default_factory=lambda: JointSettings(lr=5e-4, router_lr=2e-4, keep_every=1e9)
    )  # of the unrestricted model, on private data


QUICK = Plan(
    private={"": 32}, test=40, public=300, proxies=40, pool=150, domains=text_data.DOMAINS[:2],
    expert=Settings(epochs=1, lr=2e-3, batch=16, proxy_batch=8),
)  # fmt: skip


# What a score depends on, beside the draw: one that stays valid is not measured again.
COMMON = ("private", "test", "development", "max_tokens", "domains")
NEEDS = {
    "zero-shot": (),
    "pooled": ("expert",),
    "unrestricted": ("expert", "rates", "together", "blend"),
    "BTX": ("expert", "rates", "public", "proxies", "pool", "routers"),
    "FlexOlmo": ("expert", "rates", "public", "proxies", "pool", "routers", "sharpness"),
    OURS: ("expert", "rates", "public", "proxies", "pool", "joint", "share", "blend"),
}


@dataclass(frozen=True)
class Remembering(Seed):
    """A seed that answers a text under the same model once: BTM asks every expert what it was asked alone."""

    said: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def encode(self, model: Any, inputs: Any) -> torch.Tensor:
        """As any seed; without gradients from memory."""
        if torch.is_grad_enabled() or isinstance(inputs, np.ndarray):
            return super().encode(model, inputs)
        if new := [text for text in dict.fromkeys(inputs) if (id(model), text) not in self.said]:
            self.said.update(zip(((id(model), text) for text in new), super().encode(model, new), strict=True))
        return torch.stack([self.said[id(model), text] for text in inputs])


class Trial:
    """All methods on one draw of the data."""

    def __init__(
        self,
        plan: Plan,
        *,
        draw: int = 0,
        cache: Path | None = None,
        root: Path | None = None,
        progress: Progress = SILENT,
    ) -> None:
        self.plan, self.draw, self.cache, self.progress = plan, draw, cache, progress
        self.root = root or text_data.data_directory()
        self.seconds: dict[str, float] = {}  # by stage
        self._public: dict[str, Examples] = {}
        self._compared: dict[str, tuple[Vectors, dict[str, Vectors]]] = {}
        self._chosen: dict[tuple[str, str], dict[str, Examples]] = {}
        self._states: dict[str, State] = {}
        self._alone: dict[str, Predictor] = {}
        self._scores: dict[str, Scores] = {}

    # ---- what everybody starts from

    @cached_property
    def seed(self) -> Any:
        """MiniLM."""
        return text_data.minilm(self.plan.max_tokens)

    @cached_property
    def memory(self) -> Remembering:
        """The same, for experts that are asked more than once."""
        return Remembering(**{f.name: getattr(self.seed, f.name) for f in fields(self.seed)})

    @cached_property
    def owners(self) -> list[Owner]:
        """The organisations."""
        plan = self.plan
        return text_data.owners(
            self.root, plan.domains, dict(plan.private), plan.test, self.draw, development=plan.development
        )

    @cached_property
    def private(self) -> dict[str, Examples]:
        """Each owner's training data."""
        return {owner.name: owner.train for owner in self.owners}

    def public(self, kind: PublicKind) -> Examples:
        """Public examples."""
        if kind not in self._public:
            tasks = [owner.task for owner in self.owners]
            self._public[kind] = text_data.public(self.root, kind, self.plan.public, seed=self.seed, tasks=tasks)
        return self._public[kind]

    def compared(self, kind: PublicKind) -> tuple[Vectors, dict[str, Vectors]]:
        """What a choice of proxies compares: vectors of the public examples, and of each owner's."""
        if kind not in self._compared:
            shared = self.public(kind)
            path = self._vectors_file(shared)
            if path and path.is_file():
                with np.load(path, allow_pickle=False) as kept:
                    self._compared[kind] = kept[""], {name: kept[name] for name in self.private}
                return self._compared[kind]
            with self._clock("vectors"):
                here, vectors = view(self.seed, shared, progress=self.progress)
                own = {name: here.vectors(held, progress=self.progress) for name, held in self.private.items()}
            self._compared[kind] = vectors, own
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                with storage.fresh_file(path) as file:
                    np.savez(file, **{"": vectors}, **own)  # type: ignore[arg-type]
        return self._compared[kind]

    def proxies(self, selection: str, kind: PublicKind) -> dict[str, Examples]:
        """The public examples that stand for each owner."""
        from cloister.unify.selection import Selection, choose

        if (selection, kind) not in self._chosen:
            shared, (vectors, private) = self.public(kind), self.compared(kind)
            found = {}
            for number, (name, own) in enumerate(private.items()):
                wanted = Selection(
                    method=selection, count=self.plan.proxies, pool=min(self.plan.pool, len(shared)),  # type: ignore[arg-type]
                    seed_for_folds=1000 * self.draw + number,
                )  # fmt: skip
                with self._clock(f"selection {selection}"):
                    indices = choose(own, vectors, wanted, progress=self.progress).indices
                found[name] = shared.rows(list(indices))
            self._chosen[selection, kind] = found
        return self._chosen[selection, kind]

    def experts(self, proxies: Mapping[str, Examples] | None) -> dict[str, State]:
        """Each owner's feed-forward weights, trained on its own data and its proxies (None: on its own alone)."""
        return {
            owner.name: self._expert(owner, None if proxies is None else proxies[owner.name]) for owner in self.owners
        }

    def _expert(self, owner: Owner, proxies: Examples | None) -> State:
        rate = self.plan.rates.get(owner.name, self.plan.expert.lr)
        settings = replace(self.plan.expert, lr=rate, seed_for_order=self.draw)
        if proxies is None:  # then nothing depends on these
            settings = replace(settings, proxy_batch=0, proxy_weight=0.0)
        what = {"settings": asdict(settings), "task": owner.task.key(), "seed": self.seed.fingerprint}
        name = stamp(**what, private=owner.train.digest(), proxies=proxies and proxies.digest())
        if name not in self._states:
            folder = self.cache and self.cache / "experts" / name[:24]
            result = train_expert(
                self.seed, owner.task, owner.train, proxies, settings, workdir=folder, progress=self.progress
            )
            kind = "plain" if proxies is None else "aligned"
            self._add(f"experts {kind}", result.seconds)
            self._states[name] = apply_delta(self.seed, result.delta)
        return self._states[name]

    # ---- methods

    def methods(self) -> dict[str, Callable[[], Predictor]]:
        """What can be scored, by name; nothing is trained before it is called."""
        seed, plan = self.seed, self.plan
        tasks = {owner.name: owner.task for owner in self.owners}
        routers = replace(plan.routers, seed_for_order=self.draw)
        common = Variant()

        def flex(selection: str) -> Predictor:
            return baselines.flex_olmo(
                seed, self.experts(None), self.proxies(selection, common.public), routers,
                sharpness=plan.sharpness, progress=self.progress,
            )  # fmt: skip

        def alone(name: str) -> Predictor:
            if name not in self._alone:
                owner = next(one for one in self.owners if one.name == name)
                self._alone[name] = baselines.alone(self.memory, name, self._expert(owner, None))
            return self._alone[name]

        def btm() -> Predictor:
            return Predictor("BTM", self.memory, tuple(alone(name).models[0] for name in tasks))

        def btx() -> Predictor:
            chosen = self.proxies("relevance", common.public)
            return baselines.btx(seed, self.experts(None), chosen, routers, progress=self.progress)

        def pooled() -> Predictor:
            settings = replace(plan.expert, seed_for_order=self.draw)
            return baselines.pooled(
                seed, tasks, self.private, settings, workdir=self._folder("pooled"), progress=self.progress
            )

        def unrestricted() -> Predictor:
            settings = replace(plan.together, seed_for_order=self.draw)
            return baselines.unrestricted(
                seed, self.experts(None), tasks, self.private, settings, blend=plan.blend, progress=self.progress
            )

        made: dict[str, Callable[[], Predictor]] = {
            OURS: lambda: self.unify(common),
            "zero-shot": lambda: baselines.zero_shot(seed),
            **{f"expert {owner.name}": partial(alone, owner.name) for owner in self.owners},
            "BTM": btm,
            "ModelSoup": lambda: baselines.soup(seed, self.experts(None)),
            "BTX": btx,
            "FlexOlmo": lambda: flex("relevance"),
            "FlexOlmo, our selection": lambda: flex("dpp"),
            "pooled": pooled,
            "unrestricted": unrestricted,
        }
        return made | {f"{OURS}: {name}": partial(self.unify, v) for name, v in ABLATIONS.items()}

    def unify(self, variant: Variant) -> Predictor:
        """Our model."""
        from cloister.unify.moe import unify

        chosen = self.proxies(variant.selection, variant.public)
        states = self.experts(chosen if variant.aligned else None)
        settings = replace(self.plan.joint, seed_for_order=self.draw)
        with self._clock("router start"):
            together = joint.shared(self.seed, states, self.plan.share if variant.shared else 0.0)
            model = unify(self.seed.model, together, context=None if variant.context == "sequence" else "none")
            self.start(model, chosen, variant)
        with self._clock("joint training"):
            joint.train_jointly(model, self.seed, chosen, states, settings, progress=self.progress)
        return Predictor(OURS, self.seed, (model,))

    def start(self, model: Any, chosen: Mapping[str, Examples], variant: Variant) -> None:
        """Set the router before the joint training."""
        from cloister.unify.moe import set_router

        vectors = joint.router_vectors_from_proxies(self.seed, chosen, how=variant.start)
        set_router(model, vectors, blend=None if variant.context == "none" else self.plan.blend)

    # ---- scores

    def score(self, method: str) -> Scores:
        """Each owner's accuracy under a method, from the cache if it was measured before."""
        make = self.methods().get(method)
        if make is None:
            raise UsageError(f"There is no method {method!r}.", advice=f"Methods: {', '.join(self.methods())}.")
        if method in self._scores:
            return self._scores[method]
        path = self._score_file(method)
        if path and path.is_file():
            kept = json.loads(path.read_text())
            self.seconds |= {name: value for name, value in kept["seconds"].items() if name not in self.seconds}
            self._scores[method] = kept["scores"]
            return self._scores[method]
        predictor = make()
        with (
            self.progress.task(f"Evaluating {method}", total=len(self.owners), unit="owners") as told,
            self._clock("evaluation"),
        ):
            found: Scores = {}
            for owner in self.owners:
                found[owner.name] = predictor.evaluate(owner.task, owner.test).value
                told.advance()
        self._scores[method] = found
        if path:
            about: dict[str, Any] = {"method": method, "draw": self.draw, "scores": found, "seconds": self.seconds}
            if method.startswith(OURS):
                tests = {owner.name: owner.test for owner in self.owners}
                about["routing"] = joint.routing_accuracy(predictor.models[0], self.seed, tests)
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.write_text(path, json.dumps(about, indent=1) + "\n")
        return found

    def forget(self) -> None:
        """Give the memory of all models back; scores are kept."""
        self._alone.clear()
        self._states.clear()
        self.memory.said.clear()

    def _score_file(self, method: str) -> Path | None:
        if self.cache is None:
            return None
        kind = method.partition(":")[0].partition(",")[0]
        needs = COMMON + NEEDS.get(kind, ("expert", "rates"))
        plan = {key: value for key, value in asdict(self.plan).items() if key in needs}
        name = stamp(version=__version__, plan=plan, draw=self.draw, method=method)
        return self.cache / "scores" / f"{name[:24]}.json"

    def _folder(self, method: str) -> Path | None:
        name = stamp(plan=asdict(self.plan.expert), private=dict(self.plan.private), draw=self.draw, method=method)
        return self.cache and self.cache / "models" / name[:24]

    def _vectors_file(self, public: Examples) -> Path | None:
        private = {name: own.digest() for name, own in self.private.items()}
        name = stamp(seed=self.seed.fingerprint, look=BY_KIND[self.seed.kind], public=public.digest(), private=private)
        return self.cache and self.cache / "vectors" / f"{name[:24]}.npz"

    @contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._add(stage, time.perf_counter() - began)

    def _add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


def average(scores: Mapping[str, float]) -> float:
    """The mean over owners."""
    return float(np.mean(list(scores.values())))
