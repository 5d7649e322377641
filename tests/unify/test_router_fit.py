"""A router fitted inside the unified model: it meets what experts make of the proxies, and padding changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import TOPICS, decoder, encoder, sentences

from cloister.unify import joint, moe
from cloister.unify.moe import feed_forward_names
from cloister.unify.moe.routing import RoutedFeedForward
from cloister.unify.router_fit import fit_router
from cloister.unify.seeds import Seed

PROXIES = {name: replace(sentences(name, 24), targets=None) for name in TOPICS}
HELD_OUT = {name: sentences(name, 40, seed=5) for name in TOPICS}


def _far(seed: Seed, owners: int) -> dict[str, dict[str, torch.Tensor]]:
    """Experts far from their seed, each in a direction of its own."""
    draw = torch.Generator().manual_seed(1)
    own = {n: p.detach() for n, p in seed.model.named_parameters() if n in set(feed_forward_names(seed.model))}
    return {
        name: {n: v + 0.3 * torch.randn(v.shape, generator=draw) for n, v in own.items()}
        for name in list(TOPICS)[:owners]
    }


@pytest.mark.parametrize("make", [encoder, decoder])
def test_it_routes_texts_it_never_saw_where_experts_are_far_from_the_seed(make):
    seed = make()
    model = moe.unify(seed.model, _far(seed, 3))
    fit_router(model, seed, PROXIES, blend=0.9)
    inside = joint.routing_accuracy(model, seed, HELD_OUT)
    moe.set_router(model, joint.router_vectors_from_proxies(seed, PROXIES, how="fit"), blend=0.9)
    outside = joint.routing_accuracy(model, seed, HELD_OUT)
    assert sum(inside.values()) / 3 > 0.6, inside  # chance is a third
    assert sum(inside.values()) > sum(outside.values()), (inside, outside)


def test_it_is_the_same_twice_and_leaves_experts_and_seed_as_they_are():
    seed = encoder()
    states = _far(seed, 2)
    chosen = {name: PROXIES[name] for name in states}
    models = [moe.unify(seed.model, states) for _ in range(2)]
    before = {name: value.clone() for name, value in models[0].state_dict().items() if ".router." not in name}
    for model in models:
        fit_router(model, seed, chosen, blend=0.8)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], value) for name, value in before.items())
    routers = [part.router for part in models[0].modules() if isinstance(part, RoutedFeedForward)]
    assert all(torch.isclose(torch.sigmoid(router.blend), torch.tensor(0.8)) for router in routers)


def test_a_router_without_context_and_one_with_a_fallback_are_fitted_too():
    seed = encoder()
    states = _far(seed, 3)
    for options in ({"context": "none"}, {"fallback": True}):
        model = moe.unify(seed.model, states, **options)
        fit_router(model, seed, PROXIES)
        found = joint.routing_accuracy(model, seed, HELD_OUT)
        assert sum(found.values()) / 3 > 0.4, (options, found)


def test_sequences_without_tokens_and_short_ones_do_not_spoil_the_others():
    """A proxy may be empty for the tokenizer; the rest of its batch still gives `tokens` each."""
    from cloister.unify import router_fit

    seed = encoder()
    model = moe.unify(seed.model, _far(seed, 3))
    block = next(part for part in model.modules() if isinstance(part, RoutedFeedForward))
    long = sentences("bank", 4)
    mixed = replace(long, inputs=("", *long.texts()[1:]), targets=None)
    draw = torch.Generator().manual_seed(0)
    features, owner = router_fit._inputs(model, block, seed, {"bank": mixed}, 0.9, 3, 64, draw)
    lengths = seed.tokens(mixed.texts())["attention_mask"].sum(1).clamp(max=3)
    assert len(features) == int(lengths.sum()) == len(owner)
    assert torch.isfinite(features).all()
