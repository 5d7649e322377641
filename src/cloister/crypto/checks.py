"""Arguments are checked here, before anything is sent: a wrong one is refused by its name and the session stands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cloister.errors import InvalidParameter

MOST_VALUES = 1 << 31  # in one array
MOST_FACTOR = (1 << 22) - 1  # times a share it stays below 2^63
MOST_SUMMED = 1 << 22  # shares that a 64-bit word adds up
MOST_PLACES = 1 << 20  # of a one-hot vector
MOST_RANKED = 4096  # values of a row whose pairs are all compared
ROLES = ("client", "server")


class Shaped(Protocol):
    """Numbers or bits of any backend."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        ...


class Scaled(Shaped, Protocol):
    """Numbers of any backend."""

    @property
    def fraction(self) -> int:
        """Bits after the binary point."""
        ...


def given(value: Any, wanted: type[Any], name: str) -> None:
    """A value of this backend; an array, or another backend's value, is not one."""
    if not isinstance(value, wanted):
        advice = (
            "Bits come from less_than, top_k_mask and the like."
            if wanted.__name__ == "Bits"
            else "Numbers enter a computation by share, share_integers or constant."
        )
        raise InvalidParameter(
            f"`{name}` must be {wanted.__name__} of {wanted.__module__.rpartition('.')[0]}, not {kind_of(value)}.",
            advice=advice,
            param=name,
        )


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


def not_empty(x: Shaped) -> None:
    """What products are made of."""
    if 0 in x.shape:
        raise InvalidParameter(f"A product needs at least one row, column and output, not {tuple(x.shape)}.")


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
    if callable(getattr(values, "cpu", None)):
        values = values.detach().cpu()  # a tensor, which may live on another device
        if str(values.dtype) == "torch.bfloat16":  # NumPy has no such numbers
            values = values.float()
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):
        raise InvalidParameter(f"{what} do not make an array: rows differ in length.") from None
    if array.dtype.kind not in kinds:
        wanted = "real numbers" if "f" in kinds else "integers" if "i" in kinds else "True and False"
        advice = "Round them at their scale first." if wanted == "integers" and array.dtype.kind == "f" else ""
        raise InvalidParameter(f"{what} must be {wanted}, not {array.dtype}.", advice=advice)
    return array


def integers(values: Any, bound: int, what: str) -> NDArray[Any]:
    """An array of integers in [-bound, bound), of any type and without a copy (the weights of a layer of experts fill
    gigabytes), or an error that does not repeat them: they may be secret."""
    array = array_of(values, what, "iu")
    span = np.iinfo(array.dtype)
    fits = span.min >= -bound and span.max < bound
    if not fits and array.size and not (int(array.min()) >= -bound and int(array.max()) < bound):
        raise outside(what, bound)
    return array


def outside(what: str, bound: int) -> InvalidParameter:
    """The error for integers outside [-bound, bound)."""
    return InvalidParameter(f"{what} must lie in [-{bound}, {bound}).")


def matrix(weights: Shaped, columns: int, outputs: int) -> None:
    """The weights of one product."""
    if weights.shape != (columns, outputs):
        raise InvalidParameter(
            f"Weights of shape {tuple(weights.shape)} where ({columns}, {outputs}) was expected.",
            advice="They are (columns, outputs) here; only experts' weights are (experts, outputs, columns).",
        )


def listed(weights: Any, outputs: Sequence[int]) -> None:
    """One array of weights for each number of outputs."""
    if isinstance(weights, str) or not hasattr(weights, "__len__"):
        raise InvalidParameter(f"The weights must be a list of arrays, not {kind_of(weights)}.")
    if len(weights) != len(outputs):
        raise InvalidParameter(f"{len(weights)} arrays of weights for {len(outputs)} outputs.")


def expert_weights(weights: Sequence[Shaped], experts: int, columns: int, outputs: Sequence[int]) -> None:
    """The weights of a batched product."""
    for array, out in zip(weights, outputs, strict=True):
        if array.shape != (experts, out, columns):
            raise InvalidParameter(
                f"Weights {tuple(array.shape)} where ({experts}, {out}, {columns}) was expected.",
                advice="Experts' weights are (experts, outputs, columns).",
            )


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


def last(x: Shaped) -> int:
    """The length of the last axis."""
    if not x.shape:
        raise InvalidParameter("A single number has no axis.", advice="Reshape it to (1,).")
    return x.shape[-1]


def axis_of(x: Shaped, axis: Any) -> int:
    """An axis along which values are summed."""
    axis = whole(axis, "axis", -len(x.shape))
    if axis >= len(x.shape):
        raise InvalidParameter(f"Values of shape {x.shape} have no axis {axis}.", param="axis")
    if x.shape[axis] > MOST_SUMMED:
        raise InvalidParameter(f"At most {MOST_SUMMED:,} values can be summed at once.", advice="Sum parts of them.")
    return axis


def factor_of(factor: Any) -> int:
    """A small public factor."""
    if not isinstance(factor, int | np.integer) or isinstance(factor, bool):
        raise InvalidParameter(
            f"Values can be taken times an integer, not {kind_of(factor)}.",
            advice="Round the factor at a scale, say times(round(1.5 * 4096)), count 12 more fraction bits, and "
            "truncate; or multiply with shares of it.",
            param="factor",
        )
    return whole(factor, "factor", -MOST_FACTOR, MOST_FACTOR)


def compared(bits: Any, drop_bits: Any) -> None:
    """Bits that a comparison looks at, and those below them that it does not."""
    whole(bits, "bits", 2, 41)
    whole(drop_bits, "drop_bits", 0, 32)
    if bits + drop_bits > 41:
        raise InvalidParameter(
            f"Values have 41 bits: {bits} compared and {drop_bits} dropped are more.", param="drop_bits"
        )


def fills(shape: Sequence[int], like: Shaped) -> None:
    """Public values of a shape that `like` can take."""
    try:
        if np.broadcast_shapes(tuple(shape), like.shape) == like.shape:
            return
    except ValueError:
        pass
    raise InvalidParameter(f"Numbers of shape {tuple(shape)} do not fill {like!r}.", param="values")


def same_shape(a: Shaped, b: Shaped) -> None:
    """Arrays that go together element by element."""
    if a.shape != b.shape:
        raise InvalidParameter(f"Shapes {a.shape} and {b.shape} differ.")


def same_scale(x: Scaled, y: Scaled) -> None:
    """Numbers that can be added or compared."""
    if x.fraction != y.fraction:
        raise InvalidParameter(
            f"Numbers with {x.fraction} and {y.fraction} fraction bits do not go together.",
            advice="Truncate the one with more bits first.",
        )
