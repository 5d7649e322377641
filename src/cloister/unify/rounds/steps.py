"""The seam to everything that computes: what a round needs of seeds, selection, training and the unified model.

`rounds` and `federation` call nothing else, so that a whole round, with dead owners and hostile artefacts, can be
played with steps that take no time. `real.RealSteps` are the real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cloister.progress import Progress
from cloister.unify.artefacts import Refused
from cloister.unify.tensors import Shape

from .recipe import Terms

Shapes = Mapping[str, Sequence[Shape]]  # name -> the shapes that it may have
SAME_FOR_ALL = "Every owner of the round must have the same; compare it with another owner's."


@dataclass(frozen=True)
class Received:
    """A contribution that passed every check."""

    name: str
    proxies: tuple[str, ...]  # ids of public examples, best first
    expert: Path  # safetensors
    routing: Path | None  # safetensors, if the terms ask for private routing vectors
    digest: str


class Steps(Protocol):
    """One method for each thing that a round has computed."""

    def fingerprint(self, seed: Path) -> str:
        """SHA-256 over the tensors of a checkpoint."""

    def public(self, source: Path, out: Path, *, licence: str, description: str) -> str:
        """Write the public examples of `source` as an invitation's folder; their SHA-256."""

    def public_digest(self, public: Path) -> str:
        """The same SHA-256, of an invitation's folder: of exactly the file that the other steps read."""

    def public_ids(self, public: Path) -> Sequence[str]:
        """The ids of the public examples."""

    @property
    def decisions(self) -> str:
        """What an owner decides beyond the terms, in one text. Work that was done otherwise is not taken for this."""

    def choose(
        self, seed: Path, public: Path, private: Path, owner: str, terms: Terms, workdir: Path, progress: Progress
    ) -> Sequence[str]:
        """The ids of the proxies, best first. `owner` is its name."""

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
        """The expert, as torch tensors by name. Goes on where a killed run stopped."""

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
        """Routing vectors of private data, if the terms ask for them."""

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
        """What leaves with the contribution about it. Must not hold or imply the number of private examples: what was
        measured on them is written into `workdir`."""

    def expert_shapes(self, seed: Path, terms: Terms) -> Shapes:
        """The tensors of an expert."""

    def routing_shapes(self, seed: Path, terms: Terms) -> Shapes:
        """The tensors of routing vectors."""

    def unusable(self, seed: Path, public: Path, received: Received, terms: Terms) -> Sequence[str]:
        """Why a contribution whose files are all as agreed cannot be built from: what it would make of the seed."""

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
        """Stack, start the router, train jointly, write the checkpoint into the empty folder `out`.

        With `onto`, a unified model made earlier, only the experts that it lacks are added and trained.
        """

    def remove(self, model: Path, owner: str, out: Path) -> None:
        """The unified model without one owner's expert, into the empty folder `out`."""

    def export(self, model: Path, out: Path) -> None:
        """The unified model in a stock architecture, into the empty folder `out`."""


def right_public(steps: Steps, public: Path, terms: Terms) -> None:
    """The public examples that are here are those of the terms, by whose digest owners know that they all got the same.

    The signature does not say that: whoever signs invitations could sign others for each owner.
    """
    found = steps.public_digest(public)
    if found != terms.public:
        raise Refused(
            "The invitation",
            [f"its public examples have the SHA-256 {found}, its recipe says {terms.public}"],
            advice="Do not go on with it. Ask the other owners for the SHA-256 of theirs, and the coordinator why.",
        )
