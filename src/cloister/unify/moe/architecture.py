"""Unified models as architectures of transformers: a seed's class, with routed blocks for its feed-forward ones.

    import cloister.unify.moe                                  # registers them
    model = AutoModelForCausalLM.from_pretrained(folder)       # also save_pretrained, generate, push_to_hub

A class is made from the seed's own: the same constructor, then its feed-forward blocks are replaced and its backbone is
watched (`passes`). So everything else that transformers can do with the seed's class goes on working. Configuration
classes are made when this package is imported, model classes when the first configuration is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import nn

from cloister import storage
from cloister.errors import UnsupportedModel

from . import blocks, passes
from .routing import CONTEXTS, Context, RoutedFeedForward

PREFIX = "cloister_moe_"
CLASS_PREFIX = "Cloister"
# Seeds of these types are tried by the tests, and are registered when the package is imported.
KINDS = (
    "bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "deberta-v2",
    "modernbert", "vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "beit", "clip_vision_model",
    "siglip_vision_model", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text",
    "phi", "phi3", "olmo", "olmo2", "olmo3", "granite", "starcoder2", "falcon", "smollm3",
)  # fmt: skip
_AUTO = (
    "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification", "AutoModelForQuestionAnswering", "AutoModelForImageClassification",
)  # fmt: skip
CARD = """---
library_name: transformers
tags: [cloister, mixture-of-experts]
---
A unified Mixture-of-Experts model: {experts} experts in each feed-forward block of a `{kind}` seed. It loads with

```python
import cloister.unify.moe  # registers the architecture; transformers alone does not know it
{register}from transformers import {auto}

model = {auto}.from_pretrained("this folder")
```
"""


@dataclass
class Classes:
    """The classes for one type of seed."""

    kind: str
    config: type[Any]
    models: dict[str, type[Any]] = field(default_factory=dict)  # by the seed's class name

    def model(self, seed: type[Any]) -> type[Any]:
        """The class for seeds of class `seed`."""
        if seed.__name__ not in self.models:
            self.models[seed.__name__] = _model_class(seed, self.config)
            _carry_conversion(seed.__name__, self.models[seed.__name__].__name__)
        return self.models[seed.__name__]


@cache
def classes(kind: str) -> Classes:
    """Make and register the classes for seeds of type `kind` ("bert", "llama", "vit", ...)."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = Classes(kind, config_class(kind))
    for name in _AUTO:
        auto = getattr(modeling_auto, name)
        try:
            seed = auto._model_mapping[CONFIG_MAPPING[kind]]
        except KeyError:
            continue
        seed = seed[0] if isinstance(seed, tuple) else seed
        auto.register(made.config, made.model(seed), exist_ok=True)
    return made


@cache
def config_class(kind: str) -> type[Any]:
    """Make and register the configuration class for seeds of type `kind`."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING or kind.startswith(PREFIX):
        raise UnsupportedModel(
            f"A model of type {kind!r} cannot be a seed:", ["transformers has no dense architecture of that type"]
        )
    made = _config_class(kind, CONFIG_MAPPING[kind])
    AutoConfig.register(made.model_type, made, exist_ok=True)
    return made


def find(name: str) -> type[Any]:
    """The model class of that name ("CloisterLlamaForCausalLM"), as `architectures` in config.json gives it."""
    import transformers

    seed: Any = getattr(transformers, name.removeprefix(CLASS_PREFIX), None)
    if name.startswith(CLASS_PREFIX) and isinstance(seed, type) and issubclass(seed, transformers.PreTrainedModel):
        return classes(cast(Any, seed).config_class.model_type).model(seed)
    raise UnsupportedModel(f"{name} is no unified architecture.", ["its seed class is not one of transformers"])


def __getattr__(name: str) -> Any:
    """Model and configuration classes by name, so that they can be imported and pickled."""
    import transformers

    seed: Any = getattr(transformers, name.removeprefix(CLASS_PREFIX), None) if name.startswith(CLASS_PREFIX) else None
    if isinstance(seed, type) and issubclass(seed, transformers.PreTrainedModel):
        return find(name)
    if isinstance(seed, type) and issubclass(seed, transformers.PreTrainedConfig):
        return config_class(cast(Any, seed).model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- the configuration --------------------------------------------------------------------------------------------


def _config_class(kind: str, seed: type[Any]) -> type[Any]:
    class UnifiedConfig(seed):  # type: ignore[misc]
        model_type = PREFIX + kind
        experts: int = 1  # in each block; with a fallback, number 0 is the seed's own feed-forward weights
        experts_per_token: int = 1
        context: str = "none"  # what the router sees beside the token: "sequence", "prefix" or "none"
        owners: list[str] | None = None  # of the experts in their order, without the fallback; None: not told
        fallback: bool = False

        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**kwargs)
            _check(self)
            classes(kind)  # who has a configuration may ask any Auto class for a model

        @classmethod
        def from_seed(cls, config: Any, *, owners: list[str], top_k: int, context: Context, fallback: bool) -> Any:
            """The seed's configuration with experts in each feed-forward block."""
            left = ("model_type", "transformers_version", "architectures", "_name_or_path")
            values = {key: value for key, value in config.to_dict().items() if key not in left}
            made = cls(
                **values, experts=len(owners) + fallback, experts_per_token=top_k, context=context,
                owners=list(owners), fallback=fallback,
            )  # fmt: skip
            made._attn_implementation = config._attn_implementation
            return made

    UnifiedConfig.__name__ = UnifiedConfig.__qualname__ = f"{CLASS_PREFIX}{seed.__name__}"
    UnifiedConfig.__module__ = __name__
    return UnifiedConfig


def _check(config: Any) -> None:
    wrong = []
    if config.context not in CONTEXTS:
        wrong.append(f"context {config.context!r} is not one of {', '.join(CONTEXTS)}")
    if not 1 <= config.experts_per_token <= config.experts:
        wrong.append(f"experts_per_token is {config.experts_per_token}, of {config.experts} experts")
    if config.owners is not None and len(config.owners) + config.fallback != config.experts:
        wrong.append(f"{config.experts} experts, but the owners {config.owners}, fallback: {config.fallback}")
    if wrong:
        raise UnsupportedModel("This configuration of a unified model contradicts itself:", wrong)


# ---- the models ---------------------------------------------------------------------------------------------------


def _model_class(seed: type[Any], config: type[Any]) -> type[Any]:
    class Unified(seed):  # type: ignore[misc]
        config_class = config
        _keep_in_fp32_modules_strict: ClassVar[set[str]] = {*(seed._keep_in_fp32_modules_strict or ()), "router"}
        _can_compile_fullgraph = False  # how many tokens an expert gets is not known before the router has run

        def __init__(self, config: Any, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            route(self, config)

        def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
            if "gradient_checkpointing_func" in kwargs:
                kwargs["gradient_checkpointing_func"] = passes.checkpointing(kwargs["gradient_checkpointing_func"])
            super()._set_gradient_checkpointing(*args, **kwargs)

        def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
            return False

        def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
            """Save the checkpoint, with a card that says how it is loaded."""
            super().save_pretrained(save_directory, *args, **kwargs)
            write_card(Path(save_directory), self.config, type(self).__name__)

    Unified.__name__ = Unified.__qualname__ = f"{CLASS_PREFIX}{seed.__name__}"
    Unified.__module__ = __name__
    return Unified


def _carry_conversion(seed: str, unified: str) -> None:
    """Some architectures keep other names on disk than in memory (ViT); the unified one keeps the same others."""
    from transformers import conversion_mapping

    renamed = conversion_mapping.get_checkpoint_conversion_mapping(seed)
    if renamed is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(unified, renamed, overwrite=True)


def route(model: Any, config: Any) -> None:
    """Replace every feed-forward block by a routed one, all experts as the seed's constructor made the block."""
    from transformers import PreTrainedModel

    path = blocks.layer_list(model)[0]
    for index, block in enumerate(blocks.find(model)):
        dense = block.take()
        experts: list[nn.Module] = [dense, *(copy.deepcopy(dense) for _ in range(config.experts - 1))]
        routed = RoutedFeedForward(
            experts, config.hidden_size, top_k=config.experts_per_token, context=config.context, layer=index
        )
        block.put(routed)
    within = [
        part for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and (not name or path.startswith(f"{name}."))
    ]  # fmt: skip
    passes.watch(within[-1])


def write_card(folder: Path, config: Any, name: str) -> None:
    """A README.md that says how the checkpoint is loaded, unless there is one."""
    if folder.is_dir() and not (folder / "README.md").exists():
        kind = config.model_type.removeprefix(PREFIX)
        tasks = (one.removeprefix("AutoModel") for one in _AUTO[1:])
        auto = "AutoModel" + next((task for task in tasks if name.endswith(task)), "")
        auto = "AutoModelForCausalLM" if name.endswith("LMHeadModel") else auto
        register = "" if kind in KINDS else f"cloister.unify.moe.register(({kind!r},))\n"
        card = CARD.format(experts=config.experts, kind=kind, auto=auto, register=register)
        storage.write_text(folder / "README.md", card)


def register(kinds: tuple[str, ...] = KINDS) -> None:
    """Let transformers know the configurations of unified models of these types of seed."""
    for kind in kinds:
        config_class(kind)
