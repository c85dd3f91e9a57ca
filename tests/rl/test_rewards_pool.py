from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rl.data.problem import Problem
from rl.errors import ConfigError
from rl.rewards.pool import RewardPool
from rl.rewards.registry import load_reward
from rl.rewards.score import Score

CUSTOM = "tests.rl.custom_rewards"


def problem(answer: str = "") -> Problem:
    return Problem("p" + answer, "q", answer, "test")


def samples(*responses: str) -> list[tuple[str, Problem]]:
    return [(response, problem()) for response in responses]


def processes() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, f"{pids} are still there"
        time.sleep(0.05)


@pytest.fixture
def pool():
    before = processes()
    with RewardPool(load_reward(f"{CUSTOM}:by_order"), workers=2, timeout_s=1.5, memory_mib=1024) as pool:
        yield pool
    assert processes() <= before


def pids(pool: RewardPool) -> set[int]:
    return {int(score.value) for score in pool.score(samples(*["pid"] * 20))}


def test_scores_keep_their_order(pool):
    batch = [(f"score {index}", problem(str(2 * (index // 2)))) for index in range(301)]
    assert pool.score(batch) == [Score(float(index), correct=index % 2 == 0) for index in range(301)]
    assert pool.score([]) == []


def test_long_responses_pass_through(pool):
    (score,) = pool.score(samples("score 1 " + "x" * 2**21))
    assert score.error.startswith("ValueError: could not convert string to float")
    assert len(score.error) == 500


def test_a_batch_with_every_failure_gives_each_sample_its_own_score(pool):
    batch = [
        "score 1",
        "sleep 60",
        "score 2",
        "raise no",
        "spin",
        "score 3",
        "exit 3",
        "segfault",
        "recurse",
        "score 4",
    ]
    started = time.monotonic()
    scores = pool.score(samples(*batch))
    assert time.monotonic() - started < 15
    assert [score.value for score in scores] == [1, 0, 2, 0, 0, 3, 0, 0, 0, 4]
    assert [score.error for score in scores[:-2]] == [
        None,
        "no verdict within 1.5 s",
        None,
        "RuntimeError: no",
        "no verdict within 1.5 s",
        None,
        "the process of the reward died (exit status 3)",
        "the process of the reward died (SIGSEGV)",
    ]
    assert scores[-2].error.startswith("RecursionError")
    assert scores[-1].error is None
    # The pool is whole again.
    assert pool.score(samples("score 5", "score 6")) == [Score(5, correct=False), Score(6, correct=False)]


def test_a_computation_that_never_returns_to_python_is_ended(pool):
    started = time.monotonic()
    assert pool.score(samples("hold 60"))[0].error == "no verdict within 1.5 s"
    assert time.monotonic() - started < 5


def test_memory_is_bounded(pool):
    score, after = pool.score(samples(f"allocate {2**31}", "score 1"))
    assert score.error.startswith("MemoryError")
    assert after.value == 1


def test_processes_are_started_once_and_are_none_of_this_one(pool):
    first = pids(pool)
    assert first == pids(pool)
    assert os.getpid() not in first
    assert len(first) <= 2


def test_a_process_killed_while_idle_is_replaced(pool):
    first = pids(pool)
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    assert pool.score(samples("score 1", "score 2", "score 3")) == [
        Score(v, correct=False) for v in (1.0, 2.0, 3.0)
    ]
    assert not pids(pool) & first


def test_what_a_reward_started_ends_with_it(pool, tmp_path):
    note = tmp_path / "pid"
    assert pool.score(samples(f"child {note}"))[0].error == "no verdict within 1.5 s"
    assert_gone([int(note.read_text())])


def test_an_interrupted_batch_leaves_nothing_for_the_next(pool, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(pool, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.score(samples("score 7", "score 8"))
    assert pool.score(samples("score 1", "score 2")) == [Score(1, correct=False), Score(2, correct=False)]


def test_processes_import_the_reward_and_no_engine(pool):
    assert pool.score(samples("modules"))[0].error == "none"


def test_a_closed_pool_says_so():
    pool = RewardPool(load_reward(f"{CUSTOM}:by_order"))
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(samples("score 1"))


def test_inline_rewards_need_no_process():
    before = processes()
    with RewardPool(load_reward("arithmetic"), workers=2) as pool:
        assert processes() <= before
        batch = [("250", problem("250")), ("251", problem("250"))]
        assert pool.score(batch) == [Score.of(True), Score.of(False)]


def test_math_answers_and_a_tower_of_powers():
    with RewardPool(load_reward("math", "boxed"), workers=2, timeout_s=2) as pool:
        batch = [(rf"\boxed{{\frac{{{n}}}{{2}}}}", problem(str(n / 2))) for n in range(20)]
        batch.insert(7, (r"\boxed{9^{9^{9^9}}}", problem("3")))
        scores = pool.score(batch)
    assert scores.pop(7).error == "no verdict within 2 s"
    assert scores == [Score.of(True)] * 20


def test_math_processes_are_small():
    before = processes()
    with RewardPool(load_reward("math", "boxed")) as pool:
        pool.score([(r"\boxed{1}", problem("1"))])
        (child,) = (psutil.Process(pid) for pid in processes() - before)
        assert child.memory_info().rss < 150 * 2**20
        loaded = {os.path.basename(os.path.dirname(m.path)) for m in child.memory_maps()}
    assert not {"torch", "numpy", "ray"} & loaded


def test_a_reward_with_a_broken_contract_stops_the_batch():
    with (
        RewardPool(load_reward(f"{CUSTOM}:no_score")) as pool,
        pytest.raises(ConfigError, match=r"no_score' returned 1\.0 for problem 'p'"),
    ):
        pool.score(samples("x"))


def test_a_reward_that_processes_cannot_load_is_refused_at_the_start(monkeypatch):
    reward = load_reward(f"{CUSTOM}:by_order")
    monkeypatch.setattr(
        sys, "path", [path for path in sys.path if "site-packages" in path or "lib/python" in path]
    )
    monkeypatch.chdir("/")
    before = processes()
    with pytest.raises(
        ConfigError, match=r"reward\.function='tests\.rl\.custom_rewards:by_order': importing"
    ):
        RewardPool(reward)
    assert processes() <= before


@pytest.mark.parametrize(
    "arguments, message", [({"workers": 0}, "workers=0"), ({"timeout_s": 0}, "timeout_s=0")]
)
def test_impossible_pools_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RewardPool(load_reward("arithmetic"), **arguments)


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_nothing_outlives_a_program_that_ends_without_closing(end):
    program = f"""
import os
from rl.rewards.pool import RewardPool
from rl.rewards.registry import load_reward
pool = RewardPool(load_reward("{CUSTOM}:by_order"), workers=2)
print(*[process._process.pid for process in pool._workers], flush=True)
{end}
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    ).stdout
    children = [int(pid) for pid in output.split()]
    assert len(children) == 2
    assert_gone(children)
