"""Shuffled orders that depend on integers alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def permutation(count: int, *key: int) -> np.ndarray:
    """A permutation of 0 ... count - 1, int64 [count], by `key` (integers in [0, 2**32)).

    RandomState, because its stream is frozen (NEP 19): an order outlives a change of the NumPy version.
    """
    return np.random.RandomState(list(key)).permutation(count)


def held_out_order(count: int, seed: int) -> np.ndarray:
    """The order in which `count` items are chosen to be held out, int64 [count].

    Its key is apart from those of the shuffles, which are (seed, epoch).
    """
    return permutation(count, seed, 0, 1)


class Order:
    """Endless order over `count` items in epochs: each epoch is all of them, shuffled by (seed, epoch).

    Raises ValueError when `count` is less than 1 or `seed` is outside [0, 2**32).
    """

    def __init__(self, count: int, seed: int):
        if count < 1:
            raise ValueError(f"count={count}: there must be at least 1 item to put in order")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed}: must lie in [0, 2**32)")
        self.count = count
        # The shuffles of recent epochs are kept for speed; they never change a result.
        self._epoch = lru_cache(maxsize=2)(lambda epoch: permutation(count, seed, epoch))

    def __getitem__(self, position: int) -> int:
        """The item at `position`. Raises ValueError when it is negative."""
        if position < 0:
            raise ValueError(f"position={position}: must not be negative")
        epoch, offset = divmod(position, self.count)
        return int(self._epoch(epoch)[offset])
