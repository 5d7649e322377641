"""One (epsilon, delta) for everything that an owner releases, or the reasons why there is none.

    bound = total([
        Release("proxies", Gaussian(noise=3.1)),
        Release("expert", Stated(epsilon=4.0, delta=1e-6)),
        Release("vectors", NotDependent("a function of the proxies and the seed alone")),
    ], delta=1e-5)

Differential privacy composes: what two releases reveal about one example adds up, so a bound for each alone says
little. Mechanisms whose noise is known are composed by Renyi divergence with dp-accounting; it holds for the discrete
noise of `noise.py` as for the continuous one. Of those that only state an (epsilon, delta) both numbers are added.

One release without differential privacy leaves no bound at all, whatever the noise of the others.

Who counts as a neighbour must agree: data sets in which one example is *added or removed*, or in which one is
*replaced*. A bound of the first kind gives one of the second (two steps), not the other way round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeAlias

from cloister.errors import NotAvailable, UsageError

Neighbours = Literal["added or removed", "replaced"]


@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise, once or several times: `noise` is its standard deviation divided by the sensitivity."""

    noise: float
    times: int = 1


@dataclass(frozen=True)
class SampledGaussian:
    """DP-SGD: Gaussian noise on sums over examples that are each drawn with probability `rate` (Poisson)."""

    noise: float
    rate: float
    steps: int


@dataclass(frozen=True)
class Laplace:
    """Laplace noise: `noise` is its scale divided by the sensitivity."""

    noise: float


@dataclass(frozen=True)
class Stated:
    """A mechanism of which only the total is known."""

    epsilon: float
    delta: float = 0.0


@dataclass(frozen=True)
class NotDependent:
    """No function of private data but through what is released anyway; `because` says why."""

    because: str


@dataclass(frozen=True)
class NotPrivate:
    """Without differential privacy; `because` completes "no bound: ..."."""

    because: str


Mechanism: TypeAlias = Gaussian | SampledGaussian | Laplace | Stated | NotDependent | NotPrivate


@dataclass(frozen=True)
class Release:
    """One thing that leaves, and what was done about it."""

    name: str
    mechanism: Mechanism
    neighbours: Neighbours = "added or removed"


@dataclass(frozen=True)
class Bound:
    """Differential privacy of everything together with respect to one example. Without reasons it holds."""

    epsilon: float = math.inf
    delta: float = 0.0
    neighbours: Neighbours = "added or removed"
    reasons: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether there is one."""
        return not self.reasons and math.isfinite(self.epsilon)

    def text(self) -> str:
        """One sentence."""
        if not self.holds:
            return "No bound: " + "; ".join(self.reasons) + "."
        if self.epsilon == 0:
            return "Nothing that leaves depends on private data."
        return (
            f"Everything together is ({self.epsilon:.6g}, {self.delta:.2g})-differentially private with respect to one "
            f"example {self.neighbours}."
        )


def total(releases: Sequence[Release], delta: float, *, neighbours: Neighbours = "added or removed") -> Bound:
    """The bound of all releases together at this delta (epsilon rounded up to three places), or why there is none."""
    if not 0 < delta < 1:
        raise UsageError("Delta lies between 0 and 1.", advice="Usual is less than one over the number of examples.")
    reasons = [found for release in releases if (found := _against(release, neighbours))]
    if reasons:
        return Bound(neighbours=neighbours, reasons=tuple(reasons))
    stated = [_stated(r.mechanism, r.neighbours, neighbours) for r in releases if isinstance(r.mechanism, Stated)]
    noisy = [r for r in releases if isinstance(r.mechanism, Gaussian | SampledGaussian | Laplace)]
    left = delta - math.fsum(part.delta for part in stated)
    if left < 0 or (noisy and not left > 0):
        used = delta - left
        return Bound(
            neighbours=neighbours,
            reasons=(f"the parts' own delta add up to {used:.2g}, and {delta:.2g} was asked for",),
        )
    epsilon = math.fsum(part.epsilon for part in stated)
    if noisy:
        epsilon += _renyi(noisy, neighbours, left)
    return Bound(math.ceil(epsilon * 1000 - 1e-9) / 1000, delta if stated or noisy else 0.0, neighbours)


def noise_for(epsilon: float, delta: float, *, times: int = 1) -> float:
    """The least noise (standard deviation over sensitivity) at which `times` Gaussian releases together are
    (epsilon, delta)-private."""
    if not (epsilon > 0 and 0 < delta < 1 and times >= 1):
        raise UsageError("Differential privacy needs epsilon > 0 and 0 < delta < 1.")
    library = dp_accounting()
    found: float = library.calibrate_dp_mechanism(
        library.rdp.RdpAccountant,
        lambda noise: library.SelfComposedDpEvent(library.GaussianDpEvent(noise), times),
        epsilon,
        delta,
        library.LowerEndpointAndGuess(1e-3, 1.0),
        tol=1e-4,
    )
    return found


def sampled_noise_for(epsilon: float, delta: float, *, rate: float, steps: int) -> float:
    """As `noise_for`, of DP-SGD."""
    library = dp_accounting()
    found: float = library.calibrate_dp_mechanism(
        library.rdp.RdpAccountant,
        lambda noise: library.SelfComposedDpEvent(
            library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise)), steps
        ),
        epsilon,
        delta,
        library.LowerEndpointAndGuess(1e-2, 1.0),
        tol=1e-3,
    )
    return found


def dp_accounting() -> Any:
    """The library, or `NotAvailable` with what to do."""
    try:
        library = import_module("dp_accounting")
        # It says for each order of Renyi divergence that it leaves out; the bound is the least over the others.
        logging.getLogger("absl").setLevel(logging.ERROR)
    except ImportError as error:
        raise NotAvailable(
            f"Differential privacy is accounted for by dp-accounting, which is not here ({error}).",
            advice="Install cloister[dp].",
        ) from None
    return library


def _against(release: Release, neighbours: Neighbours) -> str:
    """Why this release leaves no bound; empty if it does not stand against one."""
    mechanism = release.mechanism
    if isinstance(mechanism, NotPrivate):
        return mechanism.because
    if isinstance(mechanism, NotDependent) or release.neighbours == neighbours:
        return ""
    if neighbours == "replaced" and isinstance(mechanism, Stated):
        return ""
    return f"{release.name} is private with respect to one example {release.neighbours}, not {neighbours}"


def _stated(part: Stated, have: Neighbours, want: Neighbours) -> Stated:
    if not (part.epsilon >= 0 and 0 <= part.delta < 1):
        raise UsageError("A stated epsilon is not negative, and its delta lies between 0 and 1.")
    if have == want:
        return part
    return Stated(2 * part.epsilon, (1 + math.exp(part.epsilon)) * part.delta)  # one removed, one added


def _renyi(releases: Sequence[Release], neighbours: Neighbours, delta: float) -> float:
    library = dp_accounting()
    relations = library.NeighboringRelation
    relation = relations.ADD_OR_REMOVE_ONE if neighbours == "added or removed" else relations.REPLACE_ONE
    accountant = library.rdp.RdpAccountant(neighboring_relation=relation)
    for release in releases:
        event, times = _event(library, release.mechanism)
        try:
            accountant.compose(event, times)
        except library.UnsupportedEventError:
            raise UsageError(
                f"dp-accounting cannot compose {type(release.mechanism).__name__} for one example {neighbours}."
            ) from None
    found: float = accountant.get_epsilon(delta)
    return found


def _event(library: Any, mechanism: Mechanism) -> tuple[Any, int]:
    if isinstance(mechanism, Gaussian):
        return library.GaussianDpEvent(mechanism.noise), mechanism.times
    if isinstance(mechanism, SampledGaussian):
        inner = library.GaussianDpEvent(mechanism.noise)
        return library.PoissonSampledDpEvent(mechanism.rate, inner), mechanism.steps
    assert isinstance(mechanism, Laplace)
    return library.LaplaceDpEvent(mechanism.noise), 1
