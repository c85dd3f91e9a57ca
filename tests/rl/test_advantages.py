from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import zscore

from rl.advantages import EPSILON, explained_variance, generalised_advantages, group_advantages, whiten

ESTIMATORS = ("grpo", "dr_grpo", "leave_one_out")
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
    for estimator in ESTIMATORS[: 2 + (size > 1)]:
        assert (group_advantages(torch.full((2, size), value), estimator) == 0).all()
    assert (group_advantages(torch.full((2, size), value), epsilon=0.0) == 0).all()


def test_without_the_standard_deviation_a_reward_is_compared_with_the_mean():
    found = group_advantages([[1.0, 0.0, 0.0, 0.0], [2.0, 4.0, 6.0, 8.0]], "dr_grpo")
    assert found.tolist() == [[0.75, -0.25, -0.25, -0.25], [-3.0, -1.0, 1.0, 3.0]]


def test_leave_one_out_compares_each_reward_with_the_mean_of_the_others():
    rewards = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = group_advantages(rewards, "leave_one_out")
    for row, own in enumerate(rewards.tolist()):
        for index, reward in enumerate(own):
            others = own[:index] + own[index + 1 :]
            assert found[row, index].item() == pytest.approx(reward - sum(others) / 4, rel=1e-12)


def test_leave_one_out_needs_another_one():
    with pytest.raises(ValueError, match="at least two responses"):
        group_advantages(torch.zeros(2, 1), "leave_one_out")


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="estimator='gae' must be one of grpo, dr_grpo, leave_one_out"):
        group_advantages(torch.zeros(2, 2), "gae")


def test_generalised_advantages_in_closed_form():
    """Rewards 1, 2, 3 with values 0.5, 1, 2; gamma 0.9 and lambda 0.5, from the last token on."""
    mask = torch.tensor([[False, True, True, True, False]])
    rewards, values = torch.tensor([[9.0, 1, 2, 3, 9]]), torch.tensor([[9.0, 0.5, 1, 2, 9]])
    advantages, returns = generalised_advantages(rewards, values, mask, gamma=0.9, lam=0.5)
    third = 3 - 2
    second = 2 + 0.9 * 2 - 1 + 0.45 * third
    first = 1 + 0.9 * 1 - 0.5 + 0.45 * second
    expected = [0.0, first, second, third, 0.0]
    assert advantages.dtype == torch.float64
    assert advantages[0].tolist() == pytest.approx(expected, rel=1e-12)
    assert returns[0].tolist() == pytest.approx([0.0, first + 0.5, second + 1, third + 2, 0.0], rel=1e-12)


def test_the_two_ends_of_lambda():
    """lambda 1: the discounted sum of rewards minus the value. lambda 0: the error of one step."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(4, 6, dtype=torch.bool)
    long, returns = generalised_advantages(rewards, values, mask, gamma=0.9, lam=1.0)
    discounts = torch.tensor([[0.9 ** (u - t) if u >= t else 0.0 for u in range(6)] for t in range(6)])
    sums = rewards @ discounts.double().T
    torch.testing.assert_close(returns, sums, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(long, sums - values, rtol=1e-6, atol=1e-6)
    short, _ = generalised_advantages(rewards, values, mask, gamma=0.9, lam=0.0)
    following = torch.cat((values[:, 1:], torch.zeros(4, 1)), dim=1)
    torch.testing.assert_close(short, rewards + 0.9 * following - values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_stands_outside_the_mask_enters_neither_advantages_nor_returns(poison):
    mask = torch.tensor([[False, True, True, False], [False, True, False, False]])
    rewards, values = torch.ones(2, 4), torch.full((2, 4), 0.25)
    clean = generalised_advantages(rewards, values, mask, 0.9, 0.95)
    poisoned = (tensor.where(mask, poison) for tensor in (rewards, values))
    for found, expected in zip(generalised_advantages(*poisoned, mask, 0.9, 0.95), clean, strict=True):
        assert torch.equal(found, expected)
        assert not found[~mask].any()


def test_tokens_that_the_mask_leaves_out_in_between_are_skipped():
    """As if they were not there: the next token of a response is the next one in the mask."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(1, 5, generator=generator) for _ in range(2))
    mask = torch.tensor([[True, False, True, False, True]])
    found = generalised_advantages(rewards, values, mask, 0.9, 0.95)
    expected = generalised_advantages(rewards[:, ::2], values[:, ::2], mask[:, ::2], 0.9, 0.95)
    for holed, dense in zip(found, expected, strict=True):
        assert torch.equal(holed[:, ::2], dense)


def test_shapes_of_rewards_values_and_mask_must_agree():
    with pytest.raises(ValueError, match=r"one shape \[B, S\], got \(2, 3\), \(2, 4\), \(2, 3\)"):
        generalised_advantages(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3) > 0, 1.0, 1.0)


def test_whitened_advantages_are_the_z_scores_of_all_tokens():
    generator = torch.Generator().manual_seed(1)
    advantages, mask = torch.randn(5, 8, generator=generator), torch.rand(5, 8, generator=generator) > 0.4
    found = whiten(advantages.where(mask, torch.nan), mask, epsilon=0.0)
    np.testing.assert_allclose(found[mask].numpy(), zscore(advantages[mask].double().numpy()), rtol=1e-10)
    assert not found[~mask].any()


def test_the_advantage_of_a_sequence_counts_once_for_each_of_its_tokens():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    found = whiten(torch.tensor([1.0, -3.0]), mask, epsilon=0.0)
    assert found[mask].tolist() == pytest.approx(zscore([1.0, 1.0, 1.0, -3.0]).tolist())


def test_equal_advantages_whiten_to_zero():
    assert not whiten(torch.full((3,), 0.1), torch.ones(3, 7) > 0).any()


def test_each_token_has_an_advantage_of_its_own():
    """A view that repeats one number along a row would change every token when one is written."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    for tensor in (
        whiten(torch.tensor([1.0, 2.0]), mask),
        *generalised_advantages(torch.ones(2, 1).expand(2, 3), torch.zeros(2, 3), mask, 1.0, 1.0),
    ):
        before = tensor.clone()
        tensor[0, 0] += 5
        assert torch.equal(tensor[0, 1:], before[0, 1:])


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


def test_explained_variance_is_that_of_the_tokens_in_the_mask():
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(5, 7, generator=generator)
    noise = 0.5 * torch.randn(5, 7, generator=generator)
    mask = torch.rand(5, 7, generator=generator) < 0.6
    values = (returns + noise).where(mask, float("nan"))
    target, value = (tensor[mask].double().numpy() for tensor in (returns, values))
    expected = 1 - np.var(target - value) / np.var(target)
    assert explained_variance(values, returns, mask) == pytest.approx(expected, rel=1e-6)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full_like(returns, 3.0), returns, mask) == pytest.approx(0, abs=1e-6)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3, rel=1e-6)


def test_returns_that_are_all_equal_have_no_variance_to_explain():
    mask = torch.tensor([[True, True, False]])
    assert explained_variance(torch.rand(1, 3), torch.tensor([[1.0, 1.0, 0.0]]), mask) is None
