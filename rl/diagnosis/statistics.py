"""Statistics of paired log-probabilities, and their intervals. NumPy only.

Tokens of one prompt are not independent, so prompts are what is resampled: a prompt comes with all of its tokens, and
with both conditions of a paired difference (Efron and Tibshirani 1993, sections 8.5 and 13.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from rl.evaluation.estimators import Estimate
from rl.gap import LOG_RATIO_BOUND

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Clustered:
    """Values [T] of tokens, and the cluster (0, 1, ...) of each, int64 [T]."""

    values: Floats
    clusters: Counts

    def __post_init__(self) -> None:
        """Raises ValueError for shapes that do not fit, no token, or values that are not finite."""
        if self.values.ndim != 1 or self.values.shape != self.clusters.shape or not self.values.size:
            raise ValueError(
                f"one value and one cluster a token are needed, got {self.values.shape}, {self.clusters.shape}"
            )
        if not np.isfinite(self.values).all():
            raise ValueError(
                f"{(~np.isfinite(self.values)).sum()} of {self.values.size} values are not finite"
            )

    @property
    def count(self) -> int:
        """Of clusters."""
        return int(self.clusters.max()) + 1


@dataclass(frozen=True)
class Bounds:
    """The clip range [1 - low, 1 + high] of an importance ratio."""

    low: float = 0.2
    high: float = 0.28


class Weighted:
    """Tokens of which each counts a whole number of times: the tokens of a resample, without copying them.

    values: float64 [T], d = log p(learner) - log p(sampler). What is the same for every resample is computed once.
    """

    def __init__(self, data: Clustered, bounds: Bounds):
        self.clusters, self.count = data.clusters, data.count
        d = data.values
        bounded = np.clip(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = np.exp(bounded)
        distance = np.abs(d)
        order = np.argsort(distance, kind="stable")
        self._sorted = distance[order]
        self._sorted_clusters = self.clusters[order]
        self._largest = np.full(self.count, -np.inf)
        np.maximum.at(self._largest, self.clusters, distance)
        self._counted: tuple[Counts, Counts] | None = (
            None  # the latest `times`, and what `quantile` makes of it
        )
        per_token = {
            "one": np.ones_like(d),
            "d": d,
            "abs": distance,
            "beyond": ((ratio < 1 - bounds.low) | (ratio > 1 + bounds.high)).astype(np.float64),
            "ratio": ratio,
            "ratio2": np.square(ratio),
            "k3": np.expm1(bounded) - bounded,
        }
        self._sums = {
            name: np.bincount(self.clusters, weights=values, minlength=self.count)
            for name, values in per_token.items()
        }

    def total(self, name: str, times: Counts) -> float:
        return float(self._sums[name] @ times)

    def mean(self, name: str, times: Counts) -> float:
        return self.total(name, times) / self.total("one", times)

    def quantile(self, q: float, times: Counts) -> float:
        """Of |d|, linear between neighbours, as `numpy.quantile` of the repeated tokens."""
        if self._counted is None or self._counted[0] is not times:
            self._counted = times, np.cumsum(times[self._sorted_clusters])
        ends = self._counted[1]
        place = q * (ends[-1] - 1)
        below = int(np.floor(place))
        low, high = np.searchsorted(ends, [below, min(below + 1, ends[-1] - 1)], side="right")
        return float(self._sorted[low] + (place - below) * (self._sorted[high] - self._sorted[low]))

    def largest(self, times: Counts) -> float:
        return float(self._largest[times > 0].max())


Statistic = Callable[[Weighted, Counts], float]

# By name, from the tokens and how often each cluster counts; the definitions are those of `rl.gap.gap_statistics`.
STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "mean": lambda w, times: w.mean("d", times),
        "abs_mean": lambda w, times: w.mean("abs", times),
        **{
            name: partial(lambda q, w, times: w.quantile(q, times), q)
            for name, q in {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}.items()
        },
        "max": lambda w, times: w.largest(times),
        "beyond_clip": lambda w, times: w.mean("beyond", times),
        "ratio_mean": lambda w, times: w.mean("ratio", times),
        "k3": lambda w, times: w.mean("k3", times),
        "ess": lambda w, times: (
            w.total("ratio", times) ** 2 / (w.total("one", times) * w.total("ratio2", times))
        ),
    }
)


@dataclass(frozen=True)
class Bootstrap:
    """How many resamples, at which confidence, from which seed."""

    resamples: int = 2000
    confidence: float = 0.95
    seed: int = 0

    def draws(self, clusters: int) -> Counts:
        """int64 [resamples, clusters]: how often each cluster was drawn. The same for the same number of clusters."""
        generator = np.random.default_rng(self.seed)
        return generator.multinomial(clusters, np.full(clusters, 1 / clusters), size=self.resamples)

    def interval(self, values: Floats) -> tuple[float, float]:
        """Percentile interval of resampled values."""
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(values, [tail, 1 - tail])
        return float(low), float(high)


def estimates(
    data: Clustered, bounds: Bounds, bootstrap: Bootstrap, names: Sequence[str] = tuple(STATISTICS)
) -> dict[str, Estimate]:
    """Statistics of `STATISTICS`, with their intervals."""
    weighted = Weighted(data, bounds)

    def values(times: Counts) -> list[float]:
        return [STATISTICS[name](weighted, times) for name in names]

    return _estimates(values, names, data.count, bootstrap)


def paired_increase(
    left: Clustered,
    right: Clustered,
    bounds: Bounds,
    bootstrap: Bootstrap,
    names: Sequence[str] = tuple(STATISTICS),
) -> dict[str, Estimate]:
    """Statistics of `right` minus those of `left`; each resample draws the same clusters on both sides.

    Raises ValueError unless both have the same number of clusters.
    """
    if left.count != right.count:
        raise ValueError(f"paired conditions need the same clusters, got {left.count} and {right.count}")
    a, b = Weighted(left, bounds), Weighted(right, bounds)

    def values(times: Counts) -> list[float]:
        return [STATISTICS[name](b, times) - STATISTICS[name](a, times) for name in names]

    return _estimates(values, names, left.count, bootstrap)


def _estimates(
    values: Callable[[Counts], list[float]], names: Sequence[str], clusters: int, bootstrap: Bootstrap
) -> dict[str, Estimate]:
    """values: of the statistics `names`, when each cluster counts so many times."""
    resampled = [values(times) for times in bootstrap.draws(clusters)]
    once = values(np.ones(clusters, np.int64))
    columns = zip(*resampled, strict=True)
    return {
        name: _estimate(bootstrap, value, list(column))
        for name, value, column in zip(names, once, columns, strict=True)
    }


def ratio_of_sums(
    numerators: Floats, denominators: Floats, bootstrap: Bootstrap, root: bool = False
) -> Estimate:
    """sum(numerators) / sum(denominators) over clusters [P], or its square root: a relative L2 norm from the squared
    norms of differences and of references. 0 where both sums are zero, infinity where only the second is.
    """
    draws = bootstrap.draws(len(numerators))

    def ratio(top: Floats, bottom: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = np.where(top == 0, 0.0, top / bottom)
        return np.sqrt(quotient) if root else quotient

    value = float(ratio(numerators.sum()[None], denominators.sum()[None])[0])
    resampled = ratio(draws @ numerators, draws @ denominators)
    if not np.isfinite(resampled).all():
        return Estimate(value, 0.0, float("inf"))
    return _estimate(bootstrap, value, list(resampled))


def _estimate(bootstrap: Bootstrap, value: float, resampled: list[float]) -> Estimate:
    return Estimate(value, *bootstrap.interval(np.array(resampled, np.float64)))
