"""Problems from JSONL or Parquet files and from data sets of the Hugging Face hub, all read by `datasets`.

Reading forks no process; it is meant to be done by the driver before Ray starts. Local files need no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl.data.order import Order, held_out_order
from rl.data.problem import Message, Problem, content_hash
from rl.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
PLACE = "{problem}"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class FileProblems:
    """Problems of one file or hub data set.

    Args:
        path: a local file (.jsonl, .json, .parquet), or the hub's ``owner/name``; ``owner/name:subset``
            where the data set has subsets (``openai/gsm8k:main``).
        split: split of the hub data set; a local file has none.
        held_out_path, held_out_split: where held-out problems come from; None takes them away from `path`.
        held_out: how many to hold out, chosen by `seed`; of a `held_out_path` with fewer problems, all.
        prompt_column, answer_column, id_column: columns; dots enter nested ones, as in
            ``reward_model.ground_truth``. The prompt may be text or a list of chat messages. Without an id
            column the row number is the id.
        answer_marker: the answer is what follows the last such text (``####`` in GSM8K's solutions).
        template: text of the prompt, with ``{problem}`` where the problem stands.
        chat: True makes the text one user message; False leaves it plain, for models without chat template.
        repeated: what to do with an id that occurs again: "error", or "drop" rows that repeat the first one.
        seed: of the held-out choice and of the training order, in [0, 2**32).

    A training problem whose prompt is also held out is left out of training; `describe` counts these.

    Raises DataError for a missing file, an unreachable hub, an empty data set, a missing column or value,
    repeated ids, or when nothing is left to train on.
    """

    def __init__(
        self,
        path: str,
        *,
        split: str = "train",
        held_out_path: str | None = None,
        held_out_split: str = "test",
        held_out: int = 32,
        prompt_column: str = "problem",
        answer_column: str = "answer",
        id_column: str | None = "id",
        answer_marker: str | None = None,
        template: str = PLACE,
        chat: bool = True,
        repeated: Literal["error", "drop"] = "error",
        seed: int = 0,
    ):
        if template.count(PLACE) != 1:
            raise DataError(f"data.template={template!r}: must contain {PLACE} exactly once")
        if held_out < 0:
            raise DataError(f"data.held_out={held_out}: must be 0 or more")
        reader = _RowReader(prompt_column, answer_column, id_column, answer_marker, template, chat, repeated)
        problems = reader.read(path, split)
        candidates = problems if held_out_path is None else reader.read(held_out_path, held_out_split)
        chosen = sorted(held_out_order(len(candidates), seed)[:held_out])
        self.held_out = tuple(candidates[index] for index in chosen)
        held_out_prompts = {problem.prompt for problem in self.held_out}
        self._training = [problem for problem in problems if problem.prompt not in held_out_prompts]
        if not self._training:
            raise DataError(
                f"data.path={path!r}: none of its {len(problems)} problems is left to train on after"
                f" holding out {len(self.held_out)} (data.held_out={held_out})"
            )
        taken_away = len(self.held_out) if held_out_path is None else 0
        self.training_count = len(self._training)
        self._order = Order(self.training_count, seed)
        self._about: dict[str, str | int | bool | None] = {
            "source": path,
            "split": split,
            "held_out_source": held_out_path or path,
            "template": template,
            "chat": chat,
            "repeated_rows": reader.repeats,
            "prompts_also_held_out": len(problems) - len(self._training) - taken_away,
        }

    def training(self, position: int) -> Problem:
        return self._training[self._order[position]]

    def describe(self) -> dict[str, str | int | bool | None]:
        return self._about | {
            "training": self.training_count,
            "held_out": len(self.held_out),
            "content_hash": content_hash(self._training, self.held_out),
        }


@dataclass
class _RowReader:
    """Rows of data sets -> problems, by one set of column names; counts the repeated rows left out."""

    prompt_column: str
    answer_column: str
    id_column: str | None
    answer_marker: str | None
    template: str
    chat: bool
    repeated: str
    repeats: int = 0

    def read(self, path: str, split: str) -> list[Problem]:
        data = _load(path, split)
        if not len(data):
            raise DataError(f"{path!r} is empty: a data set must have at least one row")
        columns = [self.prompt_column, self.answer_column, *([self.id_column] if self.id_column else [])]
        missing = [column for column in columns if column.split(".")[0] not in data.column_names]
        if missing:
            raise DataError(
                f"{path!r} has no column {', '.join(map(repr, missing))};"
                f" it has {', '.join(data.column_names)}"
            )
        # Other columns may be large (solutions, figures) and are not decoded.
        rows = data.select_columns(sorted({column.split(".")[0] for column in columns}))
        return self._problems(rows, path)

    def _problems(self, rows: Iterable[Any], path: str) -> list[Problem]:
        name = Path(path).stem if Path(path).suffix in FORMATS else path  # the same wherever the file lies
        found: dict[str, Problem] = {}
        for number, row in enumerate(rows):
            where = f"{path!r} row {number}"
            identifier = str(number) if self.id_column is None else _text(row, self.id_column, where)
            problem = Problem(identifier, self._prompt(row, where), self._answer(row, where), name)
            first = found.setdefault(problem.id, problem)
            if first is problem:
                continue
            if self.repeated == "error":
                raise DataError(
                    f"{where}: id {problem.id!r} occurs a second time"
                    " (data.repeated=drop leaves out rows that say the same)"
                )
            if first != problem:
                raise DataError(
                    f"{where}: id {problem.id!r} occurs a second time with another prompt or answer"
                )
            self.repeats += 1
        return list(found.values())

    def _prompt(self, row: Mapping[str, Any], where: str) -> str | tuple[Message, ...]:
        value = _value(row, self.prompt_column, where)
        if isinstance(value, list):
            return self._messages(value, where)
        text = self.template.replace(PLACE, _text(row, self.prompt_column, where))
        return (Message("user", text),) if self.chat else text

    def _messages(self, value: list[Any], where: str) -> tuple[Message, ...]:
        if self.template != PLACE or not self.chat:
            raise DataError(
                f"{where}: column {self.prompt_column!r} holds chat messages, to which data.template and"
                " data.chat=false do not apply"
            )
        try:
            messages = tuple(Message(message["role"], message["content"]) for message in value)
        except (TypeError, KeyError) as error:
            raise DataError(
                f"{where}: column {self.prompt_column!r} is a list, but not of chat messages"
            ) from error
        if not messages:
            raise DataError(f"{where}: column {self.prompt_column!r} holds no message")
        return messages

    def _answer(self, row: Mapping[str, Any], where: str) -> str:
        text = _text(row, self.answer_column, where)
        if self.answer_marker is None:
            return text
        _, marker, answer = text.rpartition(self.answer_marker)
        if not marker or not answer.strip():
            raise DataError(
                f"{where}: nothing follows {self.answer_marker!r} in column {self.answer_column!r}"
            )
        return answer.strip()


def _value(row: Mapping[str, Any], column: str, where: str) -> Any:
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        raise DataError(f"{where} has no value in column {column!r}")
    return value


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    value = _value(row, column, where)
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise DataError(f"{where}: column {column!r} must hold text or a number, found {value!r}")
    return str(value)


def _load(path: str, split: str) -> Dataset:
    from datasets import Dataset, disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetsError

    disable_progress_bars()
    suffix = Path(path).suffix
    name, _, subset = path.partition(":")
    try:
        if suffix in FORMATS:
            if not Path(path).is_file():
                raise DataError(f"{path!r}: no such file")
            if not Path(path).stat().st_size:
                raise DataError(f"{path!r} is empty: a data set must have at least one row")
            loaded = load_dataset(FORMATS[suffix], data_files=str(Path(path).resolve()), split="train")
        elif _HUB_NAME.fullmatch(name):
            loaded = load_dataset(name, subset or None, split=split)
        else:
            raise DataError(
                f"{path!r}: neither a file ({', '.join(FORMATS)}) nor a hub data set (owner/name)"
            )
    except (DatasetsError, OSError, ValueError, StopIteration) as error:
        raise DataError(f"{path!r} cannot be read: {error.__cause__ or error}") from error
    assert isinstance(loaded, Dataset)  # with a split named, a single data set comes back
    return loaded
