"""Server time per token: protected and plain checkpoint in the same engine, single decode steps in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloister.bench import models, timing
from cloister.bench.schema import Row
from cloister.bench.suites import Options

PROMPT = 64
BAR = 1.02


def run(options: Options) -> list[Row]:
    """One row for a dense model and one for a mixture of experts."""
    sizes = (
        (("dense", models.QUICK), ("moe", models.QUICK_EXPERTS))
        if options.quick
        else (("dense", models.MIDDLE), ("moe", models.MIDDLE_EXPERTS))
    )
    return [_row(kind, size, options) for kind, size in sizes]


def _row(kind: str, size: models.Size, options: Options) -> Row:
    import torch

    from cloister.permute.protect import protect

    with tempfile.TemporaryDirectory(prefix="cloister-bench-") as folder:
        plain = models.write(Path(folder) / "plain", size)
        protect(plain, Path(folder) / "out", base="secret", measure=False, progress=options.progress)
        protected_step = _stepper(Path(folder) / "out" / "server")
        plain_step = _stepper(plain)
        found = timing.compare(
            protected_step, plain_step, pairs=12 if options.quick else 100, warm_up=4, inner=2, deadline=180
        )
    return Row.measured(
        f"server-step-{kind}",
        found.ratio,
        "ratio",
        spread=found.spread,
        baseline=f"plain checkpoint, {1e3 * found.b_median:.1f} ms per token",
        bar=BAR,
        paper="about 1.0",
        note=f"d = {size.hidden}, {size.layers} layers, float32, {torch.get_num_threads()} threads, "
        f"{len(found.a)} pairs",
        figures={"protected_ms": 1e3 * found.a_median, "plain_ms": 1e3 * found.b_median},
    )


def _stepper(directory: Path) -> Callable[[], object]:
    """A function that does one decode step after a prompt of fixed length. The cache grows alike on both sides."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, PROMPT), generator=generator)
    with torch.inference_mode():
        state = model(input_ids=prompt, use_cache=True)
    token = state.logits[:, -1:].argmax(-1)
    cache = state.past_key_values

    def step() -> object:
        with torch.inference_mode():
            return model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)

    return step
