"""Inference of a unified model beside one expert alone, and beside what K separate experts cost (BTM).

Seven experts, one chosen a token: as many products as one expert computes, but each expert's weights are read for its
share of the tokens, and a router comes on top. Routers are fitted to sequences of seven owners, as they are in a round:
for the real MiniLM to their texts, padded as its tokenizer pads them; for the decoder to seven small vocabularies; for
the ViT to images of seven colours. A batch is one owner's, or `mixed`: of all seven. `random` is the unfavourable case
of a router that scatters every sequence over the experts. Experts are random changes of the seed: what they answer does
not matter to the clock. Padding is not computed by the unified model; the share is told.
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


def _core(name: str, trial: Trial, run: Callable[[Any], object], what: str, *, pairs: int) -> Row:
    """What the Rust core saves a router: the same model by tensor operations, and with the core."""
    import torch

    from cloister.unify.moe import dispatch

    def by_operations() -> None:
        with dispatch.by_operations():
            run(trial.unified)

    with torch.inference_mode():
        if not dispatch.core_is_free():
            return Row.failed(name, "times one with the Rust core", "the Rust core is not installed here")
        found = timing.compare(by_operations, lambda: run(trial.unified), pairs=pairs)
    return Row.measured(
        name, found.ratio, "times one with the Rust core", spread=found.spread, at_most=False,
        baseline="the unified model with the Rust core",
        note=f"{what}: the router by tensor operations {1e3 * found.a_median:.1f} ms, by the core "
        f"{1e3 * found.b_median:.1f} ms",
        figures={"operations_seconds": found.a_median, "core_seconds": found.b_median},
    )  # fmt: skip


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


def _fitted(seed: Any, per_owner: Sequence[Batch]) -> list[Any]:
    """Router vectors by which each owner's sequences go to its expert, as a round fits them to proxies."""
    import torch

    from cloister.unify import joint
    from cloister.unify.moe.blocks import find

    found: list[list[Any]] = []
    handles = []
    for place, block in enumerate(find(seed)):
        found.append([])
        module = getattr(block.owner, block.name)
        handles.append(module.register_forward_pre_hook(lambda _, z, place=place: found[place].append(z[0].mean(1))))
    with torch.inference_mode():
        for batch in per_owner:
            seed(**batch)
    for handle in handles:
        handle.remove()
    owner = torch.arange(len(per_owner)).repeat_interleave(len(found[0][0]))
    return [joint._regress(torch.cat(one).clone(), owner, len(per_owner)) for one in found]


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
    words = 64  # of each owner: an untrained model knows no others as alike

    def prompts(owner: int, size: int, length: int) -> Batch:
        ids = torch.randint(owner * words, (owner + 1) * words, (size, length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    trial = _trial(seed, _fitted(seed, [prompts(owner, 40, 32) for owner in range(EXPERTS)]))
    size, length, count, pairs = (2, 8, 4, 5) if options.quick else (16, 64, 24, 15)
    kind = "a LLaMA of hidden size 512"
    rows = []
    for many in (1, size):
        what = f"{kind}, {many} prompts of {length} tokens, of one owner"
        rows.append(_row(f"inference-prompt-{many}", trial, [prompts(1, many, length)], what, pairs=pairs))
    mixed = _together([prompts(i % EXPERTS, 1, length) for i in range(size)])
    what = f"{kind}, {size} prompts of {length} tokens, of all owners"
    rows.append(_row(f"inference-prompt-mixed-{size}", trial, [mixed], what, pairs=pairs))
    for many in (1, size):
        rows.append(_decoding(f"inference-decoding-{many}", trial, prompts(1, many, 16), count, pairs=pairs))
    one = prompts(1, 1, 16)
    what = f"{kind}, {count} tokens after 16 of one sequence"
    rows.append(
        _core("inference-decoding-core", trial, lambda m: m.generate(**one, **_wanted(count)), what, pairs=pairs)
    )
    mixed = _together([prompts(i % EXPERTS, 1, 16) for i in range(size)])
    return [*rows, _decoding(f"inference-decoding-mixed-{size}", trial, mixed, count, pairs=pairs)]


def _together(batches: Sequence[Batch]) -> Batch:
    import torch

    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _wanted(count: int) -> Batch:
    return {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}


def _decoding(name: str, trial: Trial, batch: Batch, count: int, *, pairs: int) -> Row:
    import torch

    wanted = _wanted(count)
    with torch.inference_mode():
        found = timing.compare(
            lambda: trial.unified.generate(**batch, **wanted), lambda: trial.dense.generate(**batch, **wanted),
            pairs=pairs,
        )  # fmt: skip
    used, _ = _spread(trial.unified, [batch])
    note = (
        f"{count} tokens after {batch['input_ids'].shape[1]}, {len(batch['input_ids'])} sequences that use {used:.1f} "
        f"experts a layer: unified {found.a_median:.2f} s, one expert {found.b_median:.2f} s"
    )
    return Row.measured(
        name, found.ratio, "times one expert", spread=found.spread, bar=BAR, baseline="one expert alone", note=note,
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
    seed = transformers.ViTModel(config, add_pooling_layer=False).eval()
    colours = torch.randn(EXPERTS, 3, 1, 1)

    def images(owner: int, size: int) -> Batch:
        return {"pixel_values": colours[owner] + 0.5 * torch.randn(size, 3, 32, 32)}

    trial = _trial(seed, _fitted(seed, [images(owner, 40) for owner in range(EXPERTS)]))
    pairs, rows = 5 if options.quick else 15, []
    for size in (2,) if options.quick else (1, 16, 64):
        what = f"a ViT of hidden size 192, {size} images of 65 patches"
        rows.append(_row(f"inference-vision-{size}", trial, [images(1, size)], f"{what}, of one owner", pairs=pairs))
        if size > 1:
            mixed = _together([images(i % EXPERTS, 1) for i in range(size)])
            rows.append(_row(f"inference-vision-mixed-{size}", trial, [mixed], f"{what}, of all owners", pairs=pairs))
    alone = images(1, 1)
    what = "a ViT of hidden size 192, one image"
    rows.append(_core("inference-vision-core", trial, lambda m: m(**alone), what, pairs=pairs))
    _route(trial.unified, None, blend=0.3)
    batch = images(1, 2 if options.quick else 16)
    what = f"a ViT of hidden size 192, {len(batch['pixel_values'])} images, a random router"
    rows.append(_row("inference-vision-random", trial, [batch], what, pairs=pairs, bar=None))
    return rows


def _workload(name: str, summary: str, run: Callable[[Options], list[Row]]) -> Workload:
    return Workload(name, f"{summary}, {EXPERTS} experts, top-1: time beside one expert", run, "times one expert", BAR)


WORKLOADS = (
    _workload("inference-encoder", "unified MiniLM", _encoder),
    _workload("inference-decoder", "unified decoder", _decoder),
    _workload("inference-vision", "unified ViT", _vision),
)
