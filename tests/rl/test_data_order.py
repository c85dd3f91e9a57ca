from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.order import Order, permutation


@settings(deadline=None)
@given(count=st.integers(1, 60), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 5))
def test_every_epoch_draws_every_item_once(count, seed, epoch):
    order = Order(count, seed)
    drawn = [order[epoch * count + offset] for offset in range(count)]
    assert sorted(drawn) == list(range(count))


def test_order_depends_on_seed_and_position_alone():
    whole = [Order(50, seed=3)[position] for position in range(200)]
    resumed = Order(50, seed=3)
    assert [resumed[position] for position in range(120, 200)] == whole[120:]
    assert [resumed[position] for position in reversed(range(200))] == whole[::-1]
    assert [Order(50, seed=4)[position] for position in range(200)] != whole


def test_epochs_differ():
    order = Order(50, seed=0)
    epochs = [tuple(order[50 * epoch + offset] for offset in range(50)) for epoch in range(4)]
    assert len(set(epochs)) == 4


def test_order_is_that_of_numpys_frozen_generator():
    assert permutation(10, 7, 2).tolist() == np.random.RandomState([7, 2]).permutation(10).tolist()
    # Written down, so that a change of library or code that reorders old runs shows itself.
    assert permutation(10, 7, 2).tolist() == [9, 1, 8, 3, 4, 5, 2, 7, 6, 0]


def test_each_item_is_equally_likely_at_the_first_position():
    first = np.bincount([Order(10, seed)[0] for seed in range(2000)], minlength=10)
    assert np.abs(first - 200).max() < 5 * np.sqrt(200)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="position=-1"):
        Order(5, 0)[-1]
    with pytest.raises(ValueError, match="count=0"):
        Order(0, 0)
    with pytest.raises(ValueError, match=r"seed=-1.*2\*\*32"):
        Order(5, -1)
