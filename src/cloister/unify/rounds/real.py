"""The real steps of a round: seeds, selection, experts, reports and the unified model of `cloister.unify`.

Each step of an owner writes down what it did about privacy (`disclosure.claims`), and the report is made from that.
With an epsilon, private examples are encoded one at a time: padding to a longer neighbour changes the last bits of a
vector, and a bound for one example must not depend on that.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cloister.errors import BrokenCheckpoint, DataError, NotAvailable, UsageError, WouldRevealSecret
from cloister.progress import Progress
from cloister.unify import labels

from .recipe import Terms
from .steps import SAME_FOR_ALL, Received, Shapes


@dataclass(frozen=True)
class Privacy:
    """What an owner does beyond the recipe to bound what its contribution reveals. 0: nothing."""

    epsilon: float = 0.0  # of the expert
    selection_epsilon: float = 0.0
    routing_epsilon: float = 0.0
    delta: float = 1e-5  # of each of them

    def check(self) -> None:
        """Before hours of work: whether these numbers are a guarantee, and what it takes is here."""
        epsilons = (self.epsilon, self.selection_epsilon, self.routing_epsilon)
        if not all(0 <= epsilon < 1000 for epsilon in epsilons) or not 0 < self.delta < 1:
            raise UsageError(
                "Differential privacy needs an epsilon from 0 (none) to 1000 and a delta between 0 and 1.",
                advice="Usual are epsilons from 1 to 10, and a delta below one over the number of examples.",
            )
        needed = {"opacus": self.epsilon, "dp_accounting": self.selection_epsilon or self.routing_epsilon}
        missing = [name for name, used in needed.items() if used and find_spec(name) is None]
        if missing:
            raise NotAvailable(
                f"Differential privacy needs {' and '.join(missing)}, which this installation lacks.",
                advice="pip install 'cloister[dp]'",
            )

    def text(self) -> str:
        """The decisions in one line."""
        parts = {"expert": self.epsilon, "selection": self.selection_epsilon, "routing vectors": self.routing_epsilon}
        told = [f"{name} epsilon {value:g}" for name, value in parts.items() if value]
        return f"{', '.join(told)}, delta {self.delta:g}" if told else "no differential privacy"


DISCLOSURE = "disclosure"  # in an owner's working folder: the page that stays


class RealSteps:
    """`Steps` with models. Checkpoints and public sets are read once."""

    def __init__(
        self, privacy: Privacy | None = None, *, measure: bool = True, references: int | None = None,
        max_membership: float = 1.0, learning_rate: float | None = None,
    ) -> None:  # fmt: skip
        """`measure`: attack one's own contribution, its weights with this many reference experts (0: all but those). An
        expert that the attack does better on than `max_membership` (AUC) does not become a contribution.
        `learning_rate`: the owner's, instead of the terms'; not all data are learnt at the same rate."""
        self.privacy, self.measure, self.max_membership = privacy or Privacy(), measure, max_membership
        self.learning_rate = learning_rate
        self.references = _part("disclosure.contribution").REFERENCES if references is None else references
        if self.references == 1:
            raise UsageError("One reference expert is no reference.", advice="Give 0, or at least 2.")
        if max_membership < 1 and not (measure and self.references):
            raise UsageError("What is not measured cannot be refused.", advice="Leave out --max-membership.")
        if learning_rate is not None and not 0 < learning_rate <= 10:
            raise UsageError(f"{learning_rate} is no learning rate.", advice="Usual are 0.0001 to 0.01.")
        self.privacy.check()
        _part("seeds").own_progress_only()

    @property
    def decisions(self) -> str:
        """What the owner decided beyond the terms."""
        own = "" if self.learning_rate is None else f", learning rate {self.learning_rate:g}"
        return self.privacy.text() + own

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

    def public_digest(self, public: Path) -> str:
        """SHA-256 of the file with the public examples, as it was when it was read."""
        return str(_public_set(public).sha256)

    def public_ids(self, public: Path) -> Sequence[str]:
        """The ids of the public examples."""
        return tuple(_public(public).ids)

    # An owner's -------------------------------------------------------------------------------------------------------

    def choose(
        self, seed: Path, public: Path, private: Path, owner: str, terms: Terms, workdir: Path, progress: Progress
    ) -> Sequence[str]:
        """The ids of the proxies, best first."""
        from cloister.unify.views import view

        if self.privacy.routing_epsilon and terms.router.vectors != "private":
            raise UsageError(
                "This round takes no routing vectors from owners, so --dp-routing-epsilon bounds nothing.",
                advice="Leave it out.",
            )
        selection, claims = _part("selection.choose"), _part("disclosure.claims")
        wanted, have, epsilon = terms.selection, _public(public), self.privacy.selection_epsilon
        at_random = wanted.method == "random"
        noisy = bool(epsilon) and not at_random
        settings = selection.Selection(
            method=wanted.method,
            pool=min(wanted.pool, len(have)),
            count=min(wanted.count, len(have)),
            tempering=wanted.tempering,
            gamma=wanted.gamma,
            kernel=wanted.kernel,
            folds=wanted.folds,
            negatives=wanted.negatives,
            seed_for_folds=_draw(terms, owner) if at_random else wanted.seed_for_folds,
            epsilon=epsilon if noisy else None,
            delta=self.privacy.delta if noisy else None,
        )
        model = _seed(seed)
        here, others = view(model, have, wanted.look, progress=progress)
        own = others[:2] if at_random else here.vectors(_examples(private), progress=progress, batch=_alone(noisy))
        chosen = selection.choose(own, others, settings, progress=progress)
        if noisy and chosen.privacy is None:
            raise RuntimeError("the choice was to be private and was not")
        done = claims.Done("proxy ids", "independent" if at_random else "plain")
        if chosen.privacy is not None:
            spent = chosen.privacy
            done = claims.Done("proxy ids", "noise", spent.epsilon, spent.delta, noise=(2 * spent.rho) ** -0.5)
        done.keep(workdir)
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
        from cloister.unify.disclosure.claims import Done
        from cloister.unify.experts import train_expert

        model, dp = _seed(seed), self._dp()
        made = train_expert(
            model,
            _task(model, terms, public),
            _examples(private),
            _public(public).by_id(proxies),
            self._settings(terms, dp),
            workdir=_folder(workdir / "training"),
            progress=progress,
        )
        done = Done("expert weights", "plain")
        if dp is not None:
            if made.epsilon is None or made.epsilon > dp.epsilon:
                raise RuntimeError("the training was to be private and was not")
            # What was asked for, not the little less that was spent: that is a function of the noisy count.
            done = Done("expert weights", "stated", dp.epsilon, dp.delta)
        done.keep(workdir)
        return made.delta

    def _settings(self, terms: Terms, dp: Any) -> Any:
        from cloister.unify.experts import Settings

        wanted = terms.settled().expert.model_dump()
        return Settings(**wanted | {"lr": self.learning_rate or wanted["lr"], "dp": dp})

    def _dp(self) -> Any:
        from cloister.unify.experts import DpSettings

        return DpSettings(self.privacy.epsilon, self.privacy.delta) if self.privacy.epsilon else None

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

        from cloister.unify.disclosure.claims import Done
        from cloister.unify.disclosure.routing_vectors import Yardstick, private_vectors
        from cloister.unify.views import block_inputs

        if not self.privacy.routing_epsilon:
            raise UsageError(
                "The recipe asks for routing vectors of private data, which are only sent with noise.",
                advice="Say --dp-routing-epsilon, or ask the coordinator for vectors from proxies.",
            )
        model = _seed(seed)
        have = _public(public)
        shared = block_inputs(model, have, progress=progress)
        made = private_vectors(
            block_inputs(model, _examples(private), progress=progress, batch=_alone(True)),
            block_inputs(model, have.by_id(proxies), progress=progress),
            Yardstick.of(shared),
            epsilon=self.privacy.routing_epsilon,
            delta=self.privacy.delta,
        )
        Done("routing vectors", "noise", made.epsilon, made.delta, noise=made.noise).keep(workdir)
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
        """What leaves and what bounds it, from what the steps wrote down; and, for the owner, what it reveals."""
        from cloister.unify.disclosure import claims

        done = self._done(terms, workdir)
        found = claims.public(done)
        if self.measure:
            self.measured(seed, public, private, proxies, terms, workdir, progress)
        return found

    def measured(
        self,
        seed: Path,
        public: Path,
        private: Path,
        proxies: Sequence[str],
        terms: Terms,
        workdir: Path,
        progress: Progress,
    ) -> Mapping[str, Any]:
        """Attack one's own contribution and write the page that stays: `workdir/disclosure`. What an earlier run found
        with as many reference experts is taken as it is."""
        from cloister.unify.disclosure import contribution, report

        folder = workdir / DISCLOSURE
        if not (folder / report.JSON).exists() or report.read(folder)["asked"] != self.references:
            model, have = _seed(seed), _public(public)
            place = {name: row for row, name in enumerate(have.ids)}
            found = contribution.of_contribution(
                model,
                _task(model, terms, public),
                _examples(private),
                have,
                [place[name] for name in proxies],
                self._settings(terms, self._dp()),
                self._done(terms, workdir),
                sent=_sent(workdir) if terms.router.vectors == "private" else None,
                look=terms.selection.look,
                references=self.references,
                workdir=_folder(workdir / "references"),
                progress=progress,
            )
            told = f"They are from the public examples with the SHA-256 {terms.public}. {SAME_FOR_ALL}"
            items = [replace(i, notes=(*i.notes, told)) if i.part == "proxy ids" else i for i in found.items]
            replace(found, items=tuple(items)).write(folder)
            progress.note(f"What the contribution reveals, for your eyes: {folder / report.PAGE}")
        home = report.read(folder)
        auc = report.value(home, "membership, likelihood ratio")
        if self.max_membership < 1 and (auc is None or auc > self.max_membership):
            told = "could not be measured" if auc is None else f"is {auc:.3f}"
            raise WouldRevealSecret(
                f"Membership in the expert's training data {told}; at most {self.max_membership:g} was asked for.",
                advice=f"Read {folder / report.PAGE}. --dp-selection-epsilon and --dp-epsilon together bound it.",
            )
        return home

    def _done(self, terms: Terms, workdir: Path) -> Any:
        from cloister.unify.disclosure import claims

        private = terms.router.vectors == "private"
        vectors = claims.kept(workdir, "routing vectors") if private else claims.Done("routing vectors", "absent")
        return claims.kept(workdir, "proxy ids"), claims.kept(workdir, "expert weights"), vectors

    # The coordinator's ------------------------------------------------------------------------------------------------

    def expert_shapes(self, seed: Path, terms: Terms) -> Shapes:
        """The tensors of an expert: LoRA factors of every linear layer of the blocks, or the blocks in full."""
        from torch import nn

        from cloister.unify import experts
        from cloister.unify.moe import feed_forward_names

        model = _seed(seed).model
        if terms.expert.method == "full":
            own = dict(model.named_parameters())
            return {name: [tuple(own[name].shape)] for name in feed_forward_names(model)}
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

    def unusable(self, seed: Path, public: Path, received: Received, terms: Terms) -> Sequence[str]:
        """What in its expert and its routing vectors is beyond what training makes: `cloister.unify.bounds`."""
        from safetensors.torch import load_file

        from cloister.unify import bounds

        model = _seed(seed)
        reasons = bounds.of_expert(model, load_file(received.expert))
        if received.routing is not None:
            vectors = load_file(received.routing)["vectors"]
            reasons += bounds.of_vectors(model, vectors, _public(public).by_id(received.proxies))
        return reasons

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
        from cloister.unify.moe import folders
        from cloister.unify.training import NotFinite

        from . import building

        model = _seed(seed)
        have = _public(public)
        try:
            unified = building.unified(model, have, received, terms, workdir, progress, onto)
        except (BrokenCheckpoint, NotFinite) as error:  # what numbers that are not finite end with
            _blame(model, have, received, error)
            raise
        folders.copy_rest(seed, out)
        unified.save_pretrained(out)
        _write_labels(out, model, terms, public)

    def remove(self, model: Path, owner: str, out: Path) -> None:
        """The unified model without one owner's expert."""
        from cloister.unify import moe
        from cloister.unify.moe import folders

        unified = folders.Folder(model).model()
        moe.remove_owner(unified, owner)
        folders.copy_rest(model, out)
        unified.save_pretrained(out)
        if (model / labels.FILE).exists():
            shutil.copyfile(model / labels.FILE, out / labels.FILE)

    def export(self, model: Path, out: Path) -> None:
        """The unified model in a stock architecture."""
        from cloister.unify import moe
        from cloister.unify.moe import folders

        moe.export_stock(folders.Folder(model).model(), out)
        folders.copy_rest(model, out)


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
def _public_set(folder: Path) -> Any:
    from cloister.unify import examples

    return examples.public_set(folder)


def _public(folder: Path) -> Any:
    return _public_set(folder).examples


def _examples(private: Path) -> Any:
    from cloister.unify import examples

    return examples.read(private)


def _alone(private: bool) -> int:
    """How many examples are encoded together; those whose vectors must depend on themselves alone are one by one."""
    return 1 if private else 64


def _draw(terms: Terms, owner: str) -> int:
    """Another draw for each owner, the same again after an interruption."""
    told = hashlib.sha256(f"{terms.digest()} {terms.selection.seed_for_folds} {owner}".encode()).digest()
    return int.from_bytes(told[:6], "big")


def _blame(seed: Any, public: Any, received: Sequence[Received], error: DataError) -> None:
    """Say whose experts alone already answer with numbers that are not finite, if there are such."""
    from safetensors.torch import load_file

    from cloister.unify import bounds

    bad = [
        found.name
        for found in received
        if not bounds.finite_alone(seed, load_file(found.expert), public.by_id(found.proxies))
    ]
    if bad:
        raise DataError(
            f"The model cannot be built: the experts of {', '.join(bad)} answer with numbers that are not finite.",
            advice=f"Build without them: cloister unify remove ROUND {bad[0]}",
        ) from error


def _sent(workdir: Path) -> Any:
    from safetensors.numpy import load_file

    return load_file(workdir / "routing.safetensors")["vectors"]


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


def _write_labels(out: Path, seed: Any, terms: Terms, public: Path) -> None:
    """Who asks the model needs the vectors of its labels, which are the seed's."""
    names = terms.task.labels
    if not names:
        return
    if terms.task.kind == "images":
        labels.write(out, names, _task(seed, terms, public).vectors)
    else:
        from cloister.unify.tasks import spoken

        labels.write(out, names, seed.remembered([spoken(name) for name in names]).numpy())
