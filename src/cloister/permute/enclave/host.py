"""A transformers model on the server whose named functions are done by the enclave.

Only the first layer's attention, the last norm, the entrance and the output change; every other module runs as it is,
on any permuted checkpoint:

    served = EnclavedModel(model, enclave)
    logits = served.forward(token_ids)            # plain logits, [batch, kept positions, vocabulary]

Nothing of the model's classes is patched: the first attention gets a configuration of its own that names an attention
function registered with transformers, the rest are hooks, and `close()` takes all of it away again.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AttentionInterface

from cloister.errors import InvalidParameter, UnsupportedModel
from cloister.permute.enclave.client import EnclaveConnection
from cloister.permute.enclave.theorem import Form, form_of

ATTENTION = "cloister_enclave"


@dataclass(frozen=True)
class Parts:
    """Where the functions sit in one model."""

    attention: nn.Module  # calls transformers' attention interface
    attention_block: nn.Module  # its output is added to the residual stream
    final_norm: nn.Module
    embeddings: tuple[nn.Module, ...]  # modules whose output the enclave's rows replace
    silenced: tuple[nn.Module, ...] = ()  # modules whose output must be zero (positions the enclave has already added)
    biased: tuple[nn.Module, ...] = ()  # the projections around the first attention
    vision: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


def parts_of(model: nn.Module) -> Parts:
    """Find the parts by the names that transformers' classes use; `UnsupportedModel` if they are not there."""
    base = _base(model)
    kind = base.config.model_type
    try:
        if kind == "bert":
            layers = base.encoder.layer
            attention = layers[0].attention.self
            biased = (attention.query, attention.key, attention.value, layers[0].attention.output.dense)
            return Parts(attention, layers[0].attention, layers[-1].output.LayerNorm, (base.embeddings,), biased=biased)
        if kind == "gpt2":
            attention = base.h[0].attn
            return Parts(attention, attention, base.ln_f, (), silenced=(base.wpe,))
        if kind == "vit":
            attention = base.layers[0].attention if hasattr(base, "layers") else base.encoder.layer[0].attention
            return Parts(attention, attention, base.layernorm, (base.embeddings,), vision=True)
        if kind == "clip_vision_model":
            attention = base.encoder.layers[0].self_attn
            return Parts(attention, attention, base.post_layernorm, (base.embeddings, base.pre_layrnorm), vision=True)
        attention = base.layers[0].self_attn
        return Parts(attention, attention, base.norm, ())
    except (AttributeError, IndexError, TypeError) as error:
        raise UnsupportedModel("The enclave path does not find its way in this model.", [str(error)]) from None


def _base(model: Any) -> Any:
    """The part that holds the layers."""
    for name in ("language_model", "model", "transformer", "vision_model", "vit", "bert"):
        for holder in (model, getattr(model, "model", None)):
            if isinstance(getattr(holder, name, None), nn.Module):
                model = getattr(holder, name)
                break
    return model


def biases_are_zero(model: nn.Module) -> bool:
    """Whether all projection biases around the first attention are absent or exactly zero."""
    biases = [getattr(module, "bias", None) for module in parts_of(model).biased]
    return not any(bool(bias.detach().any()) for bias in biases if isinstance(bias, torch.Tensor))


def form_of_model(model: nn.Module) -> Form:
    """The form of the functions for a loaded model, biases looked at; `UnsupportedModel` with the reasons otherwise."""
    parts = parts_of(model)
    return form_of(model.config, biases_are_zero=bool(parts.biased) and biases_are_zero(model))


class EnclavedModel:
    """A model on the server, wired to an enclave. One request at a time (the enclave answers one at a time anyway)."""

    def __init__(self, model: nn.Module, enclave: EnclaveConnection) -> None:
        form = form_of_model(model)
        self.model: Any = model.eval()
        self.enclave = enclave
        self._parts = parts_of(model)
        self._session = 0
        self._rows: torch.Tensor | None = None
        self._past = 0
        self._handles: list[Any] = []
        attention: Any = self._parts.attention
        self._plain_config = attention.config
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = ATTENTION
        attention._cloister_enclave = self
        self._hook(self._parts.final_norm, self._final_norm)
        for module in self._parts.embeddings:
            self._hook(module, lambda _m, _i, _o: self._rows)
        for module in self._parts.silenced:
            self._hook(module, lambda _m, _i, output: torch.zeros_like(output))
        if form.leaves_residual:
            self._hook(self._parts.attention_block, self._leave)

    def open(self, values: NDArray[np.generic], lengths: NDArray[np.int32] | None = None) -> int:
        """Embed the first rows of a request; returns the enclave's session."""
        self._session, rows = self.enclave.embed(values, lengths=lengths)
        self._rows, self._past = self._tensor(rows), 0
        return self._session

    def forward(
        self,
        values: NDArray[np.generic],
        *,
        lengths: NDArray[np.int32] | None = None,
        session: int = 0,
        cache: Any = None,
        last_only: bool = False,
    ) -> tuple[torch.Tensor, int]:
        """Plain outputs for token ids [batch, n] or patches [batch, patches, values], and the session to go on with.

        `cache` (a transformers cache) and `session` continue a generation with the new ids only.
        """
        if bool(session) != bool(cache is not None and cache.get_seq_length()):
            raise InvalidParameter(
                "A session continues with the cache that belongs to it, and begins with an empty one."
            )
        with torch.inference_mode(), self.enclave.lock:
            if session:
                self._session = session
                self._past = int(cache.get_seq_length())
                _, rows = self.enclave.embed(values, session)
                self._rows = self._tensor(rows)
            else:
                self.open(values, lengths)
            assert self._rows is not None
            try:
                outputs, start = self._outputs(cache, last_only, lengths)
                kept = np.ascontiguousarray(outputs.float().numpy(force=True))
                plain = torch.from_numpy(self.enclave.invert(kept, self._session, start).copy())
            finally:
                self._rows = None
            return plain, self._session

    def close_session(self, session: int) -> None:
        """End a session."""
        self.enclave.close_session(session)

    def close(self) -> None:
        """Give the model back as it was."""
        for handle in self._handles:
            handle.remove()
        attention: Any = self._parts.attention
        attention.config = self._plain_config
        del attention._cloister_enclave

    def _outputs(self, cache: Any, last_only: bool, lengths: NDArray[np.int32] | None) -> tuple[torch.Tensor, int]:
        rows = self._rows
        assert rows is not None
        if self._parts.vision:
            # The embedding modules still run and are overruled: they only need a picture of the right size.
            side = self._plain_config.image_size
            height, width = side if isinstance(side, (tuple, list)) else (side, side)
            blank = torch.zeros(rows.shape[0], self._plain_config.num_channels, height, width, dtype=rows.dtype)
            result = self.model(pixel_values=blank.to(rows.device))
            found = next(
                value
                for name in ("logits", "image_embeds", "pooler_output")
                if (value := getattr(result, name, None)) is not None
            )
            return found[:, None], 0  # all of these are computed from the class row
        keep: dict[str, Any] = {"logits_to_keep": 1} if last_only and hasattr(self.model, "lm_head") else {}
        if cache is not None:
            keep.update(past_key_values=cache, use_cache=True)
        elif self._plain_config.model_type != "bert":
            keep["use_cache"] = False
        if lengths is not None:  # for the other layers: which rows are padding is plain to see anyway
            real = torch.from_numpy(np.arange(rows.shape[1])[None] < lengths[:, None]).to(rows.device)
            keep["attention_mask"] = real.long()
        result = self.model(inputs_embeds=rows, **keep)
        outputs = result.logits if hasattr(result, "logits") else result.last_hidden_state
        return outputs, self._past + rows.shape[1] - outputs.shape[1]

    def _hook(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._handles.append(module.register_forward_hook(function))

    def _leave(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        first, *others = output if isinstance(output, tuple) else (output,)
        rows = np.ascontiguousarray(first.float().numpy(force=True))
        changed = self._tensor(self.enclave.leave(rows, self._session).copy())
        return (changed, *others) if isinstance(output, tuple) else changed

    def _final_norm(self, _module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        rows = inputs[0].float().numpy(force=True)
        flat = rows[:, None] if rows.ndim == 2 else rows  # CLIP norms the class row only
        normed = self.enclave.norm(np.ascontiguousarray(flat), self._session, self._past).copy()
        return self._tensor(normed.reshape(rows.shape)).to(output.dtype)

    def _tensor(self, array: NDArray[np.float32]) -> torch.Tensor:
        parameter = next(self.model.parameters())
        return torch.from_numpy(array).to(parameter.device, parameter.dtype)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """The first layer's attention: products here, mask and softmax in the enclave."""
        batch, heads, queries, width = query.shape
        groups, keys = key.shape[1], key.shape[2]
        room = self.enclave.room((batch, heads, queries, keys))
        scores = torch.from_numpy(room)
        # Query heads of one group share a key head: fold them into the query axis rather than repeating the keys.
        folded = query.reshape(batch, groups, heads // groups * queries, width)
        view = scores.view(batch, groups, heads // groups * queries, keys)
        if query.dtype == torch.float32 and query.device.type == "cpu":
            torch.matmul(folded, key.transpose(2, 3), out=view)
        else:
            view.copy_(torch.matmul(folded, key.transpose(2, 3)))
        weights = torch.from_numpy(self.enclave.softmax(room, self._session, scale)).to(value.device, value.dtype)
        mixed = torch.matmul(weights.view(batch, groups, heads // groups * queries, keys), value)
        return mixed.view(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous()


@functools.cache
def _register() -> None:
    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    # The server's mask is not looked at: the enclave makes its own from what it embedded.
    served: EnclavedModel = module._cloister_enclave  # type: ignore[assignment]
    return served.attend(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


_register()
