"""The real steps of a round: seeds, selection, experts, reports and the unified model of `cloister.unify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from cloister.errors import NotAvailable, UsageError
from cloister.progress import Progress

from .recipe import Terms
from .steps import Received, Shapes


@dataclass(frozen=True)
class Privacy:
    """What an owner does beyond the recipe to bound what its contribution reveals. 0: nothing."""

    epsilon: float = 0.0  # of the expert
    selection_epsilon: float = 0.0
    routing_epsilon: float = 0.0
    delta: float = 1e-5


class RealSteps:
    """`Steps` with models. Checkpoints and public sets are read once."""

    def __init__(self, privacy: Privacy | None = None, *, measure: bool = True) -> None:
        self.privacy, self.measure = privacy or Privacy(), measure

    # What is read -----------------------------------------------------------------------------------------------------

    def fingerprint(self, seed: Path) -> str:
        """SHA-256 over the tensors of a checkpoint."""
        return str(_seed(seed).fingerprint)

    def public(self, source: Path, out: Path, *, licence: str, description: str) -> str:
        """Write the public examples of `source` as an invitation's folder; their SHA-256."""
        from cloister.unify import examples

        if source.is_dir():
            given = examples.public_set(source)
            table, licence, description = given.examples, licence or given.licence, description or given.description
        else:
            table = examples.read(source)
        examples.write_public_set(out, table, licence=licence, description=description)
        return examples.public_set(out).sha256

    def public_ids(self, public: Path) -> Sequence[str]:
        """The ids of the public examples."""
        return tuple(_public(public).ids)

    # An owner's -------------------------------------------------------------------------------------------------------

    def choose(
        self, seed: Path, public: Path, private: Path, terms: Terms, workdir: Path, progress: Progress
    ) -> Sequence[str]:
        """The ids of the proxies, best first."""
        selection = _part("selection.choose")
        wanted, have = terms.selection, _public(public)
        settings = selection.Selection(
            method=wanted.method,
            pool=min(wanted.pool, len(have)),
            count=min(wanted.count, len(have)),
            tempering=wanted.tempering,
            gamma=wanted.gamma,
            folds=wanted.folds,
            negatives=wanted.negatives,
            seed_for_folds=wanted.seed_for_folds,
        )
        model = _seed(seed)
        own = model.vectors(_examples(private), progress=progress)
        others = model.vectors(have, progress=progress)
        chosen = selection.choose(own, others, settings, progress=progress)
        return [have.ids[int(index)] for index in chosen.indices]

    def train(
        self,
        seed: Path,
        public: Path,
        private: Path,
        proxies: Sequence[str],
        terms: Terms,
        workdir: Path,
        progress: Progress,
    ) -> Mapping[str, Any]:
        """The expert's tensors by name."""
        from cloister.unify.experts import DpSettings, train_expert

        dp = DpSettings(self.privacy.epsilon, self.privacy.delta) if self.privacy.epsilon else None
        model = _seed(seed)
        return train_expert(
            model,
            _task(model, terms, public),
            _examples(private),
            _public(public).by_id(proxies),
            _settings(terms, dp),
            workdir=_folder(workdir / "training"),
            progress=progress,
        ).delta

    def routing(
        self,
        seed: Path,
        public: Path,
        private: Path,
        proxies: Sequence[str],
        terms: Terms,
        workdir: Path,
        progress: Progress,
    ) -> Mapping[str, Any] | None:
        """Clipped and noisy routing vectors of private data."""
        import torch

        from cloister.unify.disclosure.routing_vectors import Yardstick, block_inputs, private_vectors

        if not self.privacy.routing_epsilon:
            raise UsageError(
                "The recipe asks for routing vectors of private data, which are only sent with noise.",
                advice="Say --dp-routing-epsilon, or ask the coordinator for vectors from proxies.",
            )
        model = _seed(seed)
        have = _public(public)
        shared = block_inputs(model, have, progress=progress)
        made = private_vectors(
            block_inputs(model, _examples(private), progress=progress),
            block_inputs(model, have.by_id(proxies), progress=progress),
            Yardstick.of(shared),
            epsilon=self.privacy.routing_epsilon,
            delta=self.privacy.delta,
        )
        return {"vectors": torch.from_numpy(made.vectors)}

    def report(
        self,
        seed: Path,
        public: Path,
        private: Path,
        proxies: Sequence[str],
        expert: Path,
        terms: Terms,
        workdir: Path,
        progress: Progress,
    ) -> Mapping[str, Any]:
        """What leaves and what bounds it. Fixed sentences: nothing in it is a function of the private examples."""
        privacy = self.privacy
        return {
            "artefacts": [
                {
                    "artefact": "proxy ids",
                    "function_of_private_data": "through the relevance classifier",
                    "bounded_by_epsilon": privacy.selection_epsilon or None,
                },
                {
                    "artefact": "expert weights",
                    "function_of_private_data": "through training",
                    "bounded_by_epsilon": privacy.epsilon or None,
                },
                {
                    "artefact": "routing vectors",
                    "sent": terms.router.vectors == "private",
                    "bounded_by_epsilon": privacy.routing_epsilon or None,
                },
            ],
            "delta": privacy.delta,
            "measured": {},
        }

    # The coordinator's ------------------------------------------------------------------------------------------------

    def expert_shapes(self, seed: Path, terms: Terms) -> Shapes:
        """The tensors of an expert: LoRA factors of every linear layer of the blocks, or the blocks in full."""
        from torch import nn

        from cloister.unify import experts

        model = _seed(seed).model
        if terms.expert.method == "full":
            own = dict(model.named_parameters())
            return {name: [tuple(own[name].shape)] for name in experts.feed_forward(model)}
        found: dict[str, list[tuple[int, ...]]] = {}
        rank = terms.expert.rank
        for name, layer in experts.linears(model).items():
            weight: Any = layer.weight
            wide, deep = weight.shape if isinstance(layer, nn.Linear) else tuple(reversed(weight.shape))
            found[name + experts.A], found[name + experts.B] = [(rank, deep)], [(wide, rank)]
        return found

    def routing_shapes(self, seed: Path, terms: Terms) -> Shapes:
        """One vector a layer."""
        from cloister.unify.moe.blocks import find

        model = _seed(seed)
        return {"vectors": [(len(find(model.model)), model.hidden)]}

    def build(
        self,
        seed: Path,
        public: Path,
        received: Sequence[Received],
        terms: Terms,
        workdir: Path,
        out: Path,
        progress: Progress,
        onto: Path | None = None,
    ) -> None:
        """Stack, start the router, train jointly, write the checkpoint."""
        import torch
        from safetensors.torch import load_file

        from cloister.unify import joint, moe
        from cloister.unify.experts import apply_delta
        from cloister.unify.moe import folders

        torch.manual_seed(terms.router.seed_for_order)
        model, have, wanted = _seed(seed), _public(public), terms.router
        states = {found.name: apply_delta(model, load_file(str(found.expert))) for found in received}
        proxies = {found.name: have.by_id(found.proxies) for found in received}
        vectors = _vectors(model, received, proxies, terms)
        new = list(states)
        if onto is None:
            context = None if wanted.context == "auto" else wanted.context
            unified = moe.unify(model.model, states, top_k=wanted.top_k, context=context, fallback=wanted.fallback)
            moe.set_router(unified, vectors)
        else:
            unified = folders.Folder(onto).model()
            there = moe.owners(unified)
            if gone := sorted(set(there) - set(states)):
                raise UsageError(
                    f"{onto} has an expert of {', '.join(gone)}, of whom no contribution is here.",
                    advice="Take them out first: cloister unify remove MODEL OWNER --out OUT",
                )
            new = [name for name in states if name not in there]
            for name in new:
                row = list(states).index(name)
                moe.add_owner(unified, name, states[name], [layer[row] for layer in vectors])
        if wanted.epochs and new:
            joint.train_jointly(
                unified,
                model,
                proxies,
                states,
                joint.JointSettings(
                    epochs=wanted.epochs,
                    lr=wanted.lr,
                    router_lr=wanted.router_lr,
                    batch=wanted.batch,
                    seed_for_order=wanted.seed_for_order,
                ),
                workdir=_folder(workdir / "joint"),
                progress=progress,
                only=None if onto is None else new,
            )
        folders._copy_rest(seed, out)
        unified.save_pretrained(out)

    def remove(self, model: Path, owner: str, out: Path) -> None:
        """The unified model without one owner's expert."""
        from cloister.unify import moe
        from cloister.unify.moe import folders

        unified = folders.Folder(model).model()
        moe.remove_owner(unified, owner)
        folders._copy_rest(model, out)
        unified.save_pretrained(out)

    def export(self, model: Path, out: Path) -> None:
        """The unified model in a stock architecture."""
        from cloister.unify import moe

        moe.export_stock(model, out)


def _part(name: str) -> Any:
    """A module that this installation may lack."""
    try:
        return import_module(f"cloister.unify.{name}")
    except ModuleNotFoundError as error:
        raise NotAvailable(
            f"This needs {error.name}, which is not here.", advice="pip install 'cloister[unify]'."
        ) from None


@lru_cache(maxsize=2)
def _seed(path: Path) -> Any:
    from cloister.unify.seeds import Seed

    return Seed.load(path)


@lru_cache(maxsize=2)
def _public(folder: Path) -> Any:
    from cloister.unify import examples

    return examples.public_set(folder).examples


def _examples(private: Path) -> Any:
    from cloister.unify import examples

    return examples.read(private)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _task(seed: Any, terms: Terms, public: Path) -> Any:
    from cloister.unify import tasks

    wanted = terms.task
    if wanted.kind == "classify":
        return tasks.Classify(wanted.labels)
    if wanted.kind == "choose":
        return tasks.Choose()
    if wanted.kind == "language":
        return tasks.Language(wanted.block)
    return tasks.Images(wanted.labels, tasks.prototypes(seed, _public(public), wanted.labels))


def _settings(terms: Terms, dp: Any) -> Any:
    from cloister.unify.experts import Settings

    wanted = terms.expert
    return Settings(
        method=wanted.method,
        rank=wanted.rank,
        alpha=wanted.alpha,
        epochs=wanted.epochs,
        lr=wanted.lr,
        batch=wanted.batch,
        proxy_batch=wanted.proxy_batch,
        proxy_weight=wanted.proxy_weight,
        seed_for_order=wanted.seed_for_order,
        dp=dp,
    )


def _vectors(seed: Any, received: Sequence[Received], proxies: Mapping[str, Any], terms: Terms) -> list[Any]:
    """Where the router starts: (owners, hidden) a layer."""
    import torch
    from safetensors.torch import load_file

    from cloister.unify.joint import router_vectors_from_proxies

    if terms.router.vectors == "proxies":
        return router_vectors_from_proxies(seed, proxies, how=terms.router.start)
    sent = [load_file(str(found.routing))["vectors"].float() for found in received]
    return list(torch.stack(sent, dim=1))
