"""Scoring in processes that can be killed, so that no response can hold up or bring down a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Self

from rl.data.problem import Problem
from rl.errors import ConfigError
from rl.rewards import worker
from rl.rewards.registry import Reward
from rl.rewards.score import Score

_START_TIMEOUT_S = 60.0


class RewardPool:
    """Scores batches of responses with one reward.

    A reward that is `inline` is called here. Any other runs in `workers` processes, started once and warm
    when the constructor returns: fresh interpreters, not forks, which import the reward alone. A sample that
    takes more than `timeout_s` seconds (wall clock), or whose process dies, gets a score with an error, and
    its process is replaced.

    Args:
        memory_mib: address space of a process; a reward that asks for more gets MemoryError. A process that has
            filled three quarters of it when a sample is done is replaced, so that what earlier samples left behind
            fails no later one.
        log: file to which the processes' output is appended; None discards it.

    Raises ConfigError when the processes cannot load the reward. Not for use by several threads at a time.
    """

    def __init__(
        self,
        reward: Reward,
        workers: int = 1,
        timeout_s: float = 10.0,
        *,
        memory_mib: int = 4096,
        log: Path | None = None,
    ):
        if workers < 1:
            raise ValueError(f"workers={workers}: must be at least 1")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be more than 0 seconds")
        self._reward, self._timeout_s = reward, timeout_s
        self._memory_mib, self._log = memory_mib, log
        self._workers: list[_Worker] = []
        self._count = 0 if reward.inline else workers
        # Also runs when the interpreter ends.
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)
        try:
            self._start_missing()
            while not all(process.ready for process in self._workers):
                self._collect([])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes; nothing can be scored afterwards. May be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, samples: Sequence[tuple[str, Problem]]) -> list[Score]:
        """One score for each (response, problem), in the order of `samples`.

        Raises ConfigError when the reward returns something else than a `Score`, RuntimeError after `close`.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the reward pool is closed")
        if self._reward.inline:
            return [self._reward(response, problem) for response, problem in samples]
        scores: list[Score | None] = [None] * len(samples)
        waiting = deque(range(len(samples)))
        self._start_missing()
        try:
            while any(score is None for score in scores):
                self._hand_out(waiting, samples)
                self._collect(scores)
        finally:
            # After an interruption: what is still being computed belongs to no batch any more.
            self._remove([process for process in self._workers if process.task is not None])
        return [score for score in scores if score is not None]

    def _hand_out(self, waiting: deque[int], samples: Sequence[tuple[str, Problem]]) -> None:
        for process in list(self._workers):
            if waiting and process.ready and process.task is None:
                try:
                    process.give(waiting[0], samples[waiting[0]], self._timeout_s)
                except ConnectionError:  # it died while it had nothing to do
                    self._replace(process)
                else:
                    waiting.popleft()

    def _collect(self, scores: list[Score | None]) -> None:
        """Wait until a process answers, dies or overruns; note the scores; replace what is lost."""
        active = [process for process in self._workers if process.task is not None or not process.ready]
        patience = max(0.0, min(process.deadline for process in active) - time.monotonic())
        answered = wait([process.pipe for process in active], patience)
        for process in active:
            task = process.task
            if process.pipe in answered:
                failure = process.answer(scores)
            elif time.monotonic() >= process.deadline:
                failure = f"no verdict within {self._timeout_s:g} s"
            else:
                continue
            if failure is None:
                if process.spent:
                    self._replace(process)
                continue
            if task is None:
                raise ConfigError(
                    f"reward.function={self._reward.name!r}: its process did not start: {failure}"
                )
            scores[task] = Score.failed(failure)
            self._replace(process)

    def _start_missing(self) -> None:
        while len(self._workers) < self._count:
            self._workers.append(_Worker(self._reward, self._timeout_s, self._memory_mib, self._log))

    def _replace(self, process: _Worker) -> None:
        self._remove([process])
        self._start_missing()

    def _remove(self, processes: list[_Worker]) -> None:
        for process in processes:
            self._workers.remove(process)
            process.stop()


class _Worker:
    """One process and the pool's end of its pipe.

    ready: it has loaded the reward. task: index of the sample that it works on. deadline: monotonic clock.
    spent: it must not be given another sample.
    """

    def __init__(self, reward: Reward, timeout_s: float, memory_mib: int, log: Path | None):
        self.pipe, theirs = Pipe()
        self.ready = False
        self.spent = False
        self.task: int | None = None
        self.deadline = time.monotonic() + _START_TIMEOUT_S
        settings = [reward.name, reward.parser or "", repr(reward.wrong), str(timeout_s), str(memory_mib)]
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        with open(log or os.devnull, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", worker.__name__, str(theirs.fileno()), *settings],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C reaches the pool alone, and `stop` a reward's own children
            )
        theirs.close()

    def give(self, task: int, sample: tuple[str, Problem], timeout_s: float) -> None:
        self.pipe.send(sample)
        self.task, self.deadline = task, time.monotonic() + timeout_s

    def answer(self, scores: list[Score | None]) -> str | None:
        """Take what the process has sent; returns how it failed, if it did."""
        try:
            kind, content = self.pipe.recv()
        except (EOFError, ConnectionError):
            return f"the process of the reward died ({self._exit_status()})"
        match kind:
            case worker.READY:
                self.ready = True
            case worker.SCORE | worker.LAST:
                assert self.task is not None
                scores[self.task], self.task = content, None
                self.spent = kind == worker.LAST
            case worker.REFUSED:
                raise ConfigError(content)
        return None

    def stop(self) -> None:
        """Kill the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.pipe.close()

    def _exit_status(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        code = self._process.returncode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()
