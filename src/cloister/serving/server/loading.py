"""From a directory to models in memory: which checkpoints it holds, what each is for, and its identity.

A directory is either one checkpoint, or a folder of contexts (`context-0`, `context-1`, ...). A checkpoint without
`cloister.toml` is served as the plain model that it is. Weights are read from safetensors only, and no code that comes
with a checkpoint is run.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from cloister import manifest as manifests
from cloister.errors import BrokenCheckpoint, BrokenManifest, NotFound, UnsupportedModel, UsageError
from cloister.families import unified
from cloister.manifest import Manifest
from cloister.serving.server.requests import Shape
from cloister.serving.server.settings import ServerSettings

log = logging.getLogger("cloister.server")

_TASKS = (
    ("ForCausalLM", "generate"),
    ("LMHeadModel", "generate"),
    ("ForMaskedLM", "fill"),
    ("ForSequenceClassification", "classify"),
    ("ForImageClassification", "vision"),
    ("VisionModel", "vision"),
    ("VisionModelWithProjection", "vision"),
)


@dataclass(frozen=True)
class Pooling:
    """How token vectors become one vector, in the words of sentence-transformers."""

    mode: str = "mean"  # "mean" or "cls"
    normalize: bool = False


@dataclass
class ServedModel:
    """One model, ready to compute."""

    name: str
    directory: Path
    model: Any
    task: str
    manifest: Manifest | None
    device: torch.device
    dtype: torch.dtype
    shape: Shape
    end_ids: frozenset[int] = frozenset()
    pooling: Pooling = field(default_factory=Pooling)
    digest: str = ""

    @property
    def loop(self) -> str:
        """Which generation loop the checkpoint was made for; empty for a plain model."""
        return self.manifest.protection.loop if self.manifest else ""

    def about(self) -> dict[str, Any] | None:
        """The `cloister` object of /v1/models."""
        if self.manifest is None:
            return None
        protection = self.manifest.protection
        return {
            "key_id": protection.key_id,
            "format": self.manifest.format,
            "loop": protection.loop,
            "label": protection.label,
            "context": protection.context,
            "weights_digest": self.manifest.identity.weights_digest,
        }


def find_checkpoints(directory: Path) -> list[Path]:
    """The checkpoint directories in `directory`: itself, or its contexts in their order."""
    if not directory.is_dir():
        raise NotFound(f"{directory} is not a directory.", advice="Point at OUT/server or at a checkpoint.")
    if (directory / "config.json").is_file():
        return [directory]
    contexts = [path for path in directory.glob("context-*") if (path / "config.json").is_file()]
    if not contexts:
        raise BrokenCheckpoint(
            f"{directory} has neither a config.json nor context-0, context-1, ...",
            advice="Point at the `server` directory that `cloister protect` wrote, or at a Hugging Face checkpoint.",
        )
    return sorted(contexts, key=lambda path: (len(path.name), path.name))


def load_all(settings: ServerSettings) -> list[ServedModel]:
    """Every model of the directory, with names that do not collide."""
    paths = find_checkpoints(settings.directory)
    served = [load(path, settings) for path in paths]
    for one in served:
        one.name = settings.served_model_name or one.name
        if len(served) > 1:
            context = one.manifest.protection.context if one.manifest else one.directory.name
            one.name = f"{one.name}@{context}"
    names = [one.name for one in served]
    if len(set(names)) != len(names):
        raise BrokenManifest(
            f"Two contexts have the same name: {', '.join(sorted(names))}.", advice="Protect the checkpoint again."
        )
    return served


def load(path: Path, settings: ServerSettings) -> ServedModel:
    """Load one checkpoint."""
    manifest = None
    if (path / manifests.FILE_NAME).exists():
        manifest = manifests.read(path, role="server")
        manifest.check_expiry()
    config = _config(path)
    architecture = (config.get("architectures") or [""])[0]
    found: Any = _class(architecture)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UnsupportedModel(
            f"{path / 'config.json'} names the architecture {architecture!r}.",
            [f"transformers {transformers.__version__} has no such class"],
            advice="Serve a checkpoint of an architecture that transformers has.",
        )
    model_class: Any = found
    device = torch.device(_device(settings.device))
    try:
        model, report = model_class.from_pretrained(
            path,
            dtype=_dtype(settings.dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as exc:
        raise BrokenCheckpoint(
            f"{path} cannot be loaded: {type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}",
            advice="Copy the directory again; `cloister doctor` says what is missing.",
        ) from None
    _check_complete(path, report)
    model = model.to(device).eval().requires_grad_(False)
    routers_in_float32(model)
    text = getattr(config, "text_config", None) or model.config
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2048
    served = ServedModel(
        name=manifest.model.name if manifest else path.resolve().name,
        directory=path,
        model=model,
        task=next((task for ending, task in _TASKS if architecture.endswith(ending)), "embed"),
        manifest=manifest,
        device=device,
        dtype=model.dtype,
        shape=Shape(
            vocab_size=int(getattr(text, "vocab_size", 0) or 0),
            hidden_size=int(text.hidden_size),
            max_model_len=min(settings.max_model_len or limit, limit),
        ),
        end_ids=_end_ids(model),
        pooling=_pooling(path),
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    log.info("loaded %s: %s, %d parameters, %s on %s", served.name, architecture, count, served.dtype, device)
    return served


def _class(architecture: str) -> Any:
    """The class of that name: of transformers, or of a unified model."""
    if architecture.startswith(unified.CLASS_PREFIX):
        from cloister.unify.moe import find

        return find(architecture)
    return getattr(transformers, architecture, None)


def routers_in_float32(model: torch.nn.Module) -> list[str]:
    """Make every router compute in float32, whatever the rest computes in; returns their names.

    The order of experts is permuted in a protected model. In 16 bits equal router scores are common, a tie is decided
    by that order, and the protected model would choose another expert than the plain one.
    """

    def widen(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(arg.float() if torch.is_tensor(arg) and arg.is_floating_point() else arg for arg in args)

    names = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        router = kind.endswith(("Router", "Gate")) or (name.endswith("mlp.gate") and not list(module.children()))
        if router and next(module.parameters(), None) is not None:
            module.float()
            module.register_forward_pre_hook(widen)
            names.append(name)
    return names


def _check_complete(path: Path, report: dict[str, Any]) -> None:
    missing, unexpected = list(report.get("missing_keys") or ()), list(report.get("unexpected_keys") or ())
    wrong = [str(item[0]) for item in report.get("mismatched_keys") or ()]
    reasons = [f"missing: {', '.join(sorted(missing)[:5])}"] if missing else []
    reasons += [f"unknown: {', '.join(sorted(unexpected)[:5])}"] if unexpected else []
    reasons += [f"of another shape: {', '.join(sorted(wrong)[:5])}"] if wrong else []
    if reasons:
        raise BrokenCheckpoint(
            f"The tensors of {path} do not fit its config.json ({'; '.join(reasons)}).",
            advice="Copy the directory again, or protect the checkpoint again.",
        )


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text())
        if isinstance(config, dict):
            return config
    except (OSError, ValueError):
        pass
    raise BrokenCheckpoint(f"{path / 'config.json'} cannot be read.", advice="Copy the directory again.")


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _dtype(name: str) -> Any:
    known = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise UsageError(f"dtype {name!r} is not one of {', '.join(known)}.")
    return known[name]


def _end_ids(model: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    found = generation.eos_token_id if generation is not None else None
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def _pooling(path: Path) -> Pooling:
    """Read the files that sentence-transformers writes beside a checkpoint, if they are there."""
    mode, normalize = "mean", False
    try:
        modules = json.loads((path / "modules.json").read_text())
        normalize = any(str(module.get("type", "")).endswith("Normalize") for module in modules)
        pooling = json.loads((path / "1_Pooling" / "config.json").read_text())
        if pooling.get("pooling_mode_cls_token"):
            mode = "cls"
        elif not pooling.get("pooling_mode_mean_tokens", True):
            raise UnsupportedModel(
                f"{path / '1_Pooling'} asks for a pooling that is neither mean nor cls.",
                advice="Serve a model that pools by mean or by its first token.",
            )
    except FileNotFoundError:
        pass
    except (ValueError, AttributeError):
        raise BrokenCheckpoint(f"The pooling files in {path} cannot be read.", advice="Copy them again.") from None
    return Pooling(mode, normalize)
