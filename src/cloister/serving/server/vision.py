"""Vision models behind a client that cuts the image up itself.

The protected checkpoint says `patch_size = 1`, `num_channels = hidden` and `image_size = grid`: each "pixel" is a patch
that the client has already embedded, in transformed coordinates. The client sends the patches row by row as a matrix
[patches, hidden]; here they become the image that the unchanged model expects.
"""

from __future__ import annotations

from typing import Any

import torch

from cloister.errors import UnsupportedParameter


def grid(config: Any) -> tuple[int, int]:
    """Height and width of the grid of patches that the checkpoint takes."""
    if config.patch_size not in (1, (1, 1), [1, 1]):
        raise UnsupportedParameter(
            "This vision model takes images, not embedded patches.",
            advice="Serve the `server` directory that `cloister protect` wrote for it.",
            param="pixel_embeds",
        )
    size = config.image_size
    return (int(size[0]), int(size[1])) if isinstance(size, list | tuple) else (int(size), int(size))


def patches_to_pixels(patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[height * width, hidden], row by row -> [1, hidden, height, width]."""
    return patches.reshape(1, height, width, -1).permute(0, 3, 1, 2).contiguous()
