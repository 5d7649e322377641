"""Putting experts into a model, taking them out, and setting its router: in memory, or from folder to folder.

    model = unify(seed, {"bank": state, "clinic": state})       seed: a model of transformers
    folder = unify("seed/", {"bank": "bank.safetensors"}, out="unified/")

A state is the seed's feed-forward parameters by the seed's own names (`feed_forward_names`). Adding or removing an
owner touches no number of the others. From folder to folder memory holds one file of the result at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from cloister.errors import NotFound, UnsupportedModel, UsageError

from . import architecture, blocks, checks
from .routing import Context, RoutedFeedForward

State = Mapping[str, Tensor]
Source = State | str | Path  # a state, or a safetensors file with one


@overload
def unify(
    seed: str | Path, owners: Mapping[str, Source], *, out: str | Path, top_k: int = 1,
    context: Context | None = None, fallback: bool = False,
) -> Path: ...  # fmt: skip
@overload
def unify(
    seed: Any, owners: Mapping[str, Source], *, top_k: int = 1, context: Context | None = None, fallback: bool = False,
) -> Any: ...  # fmt: skip
def unify(
    seed: Any, owners: Mapping[str, Source], *, out: str | Path | None = None, top_k: int = 1,
    context: Context | None = None, fallback: bool = False,
) -> Any:  # fmt: skip
    """One model with an expert of each owner in every feed-forward block of the seed.

    context: what the router sees beside the token: "sequence" for encoders, "prefix" for decoders (these are the
    defaults), or "none". fallback: the seed's own block is an expert too, number 0. The router's vectors are zero, so
    that all experts score the same, until `set_router` or training sets them. The seed is left as it is.
    """
    checks.names(list(owners))
    if isinstance(seed, str | Path):
        from . import folders

        return folders.unify(Path(seed), owners, _target(out), top_k=top_k, context=context, fallback=fallback)
    given = {name: _state(source) for name, source in owners.items()}
    config = configuration(seed.config, type(seed), list(owners), top_k=top_k, context=context, fallback=fallback)
    dense = dict(seed.named_parameters())
    names = blocks.parameters(seed)
    checks.states(given, checks.wanted({name: dense[name].detach() for name in names}))
    model_class = architecture.classes(seed.config.model_type).model(type(seed))
    model = model_class._from_config(config, dtype=seed.dtype)
    _keep_router_single(model)
    for name, _ in list(model.named_children()):
        if getattr(seed, name, seed) is None:  # a pooler that this seed was made without
            setattr(model, name, None)
    state = {name: tensor for name, tensor in seed.state_dict().items() if name not in names}
    for name, (path, inner) in names.items():
        for index, expert in enumerate([dense] * fallback + list(given.values())):
            state[blocks.expert_name(path, index, inner)] = expert[name].detach()
    left = model.load_state_dict(state, strict=False)
    strangers = [name for name in left.missing_keys if ".router." not in name] + list(left.unexpected_keys)
    if strangers:
        raise UnsupportedModel("This seed does not fit the classes of transformers:", strangers)
    model.tie_weights()
    if getattr(seed, "generation_config", None) is not None:
        model.generation_config = copy.deepcopy(seed.generation_config)
    model.config.architectures = [type(model).__name__]
    return model.to(seed.device).train(seed.training)


def owners(model: Any) -> list[str]:
    """The owners of the experts in their order, without the fallback."""
    if model.config.owners is None:
        raise NotFound("This checkpoint does not say whose its experts are.")
    return list(model.config.owners)


def set_router(model: Any, vectors: Sequence[Tensor], *, blend: float | None = None) -> Any:
    """Set the router's vectors, one tensor [owners, hidden] or [experts, hidden] a layer; returns the model.

    A fallback expert without a row of its own gets zero: it is chosen where every owner scores below zero. blend: the
    share of the context in (0, 1), for all layers.
    """
    found = routed(model)
    fallback = int(model.config.fallback)
    count = model.config.experts
    checks.vectors(vectors, len(found), (count - 1, count) if fallback else (count,), model.config.hidden_size)
    if blend is not None and (not 0 < blend < 1 or model.config.context == "none"):
        raise UsageError(f"A blend of {blend} cannot be set: it lies between 0 and 1, and needs a context.")
    with torch.no_grad():
        for block, rows in zip(found, vectors, strict=True):
            block.router.vectors.fill_(0.0)
            block.router.vectors[count - len(rows) :] = rows.to(block.router.vectors)
            if blend is not None and block.router.blend is not None:
                block.router.blend.fill_(torch.logit(torch.tensor(float(blend))).item())
    return model


@overload
def add_owner(
    model: str | Path, name: str, state: Source, vectors: Sequence[Tensor] | None = None, *, out: str | Path
) -> Path: ...
@overload
def add_owner(model: Any, name: str, state: Source, vectors: Sequence[Tensor] | None = None) -> Any: ...
def add_owner(
    model: Any, name: str, state: Source, vectors: Sequence[Tensor] | None = None, *, out: str | Path | None = None
) -> Any:
    """Put the expert of another owner behind the others; a model is changed in place and returned.

    vectors: its router vector [hidden] in each layer; zero without.
    """
    if isinstance(model, str | Path):
        from . import folders

        return folders.add_owner(Path(model), name, state, vectors, _target(out))
    checks.names([*owners(model), name])
    given, found = _state(state), routed(model)
    names = blocks.parameters(model)
    like = dict(model.named_parameters())
    expected = {seed: like[blocks.expert_name(path, 0, inner)].detach() for seed, (path, inner) in names.items()}
    checks.states({name: given}, checks.wanted(expected))
    rows = [vector.reshape(1, -1) for vector in vectors] if vectors is not None else None
    if rows is not None:
        checks.vectors(rows, len(found), (1,), model.config.hidden_size)
    paths = [path for path, part in model.named_modules() if isinstance(part, RoutedFeedForward)]
    by_path: dict[str, dict[str, Tensor]] = {path: {} for path in paths}
    for seed, (path, inner) in names.items():
        by_path[path][inner] = given[seed].detach()
    for layer, (path, block) in enumerate(zip(paths, found, strict=True)):
        expert = copy.deepcopy(block.experts[0])
        expert.load_state_dict(by_path[path], strict=False)
        block.experts.append(expert)
        old = block.router.vectors
        row = torch.zeros_like(old[:1]) if rows is None else rows[layer].to(old)
        _replace_vectors(block, torch.cat([old.detach(), row.detach()]))
    _resize(model, [*owners(model), name])
    return model


@overload
def remove_owner(model: str | Path, name: str, *, out: str | Path) -> Path: ...
@overload
def remove_owner(model: Any, name: str) -> Any: ...
def remove_owner(model: Any, name: str, *, out: str | Path | None = None) -> Any:
    """Take an owner's expert and router vectors out; a model is changed in place and returned.

    What the router and the other experts learned in joint training while it was there stays in them.
    """
    if isinstance(model, str | Path):
        from . import folders

        return folders.remove_owner(Path(model), name, _target(out))
    left = without(owners(model), name)
    index = owners(model).index(name) + int(model.config.fallback)
    for block in routed(model):
        del block.experts[index]
        rows = [row for row in range(block.router.vectors.shape[0]) if row != index]
        _replace_vectors(block, block.router.vectors.detach()[rows].clone())
    _resize(model, left)
    return model


# ---- shared with `folders` ----------------------------------------------------------------------------------------


def configuration(
    seed: Any, seed_class: type[Any], names: list[str], *, top_k: int, context: Context | None, fallback: bool
) -> Any:
    """The unified model's configuration, checked."""
    made = architecture.classes(seed.model_type)
    causal = not _looks_ahead(seed) and (
        seed_class.__name__.endswith(("ForCausalLM", "LMHeadModel")) or _decodes(seed_class, seed)
    )
    context = context or ("prefix" if causal else "sequence")
    checks.settings(context, top_k, len(names) + fallback, causal=causal, what=seed_class.__name__)
    return made.config.from_seed(seed, owners=names, top_k=top_k, context=context, fallback=fallback)


def without(names: list[str], name: str) -> list[str]:
    """The owners but for one."""
    if name not in names:
        raise NotFound(f"{name!r} owns no expert of this model.", advice=f"Its owners are {', '.join(names)}.")
    if len(names) == 1:
        raise UsageError(f"{name!r} is the last owner.", advice="A model without owners is the seed.")
    return [other for other in names if other != name]


def _looks_ahead(seed: Any) -> bool:
    """Whether a decoder's architecture is used as an encoder (EmbeddingGemma)."""
    return getattr(seed, "use_bidirectional_attention", None) in (True, "all")


def _decodes(seed_class: type[Any], seed: Any) -> bool:
    """Whether a bare model is a decoder's. Architectures that can be both say which they are by a switch."""
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.AutoModelForCausalLM._model_mapping
    masked = modeling_auto.AutoModelForMaskedLM._model_mapping
    config = seed_class.config_class
    return bool(getattr(seed, "is_decoder", False)) or (config in causal and config not in masked)


def routed(model: nn.Module) -> list[RoutedFeedForward]:
    """The routed blocks, layer by layer."""
    found = [part for part in model.modules() if isinstance(part, RoutedFeedForward)]
    if not found:
        raise UsageError(f"{type(model).__name__} is not a unified model.", advice="Make one with `unify`.")
    return found


def _state(source: Source) -> State:
    if isinstance(source, Mapping):
        return source
    from .folders import StateFile

    return StateFile(Path(source))


def _target(out: str | Path | None) -> Path:
    if out is None:
        raise UsageError("A checkpoint in a folder needs `out`, the folder for the result.")
    return Path(out)


def _replace_vectors(block: RoutedFeedForward, rows: Tensor) -> None:
    block.router.vectors = nn.Parameter(rows, requires_grad=block.router.vectors.requires_grad)


def _resize(model: Any, names: list[str]) -> None:
    config = model.config
    config.owners, config.experts = names, len(names) + int(config.fallback)
    config.experts_per_token = min(config.experts_per_token, config.experts)
    for block in routed(model):
        block.top_k = config.experts_per_token


def _keep_router_single(model: nn.Module) -> None:
    for block in routed(model):
        block.router.float()
