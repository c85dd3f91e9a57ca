"""Which of the problems read are fit to learn from: repeats, contradictions, language, overlap with benchmarks."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rl.data.rows import Statement
from rl.errors import DataError

Language = Literal["any", "en", "zh"]
Repeated = Literal["error", "drop", "drop_similar"]

_CHINESE = re.compile(r"[\u4e00-\u9fff]")
# LaTeX that changes how a problem looks and not what it says.
_LOOKS = re.compile(r"\\(?:left|right|displaystyle|textstyle|quad|qquad)(?![a-zA-Z])|\\[,;:! ]")
_NO_LETTERS = re.compile(r"[\W_]+")  # neither letters nor digits
_NO_OPERATORS = re.compile(r"[^\w+\-*/^=<>|]+|_+")
_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")


@dataclass(frozen=True)
class Distinct:
    """Problems of which no two state the same, in the order in which they first occur.

    rows: how many were read. repeated_rows: those that state a problem that had been stated before.
    contradictory: problems left out because they are stated with different answers.
    """

    statements: list[Statement]
    rows: int
    repeated_rows: int
    contradictory: int


def distinct(found: Iterable[Statement], repeated: Repeated) -> Distinct:
    """Leave out what is said again.

    "drop": of rows with the same problem and answer the first one stays; a problem with different answers goes
    altogether, as no one knows which of them is right. Two problems are the same when their texts differ in white
    space at most; with "drop_similar", when they are equal in the sense of `unadorned`. "error": nothing is left
    out, and an id must not occur again. Raises DataError for an id that stands for two different problems.
    """
    # A published set may repeat each of its texts a hundred times.
    key = lru_cache(maxsize=2**16)(unadorned if repeated == "drop_similar" else _one_spaced)
    first: dict[str, Statement] = {}  # by text
    texts: dict[str, str] = {}  # by id
    answers_differ: set[str] = set()
    everything: list[Statement] = []
    rows = 0
    for rows, statement in enumerate(found, start=1):
        problem, text = statement.problem, key(statement.text)
        if texts.setdefault(problem.id, text) != text:
            raise DataError(f"{statement.where}: id {problem.id!r} occurs a second time with another problem")
        if repeated == "error":
            if len(texts) < rows:
                raise DataError(
                    f"{statement.where}: id {problem.id!r} occurs a second time"
                    " (data.repeated=drop leaves out rows that say the same)"
                )
            everything.append(statement)
        elif first.setdefault(text, statement).problem.answer.strip() != problem.answer.strip():
            answers_differ.add(text)
    if repeated == "error":
        return Distinct(everything, rows, 0, 0)
    kept = [statement for text, statement in first.items() if text not in answers_differ]
    return Distinct(kept, rows, rows - len(first), len(answers_differ))


def in_language(text: str, language: Language) -> bool:
    """ "zh": the text has Chinese characters (U+4E00 to U+9FFF); "en": it has none; "any": always true."""
    return language == "any" or bool(_CHINESE.search(text)) == (language == "zh")


def unadorned(text: str) -> str:
    """`text` without what typography may change: letters, digits and operators, without case and LaTeX's looks."""
    return _without(text, _NO_OPERATORS)


def comparable(text: str) -> str:
    """`text` as it is compared with benchmarks: as `unadorned`, and without operators.

    x + 1 and x - 1 become the same: right for finding leaks, too coarse for finding repeats.
    """
    return _without(text, _NO_LETTERS)


def overlap(statements: Iterable[Statement], benchmarks: Mapping[str, Iterable[str]]) -> dict[str, set[int]]:
    """For each benchmark (name -> texts of its problems) the indices of the statements that equal one of them."""
    texts = {name: {comparable(text) for text in problems} - {""} for name, problems in benchmarks.items()}
    common: dict[str, set[int]] = {name: set() for name in texts}
    for index, statement in enumerate(statements):
        text = comparable(statement.text)
        for name, known in texts.items():
            if text in known:
                common[name].add(index)
    return common


def _without(text: str, symbols: re.Pattern[str]) -> str:
    plain = _FRACTION.sub("frac", _LOOKS.sub("", text))
    folded = unicodedata.normalize("NFKC", plain).casefold().replace("\u2212", "-")
    return symbols.sub("", folded)


def _one_spaced(text: str) -> str:
    return " ".join(text.split())
