"""The seed: the public checkpoint that all owners start from, and the vectors that it gives to examples.

    seed = Seed.load("path/to/MiniLM")
    seed.vectors(examples)          # (n, hidden), length one: what selection works on
    model = seed.fresh_model()      # a copy to train; the seed itself is never changed

The vector of a text is the mean of the last hidden states over its real tokens, that of an image the mean over its
patches (without the class token). `encode` gives the same vectors of any model of the seed's kind, with gradients.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloister.errors import BrokenCheckpoint, UnsupportedModel
from cloister.progress import SILENT, Progress
from cloister.unify.examples import Examples, Pixels

SeedKind = Literal["encoder", "decoder", "vision"]
Batch = dict[str, Tensor]
GROUP = 16  # texts that are padded to one length
MOST_KNOWN = 100_000  # vectors that `remembered` keeps
VISION_TOWERS = {"clip": "CLIPVisionModel"}  # of checkpoints that hold a text tower too


@dataclass(frozen=True)
class Looks:
    """How an image becomes numbers: size, and what is subtracted and divided by, a channel each."""

    size: int
    channels: int
    mean: tuple[float, ...] = (0.5,)
    spread: tuple[float, ...] = (0.5,)


@dataclass(frozen=True)
class Seed:
    """A frozen model and what turns examples into its inputs."""

    model: Any
    kind: SeedKind
    hidden: int
    tokenizer: Any = None
    looks: Looks | None = None
    max_tokens: int = 128
    fingerprint: str = field(default="")
    known: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)  # see `remembered`

    @staticmethod
    def load(path_or_name: Path | str, *, max_tokens: int = 128) -> Seed:
        """A Hugging Face checkpoint: any encoder or causal decoder, a ViT, or the vision tower of a CLIP model.

        Weights are read from safetensors only, and no code comes with them.
        """
        import transformers
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

        where = str(path_or_name)
        try:
            config = AutoConfig.from_pretrained(where, trust_remote_code=False)
            kind = _kind(config)
            options: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, "dtype": torch.float32}
            loader: Any = AutoModelForCausalLM if kind == "decoder" else AutoModel
            if config.model_type in VISION_TOWERS:
                loader = getattr(transformers, VISION_TOWERS[config.model_type])
            model = _whole(loader, where, options)
            tokenizer = None if kind == "vision" else AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise BrokenCheckpoint(f"{where} cannot be a seed: {error}") from None
        looks = _looks(model.config, where) if kind == "vision" else None
        return Seed.of(model, tokenizer=tokenizer, looks=looks, max_tokens=max_tokens)

    @staticmethod
    def of(model: Any, *, tokenizer: Any = None, looks: Looks | None = None, max_tokens: int = 128) -> Seed:
        """A seed from a model in memory. It is frozen here; give a copy if it is to be used otherwise."""
        kind = _kind(model.config)
        if kind == "vision":
            looks = looks or _looks(model.config, "")
        elif tokenizer is None:
            raise UnsupportedModel("A seed for texts needs its tokenizer.")
        elif tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        if tokenizer is not None:
            tokenizer.padding_side = "right"  # or the first real token would be predicted from padding
        most = getattr(model.config, "max_position_embeddings", None) or max_tokens
        model = model.eval().requires_grad_(False)
        return Seed(model, kind, model.config.hidden_size, tokenizer, looks, min(max_tokens, most), fingerprint(model))

    def fresh_model(self) -> Any:
        """A copy of the seed's model, frozen like it."""
        return copy.deepcopy(self.model)

    def tokens(self, texts: Sequence[str]) -> Batch:
        """Token ids and the mask of real tokens, padded to the longest of these texts."""
        found = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )
        return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}

    def batch(self, inputs: Sequence[str] | Pixels) -> Batch:
        """What the model is called with."""
        return {"pixel_values": self.pixels(inputs)} if isinstance(inputs, np.ndarray) else self.tokens(inputs)

    def pixels(self, images: Pixels) -> Tensor:
        """Bytes as the numbers that the model expects: resized, grey copied to all channels, normalised."""
        if self.looks is None:
            raise UnsupportedModel("This seed does not take images.")
        looks = self.looks
        values = torch.from_numpy(np.ascontiguousarray(images)).float() / 255
        if values.shape[1] != looks.channels:
            values = values.mean(1, keepdim=True).expand(-1, looks.channels, -1, -1)
        if values.shape[-2:] != (looks.size, looks.size):
            values = nn.functional.interpolate(values, size=(looks.size, looks.size), mode="bilinear", antialias=True)
        mean, spread = (torch.tensor(x).reshape(1, -1, 1, 1) for x in (looks.mean, looks.spread))
        return (values - mean) / spread

    def encode(self, model: Any, inputs: Sequence[str] | Pixels) -> Tensor:
        """The vectors (n, hidden) of length one that `model`, of the seed's kind, gives to the inputs."""
        if self.kind != "encoder" or len(inputs) <= GROUP:
            return pooled(model, self.batch(inputs), self.kind)
        # Texts of like length go through the model together: padding would be half of the work.
        order = sorted(range(len(inputs)), key=lambda i: len(inputs[i]))
        parts = [order[start : start + GROUP] for start in range(0, len(order), GROUP)]
        vectors = torch.cat([pooled(model, self.tokens([inputs[i] for i in part]), self.kind) for part in parts])
        return vectors[torch.tensor(order).argsort()]

    def encode_all(
        self,
        model: Any,
        inputs: Sequence[str] | Pixels,
        *,
        batch: int = 64,
        progress: Progress = SILENT,
        what: str = "",
    ) -> Tensor:
        """`encode` without gradients for any number of inputs; texts of like length share a batch."""
        out = torch.empty(len(inputs), self.hidden)
        was_training = model.training
        model.eval()
        try:
            with torch.inference_mode(), progress.task(what or "Vectors", total=len(inputs), unit="examples") as task:
                for rows in batches_by_length(inputs, batch):
                    part = inputs[rows] if isinstance(inputs, np.ndarray) else [inputs[i] for i in rows]
                    out[rows] = self.encode(model, part)
                    task.advance(len(rows))
        finally:
            model.train(was_training)
        return out

    def remembered(self, texts: Sequence[str]) -> Tensor:
        """The seed's own vectors of texts that come again and again, such as names of labels: made once, then kept."""
        if len(self.known) > MOST_KNOWN:
            self.known.clear()
        if new := [text for text in dict.fromkeys(texts) if text not in self.known]:
            self.known.update(zip(new, self.encode_all(self.model, new), strict=True))
        return torch.stack([self.known[text] for text in texts])

    def vectors(self, examples: Examples, *, batch: int = 64, progress: Progress = SILENT) -> NDArray[np.float32]:
        """The seed's own vectors of the examples, length one."""
        return self.encode_all(self.model, examples.inputs, batch=batch, progress=progress).numpy()


def own_progress_only() -> None:
    """No bars of transformers beside ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def pooled(model: Any, batch: Batch, kind: SeedKind) -> Tensor:
    """The mean of the last hidden states over real tokens, or over patches; length one."""
    if kind == "decoder":
        states = model(**batch, output_hidden_states=True, use_cache=False).hidden_states[-1]
    else:
        states = model(**batch).last_hidden_state
    if kind == "vision":
        mean = states[:, class_tokens(model.config, states.shape[1]) :].mean(1)
    else:
        real = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
        mean = (states * real).sum(1) / real.sum(1).clamp(min=1)
    return nn.functional.normalize(mean, dim=-1)


def class_tokens(config: Any, tokens: int) -> int:
    """How many of a vision model's tokens are not patches; they come first."""
    side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    patch = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
    return tokens - (side // patch) ** 2


def batches_by_length(inputs: Sequence[str] | Pixels, batch: int) -> Iterator[list[int]]:
    """Rows in batches, texts of like length together, so that little is padded."""
    order = list(range(len(inputs)))
    if not isinstance(inputs, np.ndarray):
        order.sort(key=lambda i: len(inputs[i]))
    for start in range(0, len(order), batch):
        yield order[start : start + batch]


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of all tensors, sorted by name."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return found.hexdigest()


def with_state(seed: Seed, state: Mapping[str, Tensor]) -> Any:
    """A copy of the seed's model in which the named parameters are replaced."""
    model = seed.fresh_model()
    own = dict(model.named_parameters())
    if unknown := sorted(set(state) - set(own)):
        raise BrokenCheckpoint(f"The seed has no parameter {unknown[0]} ({len(unknown)} names are unknown).")
    with torch.no_grad():
        for name, value in state.items():
            if own[name].shape != value.shape:
                raise BrokenCheckpoint(f"{name} has shape {list(value.shape)}, the seed's is {list(own[name].shape)}.")
            own[name].copy_(value)
    return model.eval()


def _kind(config: Any) -> SeedKind:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("A model with an encoder and a decoder cannot be a seed.")
    if config.model_type in VISION_TOWERS or hasattr(config, "patch_size"):
        return "vision"
    names = config.architectures or []
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names) or getattr(config, "is_decoder", False):
        return "decoder"
    return "encoder"


def _whole(loader: Any, where: str, options: dict[str, Any]) -> Any:
    """The model with every weight from the checkpoint. What is not there transformers draws at random, so that no two
    owners had the same seed. A pooler, which nobody here asks, is zero then: the same for everybody, and there for
    those who load the unified model. Any other weight must be there."""
    model, told = loader.from_pretrained(where, output_loading_info=True, **options)
    poolers = {name for name in told["missing_keys"] if "pooler." in name}
    if missing := sorted(set(told["missing_keys"]) - poolers):
        raise BrokenCheckpoint(
            f"{where} cannot be a seed: it has no weights for {missing[0]} ({len(missing)} tensors are missing).",
            advice="Give a whole checkpoint: missing weights would be random, and different for every owner.",
        )
    with torch.no_grad():
        for name in poolers:
            model.get_parameter(name).zero_()
    return model


def _looks(config: Any, where: str) -> Looks:
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    channels = config.num_channels
    mean, spread = (0.5,) * channels, (0.5,) * channels
    path = Path(where) / "preprocessor_config.json"
    if where and path.is_file():
        try:
            raw = json.loads(path.read_text())
            mean, spread = tuple(map(float, raw["image_mean"])), tuple(map(float, raw["image_std"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BrokenCheckpoint(f"{path} cannot be read: {error}.") from None
    return Looks(size, channels, mean, spread)
