"""What the package README states is what the code says."""

from __future__ import annotations

from pathlib import Path

from kernels.__main__ import catalogue_table

README = Path(__file__).resolve().parents[2] / "kernels" / "README.md"


def test_the_catalogue_table_is_that_of_the_command() -> None:
    text = README.read_text()
    start, end = "<!-- catalogue -->\n", "\n<!-- /catalogue -->"
    assert text[text.index(start) + len(start) : text.index(end)] == catalogue_table()
