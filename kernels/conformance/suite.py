"""All checks, and the table of their outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kernels.conformance import layer_checks, quantizer_checks, weight_checks
from kernels.conformance.backend import Subject
from kernels.conformance.check import Check, Kind, Outcome, Status, perform
from kernels.spec import ExecutionSpec

CHECKS: tuple[Check, ...] = tuple(
    check
    for suite in (quantizer_checks.SUITE, weight_checks.WEIGHT, weight_checks.GRADIENT, layer_checks.SUITE)
    for check in suite.checks
)


def conformance(subject: Subject, spec: ExecutionSpec) -> list[Outcome]:
    """Every check, in a fixed order. A subject that fails raises nothing."""
    return [perform(check, subject, spec) for check in CHECKS]


def format_table(outcomes: Sequence[Outcome], subject: str, spec: ExecutionSpec) -> str:
    """Plain text: one row a check, then the counts."""
    rows = [("#", "part", "check", "kind", "outcome", "first difference, reason or bound")]
    for number, outcome in enumerate(outcomes, 1):
        applies = outcome.status is not Status.NOT_APPLICABLE
        kind = str(outcome.kind) if applies else ""
        rows.append((str(number), outcome.group, outcome.name, kind, str(outcome.status), outcome.detail))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip()
        for row in rows
    ]
    title = f"{subject} under {spec.name} ({spec.fingerprint})"
    return "\n".join([title, "", *lines, "", summary(outcomes)])


def summary(outcomes: Sequence[Outcome]) -> str:
    passed = Counter(outcome.kind for outcome in outcomes if outcome.status is Status.PASS)
    count = Counter(outcome.status for outcome in outcomes)
    return (
        f"{passed[Kind.BITWISE]} bitwise and {passed[Kind.BOUND]} bound checks passed, {count[Status.FAIL]} failed,"
        f" {count[Status.NOT_APPLICABLE]} do not apply"
    )
