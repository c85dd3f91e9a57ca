"""Finding the final answer in a response. Which rule is applied changes the score, so each has a name.

Every parser takes the response and returns the answer's text, or None when there is none. Only the end of a
response is read, which bounds the work.
"""

from __future__ import annotations

import re
from collections.abc import Callable

TAIL_CHARS = 10_000
ANSWER_LINE_TAIL_CHARS = 300

# ASCII digits alone: \d has those of every script, which no parser of numbers downstream takes.
_NUMBER = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
# A minus sign (ASCII or Unicode) between two operands belongs to the operation: 10-3 holds 10 and 3.
_LAST_NUMBER = re.compile(rf"(?:(?<![\w)\]}}.])[-\u2212]\$?)?{_NUMBER}")
# What goes on after the number (as in 3/4 or 5.2.1) makes it none.
_GSM8K = re.compile(rf"####[ \t]*([-\u2212]?\$?[-\u2212]?{_NUMBER})(?![0-9]|[/.,:][0-9])")
_ANSWER_LINE = re.compile(r"answer[*\s]*:[*\s]*([^\n]*)", re.IGNORECASE)


def boxed(response: str) -> str | None:
    r"""Content of the last ``\boxed{...}``; None when there is none or the last one is not closed."""
    tail = response[-TAIL_CHARS:]
    start = tail.rfind(r"\boxed{")
    return None if start < 0 else _braced(tail[start + len(r"\boxed") :])


def answer_line(response: str) -> str | None:
    r"""What follows the last ``Answer:`` (in any case) in the last 300 characters, to the end of the line.

    The rule of the DAPO-Math-17k prompt. A box around the answer is opened; a boxed answer elsewhere is none.
    """
    matches = _ANSWER_LINE.findall(response[-ANSWER_LINE_TAIL_CHARS:])
    if not matches:
        return None
    return boxed(matches[-1]) if r"\boxed{" in matches[-1] else matches[-1].strip("* \t") or None


def answer_line_or_boxed(response: str) -> str | None:
    """`answer_line`, and where there is none the last box in the last 300 characters."""
    found = answer_line(response)
    return boxed(response[-ANSWER_LINE_TAIL_CHARS:]) if found is None else found


def last_number(response: str) -> str | None:
    """The last number in decimal digits, without thousands commas and dollar sign."""
    matches = _LAST_NUMBER.findall(response[-TAIL_CHARS:])
    return _plain(matches[-1]) if matches else None


def gsm8k(response: str) -> str | None:
    """The number after the last ``####``, without thousands commas and dollar sign."""
    matches = _GSM8K.findall(response[-TAIL_CHARS:])
    return _plain(matches[-1]) if matches else None


def without_reasoning(response: str) -> str:
    """What follows the last ``</think>``; nothing when a ``<think>`` was never closed."""
    _, end, answer = response.rpartition("</think>")
    return "" if not end and "<think>" in answer else answer.strip() if end else response


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").replace("\u2212", "-")


def _braced(text: str) -> str | None:
    """Content of the group that `text` opens with; None when it is not closed."""
    depth = 0
    for position, character in enumerate(text):
        escaped = position > 0 and text[position - 1] == "\\"
        depth += (character == "{" and not escaped) - (character == "}" and not escaped)
        if depth == 0:
            return text[1:position].strip() or None
    return None


PARSERS: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed,
    "answer_line": answer_line,
    "answer_line_or_boxed": answer_line_or_boxed,
    "last_number": last_number,
    "gsm8k": gsm8k,
}
