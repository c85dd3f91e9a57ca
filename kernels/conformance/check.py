"""Checks, their outcomes, and the first element in which two results differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from kernels.conformance.backend import Subject
from kernels.spec import ExecutionSpec


class Kind(StrEnum):
    BITWISE = "bitwise"
    BOUND = "bound"  # what the spec leaves open: within a stated distance


class Status(StrEnum):
    PASS = "pass"
    FAIL = "FAIL"
    NOT_APPLICABLE = "not applicable"


class Mismatch(Exception):
    """A result that is not the expected one; the message names the first difference."""


class NotApplicable(Exception):
    """The check says nothing about this spec or subject; the message says why."""


@dataclass
class Bench:
    """What a check is given. A check that compares within a bound sets `kind`; `note` is printed beside a pass."""

    subject: Subject
    spec: ExecutionSpec
    kind: Kind = Kind.BITWISE
    note: str = ""

    def bound(self, note: str) -> None:
        self.kind, self.note = Kind.BOUND, note


CheckFunction = Callable[[Bench], None]


@dataclass(frozen=True)
class Check:
    group: str
    name: str
    shows: str
    run: CheckFunction


@dataclass(frozen=True)
class Outcome:
    """One row of the table. detail: the first difference, the reason, or the bound."""

    group: str
    name: str
    shows: str
    kind: Kind
    status: Status
    detail: str

    def plain(self) -> dict[str, str]:
        return {key: str(value) for key, value in vars(self).items()}


@dataclass
class Suite:
    """Checks in the order in which they were added."""

    group: str
    checks: list[Check] = field(default_factory=list)

    def check(self, name: str) -> Callable[[CheckFunction], CheckFunction]:
        """Decorator: the function's docstring says what the check shows."""

        def add(function: CheckFunction) -> CheckFunction:
            shows = (function.__doc__ or "").strip().splitlines()[0]
            self.checks.append(Check(self.group, name, shows, function))
            return function

        return add


def perform(check: Check, subject: Subject, spec: ExecutionSpec) -> Outcome:
    """Any error that the subject raises is a failure."""
    bench = Bench(subject, spec)

    def outcome(status: Status, detail: str) -> Outcome:
        return Outcome(check.group, check.name, check.shows, bench.kind, status, detail)

    try:
        check.run(bench)
    except NotApplicable as reason:
        return outcome(Status.NOT_APPLICABLE, str(reason))
    except Mismatch as difference:
        return outcome(Status.FAIL, str(difference))
    except Exception as error:
        return outcome(Status.FAIL, f"{type(error).__name__}: {error}")
    return outcome(Status.PASS, bench.note)


def expect_equal(what: str, expected: np.ndarray, found: Any, show: Callable[[Any], str] = str) -> None:
    """Raises Mismatch at the first element, in row-major order, that differs. NaN equals NaN; -0 is not +0."""
    found = as_array(found)
    if found.shape != expected.shape:
        raise Mismatch(f"{what}: expected shape {expected.shape}, found {found.shape}")
    different = found != expected
    if np.issubdtype(expected.dtype, np.floating):
        different &= ~(np.isnan(found) & np.isnan(expected))
        different |= (found == expected) & (np.signbit(found) != np.signbit(expected))
    if different.any():
        index = tuple(int(i) for i in np.argwhere(different)[0])
        place = ", ".join(map(str, index))
        count = f"{int(different.sum())} of {different.size} differ"
        raise Mismatch(
            f"{what}[{place}]: expected {show(expected[index])}, found {show(found[index])} ({count})"
        )


def as_array(value: Any) -> np.ndarray:
    """A tensor as numpy, floats as float64."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.double() if value.is_floating_point() else value).numpy()
