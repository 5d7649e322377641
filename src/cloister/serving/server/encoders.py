"""Single forward passes: embeddings, class scores, logits, image vectors. What goes in and out is in the server's
coordinates; undoing the transform is the client's work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from cloister.errors import BadTensor, InvalidParameter, TooBusy, TooLarge, UnsupportedParameter
from cloister.serving.server import vision
from cloister.serving.server.loading import ServedModel
from cloister.serving.server.requests import checked_ids, checked_rows
from cloister.serving.server.settings import ServerSettings

T = TypeVar("T")
Input = tuple[int, ...] | NDArray[np.float32]
MAX_INPUTS = 2048


class Runner:
    """The worker of a model that does not generate: one forward pass at a time, a bounded number waiting."""

    def __init__(self, settings: ServerSettings) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")
        self._limit = settings.max_waiting
        self._open = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Nothing to prepare."""

    def stop(self) -> None:
        """Finish the running pass, drop the waiting ones."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, job: Callable[[], T]) -> Future[T]:
        """Run one forward pass."""
        with self._lock:
            if self._open >= self._limit:
                raise TooBusy("Too many requests are waiting.", advice="Try again soon.")
            self._open += 1
        try:
            future = self._pool.submit(job)
        except RuntimeError:
            self._open -= 1
            raise TooBusy("The server is going down.", advice="Try again when it is back.") from None
        future.add_done_callback(self._done)
        return future

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self._open -= 1

    def load(self) -> dict[str, int]:
        """How full it is."""
        return {"waiting": max(self._open - 1, 0), "running": min(self._open, 1), "slots": 1}


# /v1/embeddings -------------------------------------------------------------------------------------------------------


def parse_embeddings(body: Mapping[str, Any], served: ServedModel) -> list[Input]:
    """The inputs of a /v1/embeddings body."""
    if served.task in ("generate", "vision", "classify"):
        raise UnsupportedParameter(
            f"{served.name} is not an embedding model.", advice="See /v1/models for what is served.", param="model"
        )
    if body.get("dimensions") is not None:
        raise UnsupportedParameter("This server cannot shorten vectors.", param="dimensions")
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise InvalidParameter("encoding_format must be float or base64.", param="encoding_format")
    shape = served.shape
    if body.get("prompt_embeds") is not None:
        texts = body["prompt_embeds"]
        texts = [texts] if isinstance(texts, str) else texts
        _count(texts, "prompt_embeds")
        return [checked_rows(one, "prompt_embeds", shape.hidden_size, shape.max_model_len) for one in texts]
    given = body.get("input")
    if isinstance(given, list) and given and all(type(item) is int for item in given):
        given = [given]
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], str)):
        raise UnsupportedParameter(
            "This server has no tokenizer, so input must be lists of token ids.",
            advice="Ask through `cloister gateway`.",
            param="input",
        )
    _count(given, "input")
    inputs: list[Input] = [checked_ids(one, "input", shape.vocab_size, shape.max_model_len) for one in given or []]
    if any(len(one) == 0 for one in inputs):
        raise InvalidParameter("input has an empty list.", param="input")
    return inputs


def _count(given: Any, name: str) -> None:
    if not isinstance(given, list) or not given:
        raise InvalidParameter(f"{name} must be a list with something in it.", param=name)
    if len(given) > MAX_INPUTS:
        raise TooLarge(f"{name} has {len(given)} items, the limit is {MAX_INPUTS}.", param=name)


def by_length(inputs: list[Input]) -> list[list[int]]:
    """Indices of inputs that can share a pass without padding, at most 16 each, so that others get their turn."""
    groups: dict[tuple[bool, int], list[int]] = {}
    for index, one in enumerate(inputs):
        groups.setdefault((isinstance(one, tuple), len(one)), []).append(index)
    return [group[at : at + 16] for group in groups.values() for at in range(0, len(group), 16)]


def pooled(served: ServedModel, batch: list[Input]) -> NDArray[np.float32]:
    """Vectors [batch, hidden] of inputs of one length and kind."""
    with torch.inference_mode():
        hidden = served.model.base_model(**_inputs(served, batch)).last_hidden_state.float()
        vectors = hidden[:, 0] if served.pooling.mode == "cls" else hidden.mean(dim=1)
        if served.pooling.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
    return _finite(vectors)


def _inputs(served: ServedModel, batch: list[Input], types: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    if isinstance(batch[0], tuple):
        inputs = {"input_ids": torch.tensor(batch, dtype=torch.long, device=served.device)}
    else:
        stacked = torch.from_numpy(np.stack(batch))
        inputs = {"inputs_embeds": stacked.to(device=served.device, dtype=served.dtype)}
    if types:
        inputs["token_type_ids"] = torch.tensor([types], dtype=torch.long, device=served.device)
    return inputs


# /cloister/v1/forward -------------------------------------------------------------------------------------------------


def parse_forward(
    body: Mapping[str, Any], served: ServedModel, max_output: int
) -> Callable[[], tuple[NDArray[np.float32], str]]:
    """Check the body; the result computes the output matrix and its kind."""
    given = [name for name in ("prompt", "prompt_embeds", "pixel_embeds") if body.get(name) is not None]
    if len(given) != 1:
        raise InvalidParameter("Send exactly one of prompt, prompt_embeds and pixel_embeds.", param="prompt")
    name, shape = given[0], served.shape
    if (name == "pixel_embeds") != (served.task == "vision"):
        raise UnsupportedParameter(f"{served.name} does not take {name}.", param=name)
    if name == "pixel_embeds":
        config = served.model.config
        height, width = vision.grid(config)
        patches = checked_rows(body[name], name, int(config.num_channels), height * width)
        if len(patches) != height * width:
            raise BadTensor(
                f"There are {len(patches)} patches, the model needs {height * width}.",
                advice="Resize the image to the model's size.",
                param=name,
            )
        return lambda: _see(served, patches, height, width)
    if name == "prompt":
        one: Input = checked_ids(body[name], name, shape.vocab_size, shape.max_model_len)
    else:
        one = checked_rows(body[name], name, shape.hidden_size, shape.max_model_len)
    if len(one) == 0:
        raise InvalidParameter("The prompt is empty.", param=name)
    types = checked_ids(body["token_type_ids"], "token_type_ids", 2, len(one)) if body.get("token_type_ids") else ()
    if types and len(types) != len(one):
        raise InvalidParameter("token_type_ids must be as long as the prompt.", param="token_type_ids")
    if served.task in ("generate", "fill") and len(one) * shape.vocab_size * 4 > max_output:
        raise TooLarge(
            f"Logits of {len(one)} positions take more than {max_output} bytes.",
            advice="Send a shorter prompt.",
            param=name,
        )
    if served.task == "embed":
        return lambda: (pooled(served, [one]), "vectors")
    return lambda: _score(served, one, types)


def _score(served: ServedModel, one: Input, types: tuple[int, ...]) -> tuple[NDArray[np.float32], str]:
    with torch.inference_mode():
        logits = served.model(**_inputs(served, [one], types)).logits
    if served.task == "classify":
        return _finite(logits.reshape(1, -1)), "classes"
    return _finite(logits[0]), "logits"


def _see(served: ServedModel, patches: NDArray[np.float32], height: int, width: int) -> tuple[NDArray[np.float32], str]:
    with torch.inference_mode():
        pixels = vision.patches_to_pixels(torch.tensor(patches), height, width)
        output = served.model(pixel_values=pixels.to(device=served.device, dtype=served.dtype))
    if getattr(output, "logits", None) is not None:
        return _finite(output.logits.reshape(1, -1)), "classes"
    vectors = getattr(output, "image_embeds", None)
    return _finite(output.pooler_output if vectors is None else vectors), "vectors"


def _finite(values: torch.Tensor) -> NDArray[np.float32]:
    array = values.float().cpu().numpy()
    if not np.isfinite(array).all():
        raise BadTensor("The model's answer to this input is not finite.")
    return np.ascontiguousarray(array, dtype=np.float32)
