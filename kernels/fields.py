"""What specifications are made of: typed fields with a meaning, plain values, comparison.

`Specification` gives a frozen dataclass its dictionary form, a check of its types, and the list of its degrees
of freedom. Members of an enum are written as the formula or rule that they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple, Self, get_type_hints

PlainValue = str | int


def degree(meaning: str) -> Any:
    """A dataclass field that is one degree of freedom, with what it decides."""
    return field(metadata={"meaning": meaning})


class Degree(NamedTuple):
    name: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Specification:
    """Base of frozen dataclasses whose fields are enums or integers, each made by `degree`.

    Raises TypeError for a value of the wrong type, ValueError for what `contradictions` of the subclass names.
    """

    def __post_init__(self) -> None:
        for key, kind in self.types().items():
            if type(getattr(self, key)) is not kind:
                found = getattr(self, key)
                raise TypeError(f"{type(self).__name__}.{key} must be {kind.__name__}, got {found!r}")
        problems = list(self.contradictions())
        if problems:
            raise ValueError(f"impossible {type(self).__name__}: " + "; ".join(problems))

    def contradictions(self) -> list[str]:
        """Rules across fields that the values break, one sentence each."""
        return []

    def to_dict(self) -> dict[str, PlainValue]:
        """Plain values in the order of declaration; `from_dict` is the inverse."""
        values = {key: getattr(self, key) for key in self.types()}
        return {key: str(value) if isinstance(value, str) else value for key, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Raises ValueError for an unknown or missing field and for a value that its field does not have."""
        types = cls.types()
        unknown, missing = sorted(values.keys() - types.keys()), sorted(types.keys() - values.keys())
        if unknown or missing:
            raise ValueError(f"{cls.__name__}: unknown fields {unknown}, missing fields {missing}")
        return cls(**{key: parse(key, kind, values[key]) for key, kind in types.items()})

    @classmethod
    @cache
    def types(cls) -> dict[str, type]:
        hints = get_type_hints(cls)
        return {entry.name: hints[entry.name] for entry in fields(cls)}

    @classmethod
    def degrees(cls) -> list[Degree]:
        return [Degree(entry.name, entry.metadata["meaning"]) for entry in fields(cls)]


def parse(key: str, kind: type, value: object) -> Any:
    """`value` as the enum or integer type `kind`. Raises ValueError naming `key` when it is not one."""
    if issubclass(kind, StrEnum):
        if value not in list(kind):
            raise ValueError(f"{key}={value!r} is not one of: {', '.join(kind)}")
        return kind(str(value))
    if type(value) is not kind:
        raise ValueError(f"{key}={value!r} is not of type {kind.__name__}")
    return value
