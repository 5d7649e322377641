"""What an expert and its routing vectors may make of the seed, so that one owner cannot spoil a round for all.

    reasons = bounds.of_expert(seed, load_file(expert))

That values are finite is not enough: LoRA factors of 1e30 make a product that is not, and a change that is a thousand
times as large as the seed drowns what the others have learned, since experts are shared and trained together.

Honest training comes nowhere near these bounds: docs/unify-rounds.md has what was measured. They keep a round going;
whether an expert within them is any good they do not say.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cloister.errors import BrokenCheckpoint
from cloister.unify.examples import Examples
from cloister.unify.experts import apply_delta
from cloister.unify.seeds import Seed, with_state
from cloister.unify.views import block_inputs

MOST_CHANGE = 10.0  # times the seed's own tensor, each for itself
MOST_VECTOR = 10.0  # times what a router of that layer sees


def of_expert(seed: Seed, delta: Mapping[str, Tensor]) -> list[str]:
    """Why this change of the seed is none that training makes; computed as it is when the model is built.

    A tensor may change by `MOST_CHANGE` times its own norm (Frobenius). Biases and matrices may be zero in a seed: a
    tensor counts as at least as large as it were with entries like those of the blocks on average.
    """
    try:
        after = apply_delta(seed, delta)
    except BrokenCheckpoint as error:
        return [error.message]
    own = {name: parameter.detach() for name, parameter in seed.model.named_parameters() if name in after}
    matrices = [tensor for tensor in own.values() if tensor.dim() > 1]
    entries = sum(tensor.numel() for tensor in matrices)
    usual = (sum(_norm(tensor) ** 2 for tensor in matrices) / max(entries, 1)) ** 0.5
    reasons = []
    for name, tensor in own.items():
        if not torch.isfinite(after[name]).all():
            reasons.append(f"{name}: seed and change together are not finite")
            continue
        times = _norm(after[name] - tensor) / max(_norm(tensor), usual * tensor.numel() ** 0.5, 1e-30)
        if not times <= MOST_CHANGE:
            reasons.append(
                f"{name}: the change is {times:.3g} times as large as the seed's, at most {MOST_CHANGE:g} are taken"
            )
    return reasons


def of_vectors(seed: Seed, vectors: Tensor, proxies: Examples) -> list[str]:
    """The same of routing vectors (layers, hidden): of a layer, against what its router sees of the owner's proxies."""
    seen = torch.from_numpy(block_inputs(seed, proxies)).double().square().sum(-1).mean(0).sqrt()
    times = vectors.double().norm(dim=-1) / seen.clamp(min=1e-30)
    return [
        f"the routing vector of layer {layer} is {float(value):.3g} times as long as what its router sees, "
        f"at most {MOST_VECTOR:g} are taken"
        for layer, value in enumerate(times)
        if not value <= MOST_VECTOR
    ]


def finite_alone(seed: Seed, delta: Mapping[str, Tensor], proxies: Examples) -> bool:
    """Whether the seed with this expert alone answers all of these examples with finite numbers."""
    try:
        model = with_state(seed, apply_delta(seed, delta))
    except BrokenCheckpoint:
        return False
    return bool(torch.isfinite(seed.encode_all(model, proxies.inputs)).all())


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
