"""All cache memory that requests can ever need, taken once at start and bounded by a budget."""

from __future__ import annotations

import logging
import os

import torch
from transformers.cache_utils import DynamicCache

from cloister.errors import TooLarge
from cloister.serving.server.cache import Rows, shapes_from
from cloister.serving.server.loading import ServedModel
from cloister.serving.server.settings import ServerSettings

log = logging.getLogger("cloister.server")


def allocate(served: ServedModel, settings: ServerSettings) -> tuple[int, int, Rows]:
    """(rows for requests, rows for sessions, the cache): as many rows as were wished for and the budget allows."""
    length = served.shape.max_model_len
    probe = DynamicCache(config=served.model.config)
    one = torch.zeros(1, 1, served.shape.hidden_size, dtype=served.dtype, device=served.device)
    with torch.inference_mode():  # one pass over one position tells what each layer keeps
        served.model(inputs_embeds=one, past_key_values=probe, use_cache=True)
    shapes = shapes_from(probe)
    row = sum(shape.bytes_per_position for shape in shapes) * length
    budget = settings.kv_cache_bytes or free_memory(served.device) // 4
    wanted = max(settings.max_slots, 1) + max(settings.max_sessions, 0)
    rows = min(wanted, budget // row)
    if rows < 1:
        raise TooLarge(
            f"One sequence of {length} positions needs {row / 2**20:.1f} MiB of cache, "
            f"{budget / 2**20:.1f} MiB are allowed.",
            advice="Lower --max-model-len or raise --kv-cache-bytes.",
        )
    sessions = max(min(settings.max_sessions, rows - 1, max(rows * settings.max_sessions // wanted, 1)), 0)
    log.info(
        "%s: KV cache for %d requests and %d sessions of %d positions, %.1f MiB",
        served.name,
        rows - sessions,
        sessions,
        length,
        rows * row / 2**20,
    )
    return rows - sessions, sessions, Rows(shapes, rows, length, served.device)


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken on `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123 - a kernel interface, not a file
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
