"""Rows of a data set -> problems."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.data import tables
from rl.data.problem import Message, Problem
from rl.errors import DataError
from rl.rewards.extraction import PARSERS

PLACE = "{problem}"


@dataclass(frozen=True)
class Statement:
    """A problem, its bare text without any template, and the words that name its row in an error."""

    problem: Problem
    text: str
    where: str


@dataclass(frozen=True)
class RowReader:
    """How the rows of a data set become problems; see `rl.data.files.FileProblems` for the fields.

    Raises DataError for a template or a wrapping without exactly one place for the problem, an unknown parser, and for
    more than one of several answer columns, a marker and a parser.
    """

    prompt_column: str
    answer_column: str | tuple[str, ...]
    id_column: str | None
    answer_marker: str | None
    answer_parser: str | None
    template: str
    unwrap: str | None
    chat: bool

    def __post_init__(self) -> None:
        for key in ("template", "unwrap"):
            form = getattr(self, key)
            if form is not None and form.count(PLACE) != 1:
                raise DataError(f"data.{key}={form!r}: must contain {PLACE} exactly once")
        if self.answer_parser is not None and self.answer_parser not in PARSERS:
            raise DataError(f"data.answer_parser={self.answer_parser!r}: must be one of {', '.join(PARSERS)}")
        several = not isinstance(self.answer_column, str)
        if several + (self.answer_marker is not None) + (self.answer_parser is not None) > 1:
            raise DataError(
                f"data.answer_column={self.answer_column!r}, answer_marker={self.answer_marker!r},"
                f" answer_parser={self.answer_parser!r}: only one of several columns, a marker and a parser"
            )

    def read(self, path: str, split: str) -> Iterator[Statement]:
        """Every row, in order. Raises DataError for a missing column or a malformed value."""
        answers = (self.answer_column,) if isinstance(self.answer_column, str) else self.answer_column
        columns = [self.prompt_column, *answers, *([self.id_column] if self.id_column else [])]
        # The same wherever the file lies.
        name = Path(path).stem if Path(path).suffix in tables.FORMATS else path
        for number, (where, row) in enumerate(tables.rows(path, split, columns)):
            identifier = str(number) if self.id_column is None else tables.text(row, self.id_column, where)
            prompt, bare = self._prompt(row, where)
            yield Statement(Problem(identifier, prompt, self._answer(row, where), name), bare, where)

    def _prompt(self, row: Mapping[str, Any], where: str) -> tuple[str | tuple[Message, ...], str]:
        """The prompt and the bare problem."""
        found = tables.value(row, self.prompt_column, where)
        if isinstance(found, list):
            messages = self._messages(found, where)
            if self.unwrap is None:
                self._require_no_template(where)
                return messages, "\n".join(message.content for message in messages)
            if [message.role for message in messages] != ["user"]:
                raise DataError(f"{where}: data.unwrap needs a chat of one user message, found {messages!r}")
            bare = messages[0].content
        else:
            bare = tables.text(row, self.prompt_column, where)
        if self.unwrap is not None:
            bare = self._unwrapped(bare, self.unwrap, where)
        text = self.template.replace(PLACE, bare)
        return ((Message("user", text),) if self.chat else text), bare

    def _unwrapped(self, text: str, form: str, where: str) -> str:
        before, after = form.split(PLACE)
        bare = text.removeprefix(before).removesuffix(after)
        if len(bare) != len(text) - len(before) - len(after) or not bare.strip():
            raise DataError(
                f"{where}: the text in column {self.prompt_column!r} is not a problem wrapped as data.unwrap says"
                f" (it begins {text[:60]!r})"
            )
        return bare

    def _messages(self, found: list[Any], where: str) -> tuple[Message, ...]:
        try:
            messages = tuple(Message(message["role"], message["content"]) for message in found)
        except (TypeError, KeyError) as error:
            raise DataError(
                f"{where}: column {self.prompt_column!r} is a list, but not of chat messages"
            ) from error
        if not messages:
            raise DataError(f"{where}: column {self.prompt_column!r} holds no message")
        return messages

    def _require_no_template(self, where: str) -> None:
        if self.template != PLACE or not self.chat:
            raise DataError(
                f"{where}: column {self.prompt_column!r} holds chat messages, to which data.template and"
                " data.chat=false do not apply (data.unwrap takes the problem out of them)"
            )

    def _answer(self, row: Mapping[str, Any], where: str) -> str:
        if not isinstance(self.answer_column, str):
            found = {column: _without_none(tables.value(row, column, where)) for column in self.answer_column}
            return json.dumps(found, sort_keys=True, ensure_ascii=False)
        text = tables.text(row, self.answer_column, where)
        if self.answer_parser is not None:
            parsed = PARSERS[self.answer_parser](text)
            if parsed is None:
                raise DataError(
                    f"{where}: {self.answer_parser} finds no answer in column {self.answer_column!r}"
                )
            return parsed
        if self.answer_marker is None:
            return text
        _, marker, answer = text.rpartition(self.answer_marker)
        if not marker or not answer.strip():
            raise DataError(
                f"{where}: nothing follows {self.answer_marker!r} in column {self.answer_column!r}"
            )
        return answer.strip()


def _without_none(found: Any) -> Any:
    """Arrow fills the absent keys of nested rows with None; JSONL leaves them out."""
    if isinstance(found, Mapping):
        return {key: _without_none(item) for key, item in found.items() if item is not None}
    if isinstance(found, list):
        return [_without_none(item) for item in found]
    return found
