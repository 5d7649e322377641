"""What the enclave path costs: the same random model with and without the enclave process, timed in turns.

The enclave here is an ordinary process, so the figure is the price of the protocol and of the changed functions, not
that of SGX's memory encryption and enclave transitions. The paper's table VI (w/o TEE, w/ TEE (IO-only)) is the
comparison.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloister.errors import InvalidParameter
from cloister.permute.enclave.client import EnclaveProcess
from cloister.permute.enclave.host import EnclavedModel
from cloister.permute.enclave.making import make_bundle

PAPER_RATIO = (1.03, 1.09)  # table VI, IO-only


@dataclass(frozen=True)
class Overhead:
    """Seconds per forward pass over `batch` x `tokens`, medians over `rounds` interleaved rounds."""

    shape: str
    parameters: int
    batch: int
    tokens: int
    rounds: int
    without_s: float
    with_s: float
    ratio: float  # the median of the rounds' own ratios
    spread: float  # half the distance between the rounds' quartile ratios
    cpu_ratio: float  # processor time of both processes / without; steadier than the clock on a busy machine
    max_difference: float  # the largest difference between the two answers' scores

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def _llama(width: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, intermediate_size=int(width * 2.75), num_hidden_layers=layers, num_attention_heads=width //
        64, num_key_value_heads=width // 64, vocab_size=32_000, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


SHAPES: dict[str, Callable[[], Any]] = {
    "llama-1024x16": lambda: _llama(1024, 16),
    "llama-512x8": lambda: _llama(512, 8),
    "gpt2-124m": _gpt2,
}


def measure_overhead(shape: str = "llama-1024x16", *, batch: int = 10, tokens: int = 100, rounds: int = 5) -> Overhead:
    """Time a forward pass to the last position's scores with and without the enclave, `rounds` times in turns."""
    if shape not in SHAPES:
        raise InvalidParameter(f"There is no shape {shape!r}.", advice=f"Available: {', '.join(SHAPES)}.")
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = SHAPES[shape]().eval()
    torch.random.set_rng_state(state)
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, (batch, tokens), dtype=np.int32)
    # Which order the features are in costs nothing either way, so the server's model is left as it is.
    bundle = make_bundle(model, np.arange(model.config.hidden_size), np.arange(model.config.vocab_size))
    with tempfile.TemporaryDirectory() as directory:
        bundle.write(Path(directory))
        with EnclaveProcess(directory) as enclave:
            without, within, work, difference = _time(model, enclave, torch.from_numpy(ids).long(), ids, rounds)
    ratios = [b / a for a, b in zip(without, within, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if rounds > 1 else [ratios[0]] * 3
    return Overhead(
        shape, sum(p.numel() for p in model.parameters()), batch, tokens, rounds,
        statistics.median(without), statistics.median(within), statistics.median(ratios),
        (quartiles[2] - quartiles[0]) / 2, statistics.median(b / a for a, b in work), difference,
    )  # fmt: skip


def _time(
    model: Any, enclave: EnclaveProcess, ids: torch.Tensor, values: np.ndarray[Any, np.dtype[np.int32]], rounds: int
) -> tuple[list[float], list[float], list[tuple[float, float]], float]:
    def plainly() -> torch.Tensor:
        with torch.inference_mode():
            scores: torch.Tensor = model(input_ids=ids, logits_to_keep=1, use_cache=False).logits
            return scores

    def enclaved() -> torch.Tensor:
        wired = EnclavedModel(model, enclave)  # wiring is a handful of hooks; it is inside the time
        try:
            scores, session = wired.forward(values, last_only=True)
            wired.close_session(session)
            return scores
        finally:
            wired.close()

    difference = float((plainly() - enclaved()).abs().max())  # also the warm-up
    without: list[float] = []
    within: list[float] = []
    work: list[tuple[float, float]] = []  # processor seconds of each round: without, with
    for turn in range(rounds):
        order = [(plainly, without), (enclaved, within)]
        used: dict[bool, float] = {}
        for run, seconds in order if turn % 2 == 0 else reversed(order):
            begun, busy = time.perf_counter(), _processor_seconds(enclave)
            run()
            seconds.append(time.perf_counter() - begun)
            used[run is enclaved] = _processor_seconds(enclave) - busy
        work.append((used[False], used[True]))
    return without, within, work, difference


def _processor_seconds(enclave: EnclaveProcess) -> float:
    """Of this process and the enclave's together."""
    try:
        fields = Path(f"/proc/{enclave.process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.process_time()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
