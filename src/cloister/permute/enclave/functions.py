"""The functions that run inside the enclave, in numpy and nothing else, so that the trusted part stays small.

With `alpha` the request's one-time scaling and `r` the factor that is left on queries, keys and values:

    embed       alpha Emb(A) pi
    softmax     alpha softmax(S / (r r^T) + M) / r
    leave       pre-norm only: takes alpha off the residual stream behind the first attention
    norm        alpha Norm(A)
    invert      A / alpha, outputs back in their own order

Post-norm models have r = alpha, which is the paper's formula. In pre-norm models the entrance norm drops alpha, up to
its eps: Norm(alpha x) = r Norm(x) with r^2 = (m + eps) / (m + eps / alpha^2), m the row's mean square (or variance).
Where all that follows is linear we divide r out exactly; elsewhere alpha is drawn so near to one that
|r - 1| <= `EPS_TOLERANCE`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cloister.errors import BadTensor
from cloister.permute.enclave.bundle import Bundle

Floats = NDArray[np.float32]
ALPHA_RANGE = 4.0  # alpha is log-uniform in [1/4, 4]
EPS_TOLERANCE = 1e-5
_LOWEST, _SMALLEST = np.float32(-3e38), np.float32(1e-30)
RandomBytes = Callable[[int], bytes]


@dataclass
class Session:
    """One request's scalings. `alpha` and `rest` grow as rows are embedded; nothing of it is ever sent."""

    alpha: Floats  # [batch, rows so far]
    rest: Floats  # r, same shape
    rows: Floats = field(repr=False)  # the last embedded rows, plain: [batch, new rows, d]
    lengths: NDArray[np.int32] | None = None  # real rows per sequence, for right-padded batches


class Functions:
    """The functions over one bundle. Holds no session: the caller passes it in."""

    def __init__(self, bundle: Bundle, *, insecure_random: RandomBytes | None = None) -> None:
        self.bundle = bundle
        self._random = insecure_random or secrets.token_bytes
        tensors = {name: np.asarray(tensor) for name, tensor in bundle.tensors.items()}
        self._order = tensors.pop("output_order").astype(np.int64)
        if not np.array_equal(np.sort(self._order), np.arange(self._order.size)):
            raise BadTensor("`output_order` of the enclave bundle is no permutation.")
        self._tensors: dict[str, Floats] = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}

    def embed(self, values: NDArray[np.generic], session: Session | None) -> tuple[Floats, Session]:
        """Rows for token ids [batch, n] or image patches [batch, patches, values]; continues `session` if given."""
        start = 0 if session is None else session.alpha.shape[1]
        rows = self._plain_rows(values, start)
        alpha, rest = self._draw(rows)
        if session is None:
            session = Session(alpha, rest, rows)
        else:
            if rows.shape[0] != session.alpha.shape[0]:
                raise BadTensor("A session continues with the same number of sequences.")
            session.alpha = np.concatenate([session.alpha, alpha], axis=1)
            session.rest = np.concatenate([session.rest, rest], axis=1)
            session.rows = rows
        return rows * alpha[..., None], session

    def softmax(self, scores: Floats, session: Session, scale: float, out: Floats) -> None:
        """The first layer's mask and softmax. `scores` [batch, heads, queries, keys] are Q K^T, not yet scaled.

        `out` may lie in memory that the server sees: only the finished result is written there.
        """
        batch, _, queries, keys = scores.shape
        form = self.bundle.form
        rows = session.alpha.shape[1]
        # A cache for a sliding window keeps the last keys only.
        fits = keys == rows or (form.window and keys < rows and session.lengths is None)
        if batch != session.alpha.shape[0] or queries > keys or not fits:
            raise BadTensor("Scores that do not fit the rows of this session.")
        alpha, rest = session.alpha[:, rows - queries :], session.rest[:, rows - keys :]
        corrects_scores = form.norm_place == "post" or form.corrects == "scores and values"
        inverse = 1 / rest
        masked = self._mask(session, queries, keys)
        for number in range(batch):  # one sequence's scores stay in the cache through all the passes
            row = np.float32(scale) * (inverse[number, keys - queries :] if corrects_scores else np.float32(1))
            work = scores[number] * np.broadcast_to(row, queries)[None, :, None]
            if corrects_scores:
                work *= inverse[number]
            if masked is not None:
                np.copyto(work, np.float32(-np.inf), where=masked[number if masked.shape[0] > 1 else 0])
            # A padding row may see no key at all: it then gets zeros, not NaN, which would spread.
            work -= np.maximum(work.max(axis=-1, keepdims=True), _LOWEST)
            np.exp(work, out=work)
            work *= alpha[number, None, :, None] / np.maximum(work.sum(axis=-1, keepdims=True), _SMALLEST)
            np.multiply(work, inverse[number], out=out[number])

    def leave(self, attended: Floats, session: Session, out: Floats) -> None:
        """From `alpha u + b`, the attention's output, to `u + b + x - alpha x`.

        The server adds that to the residual stream's alpha x and has x + u + b.
        """
        rows = session.rows
        if attended.shape != rows.shape:
            raise BadTensor("Rows that do not fit the rows of this session.")
        alpha = session.alpha[:, -rows.shape[1] :, None]
        bias = self._tensors.get("attention_output_bias")
        work = attended / alpha if bias is None else (attended - bias) / alpha + bias
        np.add(work, rows * (1 - alpha), out=out)

    def norm(self, rows: Floats, session: Session, start: int, out: Floats) -> None:
        """The last norm, with alpha put back on its output. `start` is the sequence position of the first row."""
        alpha = self._alpha(session, rows.shape, start)
        normed = self._norm(rows, "final_norm", self.bundle.final_norm_eps)
        np.multiply(normed, alpha, out=out)

    def invert(self, outputs: Floats, session: Session, start: int, out: Floats) -> None:
        """Undo the scaling and the output order."""
        if outputs.shape[-1] != self._order.size:
            raise BadTensor(f"Outputs have {self._order.size} columns here, not {outputs.shape[-1]}.")
        work = outputs / self._alpha(session, outputs.shape, start)
        bias = self._tensors.get("output_bias")
        if bias is not None:  # the server computed alpha y W + b
            work += bias - bias / self._alpha(session, outputs.shape, start)
        np.take(work, self._order, axis=-1, out=out)

    @property
    def outputs(self) -> int:
        """How many output columns there are."""
        return int(self._order.size)

    def _plain_rows(self, values: NDArray[np.generic], start: int) -> Floats:
        table = self._tensors.get("embedding")
        if table is not None:
            if values.ndim != 2 or values.dtype != np.int32:
                raise BadTensor("Token ids are an int32 tensor [batch, n] here.")
            if values.size and (values.min() < 0 or values.max() >= table.shape[0]):
                raise BadTensor("A token id outside the vocabulary.")
            rows: Floats = table[values]
        else:
            weight = self._tensors["patch_weight"]
            if values.ndim != 3 or values.shape[-1] != weight.shape[0] or values.dtype != np.float32:
                raise BadTensor(f"Patches are a float32 tensor [batch, patches, {weight.shape[0]}] here.")
            rows = values.astype(np.float32) @ weight + self._tensors.get("patch_bias", np.float32(0))
            if "class_row" in self._tensors:
                first = np.broadcast_to(self._tensors["class_row"], (rows.shape[0], 1, rows.shape[2]))
                rows = np.concatenate([first, rows], axis=1)
        position = self._tensors.get("position")
        if position is not None:
            if start + rows.shape[1] > position.shape[0]:
                raise BadTensor(f"More rows than the model's {position.shape[0]} positions.")
            rows = rows + position[start : start + rows.shape[1]]
        rows = rows + self._tensors.get("type_row", np.float32(0))
        if "embedding_norm_weight" in self._tensors:
            rows = self._norm(rows, "embedding_norm", self.bundle.embedding_norm_eps)
        return rows

    def _draw(self, rows: Floats) -> tuple[Floats, Floats]:
        count = rows.shape[0] * rows.shape[1]
        drawn = np.frombuffer(self._random(4 * count), np.uint32).astype(np.float64) / 2**32
        low = np.full(count, 1 / ALPHA_RANGE)
        high = np.full(count, ALPHA_RANGE)
        form, eps = self.bundle.form, self.bundle.entrance_eps
        power = self._power(rows).reshape(-1)
        if form.norm_place == "pre" and form.corrects == "nothing" and eps > 0:
            slack = 2 * EPS_TOLERANCE * power / eps
            low = np.maximum(low, 1 / np.sqrt(1 + slack))
            high = np.where(slack < 1, np.minimum(high, 1 / np.sqrt(np.maximum(1 - slack, 1e-12))), high)
        alpha = np.exp(np.log(low) + drawn * (np.log(high) - np.log(low))).astype(np.float32)
        if form.norm_place == "post":
            rest = alpha
        elif form.corrects == "nothing" or eps == 0:
            rest = np.ones_like(alpha)
        else:
            rest = np.sqrt((power + eps) / (power + eps / alpha.astype(np.float64) ** 2)).astype(np.float32)
        return alpha.reshape(rows.shape[:2]), rest.reshape(rows.shape[:2])

    def _power(self, rows: Floats) -> NDArray[np.float64]:
        centred = rows - rows.mean(axis=-1, keepdims=True) if self.bundle.form.norm == "layer" else rows
        return np.einsum("bnd,bnd->bn", centred, centred).astype(np.float64) / rows.shape[-1]

    def _norm(self, rows: Floats, name: str, eps: float) -> Floats:
        if self.bundle.form.norm == "layer":
            rows = rows - rows.mean(axis=-1, keepdims=True)
        mean_square = np.einsum("...d,...d->...", rows, rows)[..., None] / np.float32(rows.shape[-1])
        normed: Floats = rows / np.sqrt(mean_square + np.float32(eps)) * self._tensors[f"{name}_weight"]
        bias = self._tensors.get(f"{name}_bias")
        return normed if bias is None else normed + bias

    def _mask(self, session: Session, queries: int, keys: int) -> NDArray[np.bool_] | None:
        form = self.bundle.form
        masked: NDArray[np.bool_] | None = None
        if form.causal and (queries > 1 or form.window):
            distance = np.arange(keys - queries, keys)[:, None] - np.arange(keys)[None, :]
            masked = distance < 0
            if form.window:
                masked |= distance >= form.window
            masked = masked[None, None]
        if session.lengths is not None:
            padding = (np.arange(keys)[None, :] >= session.lengths[:, None])[:, None, None, :]
            masked = padding if masked is None else masked | padding
        return masked

    @staticmethod
    def _alpha(session: Session, shape: tuple[int, ...], start: int) -> Floats:
        if len(shape) != 3 or shape[0] != session.alpha.shape[0] or start + shape[1] > session.alpha.shape[1]:
            raise BadTensor("Rows that do not fit the rows of this session.")
        return session.alpha[:, start : start + shape[1], None]
