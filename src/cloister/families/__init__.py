"""Model families: one file each, and the way to find the one that fits a checkpoint.

layout = families.layout(config, names_of_tensors)     # where the parts are
diagnosis = families.diagnose(config)                   # from the configuration alone, with every reason against
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from cloister.errors import UnsupportedModel
from cloister.families import bert, clip, deepseek, gpt2, llama, llava, mixtral, olmoe, qwen_moe, unified, vit
from cloister.families.layout import Layout

FAMILIES: dict[str, ModuleType] = {
    module.__name__.rsplit(".", 1)[-1]: module
    for module in (gpt2, llama, mixtral, qwen_moe, olmoe, deepseek, bert, vit, clip, llava, unified)
}
TRANSFORMS = ("permutation", "orthogonal")


@dataclass(frozen=True)
class Diagnosis:
    """What the configuration alone says. `reasons` stand against every mode; `transforms` lists those against each
    transform."""

    family: str | None
    architecture: str
    task: str | None = None
    reasons: list[str] = field(default_factory=list)
    transforms: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def supported(self) -> bool:
        """Whether any transform fits."""
        return self.family is not None and not self.reasons


def diagnose(config: Mapping[str, Any]) -> Diagnosis:
    """Find the family and every reason against, without looking at weights."""
    architecture = (config.get("architectures") or [""])[0]
    module = _module(config)
    reasons: list[str] = []
    kind = config.get("model_type")
    if module is None:
        known = ", ".join(sorted(kind for m in FAMILIES.values() for kind in m.MODEL_TYPES))
        reasons.append(f"model_type {kind!r} belongs to no family (known: {known})")
    elif not architecture:
        reasons.append("config.json names no architecture; the task (generate, embed, classify) is unknown")
    elif architecture not in module.ARCHITECTURES:
        reasons.append(f"architecture {architecture} is not among {', '.join(module.ARCHITECTURES)}")
    if config.get("quantization_config"):
        reasons.append("the checkpoint is quantized; protect the unquantized one and quantize the result")
    if config.get("auto_map"):
        reasons.append(
            "the checkpoint brings its own code (auto_map); only architectures of transformers are supported"
        )
    if module is not None:
        reasons += module.reasons_against(config)
    if module is None or reasons:
        name = _name(module) if module else None
        return Diagnosis(name, architecture, None, reasons, dict.fromkeys(TRANSFORMS, reasons))
    try:
        found: Layout = module.layout(config, frozenset())
    except (KeyError, TypeError, ZeroDivisionError) as error:
        reasons = [f"config.json lacks or damages {error}"]
        return Diagnosis(_name(module), architecture, None, reasons, dict.fromkeys(TRANSFORMS, reasons))
    transforms = {name: list(found.blocked.get(name, [])) for name in TRANSFORMS}
    return Diagnosis(_name(module), architecture, found.task, [], transforms, list(found.notes))


def layout(config: Mapping[str, Any], names: Iterable[str]) -> Layout:
    """Where the parts of this checkpoint are; `UnsupportedModel` with every reason if no family fits."""
    diagnosis = diagnose(config)
    if not diagnosis.supported:
        raise UnsupportedModel(
            f"This checkpoint ({diagnosis.architecture or 'no architecture'}) cannot be protected:",
            diagnosis.reasons,
            advice="`cloister doctor CHECKPOINT` shows which modes fit.",
        )
    module = _module(config)
    assert module is not None
    found: Layout = module.layout(config, frozenset(names))
    return found


def server_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the family changes in `config.json` of a protected checkpoint (vision models take patches instead of
    pixels)."""
    module = _module(config)
    if module in (vit, clip):
        from cloister.families import vision

        return vision.server_config(config)
    return dict(module.server_config(config)) if module in (llava, unified) else dict(config)


def _module(config: Mapping[str, Any]) -> ModuleType | None:
    kind = config.get("model_type")
    return next((module for module in FAMILIES.values() if kind in module.MODEL_TYPES), None)


def _name(module: ModuleType) -> str:
    return module.__name__.rsplit(".", 1)[-1]
