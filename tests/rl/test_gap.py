from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kernels.routing import NO_ROUTE
from learner.config import ObjectiveConfig
from rl.gap import NonFiniteLogp, gap_statistics, measure_gap, route_mismatch
from rl.rewards.score import Score
from rl.rollout import Rollout, Sequences, to_sequences
from sampler.engine import Completion
from tests.rl.rollouts import group

NAMES = {
    *("gap/mean", "gap/abs_mean", "gap/p50", "gap/p90", "gap/p99", "gap/p999", "gap/max"),
    *("gap/beyond_clip", "gap/ratio_mean", "gap/k3", "gap/ess"),
}


def statistics(learner, sampler, clip_low=0.2, clip_high=0.28) -> dict[str, float]:
    tensors = (torch.as_tensor(x) for x in (learner, sampler))
    return gap_statistics(*tensors, ObjectiveConfig(clip_low=clip_low, clip_high=clip_high))


def of(differences, **settings) -> dict[str, float]:
    d = torch.tensor(differences, dtype=torch.float64)
    return statistics(d, torch.zeros_like(d), **settings)


@pytest.mark.parametrize("tokens", [1, 2, 1000])
def test_equal_engines_have_no_gap(tokens):
    logp = -torch.rand(tokens)
    found = statistics(logp, logp.clone())
    assert found.keys() == NAMES
    assert found == dict.fromkeys(NAMES, 0.0) | {"gap/ratio_mean": 1.0, "gap/ess": 1.0}


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=300))
def test_against_numpy_and_the_definitions(differences):
    d = np.array(differences)
    w = np.exp(d)
    found = of(differences)
    expected = {
        "gap/mean": math.fsum(d) / len(d),
        "gap/abs_mean": math.fsum(abs(d)) / len(d),
        "gap/max": max(abs(d)),
        "gap/beyond_clip": sum(x < 0.8 or x > 1.28 for x in w) / len(d),
        "gap/ratio_mean": math.fsum(w) / len(d),
        "gap/k3": math.fsum(w - 1 - d) / len(d),
        "gap/ess": math.fsum(w) ** 2 / (len(d) * math.fsum(w**2)),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-13), name
    for name, share in {"gap/p50": 50, "gap/p90": 90, "gap/p99": 99, "gap/p999": 99.9}.items():
        assert found[name] == pytest.approx(stats.scoreatpercentile(abs(d), share), rel=1e-12, abs=1e-15)


def test_quantiles_in_closed_form():
    """|d| = 0, 1, ..., 1000 in thousandths: the quantile q is q itself."""
    thousandths = torch.randperm(1001, generator=torch.Generator().manual_seed(0)).double() / 1000
    signs = torch.where(torch.arange(1001) % 2 == 0, 1.0, -1.0)
    found = of((thousandths * signs).tolist())
    assert [found[f"gap/{q}"] for q in ("p50", "p90", "p99", "p999", "max")] == pytest.approx(
        [0.5, 0.9, 0.99, 0.999, 1.0], rel=1e-12
    )


def test_gaussian_differences_in_closed_form():
    """d ~ N(-s^2/2, s^2) is what ratios with mean 1 look like: E[k3] = s^2/2 and ess = exp(-s^2)."""
    s = 0.1
    d = np.random.default_rng(0).normal(-s * s / 2, s, 1_000_000)
    found = of(d)
    assert found["gap/ratio_mean"] == pytest.approx(1, abs=5e-4)
    assert found["gap/k3"] == pytest.approx(s * s / 2, rel=0.01)
    assert found["gap/ess"] == pytest.approx(math.exp(-s * s), abs=5e-4)
    folded = stats.foldnorm(0.5 * s, scale=s)
    assert found["gap/p99"] == pytest.approx(folded.ppf(0.99), rel=0.01)
    beyond = stats.norm(-s * s / 2, s)
    assert found["gap/beyond_clip"] == pytest.approx(
        beyond.cdf(math.log(0.8)) + beyond.sf(math.log(1.28)), rel=0.05
    )


def test_k3_estimates_the_divergence_from_sampler_to_learner():
    """Weighted by the sampler's probabilities, k3 is exactly KL(sampler || learner)."""
    counts = np.array([50, 30, 15, 5])
    sampler, learner = counts / 100, np.array([0.4, 0.4, 0.1, 0.1])
    found = statistics(np.repeat(np.log(learner), counts), np.repeat(np.log(sampler), counts))
    assert found["gap/k3"] == pytest.approx(stats.entropy(sampler, learner), rel=1e-12)
    assert found["gap/ratio_mean"] == pytest.approx(1, rel=1e-12)
    assert found["gap/mean"] == pytest.approx(-stats.entropy(sampler, learner), rel=1e-12)


def test_small_gaps_are_not_lost_to_rounding():
    found = of([1e-7] * 3)
    assert found["gap/k3"] == pytest.approx(5e-15, rel=1e-6)  # d^2 / 2
    assert 0 < found["gap/ratio_mean"] - 1 < 2e-7


def test_float32_log_probabilities_are_subtracted_in_float64():
    learner, sampler = torch.tensor([-1.0000001]), torch.tensor([-30.0])
    assert statistics(learner, sampler)["gap/mean"] == float(learner.double() - sampler.double())


def test_extreme_gaps_overflow_nothing():
    found = of([1e4, -1e4, 0.0])
    assert found["gap/max"] == 1e4
    assert found["gap/mean"] == 0
    assert found["gap/ratio_mean"] == pytest.approx((math.exp(20) + 1) / 3, rel=1e-9)
    assert found["gap/beyond_clip"] == pytest.approx(2 / 3)
    assert found["gap/ess"] == pytest.approx(1 / 3, rel=1e-6)
    assert all(map(math.isfinite, found.values()))


def test_bounds_are_inclusive():
    edges = [math.log(0.5), 0.0, math.log(2.0)]
    assert of(edges, clip_low=0.5, clip_high=1.0)["gap/beyond_clip"] == 0
    assert of(edges, clip_low=0.49, clip_high=1.0)["gap/beyond_clip"] == pytest.approx(1 / 3)
    assert of(edges, clip_low=0.5, clip_high=0.99)["gap/beyond_clip"] == pytest.approx(1 / 3)


def test_more_tokens_than_torch_quantile_takes():
    d = torch.zeros(2**24 + 1)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(d, 0.99)
    d[0] = 5.0
    assert gap_statistics(d, torch.zeros_like(d), ObjectiveConfig())["gap/max"] == 5


def test_values_that_are_not_finite_are_counted_by_engine():
    learner, sampler = torch.zeros(6), torch.zeros(6)
    learner[[2, 4]] = torch.nan
    sampler[5] = -torch.inf
    with pytest.raises(NonFiniteLogp) as failure:
        statistics(learner, sampler)
    assert str(failure.value) == (
        "log-probabilities that are not finite, of 6 response tokens: 2 from the learner, 1 from the sampler;"
        " first at token 2: learner nan, sampler 0.0"
    )


def test_no_tokens_and_other_shapes_are_refused():
    with pytest.raises(ValueError, match="no response tokens"):
        of([])
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
        statistics(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"shape \[tokens\]"):
        statistics(torch.zeros(3, 2), torch.zeros(3, 2))


def test_route_mismatch_counts_tokens_and_layers_whatever_the_order_of_slots() -> None:
    """One sequence of three tokens, two layers; the last token has no routes, and one layer of the first neither."""
    sampler = torch.tensor([[[[1, 2], [3, 0]], [[-1, -1], [4, 5]], [[-1, -1], [-1, -1]]]], dtype=torch.int16)
    learner = torch.tensor([[[[2, 1], [3, 1]], [[0, 1], [5, 4]], [[0, 1], [0, 1]]]], dtype=torch.int16)
    assert route_mismatch(learner, sampler) == pytest.approx(1 / 3)
    assert route_mismatch(sampler, sampler) == 0
    with pytest.raises(ValueError, match="no routes of the sampler"):
        route_mismatch(learner, torch.full_like(sampler, -1))
    with pytest.raises(ValueError, match=r"shape \[sequences, tokens, layers, k\], got"):
        route_mismatch(learner[:, :2], sampler)


def two_versions() -> tuple[SimpleNamespace, Sequences]:
    """A response by versions 3, 3, 4, 4 and one by 2, 3 behind prompts of two tokens. The learner is at 0.5 nats from
    the tokens of version 4, at 2 from others, and always outside the nucleus at the former; it chooses the experts of
    the sampler for what version 4 computed, and others elsewhere.
    """
    completions = [
        Completion((7, 8, 9, 9), (-1.0,) * 4, "stop", (3, 3, 4, 4), routes(6, [1, 1, 1, 4, 4])),
        Completion((7, 8), (-1.0,) * 2, "stop", (2, 3), routes(4, [1, 1, 1])),
    ]
    sequences = to_sequences([group(*(Rollout(c, Score.of(True)) for c in completions))])
    now = sequences.versions == 4
    logp = sequences.sampler_logp + torch.where(now, 0.5, -2.0)
    own = torch.where(sequences.routes == 4, 4, 6)
    return SimpleNamespace(logp=logp, outside_nucleus=now, routes=own), sequences


def routes(length: int, experts: list[int]) -> np.ndarray:
    """int16 [length, 1, 1]; the last token has none."""
    return np.array([*experts, NO_ROUTE], np.int16).reshape(length, 1, 1)


def test_the_gap_is_that_of_tokens_by_the_weights_that_the_samplers_had_last() -> None:
    scores, sequences = two_versions()
    found = measure_gap(scores, sequences, ObjectiveConfig(), 4, 0)
    assert found["gap/mean"] == found["gap/max"] == 0.5
    assert found["gap/older_abs_mean"] == 2.0
    assert found["gap/outside_nucleus"] == 1.0
    assert (
        found["gap/route_mismatch"] == 0.0
    )  # of two tokens: the one before the first by version 4, and that one

    behind = measure_gap(scores, sequences, ObjectiveConfig(), 4, 1)  # one step off: all but one token
    assert behind["gap/mean"] == pytest.approx((2 * 0.5 - 3 * 2) / 5)
    assert behind["gap/route_mismatch"] == pytest.approx(4 / 6)
    everything = measure_gap(scores, sequences, ObjectiveConfig(), 4, 2)
    assert everything["gap/outside_nucleus"] == pytest.approx(2 / 6)
    assert everything["gap/route_mismatch"] == pytest.approx(6 / 8) and "gap/older_abs_mean" not in everything


def test_where_all_tokens_are_older_there_is_no_gap_to_measure() -> None:
    scores, sequences = two_versions()
    assert measure_gap(scores, sequences, ObjectiveConfig(), 5, 0) == {"gap/older_abs_mean": 1.5}
    scores.logp[0, 2] = torch.nan
    with pytest.raises(NonFiniteLogp, match="1 from the learner"):
        measure_gap(scores, sequences, ObjectiveConfig(), 5, 0)
