"""Fixed-point numbers as the engine holds them, without shares: int64 tensors, every value inside (-p/4, p/4)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cloister.crypto.fixed import FRACTION_BITS, PRIME, VALUE_BOUND
from cloister.errors import InvalidParameter

P, BOUND, FRACTION = PRIME, VALUE_BOUND, FRACTION_BITS

Rounding = Callable[[Tensor, int, str], Tensor]
"""How values lose f bits, in a step with a name: `truncate`, or a `SharesRounding`. Every function that truncates takes
one and passes it on."""


class OutOfRange(InvalidParameter):
    """A value that the engine's shares cannot hold. The engine itself cannot see this; the simulator can."""


def check(values: Tensor, where: str, least: int = 1 - BOUND, most: int = BOUND - 1) -> Tensor:
    """Returns `values`, or raises `OutOfRange` that says where, which and how large."""
    if values.numel():
        low, high = torch.aminmax(values)
        if int(high) > most or int(low) < least:
            place = int(values.argmax() if int(high) > most else values.argmin())
            worst = int(values.flatten()[place])
            raise OutOfRange(
                f"{where}: element {place} of {tuple(values.shape)} is {worst}, outside {least} to {most}.",
                advice="Lower the scale or the plan's bounds of this step.",
            )
    return values


def encode(numbers: Tensor, f: int = FRACTION) -> Tensor:
    """Real numbers at 2^f, rounded to nearest."""
    if numbers.is_complex() or not bool(torch.isfinite(numbers).all()):
        raise InvalidParameter("Only finite real numbers can be encoded.")
    return check(torch.round(numbers.to(torch.float64) * 2.0**f).to(torch.int64), "encode")


def decode(values: Tensor, f: int = FRACTION) -> Tensor:
    """The real numbers of `values` at 2^f, as float64."""
    return values.to(torch.float64) / 2.0**f


def truncate(values: Tensor, f: int, where: str = "truncate") -> Tensor:
    """x / 2^f, rounded to nearest (halves up).

    The engine gives floor(x / 2^f) or one more, by its shares (above 16 bits, or one less too), with a mean error of
    nearly 0. Nearest is one of the two and has that mean as well; rounding down would bias every simulated sum.
    """
    return (check(values, where) + ((1 << f) >> 1)) >> f


class SharesRounding:
    """Truncation as the engine rounds when shares are random: for each value it draws two shares and takes the very
    integer that they would give. The same seed on the same device gives the same integers again. Not for secrets."""

    def __init__(self, insecure_seed: int | None = None) -> None:
        self._seed = insecure_seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, values: Tensor, f: int, where: str = "truncate") -> Tensor:
        return truncate_shares(*share(check(values, where), self._drawn_from(values.device)), f)

    def _drawn_from(self, device: torch.device) -> torch.Generator | None:
        if self._seed is not None and device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators.get(device)


def truncate_shares(client: Tensor, server: Tensor, f: int) -> Tensor:
    """The very integer that the engine's truncation of these two shares (elements of Z_p) gives."""
    if f == 0:
        return signed((client + server) % P)
    offset = ((P - 1) // 4) >> f << f
    half = (1 << f) >> 1
    client = (client + offset) % P
    wraps = (client > (P - 1) // 2) | (server > (P - 1) // 2)
    rounded = ((client + half) >> f) + ((server + half - 1) >> f)
    return rounded - wraps.to(torch.int64) * ((P + max(half, 1) - 1) >> f) - (offset >> f)


def share(values: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Splits values into two random shares, to study what depends on them. Not for secrets."""
    mask = torch.randint(P, values.shape, dtype=torch.int64, device=values.device, generator=generator)
    return mask, (values - mask) % P


def signed(elements: Tensor) -> Tensor:
    """The signed values of field elements."""
    return torch.where(elements > P // 2, elements - P, elements)
