"""BERT: post-norm encoder with learned positions; bare (sentence vectors), with a masked-word head, or with a
classifier.

Post-norm means that each norm's own scale lands on the residual stream, so only a change of order leaves it as it is.
"""

from __future__ import annotations

from cloister.families.decoder import IGNORABLE, Config
from cloister.families.layout import Elementwise, Heads, Layout, Neurons, Residual, Segment, Vocabulary

MODEL_TYPES = ("bert",)
ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
WHY_NOT = "post-norm: the norms' scales act on the residual stream itself, so only permutations leave them as they are"


def reasons_against(config: Config) -> list[str]:
    """What in this configuration the family cannot express."""
    reasons = []
    if config.get("position_embedding_type", "absolute") != "absolute":
        reasons.append(f"position_embedding_type {config['position_embedding_type']!r} is not supported")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        reasons.append("decoder or cross-attention BERT is not supported")
    return reasons


def layout(config: Config, names: frozenset[str]) -> Layout:
    """Where the parts are."""
    size, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    architecture = (config.get("architectures") or ["BertModel"])[0]
    task = {"BertForMaskedLM": "fill", "BertForSequenceClassification": "classify"}.get(architecture, "embed")
    prefix = "bert." if any(name.startswith("bert.") for name in names) or (not names and task != "embed") else ""
    model = Layout(family="bert", task=task, ignorable=IGNORABLE, output="residual")
    model.add(Residual("residual", size, "layer", rotatable=False, why_not=WHY_NOT))
    model.add(Vocabulary("vocabulary", config["vocab_size"]))
    residual, words = Segment("residual", size), Segment("vocabulary", config["vocab_size"])
    model.embedding = f"{prefix}embeddings.word_embeddings.weight"
    model.max_positions = config["max_position_embeddings"]
    model.table(model.embedding, words, residual)
    model.table(f"{prefix}embeddings.position_embeddings.weight", Segment(None, model.max_positions), residual)
    types = Segment(None, config.get("type_vocab_size", 2))
    model.table(f"{prefix}embeddings.token_type_embeddings.weight", types, residual)
    model.norm(f"{prefix}embeddings.LayerNorm", residual, bias=True, foldable=False)
    for index in range(config["num_hidden_layers"]):
        layer, space = f"{prefix}encoder.layer.{index}", f"layer{index}"
        model.add(Heads(f"{space}.attention", heads, heads, size // heads, size // heads))
        model.add(Neurons(f"{space}.mlp", inner, gated=False))
        neurons = Segment(f"{space}.mlp", inner)
        for part, letter in (("query", "q"), ("key", "k"), ("value", "v")):
            model.linear(
                f"{layer}.attention.self.{part}", Segment(f"{space}.attention.{letter}", size), residual, bias=True
            )
        model.linear(f"{layer}.attention.output.dense", residual, Segment(f"{space}.attention.o", size), bias=True)
        model.norm(f"{layer}.attention.output.LayerNorm", residual, bias=True, foldable=False)
        model.linear(f"{layer}.intermediate.dense", neurons, residual, bias=True)
        model.linear(f"{layer}.output.dense", residual, neurons, bias=True)
        model.norm(f"{layer}.output.LayerNorm", residual, bias=True, foldable=False)
    model.add(Elementwise("pooled", size))
    pooled = Segment("pooled", size)
    model.linear(f"{prefix}pooler.dense", pooled, residual, bias="optional", optional=task != "classify")
    if task == "fill":
        model.add(Elementwise("predicted", size))
        predicted = Segment("predicted", size)
        model.linear("cls.predictions.transform.dense", predicted, residual, bias=True)
        model.norm("cls.predictions.transform.LayerNorm", predicted, bias=True, foldable=False)
        model.linear("cls.predictions.decoder", words, predicted, bias="optional", optional=True)
        model.vector("cls.predictions.bias", words)
        model.head, model.output = "cls.predictions.decoder.weight", "vocabulary"
        model.head_aliases = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
    elif task == "classify":
        count = len(config.get("id2label") or {0: "", 1: ""})
        model.add(Elementwise("labels", count))
        model.linear("classifier", Segment("labels", count), pooled, bias=True)
        model.output = "labels"
    model.blocked["orthogonal"] = [WHY_NOT]
    return model
