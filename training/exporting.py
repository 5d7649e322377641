"""Write a trained model as a plain transformers folder in bfloat16, file by file and atomically."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizing import ASSISTANT, CONTEXT, EOS, PAD, SYSTEM, USER

if TYPE_CHECKING:
    from transformers import OlmoeForCausalLM, PreTrainedTokenizerFast

PACKAGE_FOLDER = Path(__file__).resolve().parents[1] / "src" / "cloister" / "embedded" / "olmoe"
MAXIMUM_BYTES = 16_000_000


def export(model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> int:
    """Save a bfloat16 copy of the model with its tokenizer; returns the size of the folder in bytes.

    Files are written beside the folder and renamed into it, so a reader never sees half a file.
    """
    import torch
    from transformers import GenerationConfig, OlmoeForCausalLM

    copy = OlmoeForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16)
    copy.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        max_new_tokens=64,
    )
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".export-", dir=folder.parent))
    try:
        copy.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        # transformers 5 adds fields about this machine and a class name that version 4 does not know.
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
            "model_max_length": CONTEXT,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
        }
        (staging / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for file in sorted(staging.iterdir()):
            file.chmod(0o644)
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    if size > MAXIMUM_BYTES:
        raise RuntimeError(f"{folder} has {size:,} bytes, more than the {MAXIMUM_BYTES:,} that a package may carry.")
    return size
