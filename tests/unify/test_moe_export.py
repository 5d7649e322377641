"""A context-free decoder as a stock checkpoint: the same logits without Cloister, or every reason why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_unified import unified, words  # noqa: E402

import cloister.unify.moe as moe  # noqa: E402
from cloister.errors import UnsupportedModel  # noqa: E402

CASES = [
    ("LlamaForCausalLM", 1, None, "Qwen2MoeForCausalLM"),
    ("LlamaForCausalLM", 2, None, "Qwen2MoeForCausalLM"),
    ("Qwen2ForCausalLM", 1, None, "Qwen2MoeForCausalLM"),
    ("Qwen3ForCausalLM", 2, None, "Qwen3MoeForCausalLM"),
    ("LlamaForCausalLM", 3, "mixtral", "MixtralForCausalLM"),
]


@pytest.mark.parametrize(("kind", "top_k", "target", "stock"), CASES)
def test_the_stock_checkpoint_gives_the_same_logits(
    kind: str, top_k: int, target: Any, stock: str, tmp_path: Path
) -> None:
    model = unified(kind, top_k=top_k, context="none", fallback=target is None)
    moe.export_stock(model, tmp_path / "out", target=target)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(loaded).__name__ == stock
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = words(3, 11)
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=2e-5)


def test_it_loads_where_there_is_no_cloister(tmp_path: Path) -> None:
    moe.export_stock(unified(context="none"), tmp_path / "out")
    script = (
        "import sys\nsys.modules['cloister'] = None\nfrom transformers import AutoModelForCausalLM\n"
        "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith("Qwen2MoeForCausalLM")


@pytest.mark.parametrize(
    ("kind", "options", "target", "why"),
    [
        ("LlamaForCausalLM", {}, None, "context 'none' and train its router"),
        ("BertModel", {"context": "none"}, None, "no place for CloisterBertModel"),
        ("GPT2LMHeadModel", {"context": "none"}, "qwen2_moe", "no place for CloisterGPT2LMHeadModel"),
        ("LlamaForCausalLM", {"context": "none"}, "mixtral", "add up to one"),
        ("MistralForCausalLM", {"context": "none"}, "qwen2_moe", "sliding window"),
        ("MistralForCausalLM", {}, "mixtral", "(?s)context.*add up to one.*sliding window"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_reasons(
    kind: str, options: dict[str, Any], target: Any, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        moe.export_stock(unified(kind, **options), tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()
