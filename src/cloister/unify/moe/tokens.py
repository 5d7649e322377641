"""Which tokens of a forward pass are real, and where a new sequence begins in a row that packs several.

Both are read from what the model was called with, in the way in which transformers itself reads it, so that the router
averages over the tokens that attention sees as one sequence: an attention mask of two or four dimensions, positions
that begin again, or lengths told to flash attention. What cannot be understood is refused, never guessed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cloister.errors import InvalidParameter, UnsupportedParameter

Found = tuple[Tensor | None, Tensor | None]  # real, starts: both [batch, tokens]; None: all are, none does


def understand(given: dict[str, Any], cache: Any, config: Any) -> Found:
    """Real tokens and starts of sequences of the pass with these arguments."""
    first = _first(given)
    if first is None:
        return _mixed(given.get("pixel_attention_mask")), None  # images: every patch is real, unless it says
    real, starts = _text(first, given, cache, config)
    rows = first.shape[0]  # one row may stand for all
    return None if real is None else real.expand(rows, -1), None if starts is None else starts.expand(rows, -1)


def padding(given: dict[str, Any]) -> Tensor | None:
    """Which tokens are real, for a router to which it makes no difference: None where the mask does not simply say."""
    mask, cache, first = given.get("attention_mask"), given.get("past_key_values"), _first(given)
    if first is None or not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    past = 0 if cache is None else cache.get_seq_length()
    if not isinstance(past, int) or mask.shape != (first.shape[0], past + first.shape[1]):
        return None
    return _mixed(_newest(mask, past, first.shape[1]))


def _first(given: dict[str, Any]) -> Any:
    return next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)


def _text(first: Tensor, given: dict[str, Any], cache: Any, config: Any) -> Found:
    if (told := getattr(cache, "real_tokens", None)) is not None:
        return _mixed(told()), None
    if str(config._attn_implementation).startswith("paged") or given.get("read_index") is not None:
        raise UnsupportedParameter(
            "This model's router averages over sequences, and continuous batching of transformers mixes them.",
            advice="Use `generate`, or `cloister serve`, which batches continuously.",
            param="attn_implementation",
        )
    count = first.shape[1]
    if (ends := given.get("cu_seq_lens_q")) is not None:
        starts = torch.zeros(1, count + 1, dtype=torch.bool, device=first.device)
        return None, starts.index_fill(1, ends.long(), True)[:, :count]
    mask = given.get("attention_mask")
    if isinstance(mask, dict):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        flash = "flash" in str(config._attn_implementation)
        return None, (_by_position(given.get("position_ids")) if cache is None or flash else None)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        raise InvalidParameter(
            "A unified model's router must know which tokens are real, and this attention mask does not tell.",
            advice="Give it as [batch, tokens] with 1 for real tokens.",
            param="attention_mask",
        )
    past = 0 if cache is None else cache.get_seq_length()
    if mask.dim() == 4:
        return _four(mask, past, count)
    if not isinstance(past, Tensor) and mask.shape[1] < past + count:
        raise InvalidParameter(
            f"The attention mask has {mask.shape[1]} columns for {past + count} tokens, cached ones included.",
            param="attention_mask",
        )
    return _mixed(_newest(mask, past, count)), None


def _newest(mask: Tensor, past: Any, count: int) -> Tensor:
    if isinstance(past, Tensor):
        return mask.index_select(1, _places(past, count, mask.shape[1], mask.device))
    return mask[:, past : past + count]


def _places(past: Any, count: int, width: int, device: torch.device) -> Tensor:
    """Columns of the tokens of this pass. A sliding window that is full keeps them at its end."""
    start = torch.as_tensor(past, device=device).clamp(max=width - count)
    return start + torch.arange(count, device=device)


def _mixed(mask: Tensor | None) -> Tensor | None:
    """The mask as truth values; None if all are true, for which less needs to be computed."""
    if mask is None:
        return None
    real = mask.bool()
    return None if bool(real.all()) else real


def _by_position(positions: Any) -> Tensor | None:
    """Starts where positions do not go on by one, as transformers finds packed sequences."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return None
    starts = torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=False)
    return starts if bool(starts.any()) else None


def _four(mask: Tensor, past: Any, count: int) -> Found:
    """From [batch, heads, queries, keys]. A real token may attend to itself, whatever else the mask hides; it goes on
    with the real token before it if it may attend to that, and begins a sequence if it may attend to none before."""
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
    places = torch.arange(count, device=mask.device)
    columns = _places(past, count, seen.shape[2], mask.device)
    real = seen[:, places, columns]
    before = torch.where(real, places, -1).cummax(1).values
    before = torch.nn.functional.pad(before, (1, 0), value=-1)[:, :count]  # the real token before each, or -1
    follows = seen.gather(2, columns[before.clamp(min=0)][..., None]).squeeze(2) & (before >= 0)
    anything = (seen & (torch.arange(seen.shape[2], device=mask.device) < columns[:, None])).any(2)
    if bool((real & anything & ~follows & (before >= 0)).any()):
        raise InvalidParameter(
            "A token of this attention mask goes on from one that is not the last before it, as in a tree of drafts; "
            "the router's mean has no such order.",
            param="attention_mask",
        )
    starts = real & ~anything
    return _mixed(real), (starts if bool((starts & ((before >= 0) | (columns > 0))).any()) else None)
