"""Texts that are like no owner's go to the seed's own feed-forward block."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import encoder, sentences  # noqa: E402

import cloister.unify.moe as moe  # noqa: E402
from cloister.unify import joint  # noqa: E402
from cloister.unify.examples import Examples  # noqa: E402
from cloister.unify.seeds import Seed  # noqa: E402
from cloister.unify.views import block_inputs  # noqa: E402

OWNERS = ("bank", "kitchen")


def unified(seed: Seed) -> Any:
    """Two owners and the fallback. Whom a vector stands for is fitted to proxies, and for the fallback to public texts
    that no owner chose."""
    own = {name: p.detach() for name, p in seed.model.named_parameters()}
    names = moe.feed_forward_names(seed.model)
    torch.manual_seed(1)
    states = {who: {n: own[n] + 0.3 * torch.randn_like(own[n]) for n in names} for who in OWNERS}
    model = moe.unify(seed.model, states, fallback=True)
    texts = {"nobody": sentences("travel", 60), **{who: sentences(who, 60) for who in OWNERS}}
    moe.set_router(model, joint.router_vectors_from_proxies(seed, texts, how="fit"))
    return model.eval()


def shares(model: Any, seed: Seed, examples: Examples) -> list[float]:
    """The share of the real tokens, over all layers, that each expert gets."""
    batch = seed.batch(examples.texts())
    with torch.no_grad(), moe.record() as routes:
        model(**batch)
    chosen = torch.cat([w.argmax(-1)[batch["attention_mask"].bool()] for w in routes.weights])
    return (torch.bincount(chosen, minlength=3).float() / len(chosen)).tolist()


def test_texts_unlike_all_owners_are_answered_by_the_seed() -> None:
    seed = encoder()
    with torch.no_grad():  # words that differ, as in a seed that was trained
        seed.model.embeddings.word_embeddings.weight.normal_(0, 1)
    model = unified(seed)
    foreign = sentences("travel", 40, seed=9)
    assert shares(model, seed, foreign)[0] > 0.7
    for place, who in enumerate(OWNERS, start=1):
        found = shares(model, seed, sentences(who, 40, seed=9))
        assert found[place] > 0.7 and found[0] < 0.25

    # and the block's answer is the seed's own, times the router's weight
    block = model.encoder.layer[0].intermediate
    layer = seed.model.encoder.layer[0]
    z = torch.from_numpy(block_inputs(seed, foreign))[:1, :1]
    with torch.no_grad():
        weight = block.router(z)[0, 0]
        assert int(weight.argmax()) == 0
        expected = weight[0] * layer.output.dense(layer.intermediate(z))
        assert torch.allclose(block(z), expected, atol=1e-5)
