"""Statistics of evaluation against enumeration, closed forms and scipy."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from scipy import stats

from rl.evaluation.estimators import paired_difference, pass_at_k, ratio_estimate


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample(samples: int):
    for correct in range(samples + 1):
        outcomes = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(combinations(outcomes, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_stays_exact_where_binomials_overflow_a_double():
    expected = 1 - comb(4000 - 3, 1000) / comb(4000, 1000)
    assert pass_at_k(4000, 3, 1000) == pytest.approx(expected, rel=1e-9)


def test_pass_at_k_is_unbiased():
    """Mean over binomially many right samples is 1 - (1-p)^k; the naive 1-(1-c/n)^k is not."""
    n, k, p = 8, 4, 0.3
    weights = stats.binom.pmf(range(n + 1), n, p)
    mean = sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
    naive = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert abs(naive - (1 - (1 - p) ** k)) > 0.01


@pytest.mark.parametrize("samples, correct, k", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_impossible_counts_are_refused(samples: int, correct: int, k: int):
    with pytest.raises(ValueError, match=rf"pass@{k}"):
        pass_at_k(samples, correct, k)


def test_the_interval_of_a_mean_agrees_with_scipys_bootstrap():
    values = np.random.default_rng(1).integers(0, 7, size=40) / 6
    ours = ratio_estimate(values, np.ones(40), resamples=20_000, seed=3)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", random_state=5, vectorized=True
    ).confidence_interval
    assert ours.value == pytest.approx(values.mean(), abs=1e-12)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.008)


def test_the_interval_of_a_ratio_of_sums_agrees_with_scipys_paired_bootstrap():
    rng = np.random.default_rng(2)
    asked = rng.integers(1, 4, size=60)
    followed = rng.binomial(asked, 0.6)
    ours = ratio_estimate(followed, asked, resamples=20_000)
    theirs = stats.bootstrap(
        (followed, asked),
        lambda a, b, axis: a.sum(axis=axis) / b.sum(axis=axis),
        n_resamples=20_000,
        paired=True,
        method="percentile",
        random_state=5,
    ).confidence_interval
    assert ours.value == pytest.approx(followed.sum() / asked.sum(), abs=1e-12)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.008)


def test_right_or_wrong_problems_give_the_binomial_interval():
    """Resampling n zeros and ones draws a binomial count: its quantiles are a closed form."""
    values = np.array([1.0] * 12 + [0.0] * 18)
    estimate = ratio_estimate(values, np.ones(30), resamples=20_000)
    exact = stats.binom.ppf([0.025, 0.975], 30, 0.4) / 30
    assert (estimate.low, estimate.high) == pytest.approx(tuple(exact), abs=1e-9)


def test_more_samples_of_the_same_problems_do_not_narrow_the_interval():
    """Clustered by problem: if all samples of a problem agree, 16 of them say no more than one."""
    outcome = np.array([1.0, 0.0] * 15)
    once = ratio_estimate(outcome, np.ones(30))
    often = ratio_estimate(16 * outcome, np.full(30, 16.0))
    assert (once.value, once.low, once.high) == pytest.approx((often.value, often.low, often.high), abs=1e-12)
    independent = 1.96 * np.sqrt(0.25 / (30 * 16))
    assert often.high - often.value > 3 * independent


def test_the_paired_interval_leaves_out_what_both_sides_share():
    rng = np.random.default_rng(4)
    hard = rng.uniform(size=200)
    left, right = hard + 0.05 + 0.01 * rng.standard_normal(200), hard
    ones = np.ones(200)
    difference = paired_difference((left, ones), (right, ones), resamples=20_000)
    theirs = stats.bootstrap(
        (left - right,), np.mean, n_resamples=20_000, method="percentile", random_state=5
    )
    assert difference.value == pytest.approx((left - right).mean(), abs=1e-12)
    expected = theirs.confidence_interval
    assert (difference.low, difference.high) == pytest.approx((expected.low, expected.high), abs=5e-4)
    assert difference.high - difference.low < 0.1 * (ratio_estimate(left, ones).high - left.mean())


def test_problems_without_a_result_do_not_count():
    assert ratio_estimate([1, 0, 0], [1, 1, 0]).value == 0.5
    assert paired_difference(([1, 1, 0], [1, 1, 0]), ([0, 1, 1], [1, 1, 1])).value == 0.5
    with pytest.raises(ValueError, match="no problem"):
        ratio_estimate([0.0], [0.0])
    with pytest.raises(ValueError, match="no problem"):
        paired_difference(([0.0], [0.0]), ([1.0], [1.0]))


def test_the_same_seed_gives_the_same_interval_in_any_chunking(monkeypatch: pytest.MonkeyPatch):
    values = np.random.default_rng(0).uniform(size=50)
    whole = ratio_estimate(values, np.ones(50), seed=7)
    monkeypatch.setattr("rl.evaluation.estimators._CHUNK", 999)
    assert ratio_estimate(values, np.ones(50), seed=7) == whole
    assert ratio_estimate(values, np.ones(50), seed=8) != whole
