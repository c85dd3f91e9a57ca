"""Wall-clock time of the stages of an iteration."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stages:
    """``with stages("update"): ...`` adds the elapsed seconds to time/update; a stage may be entered repeatedly.

    `announce` is called with the name of every stage that begins.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._started = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._announce(stage)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - started

    def metrics(self, tokens: float) -> dict[str, float]:
        """Seconds of each stage and since this object was made, and `tokens` as a rate over the latter."""
        total = time.perf_counter() - self._started
        times = {f"time/{stage}": seconds for stage, seconds in self._seconds.items()}
        return times | {"time/iteration": total, "rate/tokens_per_second": tokens / total}
