"""Statistics of benchmark results: averages, pass@k and their intervals. NumPy only.

Samples of one problem are not independent, so problems are the units that are resampled: a problem comes with all
of its samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95

_CHUNK = 2**22  # drawn indices held at a time


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of `k` samples is right, from `correct` right ones of `samples`.

    1 - C(n-c, k) / C(n, k), unbiased (Chen et al. 2021, arXiv 2107.03374, section 2.1), as a product of n-c-i over
    n-i. Raises ValueError unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} of {correct} right samples out of {samples}: needs 0 <= right <= samples >= k"
        )
    misses = samples - np.arange(k)
    return float(1 - np.prod(np.clip(misses - correct, 0, None) / misses))


def ratio_estimate(
    numerators: ArrayLike,
    denominators: ArrayLike,
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Estimate:
    """sum(numerators) / sum(denominators) over problems, with its percentile bootstrap interval.

    numerators, denominators: float [P], one a problem. With denominators of 1 this is a mean over problems; with
    counts, a share of what all problems ask for. Problems are resampled with replacement (Efron and Tibshirani
    1993, section 13.3). Problems with a denominator of 0 do not count. Raises ValueError when none is left.
    """
    top, bottom = _columns(numerators, denominators)
    totals = _resampled_sums(np.stack([top, bottom]), resamples, seed)
    low, high = _percentiles(totals[0] / totals[1], confidence)
    return Estimate(float(top.sum() / bottom.sum()), low, high)


def paired_difference(
    left: tuple[ArrayLike, ArrayLike],
    right: tuple[ArrayLike, ArrayLike],
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Estimate:
    """The ratio of `left` minus that of `right`, each (numerators, denominators) over the same problems.

    Every resample draws the same problems on both sides, so what is hard for both does not widen the interval.
    Problems with a denominator of 0 on either side do not count. Raises ValueError when none is left.
    """
    columns = np.stack([np.asarray(part, dtype=np.float64) for part in (*left, *right)])
    columns = columns[:, (columns[1] > 0) & (columns[3] > 0)]
    if not columns.shape[1]:
        raise ValueError("no problem has a result on both sides")
    totals = _resampled_sums(columns, resamples, seed)
    low, high = _percentiles(totals[0] / totals[1] - totals[2] / totals[3], confidence)
    a, b, c, d = columns.sum(axis=1)
    return Estimate(float(a / b - c / d), low, high)


def _columns(
    numerators: ArrayLike, denominators: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if top.shape != bottom.shape or top.ndim != 1:
        raise ValueError(
            f"numerators {top.shape} and denominators {bottom.shape}: one number a problem is needed"
        )
    counted = bottom > 0
    if not counted.any():
        raise ValueError("no problem has a result")
    return top[counted], bottom[counted]


def _resampled_sums(columns: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Sums [C, resamples] of `columns` [C, P] over problems drawn with replacement, the same for all columns."""
    generator = np.random.default_rng(seed)
    problems = columns.shape[1]
    sums = []
    step = max(1, _CHUNK // problems)
    for start in range(0, resamples, step):
        drawn = generator.integers(problems, size=(min(step, resamples - start), problems))
        sums.append(columns[:, drawn].sum(axis=2))
    return np.concatenate(sums, axis=1)


def _percentiles(values: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
