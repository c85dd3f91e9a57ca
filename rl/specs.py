"""Learner, sampler and weight sync must have resolved one specification (design: the idea everything hangs on)."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from rl.errors import SpecMismatch


def check_specifications(reports: Sequence[EngineReport], allow_difference: bool) -> list[str]:
    """Compare what the engines report; returns one line for each precision map: its specs, and which engines have it.

    Raises SpecMismatch, naming the fields that differ with both values, unless `allow_difference`.
    """
    first = reports[0]
    for other in reports[1:]:
        difference = first.precision_map.diff(other.precision_map, first.engine, other.engine)
        if difference and not allow_difference:
            raise SpecMismatch(
                f"{first.engine} and {other.engine} do not compute under the same execution specification"
                f" (spec.allow_difference=true asks for that)\n{difference}"
            )
    engines: dict[PrecisionMap, list[str]] = {}
    for report in reports:
        engines.setdefault(report.precision_map, []).append(report.engine)
    return [
        f"execution specification of {', '.join(names)}: {precision_map.describe()}"
        for precision_map, names in engines.items()
    ]


def check_experts_ran(reports: Sequence[EngineReport]) -> None:
    """Raise RuntimeError unless the expert layers of every engine that computes any have been called."""
    idle = [report.engine for report in reports if report.engine != "weight_sync" and not report.expert_calls]
    if idle:
        raise RuntimeError(
            f"the expert layers of {', '.join(idle)} never ran: another implementation took their place"
        )
