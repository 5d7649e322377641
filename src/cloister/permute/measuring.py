"""Collects what the server holds and sees of one context, and runs the attacks on it (`recovery`).

Everything here is done with what `protect` has at hand anyway: the source, the server's files and the client's.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cloister.families.layout import Layout, Neurons, TensorSpec
from cloister.permute import recovery, sample_text
from cloister.permute.checkpoint import Checkpoint
from cloister.permute.draw import ORTHOGONAL, Draws
from cloister.permute.maps import Permutation
from cloister.permute.numbers import widen

MOST_NUMBERS = (
    16_000_000  # of one table (64 MB); of larger ones a sample of rows is attacked, so that memory stays bounded
)


def measure_context(
    source: Checkpoint, layout: Layout, draws: Draws, server_dir: Path, client_dir: Path,
    base: str, loop: str, base_checkpoint: str | Path | None = None, sample_file: str | Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The recovery figures for the manifest."""
    server = Checkpoint(server_dir)
    public = Checkpoint(base_checkpoint) if base_checkpoint else source
    if layout.embedding is None:
        return _measure_vision(layout, draws, server, public, base)
    sent, read, known = _texts(source.directory, layout, sample_file)
    collector = _Collector(source, server, public, layout, draws)
    ids = collector.candidate_ids(sent)
    view = collector.view(ids, sent, loop)
    sample = "text that was given" if sample_file else "built-in sample text" if read else "random token ids"
    knowledge = (
        collector.knowledge(ids, known, read)
        if base.startswith("public:")
        else recovery.Knowledge(corpus=read, corpus_name=sample)
    )
    found = recovery.measure(
        collector.renumbered(view, ids), collector.renumbered_knowledge(knowledge, ids), numbers=MOST_NUMBERS
    )
    figures = found.to_manifest()
    figures["sample"] = sample
    size = source.tensors[layout.embedding].shape[0]
    if len(ids) < size:
        figures["candidates"] = f"{len(ids)} of {size} table rows, all true ones among them"
    if base.startswith("public:"):
        figures["against"] = str(base_checkpoint) if base_checkpoint else "the source itself (worst case)"
    return figures


class _Collector:
    """Reads the matrices that the attacks compare, under the names that the layout gives them."""

    def __init__(
        self, source: Checkpoint, server: Checkpoint, public: Checkpoint, layout: Layout, draws: Draws
    ) -> None:
        self._source, self._server, self._public, self._layout, self._draws = source, server, public, layout, draws
        drawn = draws.map("vocabulary")
        assert isinstance(drawn, Permutation)
        self._to_server = drawn.inverse_index()
        assert layout.embedding is not None
        self._embedding = layout.embedding
        self._folds = draws.rotates(layout.residual)

    def candidate_ids(self, sent: list[np.ndarray]) -> np.ndarray:
        """The plain ids that take part: all of them, or a sample with every id of the text."""
        size = self._source.tensors[self._embedding].shape[0]
        most = max(MOST_NUMBERS // self._source.tensors[self._embedding].shape[1], 2000)
        if size <= most:
            return np.arange(size)
        used = np.unique(np.concatenate(sent))
        others = np.setdiff1d(np.arange(size), used)
        chosen = np.random.default_rng(0).choice(others, max(most - len(used), 0), replace=False)
        return np.sort(np.concatenate([used, chosen]))

    def view(self, ids: np.ndarray, sent: list[np.ndarray], loop: str) -> recovery.ServerView:
        """What the server holds and sees."""
        head, head_rows = self._head(self._server), self._to_server[ids]
        table = widen_rows(self._source, self._embedding, ids)
        stream = self._draws.map(self._layout.residual)
        rows = stream.columns(table)
        if loop == "token":
            used = np.unique(np.concatenate(sent))
            rows, row_ids = rows[np.searchsorted(ids, used)], used
        else:
            order = np.argsort(self._to_server[ids])  # as they lie in the server's table
            rows, row_ids = rows[order], ids[order]
        place = {int(token): index for index, token in enumerate(row_ids)}
        requests = [np.array([place[int(token)] for token in request], dtype=np.int64) for request in sent]
        readers, ordered = self._weights(self._server, server=True)
        return recovery.ServerView(
            rows=rows,
            row_ids=row_ids,
            requests=[rows[request] for request in requests] if loop == "token" else requests,
            request_ids=sent,
            weights=readers,
            ordered_weights=ordered,
            head=widen_rows(self._server, head, head_rows) if head else None,
            head_ids=ids if head else None,
            transform=self._draws.transform if self._folds or self._draws.transform != ORTHOGONAL else "permutation",
        )

    def knowledge(self, ids: np.ndarray, known: Iterable[int], read: list[np.ndarray]) -> recovery.Knowledge:
        """What the owner of the public base knows."""
        readers, ordered = self._weights(self._public, server=False)
        head = self._head(self._public)
        twin = None
        if head:
            twin = widen_rows(self._public, head, ids)
            final = self._layout.tensors[self._layout.head].norm if self._layout.head else None
            if self._folds and final:
                twin = twin * self._vector(self._public, self._layout.norm_tensors[final][0])
        return recovery.Knowledge(
            table=widen_rows(self._public, self._embedding, ids), weights=readers, ordered_weights=ordered, head=twin,
            known_tokens=tuple(known), corpus=read,
        )  # fmt: skip

    def renumbered(self, view: recovery.ServerView, ids: np.ndarray) -> recovery.ServerView:
        """Ids as places in `ids`, for the tables were cut to those."""
        if len(ids) == self._source.tensors[self._embedding].shape[0]:
            return view
        from dataclasses import replace

        return replace(
            view, row_ids=np.searchsorted(ids, view.row_ids), head_ids=None if view.head_ids is None else
            np.arange(len(ids)), request_ids=[np.searchsorted(ids, request) for request in view.request_ids],
        )  # fmt: skip

    def renumbered_knowledge(self, knowledge: recovery.Knowledge, ids: np.ndarray) -> recovery.Knowledge:
        """The same for what the attacker knows; corpus tokens outside the cut become one unknown token."""
        if len(ids) == self._source.tensors[self._embedding].shape[0]:
            return knowledge
        from dataclasses import replace

        def cut(tokens: np.ndarray) -> np.ndarray:
            places = np.clip(np.searchsorted(ids, tokens), 0, len(ids) - 1)
            return places[ids[places] == tokens]

        return replace(
            knowledge, corpus=[cut(text) for text in knowledge.corpus],
            known_tokens=tuple(int(t) for t in cut(np.array(sorted(knowledge.known_tokens), dtype=np.int64))),
        )  # fmt: skip

    def _head(self, checkpoint: Checkpoint) -> str | None:
        head = self._layout.head
        if head is None or self._layout.tensors[head].axes[1].segments[0].space != self._layout.residual:
            return None  # a head behind a space of its own (masked words) does not tell the residual's coordinates
        return head if head in checkpoint.tensors else self._embedding

    def _weights(self, checkpoint: Checkpoint, *, server: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        readers: dict[str, np.ndarray] = {}
        for name, spec in self._layout.tensors.items():
            found = self._reader(checkpoint, name, spec, server=server)
            if found is not None:
                readers["first reader"] = found
                break
        ordered: dict[str, np.ndarray] = {}
        if not self._folds:
            norms = [
                weight for weight, _ in self._layout.norm_tensors.values()
                if self._layout.tensors[weight].axes[0].segments[0].space == self._layout.residual
            ]  # fmt: skip
            if norms and all(name in checkpoint.tensors for name in norms):
                ordered["norms"] = np.stack([self._vector(checkpoint, name) for name in norms])
            tables = [
                name for name, spec in self._layout.tensors.items()
                if len(spec.axes) == 2 and spec.axes[0].segments[0].space is None and spec.axes[0].size > 2
                and spec.axes[1].side == "out" and spec.axes[1].segments[0].space == self._layout.residual
            ]  # fmt: skip
            for name in tables[:1]:
                ordered["positions"] = widen(checkpoint.read(name), checkpoint.tensors[name].dtype)
        return readers, ordered

    def _reader(self, checkpoint: Checkpoint, name: str, spec: TensorSpec, *, server: bool) -> np.ndarray | None:
        """The first feed-forward matrix that reads the stream and whose rows are only reordered, norms folded alike."""
        if spec.kind != "linear" or spec.stacked or len(spec.axes) != 2:
            return None
        out, into = spec.axes if spec.axes[0].side == "out" else spec.axes[::-1]
        space = out.segments[0].space
        if len(out.segments) != 1 or not isinstance(self._layout.spaces.get(space or ""), Neurons):
            return None
        if into.segments[0].space != self._layout.residual:
            return None
        if server and spec.expert is not None:
            experts, old = spec.expert
            new = int(np.flatnonzero(self._draws.expert_order(experts) == old)[0])
            name = name.replace(f".experts.{old}.", f".experts.{new}.")
        if name not in checkpoint.tensors:
            return None
        if spec.axes[0].side == "in":
            matrix = np.ascontiguousarray(widen(checkpoint.read(name), checkpoint.tensors[name].dtype).T)
        else:
            matrix = widen_rows(checkpoint, name, self._sampled_neurons(space or "", into.size, server=server))
        if self._folds and spec.norm and not server:
            matrix = matrix * self._vector(checkpoint, self._layout.norm_tensors[spec.norm][0])
        return matrix

    def _sampled_neurons(self, space: str, width: int, *, server: bool) -> np.ndarray:
        """The same neurons on both sides, as many as memory allows; on the server in the server's own order."""
        drawn = self._draws.map(space)
        assert isinstance(drawn, Permutation)
        most = max(MOST_NUMBERS // width, 2000)
        plain = np.arange(drawn.size)
        if drawn.size > most:
            plain = np.sort(np.random.default_rng(0).choice(drawn.size, most, replace=False))
        return np.sort(drawn.inverse_index()[plain]) if server else plain

    def _vector(self, checkpoint: Checkpoint, name: str) -> np.ndarray:
        return widen(checkpoint.read(name), checkpoint.tensors[name].dtype)


def widen_rows(checkpoint: Checkpoint, name: str, rows: np.ndarray) -> np.ndarray:
    """Some rows of a table as float32, read without holding the rest."""
    stored = checkpoint.tensors[name]
    result = np.empty((len(rows), *stored.shape[1:]), dtype=np.float32)
    order = np.argsort(rows, kind="stable")
    step = max(1, (32 << 20) // max(1, stored.nbytes // stored.shape[0]))
    for start in range(0, stored.shape[0], step):
        low, high = np.searchsorted(rows[order], [start, start + step])
        if low < high:
            chunk = checkpoint.rows(name, start, min(start + step, stored.shape[0]))
            result[order[low:high]] = widen(chunk[rows[order[low:high]] - start], stored.dtype)
    return result


def _texts(
    directory: Path, layout: Layout, sample_file: str | Path | None
) -> tuple[list[np.ndarray], list[np.ndarray], set[int]]:
    """Requests, the attacker's reading, and the tokens that every request begins or ends with."""
    path = directory / "tokenizer.json"
    size = layout.tensors[layout.embedding or ""].shape[0]
    if not path.exists():
        random = np.random.default_rng(0)
        return [random.integers(0, size, 24) for _ in range(20)], [], set()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    sent, read = list(sample_text.SENT), list(sample_text.READ_ELSEWHERE)
    if sample_file:
        lines = [line for line in Path(sample_file).read_text().splitlines() if line.strip()]
        sent, read = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    encoded = [np.array([t for t in e.ids if t < size], dtype=np.int64) for e in tokenizer.encode_batch(sent)]
    reading = [np.array([t for t in e.ids if t < size], dtype=np.int64) for e in tokenizer.encode_batch(read)]
    encoded = [request for request in encoded if len(request)]
    common = set(encoded[0][[0, -1]].tolist())
    for request in encoded[1:]:
        common &= set(request[[0, -1]].tolist())
    return encoded, [text for text in reading if len(text)], common


def _measure_vision(layout: Layout, draws: Draws, server: Checkpoint, public: Checkpoint, base: str) -> dict[str, Any]:
    """Images: whoever aligns the table of positions with its public twin has the coordinates, and with them every
    patch."""
    if base == "secret":
        sentence = "Not measured: with a secret base the server sees patch vectors, their norms and all inner products."
        return {"base": "secret", "sentence": sentence}
    from cloister.permute.attacks import weights

    name = next(n for n in layout.tensors if "position_embedding" in n)
    tables = [
        widen(c.read(name), c.tensors[name].dtype).reshape(-1, c.tensors[name].shape[-1]) for c in (server, public)
    ]
    stream = draws.map(layout.vision_residual or layout.residual)
    if isinstance(stream, Permutation):
        order = weights.align_ordered(tables[0], tables[1])
        percent = 100.0 * float((np.asarray(order) == stream.index).mean())
    else:
        left, _, right = np.linalg.svd(tables[0].T @ tables[1])
        cosines = np.abs(np.einsum("ij,ij->i", left @ right, stream.matrix))  # type: ignore[attr-defined]
        percent = 100.0 * float((cosines > 0.99).mean())
    return {
        "base": "public",
        "percent": round(percent, 2),
        "attack": "weights",
        "sentence": f"A server that knows the public base recovers {percent:.1f} % of the secret coordinates from the "
        "table of positions alone, and with them the patches of every image.",
    }
