"""Theorem 2 of the paper: for which models a one-time row scaling goes in at the front and comes out at the end.

Rows are tokens, `x` is [n, d], `alpha` a positive diagonal [n, n], `r` what is left of alpha behind the first norm.

* Post-norm, no projection biases (the paper's case): queries, keys and values all carry alpha, the enclave returns
  `alpha softmax(S / (alpha alpha^T) + M) / alpha`, and the norm behind the attention drops alpha.
* Post-norm with biases: `alpha x W + b` is not `alpha (x W + b)`. Refused.
* Pre-norm: the norm at the layer's entrance already drops alpha, so dividing the scores by alpha (the paper's
  formula) is wrong. The enclave returns `alpha softmax(S + M)`, the residual becomes `alpha (x + u)`; before the
  feed-forward part adds an unscaled term to it, a fifth function takes alpha off again. Biases do no harm. The final
  norm puts alpha back and the inverse removes it.

Why an eps in the norm matters, and what is done about it, is in docs/enclave.md. This module reads configurations
only: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from cloister.errors import UnsupportedModel

Entrance = Literal["scores and values", "values", "nothing"]


@dataclass(frozen=True)
class Form:
    """How the five functions look for one model."""

    family: str
    norm_place: Literal["pre", "post"]
    norm: Literal["rms", "layer"]
    causal: bool
    window: int  # keys further back than this are masked in the first layer; 0: all are seen
    corrects: Entrance  # what the enclave corrects exactly for the norm's eps (see functions.py)

    @property
    def leaves_residual(self) -> bool:
        """Whether the fifth function is needed: alpha has to be taken off the residual stream."""
        return self.norm_place == "pre"


_RMS_PRE = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
}
_LAYER_PRE = {"gpt2", "vit", "clip_vision_model"}
_QK_NORM = {"qwen3", "qwen3_moe", "olmoe"}
_LATENT = {"deepseek_v2", "deepseek_v3"}
_BERT_HEADS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForPreTraining",
)

KNOWN = tuple(sorted(_RMS_PRE | _LAYER_PRE | {"bert", "clip", "llava"}))


def theorem2_holds(config: Any, *, biases_are_zero: bool = False) -> tuple[bool, list[str]]:
    """Whether Theorem 2 can hold for this configuration, and every reason for or against.

    `config` is a transformers configuration or its dictionary. Configurations cannot say that biases which exist are
    all zero; `host.biases_are_zero(model)` looks at the weights and the answer goes in here.
    """
    config = inner_config(config)
    kind = _get(config, "model_type", "")
    if kind not in KNOWN:
        return False, [f"model type {kind!r} is not known here (known: {', '.join(KNOWN)})"]
    against = _against(config, kind, biases_are_zero)
    if against:
        return False, against
    if kind == "bert":
        return True, ["post-norm without projection biases: the paper's formulas hold as printed"]
    reasons = [
        "pre-norm: the first layer's entrance norm drops the scaling, so the enclave returns alpha softmax(S + M)",
        "a fifth function takes the scaling off the residual stream behind the first attention",
    ]
    return True, reasons + _eps_note(form_of(config, biases_are_zero=biases_are_zero))


def form_of(config: Any, *, biases_are_zero: bool = False) -> Form:
    """The form of the functions for this configuration; `UnsupportedModel` with all reasons where the theorem fails."""
    config = inner_config(config)
    kind = _get(config, "model_type", "")
    against = _against(config, kind, biases_are_zero) if kind in KNOWN else [f"model type {kind!r} is not known here"]
    if against:
        raise UnsupportedModel(
            "The enclave path cannot be exact for this model:",
            against,
            advice="Use the permute mode without the enclave; it loses no protection against the server.",
        )
    if kind == "bert":
        return Form(kind, "post", "layer", causal=False, window=0, corrects="scores and values")
    if kind in _LAYER_PRE:
        return Form(kind, "pre", "layer", causal=kind == "gpt2", window=0, corrects="nothing")
    return Form(kind, "pre", "rms", causal=True, window=_first_window(config), corrects=_corrects(config, kind))


def inner_config(config: Any) -> Any:
    """The part that the rows go through: the text part of LLaVA, the vision part of CLIP."""
    kind = _get(config, "model_type", "")
    if kind == "llava":
        return _get(config, "text_config", config)
    if kind == "clip":
        return _get(config, "vision_config", config)
    return config


def _against(config: Any, kind: str, biases_are_zero: bool) -> list[str]:
    found: list[str] = []
    if kind == "bert":
        if not biases_are_zero:
            found += [
                f"the {name} projection of the first layer has a bias: (alpha x) W + b is not alpha (x W + b), and "
                "in a post-norm model alpha is still there"
                for name in ("query", "key", "value", "attention output")
            ]
        heads = [name for name in _get(config, "architectures", None) or [] if name.endswith(_BERT_HEADS)]
        found += [f"{name} has non-linear parts behind the last norm, where alpha is back" for name in heads]
        if _get(config, "is_decoder", False):
            found.append("BERT as a decoder is not supported")
    if _get(config, "add_cross_attention", False):
        found.append("cross-attention has keys that the enclave did not embed")
    if _get(config, "attn_logit_softcapping", None):
        found.append("soft-capped scores: tanh(alpha s) is not alpha tanh(s)")
    return found


def _corrects(config: Any, kind: str) -> Entrance:
    # The RMS norm leaves a known factor r on its output. It can be divided out where everything behind it is linear.
    biased = (
        _get(config, "attention_bias", False)
        or kind == "qwen2"
        or (kind == "qwen2_moe" and _get(config, "qkv_bias", True))
    )
    if biased or kind in _LATENT or _get(config, "clip_qkv", None):
        return "nothing"
    return "values" if kind in _QK_NORM else "scores and values"


def _eps_note(form: Form) -> list[str]:
    if form.corrects != "nothing":
        return ["the eps of the first norm is corrected in the enclave, so alpha may be drawn from the full range"]
    return [
        "the eps of the first norm cannot be divided out here, so alpha is kept so near to one that it does not show"
    ]


def _first_window(config: Any) -> int:
    kinds = _get(config, "layer_types", None)
    window = _get(config, "sliding_window", None) or 0
    if kinds:
        return int(window) if kinds[0] == "sliding_attention" else 0
    return int(window) if _get(config, "model_type", "") in {"mistral", "mixtral"} else 0


def _get(config: Any, name: str, default: Any) -> Any:
    if isinstance(config, dict):
        return config.get(name, default)
    return getattr(config, name, default)
