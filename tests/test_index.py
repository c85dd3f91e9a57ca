"""tests/README.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def test_every_test_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"\btest_\w+", (TESTS / "README.md").read_text()))
    files = list(TESTS.rglob("test_*.py"))
    there = {file.stem for file in files}
    for file in files:
        there |= set(re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
    assert named <= there, sorted(named - there)
    assert len(named) > 100
