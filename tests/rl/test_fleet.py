"""In which order samplers and learners leave a GPU that they share, and come back to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rl.fleet
from rl.fleet import Fleet


class Recorder:
    """An actor whose calls are written down, and answered by `answers`."""

    def __init__(self, name: str, asked: list[str], **answers: Any) -> None:
        self._name, self._asked, self._answers = name, asked, answers
        self.later = self

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            self._asked.append(f"{self._name} {method}")
            return self._answers.get(method)

        return call


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(rl.fleet, "wait", lambda references: references)
    return []


def fleet(asked: list[str], sleeps: bool) -> Fleet:
    learners: list[Any] = [
        Recorder(name, asked, offload=nbytes) for name, nbytes in (("learner", 2**20), ("critic", 3 * 2**20))
    ]
    sync: Any = Recorder("sync", asked, sync={"sync/bytes": 7}, lost={})
    sampler: Any = Recorder("sampler", asked)
    return Fleet([sampler], sync, lambda _: sampler, 0, sleeps, learners)


def test_one_leaves_before_the_other_comes(asked: list[str]) -> None:
    own = fleet(asked, sleeps=True)
    assert own.sync(1) == {"sync/bytes": 7, "memory/gpu_offloaded": 3.0}
    assert asked == ["sync sync", "learner offload", "critic offload", "sync lost"]
    asked.clear()
    own.rest()
    assert asked == ["sampler sleep", "learner onload", "critic onload"]
    asked.clear()
    own.sync(2)
    assert asked == [
        "sampler wake_weights",
        "sync sync",
        "learner offload",
        "critic offload",
        "sync lost",
        "sampler wake_cache",
        "sync lost",
    ]


def test_learners_leave_samplers_that_never_sleep(asked: list[str]) -> None:
    own = fleet(asked, sleeps=False)
    own.rest()
    assert asked == []  # they have not left yet
    own.sync(1)
    asked.clear()
    own.rest()
    own.rest()
    assert asked == ["learner onload", "critic onload"]
