"""Which positions each query may attend to, for rows of different lengths in one batch."""

from __future__ import annotations

from typing import Any

import torch


class Masks:
    """Makes the explicit attention masks of one model."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kind, self._window = _windows(config)

    def __call__(self, positions: torch.Tensor, width: int) -> Any:
        """Additive masks [batch, 1, queries, width]: a query at position p sees what lies at or before p in its row.

        Models that mix full and windowed layers get both, by the names that transformers uses.
        """
        distance = positions[:, None, :, None] - torch.arange(width, device=positions.device)
        if self._kind == "full":
            return self._additive(distance >= 0)
        near = self._additive((distance >= 0) & (distance < self._window))
        if self._kind == "window":
            return near
        return {"full_attention": self._additive(distance >= 0), "sliding_attention": near}

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(self._dtype).min)


def _windows(config: Any) -> tuple[str, int]:
    """How the model masks: "full", "window" in every layer, or "mixed" by layer."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds and window:
        return "mixed", int(window)
    if not kinds and window:
        return "window", int(window)
    return "full", 0
