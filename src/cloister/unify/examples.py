"""Examples: what an owner keeps at home, and what everybody has.

    private = examples.read("tickets.csv")          # text,label
    public = examples.public_set(folder).examples   # what came with the invitation

One table of inputs (texts, or images as bytes) with an id each and, where there is one, a target:

    a text          what a text is called (a label), or what answers it (the second half of a pair)
    a `Choice`      the possible answers to a question, and which of them is right

Readers take CSV (`text,label`), JSON lines ({"id","text","target"}, {"question","choices","answer"},
{"prompt","answer"}), plain text lines, and safetensors of images (`pixels`, `label`). What they refuse they refuse with
the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cloister import storage
from cloister.errors import DataError, FormatVersion, TooLarge, UsageError

Kind = Literal["text", "image"]
Pixels: TypeAlias = NDArray[np.uint8]

FORMAT = 1
MOST_FILE_BYTES = 4 << 30
MOST_EXAMPLES = 5_000_000
MOST_CHARACTERS = 100_000  # of one text
MOST_CHOICES = 64
MOST_SIDE = 4096  # of an image


@dataclass(frozen=True)
class Choice:
    """The possible answers to a question, and the index of the right one."""

    choices: tuple[str, ...]
    answer: int


Target: TypeAlias = "str | Choice | None"


@dataclass(frozen=True)
class Examples:
    """A table of inputs. `targets` is None where no example has one."""

    kind: Kind
    ids: tuple[str, ...]
    inputs: tuple[str, ...] | Pixels  # images: (n, channels, height, width)
    targets: tuple[Target, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.ids) or (self.targets is not None and len(self.targets) != len(self.ids)):
            raise UsageError("Examples need one id, one input and, if any, one target each.")
        if self.kind == "image" and (not isinstance(self.inputs, np.ndarray) or self.inputs.ndim != 4):
            raise UsageError("Images are one array of bytes: examples, channels, height, width.")
        if len(set(self.ids)) != len(self.ids):
            raise DataError(f"The id {_first_repeated(self.ids)!r} is given to two examples.")

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> Examples:
        """The examples at `indices`, in that order."""
        at = [int(i) for i in indices]
        inputs = self.inputs[at] if isinstance(self.inputs, np.ndarray) else tuple(self.inputs[i] for i in at)
        targets = None if self.targets is None else tuple(self.targets[i] for i in at)
        return Examples(self.kind, tuple(self.ids[i] for i in at), inputs, targets)

    def by_id(self, ids: Sequence[str]) -> Examples:
        """The examples with these ids, in that order; `DataError` names one that is not there."""
        place = {name: i for i, name in enumerate(self.ids)}
        if missing := [name for name in ids if name not in place]:
            raise DataError(f"There is no example {missing[0]!r} ({len(missing)} of {len(ids)} ids are unknown).")
        return self.rows([place[name] for name in ids])

    def target(self, index: int) -> Target:
        """The target of one example."""
        return None if self.targets is None else self.targets[index]

    def labels(self) -> tuple[str, ...]:
        """The distinct texts among the targets, sorted."""
        return tuple(sorted({t for t in self.targets or () if isinstance(t, str)}))

    def texts(self) -> tuple[str, ...]:
        """The inputs, where they are texts."""
        if isinstance(self.inputs, np.ndarray):
            raise UsageError("These examples are images; the task at hand needs texts.")
        return self.inputs

    def pixels(self) -> Pixels:
        """The inputs, where they are images."""
        if not isinstance(self.inputs, np.ndarray):
            raise UsageError("These examples are texts; the task at hand needs images.")
        return self.inputs

    def some(self, rows: Sequence[int]) -> list[str] | Pixels:
        """The inputs of these rows, as `Seed.batch` takes them."""
        inputs = self.inputs
        return inputs[list(rows)] if isinstance(inputs, np.ndarray) else [inputs[row] for row in rows]

    def digest(self) -> str:
        """SHA-256 over everything in the table."""
        found = hashlib.sha256(self.kind.encode())
        for name, target in zip(self.ids, self.targets or (None,) * len(self), strict=True):
            found.update(json.dumps([name, _plain(target)]).encode())
        if isinstance(self.inputs, np.ndarray):
            found.update(str(self.inputs.shape).encode())
            found.update(np.ascontiguousarray(self.inputs).tobytes())
        else:
            for text in self.inputs:
                found.update(json.dumps(text).encode())
        return found.hexdigest()


def concat(parts: Sequence[Examples]) -> Examples:
    """All of them in one table; ids that meet are told apart by the part's number."""
    if not parts:
        raise UsageError("There is nothing to put together.")
    if len({part.kind for part in parts}) != 1:
        raise UsageError("Texts and images cannot be put into one table.")
    ids = [name for part in parts for name in part.ids]
    if len(set(ids)) != len(ids):
        ids = [f"{number}:{name}" for number, part in enumerate(parts) for name in part.ids]
    targets = None
    if any(part.targets is not None for part in parts):
        targets = tuple(t for part in parts for t in (part.targets or (None,) * len(part)))
    if parts[0].kind == "image":
        if len({part.pixels().shape[1:] for part in parts}) != 1:
            raise UsageError("Images of different sizes cannot be put into one table.")
        return Examples("image", tuple(ids), np.concatenate([part.pixels() for part in parts]), targets)
    return Examples("text", tuple(ids), tuple(t for part in parts for t in part.texts()), targets)


def read(path: Path | str) -> Examples:
    """The examples of a file, by its ending: .csv, .jsonl, .txt (each also with .gz), .safetensors."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    if path.stat().st_size > MOST_FILE_BYTES:
        raise TooLarge(f"{path} is larger than {storage.gigabytes(MOST_FILE_BYTES)}.", advice="Give a part of it.")
    ending = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    reader = {".csv": _read_csv, ".jsonl": _read_jsonl, ".txt": _read_lines}.get(ending)
    if path.suffix == ".safetensors":
        return _read_images(path)
    if reader is None:
        raise UsageError(
            f"{path} has an ending that is not known.", advice="Known: .csv, .jsonl, .txt (also .gz), .safetensors."
        )
    rows = list(reader(path))
    if not rows:
        raise DataError(f"{path} holds no examples.")
    ids, texts, targets = zip(*rows, strict=True)
    return Examples("text", ids, texts, targets if any(t is not None for t in targets) else None)


def write(path: Path | str, examples: Examples) -> None:
    """Write what `read` reads: JSON lines for texts, safetensors for images; all of it or nothing."""
    path = Path(path)
    if examples.kind == "image":
        _write_images(path, examples)
        return
    with storage.fresh_file(path) as file:
        for index, (name, text) in enumerate(zip(examples.ids, examples.texts(), strict=True)):
            target = examples.target(index)
            line: dict[str, Any] = {"id": name, "text": text}
            if isinstance(target, Choice):
                line = {"id": name, "question": text, "choices": list(target.choices), "answer": target.answer}
            elif target is not None:
                line["target"] = target
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


@dataclass(frozen=True)
class PublicSet:
    """The public examples of an invitation, and what is said about them."""

    examples: Examples
    licence: str
    description: str
    sha256: str


def write_public_set(folder: Path | str, examples: Examples, *, licence: str, description: str) -> None:
    """Write the examples and `public.json` into `folder`, which others find complete or not at all."""
    name = "images.safetensors" if examples.kind == "image" else "examples.jsonl"
    with storage.fresh_directory(folder) as partial:
        write(partial / name, examples)
        about = {
            "schema": FORMAT,
            "kind": examples.kind,
            "count": len(examples),
            "licence": licence,
            "description": description,
            "sha256": _hash_file(partial / name),
        }
        storage.write_text(partial / "public.json", json.dumps(about, indent=2) + "\n")


def public_set(folder: Path | str) -> PublicSet:
    """Read what `write_public_set` wrote; `DataError` if anything was changed since."""
    folder = Path(folder)
    try:
        about = json.loads((folder / "public.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is not a public set: {error}.", advice="Copy the invitation again.") from None
    if not isinstance(about, dict) or about.get("schema") != FORMAT:
        raise FormatVersion(f"{folder}/public.json is not of format {FORMAT}.")
    name = {"text": "examples.jsonl", "image": "images.safetensors"}.get(str(about.get("kind")))
    if name is None:
        raise DataError(f"{folder}/public.json names a kind that is not known: {about.get('kind')!r}.")
    examples = read(folder / name)
    found = _hash_file(folder / name)
    if found != about.get("sha256") or len(examples) != about.get("count"):
        raise DataError(f"{folder / name} is not what public.json says.", advice="Copy the invitation again.")
    return PublicSet(examples, str(about.get("licence", "")), str(about.get("description", "")), found)


# ---------------------------------------------------------------- texts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines with their numbers, from 1, without taking more memory than the bounds allow."""
    total = 0
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        number = 0
        while True:
            number += 1
            try:
                line = file.readline(8 * MOST_CHARACTERS + 1)
            except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
                raise DataError(f"{path}, line {number}: it cannot be read as UTF-8 text ({error}).") from None
            if not line:
                return
            total += len(line)
            if len(line) > 8 * MOST_CHARACTERS or total > MOST_FILE_BYTES:
                raise TooLarge(f"{path}, line {number}: too long.", advice="Cut long texts into several examples.")
            if number > MOST_EXAMPLES:
                raise TooLarge(f"{path} has more than {MOST_EXAMPLES} lines.", advice="Give a part of it.")
            yield number, line.rstrip("\r\n")


def _text(value: Any, path: Path, number: int, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{path}, line {number}: {what} is not a text, or empty.")
    if len(value) > MOST_CHARACTERS:
        raise TooLarge(f"{path}, line {number}: {what} has more than {MOST_CHARACTERS} characters.")
    return value


def _read_lines(path: Path) -> Iterator[tuple[str, str, Target]]:
    for number, line in _lines(path):
        if line.strip():
            yield str(number), _text(line, path, number, "the line"), None


def _read_csv(path: Path) -> Iterator[tuple[str, str, Target]]:
    numbers = [0]

    def lines() -> Iterator[str]:
        for number, line in _lines(path):
            numbers[0] = number
            yield line + "\n"

    reader = csv.DictReader(lines(), strict=True)
    try:
        columns = set(reader.fieldnames or ())
        if "text" not in columns:
            raise DataError(f"{path}, line 1: there is no column `text`.", advice="Name the columns text,label.")
        for row in reader:
            number = numbers[0]
            if None in row or None in row.values():
                raise DataError(f"{path}, line {number}: it has another number of columns than the first line.")
            target = _text(row["label"], path, number, "`label`") if "label" in columns else None
            yield row.get("id") or str(number), _text(row["text"], path, number, "`text`"), target
    except csv.Error as error:
        raise DataError(f"{path}, line {numbers[0]}: {error}.") from None


def _read_jsonl(path: Path) -> Iterator[tuple[str, str, Target]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}).") from None
        if not isinstance(raw, dict):
            raise DataError(f"{path}, line {number}: not a JSON object.")
        name = raw.get("id", str(number))
        if not isinstance(name, str | int) or not str(name) or len(str(name)) > 200:
            raise DataError(f"{path}, line {number}: `id` must be a short text.")
        yield str(name), *_row(raw, path, number)


def _row(raw: dict[str, Any], path: Path, number: int) -> tuple[str, Target]:
    if "question" in raw and "choices" in raw:
        question = _text(raw["question"], path, number, "`question`")
        if raw.get("context"):
            question = f"{_text(raw['context'], path, number, '`context`')} {question}"
        return question, _choice(raw, path, number)
    if "prompt" in raw:
        answer = _text(raw.get("answer"), path, number, "`answer`")
        return _text(raw["prompt"], path, number, "`prompt`"), answer
    if "text" in raw:
        target = raw.get("target", raw.get("label"))
        if target is not None:
            target = _text(target, path, number, "`target`")
        return _text(raw["text"], path, number, "`text`"), target
    raise DataError(
        f"{path}, line {number}: neither `text` nor `question` with `choices` nor `prompt`.",
        advice='Give {"id","text","target"}, {"question","choices","answer"} or {"prompt","answer"}.',
    )


def _choice(raw: dict[str, Any], path: Path, number: int) -> Choice:
    choices, answer = raw["choices"], raw.get("answer")
    if not isinstance(choices, list) or not 2 <= len(choices) <= MOST_CHOICES:
        raise DataError(f"{path}, line {number}: `choices` must be 2 to {MOST_CHOICES} texts.")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise DataError(f"{path}, line {number}: `answer` must be the index of a choice, from 0.")
    return Choice(tuple(_text(choice, path, number, "a choice") for choice in choices), answer)


# ---------------------------------------------------------------- images


def _read_images(path: Path) -> Examples:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names, about = set(file.keys()), file.metadata() or {}
            if "pixels" not in names or not names <= {"pixels", "label"}:
                raise DataError(f"{path} must hold `pixels` and, if any, `label`; it holds {', '.join(sorted(names))}.")
            shape = file.get_slice("pixels").get_shape()
            if len(shape) != 4 or file.get_slice("pixels").get_dtype() != "U8":
                raise DataError(f"{path}: `pixels` must be bytes of shape examples, channels, height, width.")
            if not 0 < shape[0] <= MOST_EXAMPLES or shape[1] not in (1, 3) or not 0 < max(shape[2:]) <= MOST_SIDE:
                raise TooLarge(f"{path}: {shape} is not a number of images with 1 or 3 channels within the bounds.")
            pixels = file.get_tensor("pixels")
            labels = file.get_tensor("label") if "label" in names else None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a safetensors file: {error}.") from None
    targets = None if labels is None else _image_targets(labels, about, len(pixels), path)
    return Examples("image", tuple(str(i) for i in range(len(pixels))), pixels, targets)


def _image_targets(labels: NDArray[Any], about: dict[str, str], count: int, path: Path) -> tuple[Target, ...]:
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise DataError(f"{path}: `label` must be one whole number an image.")
    try:
        names = json.loads(about.get("labels", "null"))
    except (ValueError, RecursionError):
        names = 0
    if names is None:
        names = [str(i) for i in range(int(labels.max(initial=0)) + 1)] if labels.max(initial=0) < MOST_EXAMPLES else 0
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path}: the metadata `labels` must be a JSON list of texts.")
    if labels.size and (labels.max() >= len(names) or labels.min() < -1):
        raise DataError(f"{path}: a label lies outside the {len(names)} names (-1 means none).")
    return tuple(None if i < 0 else names[i] for i in labels.tolist())


def _write_images(path: Path, examples: Examples) -> None:
    from safetensors.numpy import save

    tensors: dict[str, NDArray[Any]] = {"pixels": np.ascontiguousarray(examples.pixels())}
    about = None
    if examples.targets is not None:
        names = list(examples.labels())
        place = {name: i for i, name in enumerate(names)}
        tensors["label"] = np.array([place.get(t, -1) if isinstance(t, str) else -1 for t in examples.targets])
        about = {"labels": json.dumps(names)}
    storage.write_bytes(path, save(tensors, metadata=about))


# ---------------------------------------------------------------- odds and ends


def _plain(target: Target) -> Any:
    return [*target.choices, target.answer] if isinstance(target, Choice) else target


def _first_repeated(ids: Sequence[str]) -> str:
    seen: set[str] = set()
    return next(name for name in ids if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _hash_file(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()
