"""How a rule about one key is stated."""

from __future__ import annotations


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """Raises ValueError, which names the key, its value and the rule, where `condition` does not hold."""
    if not condition:
        raise ValueError(f"{key}={value!r}: {rule}")
