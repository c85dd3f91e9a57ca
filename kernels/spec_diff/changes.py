"""Specs between two specs: one degree of freedom changed at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from kernels.spec import PARTS, ExecutionSpec, FieldDifference, meanings, spec_diff

_Attempt = Callable[[frozenset[str]], tuple[ExecutionSpec | None, str]]


@dataclass(frozen=True)
class Change:
    """Spec A with one field's value from B, and with the fewest further fields of B that make it possible."""

    difference: FieldDifference
    others: tuple[str, ...]
    spec: ExecutionSpec


def single_changes(left: ExecutionSpec, right: ExecutionSpec) -> list[Change]:
    """One change for each field in which the specs differ, in order of declaration.

    Where the constructor refuses the field's value on its own, the smallest set of other differing fields that
    it accepts changes too.
    """
    differences = spec_diff(left, right)
    names = [difference.field for difference in differences]
    attempt = cache(partial(_attempt, left, right))
    changes = []
    for difference in differences:
        spec, changed = _smallest(difference.field, names, attempt)
        others = tuple(name for name in names if name in changed and name != difference.field)
        changes.append(Change(difference, others, spec))
    return changes


def with_fields(left: ExecutionSpec, right: ExecutionSpec, names: frozenset[str]) -> ExecutionSpec | None:
    """`left` with the fields `names` (of `spec_diff`) from `right`; None where no such spec can be."""
    return _attempt(left, right, names)[0]


def _smallest(field: str, names: list[str], attempt: _Attempt) -> tuple[ExecutionSpec, frozenset[str]]:
    """Breadth first over sets of fields that hold `field`; a set grows by what can lift its refusal."""
    level: dict[frozenset[str], None] = {frozenset({field}): None}
    while True:
        larger: dict[frozenset[str], None] = {}
        for changed in level:
            spec, refusal = attempt(changed)
            if spec is not None:
                return spec, changed
            larger |= {changed | {name}: None for name in _remedies(changed, refusal, names, attempt)}
        level = larger


def _remedies(changed: frozenset[str], refusal: str, names: list[str], attempt: _Attempt) -> list[str]:
    """Other differing fields that can lift a refusal: those that it names, else those that alter it, else all."""
    rest = [name for name in names if name not in changed]
    mentioned = set(re.findall(r"([\w.]+)=", refusal))
    named = [name for name in rest if name in mentioned or name.rpartition(".")[2] in mentioned]
    return named or [name for name in rest if attempt(changed | {name})[1] != refusal] or rest


def _attempt(
    left: ExecutionSpec, right: ExecutionSpec, changed: frozenset[str]
) -> tuple[ExecutionSpec | None, str]:
    """`left` with the fields `changed` from `right`, or None and the first reason why there is no such spec."""
    values = {name: getattr(right, name) for name in changed if "." not in name}
    for role in PARTS:
        prefix = f"{role}."
        inner = [name.removeprefix(prefix) for name in changed if name.startswith(prefix)]
        if inner:
            source = getattr(right, role)
            try:
                values[role] = replace(getattr(left, role), **{key: getattr(source, key) for key in inner})
            except ValueError as error:
                return None, re.sub(r"\b(\w+)=", rf"{role}.\1=", _first_reason(error))
    label = ",".join(name for name in meanings() if name in changed)
    try:
        return replace(left, name=f"{left.name}->{right.name}[{label}]", **values), ""
    except ValueError as error:
        return None, _first_reason(error)


def _first_reason(error: ValueError) -> str:
    return str(error).partition(": ")[2].partition("; ")[0]
