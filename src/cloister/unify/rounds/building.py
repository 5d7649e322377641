"""How contributions become one model: stack the experts, start the router at the proxies, train both on their union."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file

from cloister.errors import UsageError
from cloister.progress import Progress
from cloister.unify import joint, moe
from cloister.unify.examples import Examples
from cloister.unify.experts import apply_delta
from cloister.unify.moe import folders
from cloister.unify.router_fit import fit_router
from cloister.unify.seeds import Seed

from .provenance import PROVENANCE, read_provenance
from .recipe import Router, Terms
from .steps import Received

_NOBODY = ""  # no owner can be called so


def unified(
    seed: Seed,
    public: Examples,
    received: Sequence[Received],
    terms: Terms,
    workdir: Path,
    progress: Progress,
    onto: Path | None,
) -> Any:
    """The model. With `onto` only the experts that it lacks are added and trained; its others keep every number."""
    wanted = terms.settled().router
    torch.manual_seed(wanted.seed_for_order)
    sent = {found.name: apply_delta(seed, load_file(str(found.expert))) for found in received}
    states = joint.shared(seed, sent, wanted.share or 0.0) if wanted.share and len(sent) > 1 else sent
    proxies = {found.name: public.by_id(found.proxies) for found in received}
    if onto is None:
        context = None if wanted.context == "auto" else wanted.context
        model = moe.unify(seed.model, states, top_k=wanted.top_k, context=context, fallback=wanted.fallback)
        new = list(states)
    else:
        model, new = _enlarged(onto, states)
    order = moe.owners(model)
    others = _chosen_by_nobody(public, proxies, wanted.seed_for_order) if model.config.fallback else None
    _start(model, seed, received, {name: proxies[name] for name in order}, others, wanted, progress)
    if wanted.epochs and new:
        settings = joint.JointSettings(
            epochs=wanted.epochs,
            public_weight=wanted.public_weight or 0.0,
            lr=wanted.lr,
            router_lr=wanted.router_lr,
            batch=wanted.batch,
            seed_for_order=wanted.seed_for_order,
        )
        folder = workdir / "joint"
        folder.mkdir(parents=True, exist_ok=True)
        joint.train_jointly(
            model, seed, proxies, sent, settings,
            workdir=folder, progress=progress, only=None if onto is None else new, others=others,
        )  # fmt: skip
    return model


def _enlarged(onto: Path, states: Mapping[str, Any]) -> tuple[Any, list[str]]:
    model = folders.Folder(onto).model()
    there = moe.owners(model)
    if sorted(there) != sorted(named := read_provenance(onto)["owners"]):
        raise UsageError(
            f"{onto} has the experts of {', '.join(there)}, and {PROVENANCE} in it says {', '.join(named)}.",
            advice="Build without --onto.",
        )
    if gone := sorted(set(there) - set(states)):
        raise UsageError(
            f"{onto} has an expert of {', '.join(gone)}, of whom no contribution is here.",
            advice="Take them out first: cloister unify remove MODEL OWNER --out OUT",
        )
    new = [name for name in states if name not in there]
    for name in new:
        moe.add_owner(model, name, states[name])
    return model, new


def _chosen_by_nobody(public: Examples, proxies: Mapping[str, Examples], seed: int) -> Examples:
    """What the fallback is for: public examples that no owner chose, as many as an owner has proxies."""
    chosen = {one for held in proxies.values() for one in held.ids}
    left = [row for row, one in enumerate(public.ids) if one not in chosen]
    if not left:
        raise UsageError(
            "Every public example was chosen by somebody, so nothing is left for the fallback to learn from.",
            advice="Give more public examples, let owners choose fewer (--count), or leave --fallback out.",
        )
    most = max(len(held) for held in proxies.values())
    return public.rows(sorted(np.random.default_rng(seed).permutation(left)[:most].tolist()))


def _start(
    model: Any,
    seed: Seed,
    received: Sequence[Received],
    proxies: Mapping[str, Examples],
    others: Examples | None,
    wanted: Router,
    progress: Progress,
) -> None:
    """Set the router before the joint training; the fallback's row comes first."""
    blend = None if model.config.context == "none" else wanted.blend
    held = dict(proxies) if others is None else {_NOBODY: others, **proxies}
    if wanted.vectors == "private":
        sent = {found.name: load_file(str(found.routing))["vectors"].float() for found in received}
        moe.set_router(model, list(torch.stack([sent[name] for name in proxies], dim=1)), blend=blend)
    elif wanted.start == "inside":
        fit_router(model, seed, held, blend=wanted.blend or 0.0, progress=progress)
    else:
        how: Literal["fit", "mean"] = "mean" if wanted.start == "mean" else "fit"
        moe.set_router(model, joint.router_vectors_from_proxies(seed, held, how=how), blend=blend)
