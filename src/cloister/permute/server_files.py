"""Everything in OUT/server except weights: configuration in the permuted vocabulary, licence, model card.

No tokenizer: a stock client would send text with it.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from cloister import families
from cloister import manifest as manifests
from cloister.families.layout import Layout
from cloister.manifest import OBFUSCATION, Manifest
from cloister.permute.checkpoint import Checkpoint
from cloister.permute.plan import token_ids

# Names that would tell the server what the model was made from, or what its classes mean.
# Older config.json files carry settings of generation too, some with words or ids of the plain vocabulary.
_WORDS = ("bad_words_ids", "sequence_bias", "forced_decoder_ids", "stop_strings", "prefix")
_DROPPED = (
    "_name_or_path", "id2label", "label2id", "task_specific_params", "transformers_version", "auto_map",
    "finetuning_task", *_WORDS,
)  # fmt: skip
_ID_LISTS = ("suppress_tokens", "begin_suppress_tokens")
_POOLING = ("modules.json", "1_Pooling/config.json")


def write(directory: Path, checkpoint: Checkpoint, layout: Layout, vocab_to_server: np.ndarray | None) -> None:
    """Write configuration files and carry the licence over."""
    config = _translated(families.server_config(checkpoint.config), vocab_to_server)
    config["tie_word_embeddings"] = False
    if isinstance(config.get("text_config"), dict):
        config["text_config"]["tie_word_embeddings"] = False
    if layout.output == "labels":
        count = layout.spaces["labels"].size  # type: ignore[union-attr]
        config["id2label"] = {str(index): f"LABEL_{index}" for index in range(count)}
        config["label2id"] = {f"LABEL_{index}": index for index in range(count)}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generation = checkpoint.optional_json("generation_config.json")
    if generation or layout.task == "generate":
        kept = {key: value for key, value in generation.items() if key not in _WORDS}
        if layout.task == "generate":  # what transformers would take from config.json
            for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                kept.setdefault(key, (checkpoint.config.get("text_config") or checkpoint.config).get(key))
        (directory / "generation_config.json").write_text(json.dumps(_translated(kept, vocab_to_server), indent=2))
    for name in _POOLING:
        if (checkpoint.directory / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.directory / name, directory / name)
    for path in licence_files(checkpoint.directory):
        shutil.copyfile(path, directory / path.name)


def _translated(config: dict[str, Any], vocab_to_server: np.ndarray | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in config.items():
        if key in _DROPPED:
            continue
        if isinstance(value, dict):
            result[key] = _translated(value, vocab_to_server)
        elif vocab_to_server is not None and (re.search(r"token_(id|index)$", key) or key in _ID_LISTS):
            result[key] = token_ids(value, vocab_to_server)
        else:
            result[key] = value
    return result


def licence_files(directory: Path) -> list[Path]:
    """Files that state the base model's licence."""
    wanted = ("license", "licence", "notice", "copying", "use_policy")
    return sorted(path for path in directory.iterdir() if path.is_file() and path.name.lower().startswith(wanted))


def base_licence(directory: Path) -> str | None:
    """The licence that the source's model card names."""
    card = directory / "README.md"
    if not card.exists():
        return None
    text = card.read_text(errors="replace")
    head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^license:\s*['\"]?([\w.\-]+)", head.group(1), re.MULTILINE) if head else None
    return found.group(1) if found else None


def write_cards(partial: Path, checkpoint: Checkpoint, manifest: Manifest, contexts: int) -> None:
    """The model card of every context, once the recovery figures are known."""
    licence = base_licence(checkpoint.directory)
    for index in range(contexts):
        directory = partial / "server" / f"context-{index}"
        own = manifests.read(directory)
        (directory / "README.md").write_text(_card(replace(own, measured=manifest.measured), licence))


_PUBLIC = (
    "Its base is public, so this is **obfuscation, not privacy**: "
    "whoever holds this checkpoint and the base can undo it."
)
_SECRET = (
    "Its base is declared secret. What the server sees is then a substitution cipher: equal tokens are equal, and a "
    "server that has text of the same kind and some thousand tokens of traffic reads most of it (55 to 97 % on public "
    "data sets, docs/permute-leakage.md). One user who hands the client directory to the server opens the texts of all "
    "users of this context."
)


def _card(manifest: Manifest, licence: str | None) -> str:
    protection = manifest.protection
    base = protection.base.removeprefix("public:")
    template = Template((Path(__file__).parent / "card.md.template").read_text())
    return template.substitute(
        licence_head=f"license: {licence}\n" if licence else "license: other\nlicense_name: unknown-see-base-model\n",
        base_head=f"base_model: {base}\n" if protection.base.startswith("public:") and "/" in base else "",
        transform=protection.transform,
        name=manifest.model.name,
        architecture=manifest.model.architecture,
        loop=protection.loop,
        context=protection.context,
        key_id=protection.key_id,
        warning=_PUBLIC if protection.label == OBFUSCATION else _SECRET,
        measured=manifest.measured.get("sentence", "the attacks were not run."),
        licence=licence or "unknown; ask who published it before you pass this on",
    )
