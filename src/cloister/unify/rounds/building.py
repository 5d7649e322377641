"""How contributions become one model: stack the experts, start the router at the proxies, train both on their union."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from cloister.errors import UsageError
from cloister.progress import Progress
from cloister.unify import joint, moe
from cloister.unify.examples import Examples
from cloister.unify.experts import apply_delta
from cloister.unify.moe import folders
from cloister.unify.seeds import Seed

from .recipe import Terms
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
    wanted = terms.router
    torch.manual_seed(wanted.seed_for_order)
    sent = {found.name: apply_delta(seed, load_file(str(found.expert))) for found in received}
    states = joint.shared(seed, sent, terms.share()) if terms.share() and len(sent) > 1 else sent
    proxies = {found.name: public.by_id(found.proxies) for found in received}
    if onto is None:
        context = None if wanted.context == "auto" else wanted.context
        model = moe.unify(seed.model, states, top_k=wanted.top_k, context=context, fallback=wanted.fallback)
        new = list(states)
    else:
        model, new = _enlarged(onto, states)
    order = moe.owners(model)
    others = _chosen_by_nobody(public, proxies, wanted.seed_for_order) if model.config.fallback else None
    moe.set_router(model, _vectors(seed, received, {name: proxies[name] for name in order}, others, terms))
    if wanted.epochs and new:
        settings = joint.JointSettings(
            epochs=wanted.epochs,
            lr=wanted.lr,
            router_lr=wanted.router_lr,
            batch=wanted.batch,
            seed_for_order=wanted.seed_for_order,
        )
        folder = workdir / "joint"
        folder.mkdir(parents=True, exist_ok=True)
        joint.train_jointly(
            model, seed, proxies, states, settings,
            workdir=folder, progress=progress, only=None if onto is None else new, others=others,
        )  # fmt: skip
    return model


def _enlarged(onto: Path, states: Mapping[str, Any]) -> tuple[Any, list[str]]:
    model = folders.Folder(onto).model()
    there = moe.owners(model)
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


def _vectors(
    seed: Seed, received: Sequence[Received], proxies: Mapping[str, Examples], others: Examples | None, terms: Terms
) -> list[Any]:
    """Where the router starts, in the order of `proxies`: (experts, hidden) a layer, the fallback's row first."""
    if terms.router.vectors == "proxies":
        held = dict(proxies) if others is None else {_NOBODY: others, **proxies}
        return joint.router_vectors_from_proxies(seed, held, how=terms.router.start)
    sent = {found.name: load_file(str(found.routing))["vectors"].float() for found in received}
    return list(torch.stack([sent[name] for name in proxies], dim=1))
