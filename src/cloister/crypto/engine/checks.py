"""Arguments are checked here, before anything is sent: a wrong one is refused by its name and the session stands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cloister.errors import InvalidParameter

MOST_VALUES = 1 << 31  # in one array


class Shaped(Protocol):
    """Shares of numbers or of bits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        ...


def whole(value: Any, name: str, least: int = 0, most: int | None = None) -> int:
    """An integer from `least` to `most`; nothing else is rounded to one."""
    span = f"of at least {least:,}" if most is None else f"from {least:,} to {most:,}"
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise InvalidParameter(
            f"`{name}` must be an integer {span}, not {kind_of(value)}.", advice="Round it yourself.", param=name
        )
    if value < least or (most is not None and value > most):
        raise InvalidParameter(f"`{name}` is {value}; it must be an integer {span}.", param=name)
    return int(value)


def real(value: Any, name: str, least: float, most: float, *, open_below: bool = False) -> float:
    """A finite number from `least` to `most`, without `least` itself where the range is `open_below`."""
    span = f"{'above' if open_below else 'at least'} {least:g}" + (f" and at most {most:g}" if most < math.inf else "")
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidParameter(f"`{name}` must be a number {span}, not {kind_of(value)}.", param=name)
    number = float(value)
    if not (math.isfinite(number) and least <= number <= most) or (open_below and number == least):
        raise InvalidParameter(f"`{name}` is {number:g}; it must be a finite number {span}.", param=name)
    return number


def text(value: Any, name: str) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        said = "empty" if value == "" else kind_of(value)
        raise InvalidParameter(f"`{name}` must be a string that says something, not {said}.", param=name)
    return value


def one_of(value: Any, name: str, known: Sequence[str]) -> None:
    """One of the words that are known."""
    if not isinstance(value, str) or value not in known:
        said = repr(value) if isinstance(value, str) else kind_of(value)
        raise InvalidParameter(f"`{name}` is one of {', '.join(map(repr, known))}, not {said}.", param=name)


def kind_of(value: Any) -> str:
    """What a value is; never the value: it may be secret."""
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def shape_of(shape: Any) -> tuple[int, ...]:
    """A shape, with a number of values that a message can hold."""
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise InvalidParameter(
            f"`shape` must be a tuple of integers, not {kind_of(shape)}.", advice="Write shape=(5,).", param="shape"
        )
    sizes = tuple(whole(size, "shape") for size in shape)
    if math.prod(sizes) > MOST_VALUES:
        raise InvalidParameter(
            f"An array of shape {sizes} has more than {MOST_VALUES:,} values.",
            advice="Share it in parts.",
            param="shape",
        )
    return sizes


def outputs_of(outputs: Any) -> list[int]:
    """The numbers of outputs of several matrices that meet one input."""
    if isinstance(outputs, str) or not isinstance(outputs, Sequence) or not len(outputs):
        raise InvalidParameter(
            f"`outputs` must be a list with one number for each array of weights, not {kind_of(outputs)}.",
            advice="For one array write outputs=[n].",
            param="outputs",
        )
    return [whole(n, "outputs", 1) for n in outputs]


def array_of(values: Any, what: str, kinds: str) -> NDArray[Any]:
    """Values as an array whose type is of the `kinds`, or an error that does not repeat them."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):
        raise InvalidParameter(f"{what} do not make an array: rows differ in length.") from None
    if array.dtype.kind not in kinds:
        wanted = "real numbers" if "f" in kinds else "integers" if "i" in kinds else "True and False"
        advice = "Round them at their scale first." if wanted == "integers" and array.dtype.kind == "f" else ""
        raise InvalidParameter(f"{what} must be {wanted}, not {array.dtype}.", advice=advice)
    return array


def integers(values: Any, bound: int, what: str) -> NDArray[np.int64]:
    """Integers in [-bound, bound), or an error that does not repeat them: they may be secret."""
    array = array_of(values, what, "iu")
    if array.size and not (int(array.min()) >= -bound and int(array.max()) < bound):
        raise InvalidParameter(f"{what} must lie in [-{bound}, {bound}).")
    return np.ascontiguousarray(array, dtype=np.int64).reshape(array.shape)


def matrix(weights: Any, columns: int, outputs: int, weight_bits: int) -> NDArray[np.int32]:
    """The weights of one product."""
    given = integers(weights, 1 << (weight_bits - 1), "The weights").astype(np.int32)
    if given.shape != (columns, outputs):
        raise InvalidParameter(
            f"Weights of shape {given.shape} where ({columns}, {outputs}) was expected.",
            advice="They are (columns, outputs) here; only experts' weights are (experts, outputs, columns).",
        )
    return given


def expert_weights(weights: Any, experts: int, columns: int, outputs: Sequence[int]) -> list[NDArray[np.int16]]:
    """The weights of a batched product."""
    if not isinstance(weights, Sequence | np.ndarray):
        raise InvalidParameter(f"The weights must be a list of arrays, not {kind_of(weights)}.")
    given = [integers(w, 1 << 15, "The weights").astype(np.int16) for w in weights]
    if len(given) != len(outputs):
        raise InvalidParameter(f"{len(given)} arrays of weights for {len(outputs)} outputs.")
    for array, out in zip(given, outputs, strict=True):
        if array.shape != (experts, out, columns):
            raise InvalidParameter(
                f"Weights {array.shape} where ({experts}, {out}, {columns}) was expected.",
                advice="Experts' weights are (experts, outputs, columns).",
            )
    return given


def octaves(least: Any, most: Any, fraction: int) -> tuple[int, int]:
    """The powers of two of last places between which numbers from `least` to `most` lie."""
    low = real(least, "least", 0, math.inf, open_below=True)
    high = real(most, "most", 0, math.inf, open_below=True)
    if not 2.0**-fraction <= low < high:
        raise InvalidParameter(
            f"A range from {low:g} to {high:g} cannot be used with {fraction} fraction bits.",
            advice=f"`least` must be at least one last place, {2.0**-fraction:g}, and below `most`.",
            param="least",
        )
    return math.floor(math.log2(low)) + fraction, math.ceil(math.log2(high)) + fraction


def two(x: Shaped) -> tuple[int, int]:
    """The rows and columns of a matrix."""
    if len(x.shape) != 2:
        raise InvalidParameter(f"Shares of shape {x.shape} where (rows, columns) was expected.")
    return x.shape[0], x.shape[1]


def last(x: Shaped) -> int:
    """The length of the last axis."""
    if not x.shape:
        raise InvalidParameter("Shares of a single number have no axis.", advice="Reshape them to (1,).")
    return x.shape[-1]


def same_shape(a: Shaped, b: Shaped) -> None:
    """Arrays that go together element by element."""
    if a.shape != b.shape:
        raise InvalidParameter(f"Shapes {a.shape} and {b.shape} differ.")
