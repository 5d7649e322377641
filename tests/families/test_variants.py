"""Configurations that real checkpoints have and the parity test's do not: same answers, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloister.errors import CloisterError
from cloister.permute import selfcheck
from cloister.permute.protect import protect

_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("biases everywhere", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("scaled positions, odd heads", "LlamaForCausalLM", {"rope_parameters": _YARN, "head_dim": 12}),
    ("one key head, tied", "LlamaForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("sliding window", "MistralForCausalLM", {"sliding_window": 8}),
    ("windows in some layers", "Qwen2ForCausalLM", _WINDOW),
    ("some layers dense", "Qwen2MoeForCausalLM", {"decoder_sparse_step": 2, "mlp_only_layers": [], "qkv_bias": False}),
    ("biases and a dense layer", "Qwen3MoeForCausalLM", {"mlp_only_layers": [0], "attention_bias": True}),
    ("clipped", "OlmoeForCausalLM", {"clip_qkv": 0.5, "attention_bias": True}),
    ("no query latent", "DeepseekV3ForCausalLM", {"q_lora_rank": None}),
    ("no groups", "DeepseekV2ForCausalLM", {"n_group": None, "topk_group": None, "topk_method": "greedy"}),
    ("scaled by layer, narrow", "GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 50}),
    ("no q, k, v biases", "ViTForImageClassification", {"qkv_bias": False}),
]


def _tiny(monkeypatch: pytest.MonkeyPatch, architecture: str, changes: dict[str, Any], directory: Path) -> Path:
    class_name, arguments = selfcheck.TINY[architecture]
    monkeypatch.setitem(selfcheck.TINY, architecture, (class_name, {**arguments, **changes}))
    return selfcheck.make_tiny(architecture, directory)


@pytest.mark.parametrize("transform", ["permutation", "orthogonal"])
@pytest.mark.parametrize(("architecture", "changes"), [case[1:] for case in _CASES], ids=[case[0] for case in _CASES])
def test_the_answers_stay_the_same(
    architecture: str, changes: dict[str, Any], transform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _tiny(monkeypatch, architecture, changes, tmp_path / "plain")
    out = tmp_path / "out"
    protect(plain, out, base="secret", transform=transform, measure=False)
    result = selfcheck.compare(plain, out / "server", out / "client", inputs=10, greedy=12)
    assert result.max_difference < 1e-4 * result.scale
    assert result.top1 == 1.0 and result.greedy_equal


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("DeepseekV3ForCausalLM", {"rope_interleave": False}), ("DeepseekV2ForCausalLM", {"mlp_bias": True})],
)
def test_what_cannot_be_expressed_is_refused(
    architecture: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _tiny(monkeypatch, architecture, changes, tmp_path / "plain")
    with pytest.raises(CloisterError):
        protect(plain, tmp_path / "out", base="secret", measure=False)
    assert not (tmp_path / "out").exists()
