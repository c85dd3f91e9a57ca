"""Rules on the fields of a configuration dataclass. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def checker(config: Any) -> Callable[[str, Callable[[Any], object], str], None]:
    """`check(field, holds, rule)`: raises ValueError naming field, value and rule unless `holds(value)`."""

    def check(name: str, holds: Callable[[Any], object], rule: str) -> None:
        value = getattr(config, name)
        try:
            valid = bool(holds(value))
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(f"{type(config).__name__}.{name}={value!r} {rule}")

    return check
