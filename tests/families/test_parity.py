"""Every family against transformers' own classes: a protected checkpoint computes what the original does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloister import families
from cloister.errors import UnsupportedModel
from cloister.permute import selfcheck
from cloister.permute.protect import protect

POST_NORM = {"BertModel", "BertForMaskedLM", "BertForSequenceClassification"}
PERMUTED_ONLY = POST_NORM | {"ViTModel", "CLIPVisionModel", "CLIPVisionModelWithProjection"}
SEES_ONLY = {"ViTModel", "ViTForImageClassification", "CLIPVisionModel", "CLIPVisionModelWithProjection"}
CASES = [
    (architecture, transform)
    for architecture in selfcheck.TINY
    for transform in families.TRANSFORMS
    if transform == "permutation" or architecture not in PERMUTED_ONLY
]


@pytest.mark.parametrize(("architecture", "transform"), CASES)
def test_protected_model_is_lossless(architecture: str, transform: str, tmp_path: Path) -> None:
    found = selfcheck.check_architecture(architecture, transform, tmp_path, inputs=1000)
    assert found.inputs == 1000
    assert found.top1 == 1.0
    assert found.max_difference < 1e-4 * max(1.0, found.scale)
    assert found.greedy_equal
    generates = architecture.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration"))
    assert found.greedy_tokens == (128 if generates else 0)
    # bfloat16: no worse than the format itself
    assert found.bfloat16_top1 > found.bfloat16_plain_top1 - 0.03


@pytest.mark.parametrize(
    "architecture", ["OlmoeForCausalLM", "GPT2LMHeadModel", "DeepseekV3ForCausalLM", "BertForMaskedLM"]
)
def test_token_loop_is_lossless(architecture: str, tmp_path: Path) -> None:
    found = selfcheck.check_architecture(architecture, "permutation", tmp_path, loop="token", inputs=50)
    assert found.top1 == 1.0
    assert found.greedy_equal


@pytest.mark.parametrize("architecture", sorted(PERMUTED_ONLY))
def test_families_that_cannot_rotate_say_so(architecture: str, tmp_path: Path) -> None:
    plain = selfcheck.make_tiny(architecture, tmp_path / "plain")
    with pytest.raises(UnsupportedModel, match="orthogonal") as caught:
        protect(plain, tmp_path / "out", transform="orthogonal", base="secret", measure=False)
    assert caught.value.reasons
    assert not (tmp_path / "out").exists()


def test_fused_expert_tensors_are_understood(tmp_path: Path) -> None:
    """Checkpoints saved by transformers 5 without converting back hold all experts in one tensor."""
    from safetensors.torch import load_file, save_file
    from transformers import OlmoeForCausalLM

    plain = selfcheck.make_tiny("OlmoeForCausalLM", tmp_path / "plain")
    model = OlmoeForCausalLM.from_pretrained(plain)
    fused = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    assert any("experts.gate_up_proj" in name for name in fused)
    save_file(fused, plain / "model.safetensors", metadata={"format": "pt"})
    assert set(load_file(plain / "model.safetensors")) == set(fused)
    for transform in families.TRANSFORMS:
        out = tmp_path / transform
        protect(plain, out, transform=transform, base="secret", measure=False)
        found = selfcheck.compare(plain, out / "server", out / "client", inputs=50, greedy=16)
        assert found.top1 == 1.0
        assert found.greedy_equal


def test_real_minilm_sentence_vectors(minilm_dir: Path, tmp_path: Path) -> None:
    protect(minilm_dir, tmp_path / "out", base="public:all-MiniLM-L6-v2", measure=False)
    found = selfcheck.compare(minilm_dir, tmp_path / "out" / "server", tmp_path / "out" / "client", inputs=40)
    assert found.max_difference < 1e-4
    assert found.top1 == 1.0


def test_server_checkpoint_loads_with_plain_transformers(tmp_path: Path) -> None:
    """The contract of OUT/server: no Cloister is needed to run it, and its answer is the permuted answer."""
    import subprocess
    import sys

    plain = selfcheck.make_tiny("OlmoeForCausalLM", tmp_path / "plain")
    protect(plain, tmp_path / "out", base="secret", measure=False)
    script = (
        "import sys, torch\n"
        "sys.modules['cloister'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print(m.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, min_new_tokens=8, do_sample=False,"
        " attention_mask=torch.ones(1, 3), pad_token_id=0)[0, 3:].tolist())\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out" / "server")], capture_output=True, text=True, check=True
    ).stdout
    answered = json.loads(output.strip().splitlines()[-1])

    import numpy as np
    import torch
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    to_server = load_file(tmp_path / "out" / "client" / "client.safetensors")["vocab_to_server"]
    to_plain = np.argsort(to_server)
    model = AutoModelForCausalLM.from_pretrained(plain)
    prompt = torch.tensor([to_plain[[5, 6, 7]].tolist()])
    expected = model.generate(
        prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False, attention_mask=torch.ones(1, 3), pad_token_id=0
    )[0, 3:].tolist()
    assert to_plain[answered].tolist() == expected
    assert answered != expected


def test_router_scores_tie_only_in_low_precision(tmp_path: Path) -> None:
    """Why routers must run in float32: bfloat16 scores tie at the top-k border, and expert order breaks ties."""
    import torch

    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20_000, 64, generator=generator)
    for dtype, low, high in ((torch.float32, 0.0, 1e-4), (torch.bfloat16, 0.02, 0.10)):
        ordered = scores.to(dtype).sort(dim=-1, descending=True).values
        ties = (ordered[:, 7] == ordered[:, 8]).float().mean().item()
        assert low <= ties <= high
