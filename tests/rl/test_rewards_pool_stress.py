"""A thousand answers, some of which hang, crash, eat memory or fool a parser: every one gets its own score, once."""

from __future__ import annotations

import random
import time
from collections.abc import Collection

import psutil
import pytest

from rl.data.problem import Problem
from rl.rewards.pool import RewardPool
from rl.rewards.registry import load_reward
from rl.rewards.score import Score

CUSTOM = "tests.rl.custom_rewards"
ANSWERS = 1000
TIMEOUT_S = 2.0  # an ordinary answer must not reach it on a busy machine
# command -> what the error says; a sample of each kind for every ~150 answers
ODD = {
    "sleep 60": "no verdict within 2 s",
    "spin": "no verdict within 2 s",
    "hold 60": "no verdict within 2 s",
    "exit 3": "exit status 3",
    "segfault": "SIGSEGV",
    f"allocate {2**33}": "MemoryError",
    "recurse": "RecursionError",
    "raise no": "RuntimeError: no",
    "score nan": "must be finite",
    "score \ud83d\0{}": "ValueError",
}


def batch(seed: int) -> list[str]:
    commands = [f"score {number}" for number in range(ANSWERS)]
    draw = random.Random(seed)
    for position, command in zip(draw.sample(range(ANSWERS), 2 * len(ODD)), [*ODD] * 2, strict=True):
        commands[position] = command
    return commands


def children(before: Collection[int] = ()) -> list[psutil.Process]:
    """Processes of this one, but for those of tests before."""
    return [own for own in psutil.Process().children(recursive=True) if own.pid not in before]


def test_no_score_is_lost_or_doubled_and_the_pool_is_whole_afterwards():
    commands = batch(seed=1)
    problems = [Problem(f"p{number}", "q", str(number), "test") for number in range(ANSWERS)]
    before = {own.pid for own in children()}
    with RewardPool(
        load_reward(f"{CUSTOM}:by_order"), workers=3, timeout_s=TIMEOUT_S, memory_mib=1024
    ) as pool:
        scores = pool.score(list(zip(commands, problems, strict=True)))
        assert len(scores) == ANSWERS
        for number, (command, score) in enumerate(zip(commands, scores, strict=True)):
            if command in ODD:
                assert score.error is not None, command
                assert ODD[command] in score.error
                assert (score.value, score.correct) == (0.0, False)
            else:
                assert score == Score(float(number), correct=True)
        assert sum(score.error is not None for score in scores) == 2 * len(ODD)

        started = time.monotonic()
        again = pool.score([(f"score {number}", problems[number]) for number in range(200)])
        assert again == [Score(float(number), correct=True) for number in range(200)]
        assert time.monotonic() - started < 5
        assert len(children(before)) == 3
        assert {"zombie"}.isdisjoint(process.status() for process in children(before))
    assert not children(before)


def test_what_samples_leave_behind_does_not_fail_the_next_one():
    problem = Problem("p", "q", "", "test")
    with RewardPool(load_reward(f"{CUSTOM}:leaky"), memory_mib=1024) as pool:
        scores = pool.score([("leak" if n % 3 == 0 else "", problem) for n in range(24)])
        assert [score.error for score in scores] == [None] * 24
        assert len({score.value for score in scores}) > 2  # full processes were replaced
        assert len({score.value for score in pool.score([("", problem)] * 20)}) <= 2


@pytest.mark.parametrize(
    "answer", [r"\boxed{9^{9^{9^9}}}", r"\boxed{(10^9)!}", r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k}}"]
)
def test_an_answer_that_cannot_be_computed_is_no_wrong_answer_and_holds_up_nobody(answer):
    ordinary = [(rf"\boxed{{{n}}}", Problem(str(n), "q", str(n), "test")) for n in range(40)]
    started = time.monotonic()
    with RewardPool(load_reward("math", "boxed"), workers=2, timeout_s=3) as pool:
        odd, *others = pool.score([(answer, Problem("odd", "q", "3", "test")), *ordinary])
    assert not odd.correct
    assert others == [Score.of(True)] * 40
    assert time.monotonic() - started < 60


def test_wrong_answers_are_worth_what_the_configuration_says_and_errors_nothing():
    with RewardPool(load_reward("math", "boxed", wrong=-1.0), timeout_s=3) as pool:
        problem = Problem("p", "q", "3", "test")
        scores = pool.score(
            [(r"\boxed{3}", problem), (r"\boxed{4}", problem), (r"\boxed{9^{9^{9^9}}}", problem)]
        )
    assert scores[:2] == [Score(1.0, True), Score(-1.0, False)]
    assert (scores[2].value, scores[2].error) == (0.0, "no verdict within 3 s")
