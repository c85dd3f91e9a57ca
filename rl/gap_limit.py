"""Bounds on the gap between learner and sampler, over the iterations of a run.

The gap is numerical noise that the objective learns from. One bad iteration may be chance; several mean that the
engines no longer compute the same policy.
"""

from __future__ import annotations

from collections.abc import Mapping

from rl.config.algorithm import GapLimitConfig
from rl.errors import UserError
from rl.records.history import History


class GapLimitExceeded(UserError):
    """The run ended because of `algorithm.gap_limit`."""


class GapWatch:
    """Counts the iterations that cross a bound, those of a resumed run's history among them.

    One iteration counts once, however many bounds it crosses.
    """

    def __init__(self, limit: GapLimitConfig, history: History) -> None:
        self.limit = limit
        self._crossed: dict[int, list[str]] = {}
        for step, metrics in history.items():
            self._count(step, metrics)

    def see(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What to tell the user after iteration `step`; None while the bounds are kept often enough."""
        if not self._count(step, metrics):
            return None
        limit = self.limit
        recent = [at for at in self._crossed if step - limit.within < at <= step]
        if len(recent) < limit.times:
            return None
        return (
            f"iteration {step}: {', '.join(self._crossed[step])}; a bound of algorithm.gap_limit was crossed in"
            f" {len(recent)} of the last {min(limit.within, step)} iterations"
        )

    def _count(self, step: int, metrics: Mapping[str, float]) -> bool:
        crossed = []
        for name in ("p99", "k3", "ess"):
            bound, value = getattr(self.limit, name), metrics.get(f"gap/{name}")
            if bound is None or value is None:
                continue
            if (value < bound) if name == "ess" else (value > bound):
                comparison = "below" if name == "ess" else "above"
                crossed.append(f"gap/{name}={value:.4g} is {comparison} {bound:g}")
        if crossed:
            self._crossed[step] = crossed
        return bool(crossed)
