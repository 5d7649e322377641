"""The plain twin: does a protected checkpoint compute what the original does?

Both are loaded with plain transformers, the same random inputs go through both, the client's part is undone, and the
numbers are compared.
`TINY` holds one tiny random model per architecture, built with transformers' own classes, so that every family can be
checked anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister import families
from cloister import manifest as manifests

_SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT: dict[str, Any] = {
    **_SMALL, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 16,
    "q_lora_rank": 20, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 10,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
_BERT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 256, "num_labels": 5,
}  # fmt: skip
_SIGHT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 24,
    "patch_size": 8, "num_labels": 7, "projection_dim": 20,
}  # fmt: skip

# architecture -> (configuration class, its arguments)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "LlamaForCausalLM": ("LlamaConfig", _SMALL),
    "MistralForCausalLM": ("MistralConfig", _SMALL),
    "Qwen2ForCausalLM": ("Qwen2Config", {**_SMALL, "tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**_SMALL, "head_dim": 8}),
    "MixtralForCausalLM": ("MixtralConfig", {**_SMALL, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {**_SMALL, **_ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1]},
    ),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**_SMALL, **_ROUTED, "num_experts": 8, "head_dim": 8}),
    "OlmoeForCausalLM": ("OlmoeConfig", {**_SMALL, "num_experts": 8, "num_experts_per_tok": 2}),
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", {**_LATENT, "topk_method": "group_limited_greedy"}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", _LATENT),
    "BertModel": ("BertConfig", _BERT),
    "BertForMaskedLM": ("BertConfig", _BERT),
    "BertForSequenceClassification": ("BertConfig", _BERT),
    "ViTForImageClassification": ("ViTConfig", _SIGHT),
    "ViTModel": ("ViTConfig", _SIGHT),
    "CLIPVisionModel": ("CLIPVisionConfig", _SIGHT),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", _SIGHT),
    "LlavaForConditionalGeneration": ("LlavaConfig", {}),
}


@dataclass(frozen=True)
class Comparison:
    """How a protected checkpoint differs from the original. Agreement is a fraction."""

    architecture: str
    transform: str
    inputs: int
    max_difference: float  # float32, largest over all outputs
    scale: float  # standard deviation of the plain outputs, to read the difference against
    top1: float  # share of positions with the same winner, numerical ties left out
    ties: int  # positions whose two best plain scores lie closer together than float32 can tell
    greedy_tokens: int  # length of the greedy continuation compared, 0 where the model does not generate
    greedy_equal: bool
    bfloat16_difference: float  # protected bfloat16 against plain float32
    bfloat16_plain_difference: float  # plain bfloat16 against plain float32: the format's own loss
    bfloat16_top1: float
    bfloat16_plain_top1: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def make_tiny(architecture: str, directory: Path, *, seed: int = 0) -> Path:
    """Write a tiny random checkpoint of `architecture`; its norms, biases and routers are random too, so that nothing
    is trivially right."""
    import torch
    import transformers

    torch.manual_seed(seed)
    class_name, arguments = TINY[architecture]
    if architecture == "LlavaForConditionalGeneration":
        sight = transformers.CLIPVisionConfig(**_SIGHT)
        text = transformers.LlamaConfig(**_SMALL)
        config = transformers.LlavaConfig(vision_config=sight, text_config=text, image_token_index=95)
    else:
        config = getattr(transformers, class_name)(**arguments)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in name:
                continue
            if tensor.ndim == 1 and name.endswith("weight"):
                tensor.copy_(1.0 + 0.3 * torch.randn_like(tensor))
            elif tensor.ndim == 1:
                tensor.copy_(0.2 * torch.randn_like(tensor))
            elif "gate.weight" in name or tensor.ndim > 1:
                tensor.mul_(6.0 if "embed" not in name and "wte" not in name else 20.0)
    model.save_pretrained(directory)
    return directory


def compare(
    plain: Path, server: Path, client: Path, *, inputs: int = 1000, length: int = 24, greedy: int = 128
) -> Comparison:
    """Run `inputs` random inputs through both checkpoints, in float32 and bfloat16."""
    import torch

    with torch.inference_mode():
        twin = Twin(plain, server, client)
        batches = [twin.random_inputs(min(100, inputs - done), length, seed=done) for done in range(0, inputs, 100)]
        reference = [twin.plain_output(batch, torch.float32) for batch in batches]
        exact = [twin.protected_output(batch, torch.float32) for batch in batches]
        half = [twin.protected_output(batch, torch.bfloat16) for batch in batches]
        half_plain = [twin.plain_output(batch, torch.bfloat16) for batch in batches]
        steps = greedy if twin.manifest.model.task == "generate" else 0
        equal = twin.greedy_equal(steps) if steps else True
    scale = float(np.std(np.concatenate([r.ravel() for r in reference])))
    tie = 2e-5 * scale
    return Comparison(
        architecture=twin.manifest.model.architecture,
        transform=twin.manifest.protection.transform,
        inputs=inputs,
        max_difference=_difference(reference, exact),
        scale=scale,
        top1=_agreement(reference, exact, tie=tie),
        ties=sum(int((_margin(r) < tie).sum()) for r in reference),
        greedy_tokens=steps,
        greedy_equal=equal,
        bfloat16_difference=_difference(reference, half),
        bfloat16_plain_difference=_difference(reference, half_plain),
        bfloat16_top1=_agreement(reference, half),
        bfloat16_plain_top1=_agreement(reference, half_plain),
    )


class Twin:
    """A plain and a protected checkpoint side by side, and the client's part between them."""

    def __init__(self, plain: Path, server: Path, client: Path) -> None:
        import transformers
        from safetensors.numpy import load_file

        self.manifest = manifests.read(client)
        self._class = _class(self.manifest.model.architecture)
        self._plain_dir, self._server_dir = plain, server
        self._loaded: dict[tuple[str, str], Any] = {}
        self._config = transformers.AutoConfig.from_pretrained(plain)
        self.tensors = load_file(client / "client.safetensors") if not _has_bfloat16(client) else _load_torch(client)

    def model(self, which: str, dtype: Any) -> Any:
        """The "plain" or "server" model in `dtype`, routers in float32."""
        key = (which, str(dtype))
        if key not in self._loaded:
            directory = self._plain_dir if which == "plain" else self._server_dir
            model = self._class.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
            self._loaded[key] = model
        return self._loaded[key]

    def random_inputs(self, count: int, length: int, *, seed: int) -> dict[str, Any]:
        """Token ids, or images, or both."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        sight = getattr(self._config, "vision_config", self._config)
        inputs: dict[str, Any] = {}
        if self.manifest.model.vocab_size:
            usable = self.manifest.model.vocab_size - (1 if hasattr(self._config, "image_token_id") else 0)
            inputs["ids"] = torch.randint(0, usable, (count, length), generator=generator)
        if "patch_weight" in self.tensors:
            size = sight.image_size
            inputs["pixels"] = torch.randn(count, sight.num_channels, size, size, generator=generator)
            if "ids" in inputs:  # a vision-language model: as many placeholders as the tower gives vectors
                places = (size // sight.patch_size) ** 2
                image = torch.full((count, places), self._config.image_token_id)
                inputs["ids"] = torch.cat([inputs["ids"][:, :4], image, inputs["ids"][:, 4:]], dim=1)
        return inputs

    def plain_output(self, inputs: dict[str, Any], dtype: Any) -> np.ndarray:
        """What the original says."""
        arguments = {}
        if "ids" in inputs:
            arguments["input_ids"] = inputs["ids"]
        if "pixels" in inputs:
            arguments["pixel_values"] = inputs["pixels"].to(dtype)
        return self._output(self.model("plain", dtype)(**arguments))

    def protected_output(self, inputs: dict[str, Any], dtype: Any) -> np.ndarray:
        """What the server says, with the client's part before and after."""
        arguments: dict[str, Any] = {}
        if "ids" in inputs:
            arguments.update(self._server_words(inputs["ids"], dtype))
        if "pixels" in inputs:
            arguments["pixel_values"] = self._server_image(inputs["pixels"]).to(dtype)
        return self._undo(self._output(self.model("server", dtype)(**arguments)))

    def greedy_equal(self, steps: int) -> bool:
        """The same greedy continuation, with the KV cache."""
        import torch

        inputs = self.random_inputs(1, 6, seed=7)
        extra = {"pixel_values": inputs["pixels"]} if "pixels" in inputs else {}
        options: dict[str, Any] = {
            "max_new_tokens": steps,
            "min_new_tokens": steps,
            "do_sample": False,
            "use_cache": True,
            "pad_token_id": 0,
        }
        # said explicitly, or transformers would take a prompt token that happens to be the padding id for padding
        options["attention_mask"] = torch.ones_like(inputs["ids"])
        plain = self.model("plain", torch.float32).generate(inputs["ids"], **extra, **options)
        plain = plain[0, inputs["ids"].shape[1] :]
        if "embedding" in self.tensors:  # loop "token": the server has no table; feed the client's rows one by one
            return self._greedy_by_rows(inputs, steps, plain.tolist())
        if "pixels" in inputs:
            extra = {"pixel_values": self._server_image(inputs["pixels"])}
        words = self._server_words(inputs["ids"], torch.float32)
        answer = self.model("server", torch.float32).generate(**words, **extra, **options)[0, inputs["ids"].shape[1] :]
        back = np.argsort(self.tensors["vocab_to_server"])
        return bool((back[answer.numpy()] == plain.numpy()).all())

    def _greedy_by_rows(self, inputs: dict[str, Any], steps: int, expected: list[int]) -> bool:
        import torch

        back = np.argsort(self.tensors["vocab_to_server"])
        model = self.model("server", torch.float32)
        arguments = self._server_words(inputs["ids"], torch.float32)
        if "pixels" in inputs:
            arguments["pixel_values"] = self._server_image(inputs["pixels"])
        produced, cache = [], None
        for _ in range(steps):
            result = model(**arguments, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            token = int(back[int(result.logits[0, -1].argmax())])
            produced.append(token)
            arguments = self._server_words(torch.tensor([[token]]), torch.float32)
        return produced == expected

    def _server_words(self, ids: Any, dtype: Any) -> dict[str, Any]:
        import torch

        if "embedding" in self.tensors:
            rows = torch.as_tensor(self.tensors["embedding"])
            return {"inputs_embeds": rows[ids].to(dtype)}
        return {"input_ids": torch.as_tensor(self.tensors["vocab_to_server"]).long()[ids]}

    def _server_image(self, pixels: Any) -> Any:
        import torch

        sight = getattr(self._config, "vision_config", self._config)
        patch = sight.patch_size
        cut = torch.nn.functional.unfold(pixels, patch, stride=patch).transpose(1, 2)  # [n, patches, channels * p * p]
        rows = cut @ torch.as_tensor(self.tensors["patch_weight"]) + torch.as_tensor(self.tensors["patch_bias"])
        side = pixels.shape[-1] // patch
        return rows.transpose(1, 2).reshape(len(pixels), -1, side, side)

    def _output(self, result: Any) -> np.ndarray:
        for name in ("logits", "image_embeds", "last_hidden_state"):
            if getattr(result, name, None) is not None:
                return np.asarray(getattr(result, name).float().numpy())
        raise AssertionError(f"{type(result).__name__} has no output that could be compared")

    def _undo(self, output: np.ndarray) -> np.ndarray:
        for name in ("class_order", "output_order"):
            if name in self.tensors:
                return output[..., np.asarray(self.tensors[name])]
        return output[..., np.asarray(self.tensors["vocab_to_server"])]


def _class(architecture: str) -> Any:
    import transformers

    if architecture.startswith(families.unified.CLASS_PREFIX):
        from cloister.unify.moe import find

        return find(architecture)
    return getattr(transformers, architecture)


def _has_bfloat16(client: Path) -> bool:
    from cloister.permute.checkpoint import read_header

    return any(stored.dtype == "BF16" for stored in read_header(client / "client.safetensors").values())


def _load_torch(client: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        name: tensor if tensor.is_floating_point() else tensor.numpy()
        for name, tensor in load_file(client / "client.safetensors").items()
    }


def _difference(reference: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(reference, other, strict=True))


def _agreement(reference: list[np.ndarray], other: list[np.ndarray], *, tie: float = 0.0) -> float:
    same = [(a.argmax(-1) == b.argmax(-1)) | (_margin(a) < tie) for a, b in zip(reference, other, strict=True)]
    return float(np.concatenate([part.ravel() for part in same]).mean())


def _margin(scores: np.ndarray) -> np.ndarray:
    best = np.partition(scores, -2, axis=-1)
    return best[..., -1] - best[..., -2]


def check_architecture(
    architecture: str,
    transform: str,
    directory: Path,
    *,
    loop: str = "server",
    inputs: int = 1000,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Make a tiny model, protect it, compare: what `cloister bench permute` and the tests run for every family."""
    from cloister.permute.protect import protect

    plain = make_tiny(architecture, directory / "plain")
    protect(plain, directory / "out", transform=transform, base="secret", loop=loop, measure=False)
    if progress:
        progress(f"{architecture}, {transform}")
    return compare(plain, directory / "out" / "server", directory / "out" / "client", inputs=inputs)
