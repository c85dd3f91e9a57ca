"""Statistics of the gap: against `rl.gap`, NumPy and SciPy, and intervals against what they should cover."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config import ObjectiveConfig
from rl.diagnosis.statistics import (
    STATISTICS,
    Bootstrap,
    Bounds,
    Clustered,
    Weighted,
    estimates,
    paired_increase,
    ratio_of_sums,
)
from rl.gap import gap_statistics

BOUNDS = Bounds()


def clustered(
    seed: int, clusters: int = 32, spread: float = 0.8, tokens: tuple[int, int] = (5, 41)
) -> Clustered:
    """d ~ Normal(0, s) with s log-normal over clusters: tokens of a cluster are alike."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(*tokens, clusters)
    scales = 0.1 * np.exp(spread * generator.standard_normal(clusters))
    numbers = np.repeat(np.arange(clusters), sizes)
    return Clustered(scales[numbers] * generator.standard_normal(len(numbers)), numbers)


def test_values_are_those_of_the_training_metrics():
    data = clustered(1)
    found = estimates(data, BOUNDS, Bootstrap(20))
    expected = gap_statistics(
        torch.from_numpy(data.values), torch.zeros(data.values.size, dtype=torch.float64), ObjectiveConfig()
    )
    assert {f"gap/{name}" for name in found} == expected.keys()
    for name, estimate in found.items():
        assert estimate.value == pytest.approx(expected[f"gap/{name}"], rel=1e-9), name


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.data())
def test_a_resample_is_the_tokens_repeated(seed: int, clusters: int, data: st.DataObject):
    """Every statistic under counts equals that of the tokens written out as often as they count."""
    own = clustered(seed, clusters)
    times = np.array(data.draw(st.lists(st.integers(0, 3), min_size=clusters, max_size=clusters)))
    times[data.draw(st.integers(0, clusters - 1))] += 1
    repeated = np.repeat(own.values, times[own.clusters])
    expected = gap_statistics(
        torch.from_numpy(repeated), torch.zeros(len(repeated), dtype=torch.float64), ObjectiveConfig()
    )
    weighted = Weighted(own, BOUNDS)
    for name, statistic in STATISTICS.items():
        assert statistic(weighted, times) == pytest.approx(expected[f"gap/{name}"], rel=1e-9, abs=1e-15), name


def test_the_interval_of_a_mean_is_that_of_scipy():
    """Which resamples clusters as pairs of a sum and a count."""
    data = clustered(2)
    distance = np.abs(data.values)
    sums = np.bincount(data.clusters, weights=distance)
    counts = np.bincount(data.clusters)
    theirs = scipy.stats.bootstrap(
        (sums, counts),
        lambda a, b, axis: a.sum(axis) / b.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(3),
    ).confidence_interval
    found = estimates(data, BOUNDS, Bootstrap(8000))["abs_mean"]
    width = theirs.high - theirs.low
    assert found.low == pytest.approx(theirs.low, abs=0.03 * width)
    assert found.high == pytest.approx(theirs.high, abs=0.03 * width)


def test_the_interval_of_a_mean_over_many_equal_clusters_is_the_closed_form():
    """Mean plus or minus 1.96 times the standard deviation of cluster means over the root of their number."""
    generator = np.random.default_rng(4)
    clusters, size = 400, 12
    means = generator.standard_normal(clusters)
    values = np.repeat(means, size) + generator.standard_normal(clusters * size)
    data = Clustered(values, np.repeat(np.arange(clusters), size))
    found = estimates(data, BOUNDS, Bootstrap(4000))["mean"]
    own = values.reshape(clusters, size).mean(1)
    half = scipy.stats.norm.ppf(0.975) * own.std() / np.sqrt(clusters)
    assert found.low == pytest.approx(own.mean() - half, abs=0.06 * half)
    assert found.high == pytest.approx(own.mean() + half, abs=0.06 * half)
    # Tokens taken as independent would give less than half of that.
    assert half > 2 * 1.96 * values.std() / np.sqrt(values.size)


SPREAD = 0.3


def true_p99() -> float:
    """Of |d|, from the distribution itself: P(|d| > x) averaged over the clusters' scales."""

    def beyond(x: float) -> float:
        def tail(z: float) -> float:
            return 2 * scipy.stats.norm.sf(x / (0.1 * np.exp(SPREAD * z))) * scipy.stats.norm.pdf(z)

        return scipy.integrate.quad(tail, -8, 8, limit=200)[0]

    return scipy.optimize.brentq(lambda x: beyond(x) - 0.01, 0.1, 3.0)


def true_abs_mean() -> float:
    return 0.1 * np.exp(SPREAD**2 / 2) * np.sqrt(2 / np.pi)


def coverage(sets: list[Clustered], truth: dict[str, float], resamples: int) -> dict[str, float]:
    """Share of the data sets whose 95 % interval holds the truth."""
    covered = dict.fromkeys(truth, 0.0)
    for data in sets:
        weighted, bootstrap = Weighted(data, BOUNDS), Bootstrap(resamples)
        draws = bootstrap.draws(data.count)
        for name, value in truth.items():
            low, high = bootstrap.interval(np.array([STATISTICS[name](weighted, times) for times in draws]))
            covered[name] += (low <= value <= high) / len(sets)
    return covered


def test_intervals_cover_the_truth_and_tokens_taken_as_independent_do_not():
    """95 % intervals of data sets of 64 prompts. Of a mean they hold what they say. Of a tail quantile they fall short
    of it by some points, as percentile intervals of few clusters do (rl/README.md says by how much); a bootstrap over
    tokens is far off for both.
    """
    truth = {"p99": true_p99(), "abs_mean": true_abs_mean()}
    many = np.abs(clustered(99, 20_000, SPREAD).values)
    assert truth["abs_mean"] == pytest.approx(many.mean(), rel=0.02)
    assert truth["p99"] == pytest.approx(np.quantile(many, 0.99), rel=0.02)
    sets = [clustered(1000 + number, 64, SPREAD, tokens=(100, 301)) for number in range(80)]
    covered = coverage(sets, truth, 300)
    assert 0.88 <= covered["abs_mean"] <= 1.0
    assert 0.78 <= covered["p99"] <= 1.0
    independent = [Clustered(data.values, np.arange(data.values.size)) for data in sets[:25]]
    naive = coverage(independent, truth, 60)
    assert naive["abs_mean"] < 0.65
    assert naive["p99"] < covered["p99"]


def test_a_paired_increase_is_narrower_than_its_parts():
    """Both conditions share the hard prompts; the second is twice the first, token by token."""
    left = clustered(5)
    right = Clustered(2 * left.values, left.clusters)
    alone = estimates(right, BOUNDS, Bootstrap(500))["p99"]
    paired = paired_increase(left, right, BOUNDS, Bootstrap(500))["p99"]
    first = estimates(left, BOUNDS, Bootstrap(500))["p99"]
    assert paired.value == pytest.approx(first.value)
    assert (paired.low, paired.high) == pytest.approx((first.low, first.high))
    assert paired.high - paired.low < alone.high - alone.low
    nothing = paired_increase(left, left, BOUNDS, Bootstrap(50))
    assert all((e.value, e.low, e.high) == (0.0, 0.0, 0.0) for e in nothing.values())


def test_relative_norms_over_clusters():
    top, bottom = np.array([1.0, 4.0, 0.0]), np.array([4.0, 4.0, 8.0])
    found = ratio_of_sums(top, bottom, Bootstrap(200), root=True)
    assert found.value == pytest.approx(np.sqrt(5 / 16))
    assert 0.0 <= found.low < found.value < found.high <= 1.0
    zero = ratio_of_sums(np.zeros(3), np.zeros(3), Bootstrap(10), root=True)
    assert (zero.value, zero.high) == (0.0, 0.0)
    assert ratio_of_sums(np.ones(1), np.zeros(1), Bootstrap(10)).value == np.inf


@pytest.mark.parametrize(
    "values, clusters",
    [([1.0, 2.0], [0]), ([], []), ([np.nan], [0]), ([np.inf], [0])],
    ids=["shapes", "no token", "nan", "infinite"],
)
def test_what_has_no_statistics_is_refused(values: list[float], clusters: list[int]):
    with pytest.raises(ValueError):
        Clustered(np.array(values), np.array(clusters, np.int64))


def test_other_clusters_cannot_be_paired():
    with pytest.raises(ValueError, match="same clusters"):
        paired_increase(clustered(1, 4), clustered(1, 5), BOUNDS, Bootstrap(5))
