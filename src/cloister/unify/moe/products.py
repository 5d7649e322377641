"""Linear layers for few tokens on a processor: the weights times the tokens, not the tokens times the weights.

Experts share the tokens of a batch, so each sees few. MKL takes up to a third less time for the product of 5 to 150
rows when it is told to compute the transposed one (measured: 1536 x 384, single precision, AVX-512). The numbers differ
by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FEWEST, MOST = 5, 150


class _Turned(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear and not kwargs and len(args) == 3 and args[0].dim() == 2:
            rows, weight, bias = args
            turned = rows.t().contiguous()
            return (weight @ turned if bias is None else torch.addmm(bias[:, None], weight, turned)).t()
        return func(*args, **(kwargs or {}))


def applied(expert: nn.Module, rows: Tensor) -> Tensor:
    """The expert's output for these tokens [tokens, hidden]."""
    few = FEWEST <= len(rows) <= MOST and rows.dtype == torch.float32 and rows.device.type == "cpu"
    if not few or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        result: Tensor = expert(rows)
        return result
    with _Turned():
        result = expert(rows)
    return result
