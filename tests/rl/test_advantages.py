from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import zscore

from rl.advantages import EPSILON, group_advantages

values = st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3))


@settings(deadline=None)
@given(
    st.integers(2, 9).flatmap(
        lambda n: st.lists(st.lists(values, min_size=n, max_size=n), min_size=1, max_size=6)
    )
)
def test_equals_scipys_population_z_score(rewards):
    found = group_advantages(rewards, epsilon=0.0)
    assert found.dtype == torch.float64
    for row, group in zip(found.numpy(), rewards, strict=True):
        if min(group) == max(group):
            assert (row == 0).all()
        else:
            np.testing.assert_allclose(row, zscore(group), rtol=1e-9, atol=1e-12)


def test_binary_rewards_in_closed_form():
    """With a share p of ones: sqrt((1 - p) / p) for a one, -sqrt(p / (1 - p)) for a zero."""
    for ones in range(1, 8):
        p = ones / 8
        found = group_advantages(torch.tensor([[1.0] * ones + [0.0] * (8 - ones)]))
        std = (p * (1 - p)) ** 0.5
        torch.testing.assert_close(found[0, 0].item(), (1 - p) / (std + EPSILON), rtol=1e-12, atol=0)
        torch.testing.assert_close(found[0, -1].item(), -p / (std + EPSILON), rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.1, 1 / 3, 1e-8, 1e8])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 16])
def test_constant_groups_are_exactly_zero(value, size):
    """The mean of equal numbers is not always that number: 0.1 seven times sums to 0.7000000000000001."""
    assert (group_advantages(torch.full((2, size), value)) == 0).all()
    assert (group_advantages(torch.full((2, size), value), epsilon=0.0) == 0).all()


def test_groups_do_not_touch_each_other():
    rewards = torch.tensor([[0.0, 1.0], [5.0, 9.0], [3.0, 3.0]])
    together = group_advantages(rewards)
    for index in range(3):
        assert torch.equal(together[index : index + 1], group_advantages(rewards[index : index + 1]))


def test_float32_rewards_are_normalised_in_float64():
    rewards = torch.tensor([[0.1, 0.7, 0.4, 0.2]])
    exact = zscore(rewards.numpy()[0].astype(np.float64))
    np.testing.assert_allclose(group_advantages(rewards, epsilon=0.0)[0].numpy(), exact, rtol=1e-14)


def test_the_result_can_be_written_to_and_leaves_the_rewards_alone():
    rewards = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    advantages = group_advantages(rewards)
    advantages[0, 0] = 7
    assert advantages[0, 1] == pytest.approx(-1, abs=1e-5)
    assert rewards.tolist() == [[1.0, 0.0]]


def test_no_groups_give_no_advantages():
    assert group_advantages(torch.zeros(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("shape", [(4,), (2, 0), (1, 2, 3)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"shape \[groups, group size\]"):
        group_advantages(torch.zeros(shape))


def test_groups_of_different_sizes_are_refused():
    with pytest.raises(ValueError):
        group_advantages([[0.0, 1.0], [0.0, 1.0, 1.0]])


def test_rewards_that_are_not_finite_are_counted():
    with pytest.raises(ValueError, match="2 are not"):
        group_advantages(torch.tensor([[0.0, torch.nan, torch.inf]]))
