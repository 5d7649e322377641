"""Steps that take no time, and small rounds made of them. Everything is a deterministic function of its inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from cloister.progress import SILENT, Progress
from cloister.unify import artefacts
from cloister.unify.keys import Key
from cloister.unify.rounds import owner as owners
from cloister.unify.rounds import recipe as recipes
from cloister.unify.rounds.begin import begin
from cloister.unify.rounds.coordinator import INVITATION, Coordinator
from cloister.unify.rounds.recipe import Terms
from cloister.unify.rounds.steps import Received, Shapes

WIDTH = 8
ROUND = "0123456789abcdef" * 2


class StandIn:
    """`Steps` without models. `fail` is called with the name of each step before it is done, and may raise."""

    def __init__(self, fail: Callable[[str], None] = lambda _: None) -> None:
        self.fail = fail
        self.done: list[str] = []
        self.decisions = ""

    def _begin(self, name: str) -> None:
        self.fail(name)
        self.done.append(name)

    def fingerprint(self, seed: Path) -> str:
        return hashlib.sha256((seed / "model.safetensors").read_bytes()).hexdigest()

    def public(self, source: Path, out: Path, *, licence: str, description: str) -> str:
        out.mkdir()
        (out / "examples.jsonl").write_bytes(source.read_bytes())
        (out / "public.json").write_text(json.dumps({"licence": licence, "description": description}))
        return hashlib.sha256(source.read_bytes()).hexdigest()

    def public_digest(self, public: Path) -> str:
        return hashlib.sha256((public / "examples.jsonl").read_bytes()).hexdigest()

    def public_ids(self, public: Path) -> Sequence[str]:
        return [json.loads(line)["id"] for line in (public / "examples.jsonl").read_text().splitlines()]

    def choose(
        self, seed: Path, public: Path, private: Path, owner: str, terms: Terms, workdir: Path, progress: Progress
    ) -> Sequence[str]:
        self._begin("choose")
        data = private.read_bytes()
        ids = sorted(self.public_ids(public), key=lambda name: hashlib.sha256(name.encode() + data).hexdigest())
        return ids[: terms.selection.count]

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
        import torch

        self._begin("train")
        digest = hashlib.sha256(private.read_bytes() + "".join(proxies).encode()).digest()
        random = np.random.default_rng(list(digest))
        return {
            name: torch.from_numpy(random.standard_normal(options[0]).astype(np.float32))
            for name, options in self.expert_shapes(seed, terms).items()
        }

    def routing(self, *_: Any) -> Mapping[str, Any] | None:
        self._begin("routing")
        return None

    def report(self, *_: Any) -> Mapping[str, Any]:
        self._begin("report")
        return {"leaves": ["proxies", "expert"], "measured": {}}

    def expert_shapes(self, seed: Path, terms: Terms) -> Shapes:
        return {f"layer.{i}.{part}.weight": [(WIDTH, 2 * WIDTH)] for i in range(2) for part in ("up", "down")}

    def routing_shapes(self, seed: Path, terms: Terms) -> Shapes:
        return {"layer.0": [(WIDTH,)]}

    def unusable(self, seed: Path, public: Path, received: Received, terms: Terms) -> Sequence[str]:
        most = max(float(np.abs(value).max()) for value in load_file(received.expert).values())
        return [f"a change of {most:g}"] if most > 1000 else []

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
        self._begin("build")
        stacked: dict[str, Any] = {}
        for place, found in enumerate(received):
            for name, value in load_file(found.expert).items():
                stacked[f"{name}.{place}"] = value * np.float32(1 + len(found.proxies))
        save_file(stacked, out / "model.safetensors")
        (out / "config.json").write_text(json.dumps({"owners": [found.name for found in received]}))

    def remove(self, model: Path, owner: str, out: Path) -> None:
        names = json.loads((model / "config.json").read_text())["owners"]
        (out / "config.json").write_text(json.dumps({"owners": [name for name in names if name != owner]}))

    def export(self, model: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")


@dataclass
class Parties:
    """A coordinator's folder, the owners' keys and private files, all below one directory."""

    folder: Path
    names: list[str]

    @property
    def round_folder(self) -> Path:
        return self.folder / "round"

    @property
    def invitation(self) -> Path:
        return self.round_folder / INVITATION

    def key(self, name: str) -> Key:
        return Key.at(self.folder / "keys" / name)

    def private(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def begin(
        self, steps: StandIn | None = None, *, quorum: int = 1, owners: Sequence[str] = (), **more: Any
    ) -> Coordinator:
        terms = {"selection": {"count": 20}, **more.pop("terms", {})}
        return begin(
            self.round_folder,
            self.folder / "seed",
            self.folder / "public.jsonl",
            [recipes.Owner(name=name, key=self.key(name).public.text) for name in owners or self.names],
            key=self.key("coordinator"),
            steps=steps or StandIn(),
            task=recipes.Task(kind="classify", labels=("cold", "warm")),
            terms=terms,
            quorum=quorum,
            round_id=ROUND,
            **more,
        )

    def contribute(self, name: str, steps: StandIn | None = None, *, key: Key | None = None, **more: Any) -> Path:
        return owners.contribute(
            self.invitation,
            self.private(name),
            self.folder / "owners" / name,
            key=key or self.key(name),
            steps=steps or StandIn(),
            progress=SILENT,
            **more,
        )


def make_parties(folder: Path, names: Sequence[str] = ("ada", "ben", "cyd"), examples: int = 30) -> Parties:
    """The files that a round needs: a seed, public examples, and private ones for each owner."""
    seed = folder / "seed"
    seed.mkdir(parents=True)
    (seed / "config.json").write_text("{}")
    save_file({"weight": np.arange(WIDTH, dtype=np.float32)}, seed / "model.safetensors")
    lines = [json.dumps({"id": f"p{i}", "text": f"public {i}"}) for i in range(100)]
    (folder / "public.jsonl").write_text("\n".join(lines) + "\n")
    for name in names:
        (folder / f"{name}.txt").write_text("".join(f"{name} {i}\n" for i in range(examples)))
    return Parties(folder, list(names))


def sign_again(folder: Path, key: Key) -> None:
    """A manifest that fits the files as they are now: what a party can do that means no good."""
    old = artefacts.load_manifest(folder)[0]
    assert old is not None
    files = {name: artefacts.File(*artefacts._measure(folder / name)) for name in old.files}
    new = artefacts.Manifest(old.label, files)
    (folder / artefacts.MANIFEST).write_text(artefacts.Manifest(old.label, files, key.sign(new.message())).text())


def later(days: float = 100) -> datetime:
    """A moment after every deadline."""
    return datetime.now(UTC) + timedelta(days=days)
