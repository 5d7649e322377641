"""Vectors of the seed, and that they depend on nothing but the example."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SMALL, WORDS, decoder, encoder, images, sentences, tokenizer, vision

import cloister.unify.moe as moe
from cloister.errors import BrokenCheckpoint, UnsupportedModel
from cloister.unify.examples import Examples
from cloister.unify.moe.folders import Folder
from cloister.unify.seeds import Looks, Seed, fingerprint, with_state

ENCODER, DECODER = encoder(), decoder()


@pytest.mark.parametrize("seed", [ENCODER, DECODER], ids=["encoder", "decoder"])
@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=12), min_size=1, max_size=40))
def test_a_text_s_vector_is_the_mean_over_its_own_tokens(seed, texts):
    given_ = [" ".join(words) for words in texts]
    together = seed.encode(seed.model, given_)
    for text, vector in zip(given_, together, strict=True):
        batch = seed.tokens([text])
        if seed.kind == "decoder":
            states = seed.model(**batch, output_hidden_states=True).hidden_states[-1]
        else:
            states = seed.model(**batch).last_hidden_state
        slow = states[0].mean(0) / states[0].mean(0).norm()
        assert torch.allclose(vector, slow, atol=1e-5)


@pytest.mark.parametrize("kind", ["vit", "clip"])
def test_images_are_means_over_patches(kind):
    seed, given_ = vision(kind), images(5)
    vectors = seed.vectors(given_, batch=2)
    states = seed.model(pixel_values=seed.pixels(given_.pixels())).last_hidden_state
    assert states.shape[1] == 5  # a class token and four patches
    slow = torch.nn.functional.normalize(states[:, 1:].mean(1), dim=-1)
    assert np.allclose(vectors, slow.detach().numpy(), atol=1e-5)
    larger = np.repeat(np.repeat(given_.pixels(), 2, axis=2), 2, axis=3)
    assert seed.pixels(larger).shape[-2:] == (8, 8)


@pytest.mark.parametrize("make", [encoder, decoder, vision])
def test_load_gives_what_was_saved(tmp_path, make):
    seed = make()
    seed.model.save_pretrained(tmp_path)
    if seed.kind != "vision":
        tokenizer().save_pretrained(tmp_path)
    again = Seed.load(tmp_path, max_tokens=16)
    assert again.kind == seed.kind and again.hidden == 32 and again.fingerprint == seed.fingerprint
    given_ = images(4) if seed.kind == "vision" else sentences("bank", 4)
    assert np.allclose(again.vectors(given_), seed.vectors(given_), atol=1e-6)
    assert np.allclose(np.linalg.norm(again.vectors(given_), axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["ViTForImageClassification", "RobertaForMaskedLM", "BertForMaskedLM"])
def test_a_checkpoint_without_a_pooler_is_one_and_the_same_seed_for_everybody(tmp_path, kind):
    """What a checkpoint lacks, transformers draws at random: each owner would hold another seed."""
    if kind.startswith("ViT"):
        config = transformers.ViTConfig(**{**SMALL, "image_size": 16, "patch_size": 8})
    else:
        shape = {**SMALL, "vocab_size": len(tokenizer()), "max_position_embeddings": 40, "pad_token_id": 0}
        config = getattr(transformers, kind.replace("ForMaskedLM", "Config"))(**shape)
        tokenizer().save_pretrained(tmp_path / "seed")
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "seed")
    one, other = Seed.load(tmp_path / "seed"), Seed.load(tmp_path / "seed")
    assert one.fingerprint == other.fingerprint
    own = dict(one.model.named_parameters())
    state = {name: own[name].detach() + 0.1 for name in moe.feed_forward_names(one.model)}
    moe.unify(one.model, {"bank": state, "travel": state}).save_pretrained(tmp_path / "unified")
    unified, again = (Folder(tmp_path / "unified").model() for _ in range(2))
    assert fingerprint(unified) == fingerprint(again)  # nothing is drawn at random here either
    held = images(3).pixels() if kind.startswith("ViT") else sentences("bank", 3).texts()
    assert torch.isfinite(one.encode(unified.eval(), held)).all()


def test_a_checkpoint_with_a_weight_missing_is_no_seed(tmp_path):
    ENCODER.model.save_pretrained(tmp_path)
    ENCODER.tokenizer.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenCheckpoint, match=r"no weights for encoder\.layer\.1\.output\.dense\.weight"):
        Seed.load(tmp_path)


def test_fingerprint_sees_one_bit_and_fresh_models_are_copies():
    model = ENCODER.fresh_model()
    assert fingerprint(model) == ENCODER.fingerprint
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-6
    assert fingerprint(model) != ENCODER.fingerprint == fingerprint(ENCODER.model)


def test_states_that_do_not_fit_and_seeds_that_cannot_be(tmp_path):
    with pytest.raises(BrokenCheckpoint, match="no parameter"):
        with_state(ENCODER, {"nothing": torch.zeros(1)})
    with pytest.raises(BrokenCheckpoint, match="shape"):
        with_state(ENCODER, {"encoder.layer.0.output.dense.bias": torch.zeros(3)})
    with pytest.raises(BrokenCheckpoint):
        Seed.load(tmp_path)
    with pytest.raises(UnsupportedModel):
        Seed.of(ENCODER.fresh_model())
    with pytest.raises(UnsupportedModel):
        ENCODER.pixels(images(1).pixels())
    assert Looks(8, 1).mean == (0.5,) and SMALL["hidden_size"] == 32


def test_minilm(minilm_dir):
    seed = Seed.load(minilm_dir)
    texts = ("my card was stolen", "someone took my credit card", "how long do I boil an egg")
    vectors = seed.vectors(Examples("text", ("a", "b", "c"), texts))
    assert seed.hidden == 384 and vectors[0] @ vectors[1] > 0.6 > 0.3 > vectors[0] @ vectors[2]


def test_remembered_vectors_are_made_once():
    seed = encoder()
    first = seed.remembered(["the card", "my soup", "the card"])
    assert torch.allclose(first, seed.encode_all(seed.model, ["the card", "my soup", "the card"]), atol=1e-6)
    assert list(seed.known) == ["the card", "my soup"]
    seed.known["the card"] = torch.zeros(32)
    assert torch.equal(seed.remembered(["the card"])[0], torch.zeros(32))
    assert first.requires_grad is False and not first.is_inference()
