"""Tasks against their slow twins."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny import TOPICS, decoder, encoder, images, sentences, vision

from cloister.errors import DataError
from cloister.unify.examples import Choice, Examples
from cloister.unify.tasks import (
    SCALE,
    Choose,
    Classify,
    Images,
    Language,
    evaluate,
    prototypes,
    public_loss,
    public_targets,
    spoken,
)

ENCODER, DECODER = encoder(), decoder()
QUESTIONS = Examples(
    "text", ("1", "2"), ("the card is lost", "cook the soup"),
    (Choice(("bank", "soup", "hotel"), 0), Choice(("pan", "train"), 0)),
)  # fmt: skip


def vector(text: str) -> torch.Tensor:
    return ENCODER.encode(ENCODER.model, [text])[0]


def test_classify_is_scaled_cosine_cross_entropy():
    given, task = sentences("bank", 20), Classify(tuple(TOPICS["bank"]))
    logits = torch.stack(
        [torch.stack([SCALE * vector(t) @ vector(label) for label in task.labels]) for t in given.texts()]
    )
    right = torch.tensor([task.labels.index(label) for label in given.targets])
    slow = torch.nn.functional.cross_entropy(logits, right)
    assert torch.allclose(task.loss(ENCODER.model, ENCODER, given, range(20)), slow, atol=1e-4)
    score = task.evaluate(ENCODER.model, ENCODER, given, batch=7)
    assert score.value == pytest.approx(float((logits.argmax(-1) == right).float().mean())) and score.n == 20
    assert spoken("card_arrival  now") == "card arrival now"
    with pytest.raises(DataError, match="travel-0"):
        task.check(sentences("travel", 2))


def test_names_are_read_by_the_seed_unless_asked_otherwise():
    given, words = sentences("bank", 6), tuple(TOPICS["bank"])
    other = ENCODER.fresh_model()
    with torch.no_grad():
        torch.nn.init.normal_(other.encoder.layer[1].output.dense.weight)
    by_seed, own = Classify(words), Classify(words, names="own")
    assert torch.allclose(by_seed.fixed(other, ENCODER), torch.stack([vector(word) for word in words]), atol=1e-6)
    assert torch.allclose(own.fixed(other, ENCODER), ENCODER.encode(other, words), atol=1e-6)
    assert not torch.allclose(own.fixed(other, ENCODER), by_seed.fixed(other, ENCODER), atol=1e-3)
    assert by_seed.key() != own.key()
    asked = Choose().predict(other, ENCODER, QUESTIONS, [1], None).log_probabilities
    question = ENCODER.encode(other, ["cook the soup"])[0]
    slow = torch.log_softmax(torch.stack([SCALE * question @ vector(word) for word in ("pan", "train")]), dim=0)
    assert torch.allclose(asked[0], slow, atol=1e-4)
    assert own.loss(ENCODER.model, ENCODER, given, range(6)) == pytest.approx(
        float(by_seed.loss(ENCODER.model, ENCODER, given, range(6))), abs=1e-4
    )


def test_choose_is_the_closest_choice_and_padding_has_no_chance():
    found = Choose().predict(ENCODER.model, ENCODER, QUESTIONS, [0, 1], None)
    slow = torch.log_softmax(
        torch.stack([SCALE * vector("cook the soup") @ vector(c) for c in ("pan", "train")]), dim=0
    )
    assert torch.allclose(found.log_probabilities[1, :2], slow, atol=1e-4)
    assert found.log_probabilities[1, 2] == -math.inf and found.right.tolist() == [0, 0]
    assert torch.isfinite(Choose().loss(ENCODER.model, ENCODER, QUESTIONS, [0, 1]))
    with pytest.raises(DataError):
        Choose().check(sentences("bank", 1))


def test_language_counts_real_tokens_only():
    given = Examples("text", ("1", "2"), ("the card is lost now", "my pan"))
    score = Language(block=16).evaluate(DECODER.model, DECODER, given)
    losses = []
    for text in given.texts():
        batch = DECODER.tokens([text])
        logits = torch.log_softmax(DECODER.model(**batch).logits[0, :-1], -1)
        losses += (-logits.gather(1, batch["input_ids"][0, 1:, None])).flatten().tolist()
    assert score.name == "perplexity" and score.n == len(losses) == 5
    assert score.value == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_ensembles_average_probabilities():
    task, given = Classify(tuple(TOPICS["bank"])), sentences("bank", 12)
    other = ENCODER.fresh_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    right = task.predict(ENCODER.model, ENCODER, given, range(12), task.fixed(ENCODER.model, ENCODER)).right
    probabilities = [
        task.predict(m, ENCODER, given, range(12), task.fixed(m, ENCODER)).log_probabilities.exp()
        for m in (ENCODER.model, other)
    ]
    hits = (sum(probabilities).argmax(-1) == right).float().mean()
    assert evaluate(task, [ENCODER.model, other], ENCODER, given).value == pytest.approx(float(hits))
    first = np.tile(np.array([[1.0, 0.0]], dtype=np.float32), (12, 1))
    alone = evaluate(task, [ENCODER.model], ENCODER, given)
    assert evaluate(task, [ENCODER.model, other], ENCODER, given, weights=first) == alone


def test_public_examples_keep_the_seed_s_vector_or_find_their_other_half():
    given = Examples("text", ("1", "2", "3"), ("the card", "my soup", "a train"), ("lost card", "salt pan", None))
    kept = public_targets(ENCODER, given)
    alone = public_loss(ENCODER.model, ENCODER, given, [2], kept)
    assert float(alone) == pytest.approx(0, abs=1e-4)
    assert float(public_loss(ENCODER.model, ENCODER, given, [2], -kept)) > 1
    both = public_loss(ENCODER.model, ENCODER, given, [0, 1, 2], kept)
    left = torch.stack([vector("the card"), vector("my soup")])
    right = torch.stack([vector("lost card"), vector("salt pan")])
    cosines, target = SCALE * left @ right.T, torch.arange(2)
    ce = torch.nn.functional.cross_entropy
    assert torch.allclose(both, (ce(cosines, target) + ce(cosines.T, target)) / 2 * 2 / 3, atol=1e-4)
    assert torch.isfinite(public_loss(DECODER.model, DECODER, given, [0, 1], kept))


def test_images_and_prototypes():
    seed, given = vision(), images(40)
    task = Images(("above", "below"), prototypes(seed, given, ("above", "below")))
    assert np.allclose(np.linalg.norm(task.vectors, axis=1), 1, atol=1e-5)
    assert task.evaluate(seed.model, seed, given).value > 0.8
    assert torch.isfinite(task.loss(seed.model, seed, given, range(8)))
    with pytest.raises(DataError):
        prototypes(seed, given, ("left",))
