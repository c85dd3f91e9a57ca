"""Demonstrations as batches, and the schedule of the supervised start."""

from __future__ import annotations

import pytest

from rl.config.model import WarmStartConfig
from rl.warm_start import supervised_batch, warm_start


def test_only_answer_tokens_count():
    tokens, lengths, mask = supervised_batch([([3, 4], [5, 1]), ([3], [6, 7, 8, 1])])
    assert tokens.tolist() == [[3, 4, 5, 1, 0], [3, 6, 7, 8, 1]]
    assert lengths.tolist() == [4, 5]
    assert mask.int().tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]


def test_numbers_run_on_and_the_rate_rises_then_falls():
    seen: list[int] = []
    rates: list[float] = []

    class Learner:
        def supervised_step(self, *batch: object, lr: float) -> float:
            rates.append(lr)
            return 0.0

    def demonstrations(numbers: range, correct_share: float):
        seen.extend(numbers)
        assert correct_share == 0.5
        return [([1], [2])] * len(numbers)

    steps: list[int] = []
    config = WarmStartConfig(steps=1000, batch_size=3, lr=1.0)
    warm_start(Learner(), demonstrations, config, lambda step, loss: steps.append(step))
    assert seen == list(range(3000))
    assert steps == list(range(1, 1001))
    assert rates[0] == pytest.approx(1 / 50)
    assert max(rates) == pytest.approx(rates[49], rel=0.06)
    assert rates[-1] == pytest.approx(0.05)
    assert rates[100:] == sorted(rates[100:], reverse=True)
