"""What `protect` will write, worked out and checked before anything is written.

Every tensor of the checkpoint must be known to its family, have the shape that the configuration promises, and none
may be missing: an
unknown tensor could carry the model's secrets to the server untransformed. All faults are listed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cloister import families
from cloister.errors import BrokenCheckpoint, UnsupportedModel
from cloister.families.layout import Layout, TensorSpec
from cloister.permute.checkpoint import Checkpoint, Planned
from cloister.permute.draw import Draws
from cloister.permute.numbers import FLOATS, narrow
from cloister.permute.rewrite import Rewriter

LOOPS = ("server", "token")


@dataclass(frozen=True)
class Job:
    """One tensor of the server's checkpoint and where its numbers come from."""

    planned: Planned
    source: str
    role: str  # "rewrite", "zero", "identity"


@dataclass
class ShardPlan:
    """One file of the server's checkpoint."""

    file: str
    jobs: list[Job] = field(default_factory=list)


def inspect(checkpoint: Checkpoint) -> Layout:
    """The layout of a checkpoint, after checking that it fits tensor by tensor."""
    layout = families.layout(checkpoint.config, checkpoint.tensors)
    faults = []
    for name, stored in checkpoint.tensors.items():
        spec = layout.tensors.get(name)
        if spec is None:
            if not name.endswith(layout.ignorable):
                faults.append(f"unknown tensor {name} {list(stored.shape)}")
        elif stored.shape != spec.shape:
            faults.append(f"{name} has shape {list(stored.shape)}, the configuration promises {list(spec.shape)}")
        elif stored.dtype not in FLOATS:
            faults.append(f"{name} is stored as {stored.dtype}, only floating point is supported")
    faults += [f"missing tensor {name}" for name in _missing(layout, checkpoint)]
    if faults:
        shown = faults[:40] + ([f"and {len(faults) - 40} more"] if len(faults) > 40 else [])
        raise BrokenCheckpoint(
            "\n  - ".join([f"{checkpoint.directory} does not fit its configuration:", *shown]),
            advice="Is config.json the one of these weights? Adapters must be merged first.",
        )
    return layout


def check_transform(layout: Layout, transform: str) -> None:
    """Refuse a transform that this family cannot have, with every reason."""
    if transform not in families.TRANSFORMS:
        raise UnsupportedModel(
            f"There is no transform {transform!r}.", advice=f"Use one of {', '.join(families.TRANSFORMS)}."
        )
    if reasons := layout.blocked.get(transform):
        raise UnsupportedModel(
            f"The transform {transform!r} does not fit this {layout.family} checkpoint:",
            reasons, advice="Use --transform permutation.",
        )  # fmt: skip


def shards(checkpoint: Checkpoint, layout: Layout, draws: Draws, loop: str) -> list[ShardPlan]:
    """The server's files: experts renamed, tied heads given a tensor of their own.

    A tensor goes into the file in which the source keeps the tensor of its new name, and files are ordered by width and
    name: left where the source had them, renamed experts would tell the server their old numbers.
    """
    plans = {file: ShardPlan(file) for file, _ in checkpoint.shards}
    for file, names in checkpoint.shards:
        for name in names:
            spec = layout.tensors.get(name)
            if spec is not None:
                job = _job(checkpoint, layout, draws, name, spec, loop)
                home = checkpoint.tensors.get(job.planned.name)
                plans[home.file.name if home else file].jobs.append(job)
        if layout.embedding in names and layout.head and layout.head not in checkpoint.tensors:
            stored = checkpoint.tensors[layout.embedding]
            plans[file].jobs.append(Job(Planned(layout.head, stored.dtype, stored.shape), layout.embedding, "rewrite"))
        for alias, origin in layout.head_aliases.items():
            if origin in names and alias not in checkpoint.tensors:
                stored = checkpoint.tensors[origin]
                plans[file].jobs.append(Job(Planned(alias, stored.dtype, stored.shape), origin, "rewrite"))
    for plan in plans.values():
        plan.jobs.sort(key=lambda job: (-job.planned.width, job.planned.name))
    return list(plans.values())


def pieces(
    plan: ShardPlan, checkpoint: Checkpoint, rewriter: Rewriter, kept_rows: tuple[int, ...]
) -> Iterator[np.ndarray]:
    """The raw numbers of one file, in order. `kept_rows`: rows of a withheld table that the server needs all the
    same."""
    for job in plan.jobs:
        planned = job.planned
        if job.role == "identity":
            yield identity_projection(planned)
        elif job.role == "zero":
            yield from _zero_table(job, checkpoint, rewriter, kept_rows)
        else:
            name = (
                planned.name if planned.name in rewriter.layout.tensors and job.source != planned.name else job.source
            )
            yield from rewriter.pieces(name, checkpoint.read(job.source), planned.dtype)


def identity_projection(planned: Planned) -> np.ndarray:
    """The server's patch projection: the client has projected already."""
    if len(planned.shape) == 1:
        return narrow(np.zeros(planned.shape, dtype=np.float32), planned.dtype)
    size = planned.shape[0]
    return narrow(np.eye(size, dtype=np.float32).reshape(size, size, 1, 1), planned.dtype)


def _job(checkpoint: Checkpoint, layout: Layout, draws: Draws, name: str, spec: TensorSpec, loop: str) -> Job:
    stored = checkpoint.tensors[name]
    new_name, shape, role = name, stored.shape, "rewrite"
    if spec.expert is not None:
        space, old = spec.expert
        new = int(np.flatnonzero(draws.expert_order(space) == old)[0])
        new_name = name.replace(f".experts.{old}.", f".experts.{new}.")
    elif spec.kind == "patch":
        role = "identity"
        shape = shape if len(shape) == 1 else (shape[0], shape[0], 1, 1)
    elif name == layout.embedding and loop == "token":
        role = "zero"
    return Job(Planned(new_name, stored.dtype, shape), name, role)


def _zero_table(job: Job, checkpoint: Checkpoint, rewriter: Rewriter, kept: tuple[int, ...]) -> Iterator[np.ndarray]:
    rows, columns = job.planned.shape
    zero = narrow(np.zeros((1, columns), dtype=np.float32), job.planned.dtype)
    if not kept:
        for start in range(0, rows, 4096):
            yield np.broadcast_to(zero, (min(4096, rows - start), columns))
        return
    table = np.concatenate(list(rewriter.pieces(job.source, checkpoint.read(job.source), job.planned.dtype)))
    kept_only = np.broadcast_to(zero, table.shape).copy()
    kept_only[list(kept)] = table[list(kept)]
    yield kept_only


def _missing(layout: Layout, checkpoint: Checkpoint) -> list[str]:
    """Tensors that must be there. Of experts, one of the two stored forms must be complete."""
    present = checkpoint.tensors.keys()
    lost = [name for name, spec in layout.tensors.items() if not spec.optional and name not in present]
    tied = bool(checkpoint.config.get("tie_word_embeddings", True)) or bool(
        (checkpoint.config.get("text_config") or {}).get("tie_word_embeddings", False)
    )
    if layout.head and layout.head not in present and not tied:
        lost.append(layout.head)
    loose = {name for name, spec in layout.tensors.items() if spec.expert is not None}
    for space in {spec.expert[0] for spec in layout.tensors.values() if spec.expert is not None}:
        fused = [name for name, spec in layout.tensors.items() if spec.stacked and spec.stacked[0] == space]
        if not all(name in present for name in fused):
            lost += [n for n in loose if layout.tensors[n].expert[0] == space and n not in present]  # type: ignore[index]
    return sorted(lost)


def token_ids(value: Any, vocab_to_server: np.ndarray) -> Any:
    """Token ids in a configuration, translated; -1, None and out-of-range values stay."""
    if isinstance(value, list):
        return [token_ids(item, vocab_to_server) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(vocab_to_server):
        return int(vocab_to_server[value])
    return value


def sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """hidden size and vocabulary, whatever the family calls them."""
    text = config.get("text_config") or config
    return {
        "hidden": int(text.get("hidden_size") or text.get("n_embd") or 0),
        "vocabulary": int(text.get("vocab_size") or 0),
    }
