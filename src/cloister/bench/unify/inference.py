"""Inference of a unified model beside one expert alone, and beside what K separate experts cost (BTM).

Seven experts, one chosen a token: as many products as one expert computes, but each expert's weights are read for its
share of the tokens, and a router comes on top. The text rows use the real MiniLM, texts of Banking77 padded as its
tokenizer pads them, and a router fitted to texts of seven owners; `mixed` batches hold texts of all seven, and `random`
is the unfavourable case of a router that scatters every sequence over the experts. Experts are random changes of the
seed: what they answer does not matter to the clock. Padding is not computed by the unified model; the share is told.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cloister.bench import timing
from cloister.bench.schema import Row
from cloister.bench.suites import Options, Workload

EXPERTS = 7
BAR = 1.1
BLEND = 0.9
PAPER = "top-1: as much computation as one expert; BTM: K times"
Batch = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """A unified model and one of its experts as a dense model."""

    unified: Any
    states: list[dict[str, Any]]
    dense: Any


def _trial(seed: Any, vectors: Sequence[Any] | None = None) -> Trial:
    """`vectors`: the router's; random ones without."""
    import torch

    from cloister.unify import moe

    torch.manual_seed(0)
    own = {name: parameter.detach() for name, parameter in seed.named_parameters()}
    states = [
        {name: own[name] + 0.02 * own[name].std() * torch.randn_like(own[name])
         for name in moe.feed_forward_names(seed)} for _ in range(EXPERTS)
    ]  # fmt: skip
    model = moe.unify(seed, {f"owner {number}": state for number, state in enumerate(states)})
    _route(model, vectors)
    return Trial(model.eval(), states, _dense(seed, states[0]))


def _route(model: Any, vectors: Sequence[Any] | None, blend: float = BLEND) -> None:
    import torch

    from cloister.unify import moe

    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    random_ones = [0.3 * torch.randn(EXPERTS, hidden) for _ in range(layers)]
    moe.set_router(model, random_ones if vectors is None else vectors, blend=blend)


def _dense(seed: Any, state: dict[str, Any]) -> Any:
    one = copy.deepcopy(seed)
    one.load_state_dict(state, strict=False)
    return one.eval()


def _row(name: str, trial: Trial, batches: list[Batch], what: str, *, pairs: int, bar: float | None = BAR) -> Row:
    import torch

    def run(model: Any) -> None:
        for batch in batches:
            model(**batch)

    with torch.inference_mode():
        found = timing.compare(lambda: run(trial.unified), lambda: run(trial.dense), pairs=pairs)
    masks = [batch["attention_mask"].float() for batch in batches if "attention_mask" in batch]
    padding = 1 - sum(float(m.sum()) for m in masks) / sum(m.numel() for m in masks) if masks else 0.0
    used, most = _spread(trial.unified, batches)
    note = (
        f"{what}, {torch.get_num_threads()} threads: unified {1e3 * found.a_median / len(batches):.1f} ms, one expert "
        f"{1e3 * found.b_median / len(batches):.1f} ms a batch; {padding:.0%} padding, {used:.1f} experts a layer, the "
        f"fullest with {most:.0%} of the tokens"
    )
    figures = {
        "unified_seconds": found.a_median / len(batches), "dense_seconds": found.b_median / len(batches),
        "padding": padding, "experts_used": used, "fullest": most,
    }  # fmt: skip
    return Row.measured(
        name, found.ratio, "times one expert", spread=found.spread, bar=bar, baseline="one expert alone", paper=PAPER,
        note=note, figures=figures,
    )  # fmt: skip


def _spread(model: Any, batches: list[Batch]) -> tuple[float, float]:
    """Of the experts in a layer: how many get a token, and the fullest's share; means over layers and batches."""
    import torch

    from cloister.unify import moe

    with torch.inference_mode(), moe.record() as routes:
        for batch in batches:
            model(**batch)
    loads = []
    for weights, real in zip(routes.weights, routes.real, strict=True):
        chosen = weights.argmax(-1)
        loads.append(torch.bincount(chosen.flatten() if real is None else chosen[real], minlength=EXPERTS).float())
    used = torch.stack([(load > 0).sum() for load in loads]).float().mean()
    return float(used), float(torch.stack([load.max() / load.sum() for load in loads]).mean())


def _btm(name: str, trial: Trial, seed: Any, batch: Batch, *, pairs: int) -> Row:
    """What BTM costs: every expert answers every batch."""
    import torch

    experts = [_dense(seed, state) for state in trial.states]
    with torch.inference_mode():
        found = timing.compare(
            lambda: [one(**batch) for one in experts], lambda: trial.unified(**batch), pairs=pairs, warm_up=1
        )
    return Row.measured(
        name, found.ratio, "times the unified model", spread=found.spread, at_most=False, baseline="the unified model",
        paper=PAPER, note=f"BTM with {EXPERTS} experts, each on every token",
        figures={"btm_seconds": found.a_median, "unified_seconds": found.b_median},
    )  # fmt: skip


# ---- texts ------------------------------------------------------------------------------------------------------


def _encoder(options: Options) -> list[Row]:
    from cloister.bench.unify import text_data
    from cloister.unify import joint

    seed = text_data.minilm(64)
    count = 20 if options.quick else 150
    owners = text_data.owners(
        text_data.data_directory(), text_data.DOMAINS, {"": count}, 4 if options.quick else 60, 0, development=False
    )
    options.progress.note("inference: a router for the texts of seven owners")
    vectors = joint.router_vectors_from_proxies(seed, {o.name: o.train for o in owners}, how="fit")
    trial = _trial(seed.model, vectors)
    own = [text for owner in owners if owner.name == text_data.BANKING for text in owner.test.texts()]
    everybody = [text for owner in owners for text in owner.test.texts()]

    def batches(texts: list[str], size: int, many: int) -> list[Batch]:
        draw = random.Random(size)
        return [seed.tokens(draw.choices(texts, k=size)) for _ in range(many)]

    pairs = 5 if options.quick else 15
    plan = ((1, 2),) if options.quick else ((1, 16), (16, 2), (64, 1))
    rows = []
    for size, many in plan:
        given = batches(own, size, many)
        what = f"MiniLM, {size} texts of Banking77"
        rows.append(_row(f"inference-encoder-{size}", trial, given, what, pairs=pairs))
        if size > 1:
            given = batches(everybody, size, many)
            what = f"MiniLM, {size} texts of all owners"
            rows.append(_row(f"inference-encoder-mixed-{size}", trial, given, what, pairs=pairs))
    rows.append(_btm("inference-encoder-btm", trial, seed.model, given[0], pairs=5))
    _route(trial.unified, None, blend=0.3)
    what = f"MiniLM, {plan[-1][0]} texts of Banking77, a random router"
    rows.append(_row("inference-encoder-random", trial, batches(own, *plan[-1]), what, pairs=pairs, bar=None))
    return rows


# ---- decoders and images ----------------------------------------------------------------------------------------


def _decoder(options: Options) -> list[Row]:
    """A LLaMA of hidden size 512: whole prompts, and token by token with the cache, where each operation counts."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, num_hidden_layers=2 if options.quick else 6, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=1408, vocab_size=8192, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    seed = transformers.LlamaForCausalLM(config).eval()
    trial, rows = _trial(seed), []
    for size, length in ((2, 8),) if options.quick else ((1, 64), (16, 64)):
        ids = torch.randint(0, config.vocab_size, (size, length))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        what = f"a LLaMA of hidden size 512, {size} prompts of {length} tokens"
        rows.append(_row(f"inference-prompt-{size}", trial, [batch], what, pairs=5 if options.quick else 15))
    for size in (2,) if options.quick else (1, 16):
        rows.append(_decoding(trial, size, 4 if options.quick else 24, pairs=5 if options.quick else 11))
    return rows


def _decoding(trial: Trial, size: int, count: int, *, pairs: int) -> Row:
    import torch

    ids = torch.randint(0, trial.dense.config.vocab_size, (size, 16))
    wanted: Batch = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    wanted["attention_mask"] = torch.ones_like(ids)
    with torch.inference_mode():
        found = timing.compare(
            lambda: trial.unified.generate(ids, **wanted), lambda: trial.dense.generate(ids, **wanted), pairs=pairs
        )
    note = (
        f"{count} tokens after 16, {size} sequences: unified {found.a_median:.2f} s, one expert {found.b_median:.2f} s"
    )
    return Row.measured(
        f"inference-decoding-{size}", found.ratio, "times one expert", spread=found.spread, bar=BAR,
        baseline="one expert alone", note=note,
        figures={"unified_seconds": found.a_median, "dense_seconds": found.b_median},
    )  # fmt: skip


def _vision(options: Options) -> list[Row]:
    """A ViT of hidden size 192 on 4 x 4 patches of 32 x 32 pixels."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=2 if options.quick else 6, num_attention_heads=3, intermediate_size=768,
        image_size=32, patch_size=4,
    )  # fmt: skip
    trial, rows = _trial(transformers.ViTModel(config, add_pooling_layer=False).eval()), []
    for size in (2,) if options.quick else (1, 16, 64):
        batch = {"pixel_values": torch.randn(size, 3, 32, 32)}
        what = f"a ViT of hidden size 192, {size} images of 65 patches"
        rows.append(_row(f"inference-vision-{size}", trial, [batch], what, pairs=5 if options.quick else 15))
    return rows


def _workload(name: str, summary: str, run: Callable[[Options], list[Row]]) -> Workload:
    return Workload(name, f"{summary}, {EXPERTS} experts, top-1: time beside one expert", run, "times one expert", BAR)


WORKLOADS = (
    _workload("inference-encoder", "unified MiniLM", _encoder),
    _workload("inference-decoder", "unified decoder", _decoder),
    _workload("inference-vision", "unified ViT", _vision),
)
