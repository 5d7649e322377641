"""What the model developer gives to the enclave: one directory, `enclave.json` and `enclave.safetensors` (0600).

All tensors over the residual stream are already in the server's feature order, so the enclave multiplies by no
permutation.

| tensor | shape | present |
|---|---|---|
| `embedding` | [vocab, d] | text |
| `patch_weight`, `patch_bias`, `class_row` | [patch values, d], [d], [d] | vision |
| `position`, `type_row` | [positions, d], [d] | learned positions; BERT's token type 0 |
| `embedding_norm_weight`, `embedding_norm_bias` | [d] | BERT, CLIP: a norm in front of the first layer |
| `attention_output_bias` | [d] | pre-norm models with a bias behind the first attention |
| `final_norm_weight`, `final_norm_bias` | [d] | always; LayerNorm |
| `output_order` | [outputs] int32 | plain output = server output[output_order] |
| `output_bias` | [outputs] | heads with a bias, in the server's order |
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from cloister.errors import BrokenCheckpoint
from cloister.permute.enclave.theorem import Entrance, Form

if TYPE_CHECKING:
    import numpy as np

FORMAT = 1
SETTINGS_FILE = "enclave.json"
SECRETS_FILE = "enclave.safetensors"
_VECTORS = (
    "patch_bias", "class_row", "type_row", "embedding_norm_weight", "embedding_norm_bias", "attention_output_bias",
    "final_norm_weight", "final_norm_bias",
)  # fmt: skip
_NAMES = {*_VECTORS, "embedding", "patch_weight", "position", "output_order", "output_bias"}


@dataclass(frozen=True)
class Bundle:
    """The enclave's settings (public) and tensors (secret; kept out of `repr`)."""

    form: Form
    hidden_size: int
    entrance_eps: float = 0.0  # eps of the norm at the first layer's entrance; 0 for post-norm models
    embedding_norm_eps: float = 0.0
    final_norm_eps: float = 1e-6
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tensors) - _NAMES)
        if unknown:
            raise BrokenCheckpoint(f"The enclave bundle holds unknown tensors: {', '.join(unknown)}.")
        for name in ("final_norm_weight", "output_order"):
            if name not in self.tensors:
                raise BrokenCheckpoint(f"The enclave bundle has no tensor {name!r}.")
        if ("embedding" in self.tensors) == ("patch_weight" in self.tensors):
            raise BrokenCheckpoint("The enclave bundle needs either `embedding` or `patch_weight`.")
        for name in (*_VECTORS, "embedding", "patch_weight", "position"):
            tensor = self.tensors.get(name)
            if tensor is not None and (
                tensor.ndim != (1 if name in _VECTORS else 2) or tensor.shape[-1] != self.hidden_size
            ):
                raise BrokenCheckpoint(f"Tensor {name!r} of the enclave bundle has shape {tensor.shape}.")

    def write(self, directory: Path) -> None:
        """Write the directory; the secrets are readable by their owner only."""
        from safetensors.numpy import save

        directory.mkdir(parents=True, exist_ok=True)
        settings = {"format": FORMAT, **{k: v for k, v in asdict(self).items() if k != "tensors"}}
        (directory / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        handle = os.open(directory / SECRETS_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(save(dict(self.tensors)))


def read(directory: Path) -> Bundle:
    """Read a bundle; `BrokenCheckpoint` for anything that is not one."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        settings: dict[str, Any] = json.loads((directory / SETTINGS_FILE).read_text())
        if settings.pop("format") != FORMAT:
            raise BrokenCheckpoint("The enclave bundle has another format version.")
        form = Form(**settings.pop("form"))
        if form.corrects not in get_args(Entrance) or form.norm_place not in ("pre", "post"):
            raise BrokenCheckpoint("The enclave bundle has an unknown form.")
        return Bundle(form=form, tensors=load_file(directory / SECRETS_FILE), **settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise BrokenCheckpoint(f"{directory} is no enclave bundle: {error}.", advice="Write it again.") from None
