"""Problems from JSONL or Parquet files and from data sets of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from rl.data.order import Order, held_out_order
from rl.data.problem import Problem, content_hash
from rl.data.rows import PLACE, RowReader, Statement
from rl.data.selection import Language, Repeated, distinct, in_language, overlap, unadorned
from rl.errors import DataError


class FileProblems:
    """Problems of one file or hub data set.

    Args:
        path: a local file (.jsonl, .json, .parquet), or the hub's ``owner/name``; ``owner/name:subset``
            where the data set has subsets (``openai/gsm8k:main``).
        split: split of the hub data set; a local file has none.
        held_out_path, held_out_split: where held-out problems come from; None takes them away from `path`.
        held_out: how many to hold out, chosen by `seed`; of a `held_out_path` with fewer problems, all.
        prompt_column, answer_column, id_column: columns; dots enter nested ones, as in
            ``reward_model.ground_truth``. The prompt may be text or a list of chat messages. Several answer columns
            make an answer in JSON, an object with these keys. Without an id column the row number is the id.
        answer_marker: the answer is what follows the last such text (``####`` in GSM8K's solutions).
        answer_parser: the answer is what this parser of `rl.rewards.extraction` finds (``boxed`` in MATH's
            solutions).
        unwrap: for data sets that are published inside a template: the text of the prompt, with ``{problem}``
            where the problem stands. What stands there is taken out, and `template` applies to it.
        template: text of the prompt, with ``{problem}`` where the problem stands.
        chat: True makes the text one user message; False leaves it plain, for models without chat template.
        repeated: "error": an id must not occur again. "drop" and "drop_similar": problems that are stated again
            are left out, and so are problems with two different answers; see `rl.data.selection.distinct`.
        language: "en" leaves out problems with Chinese characters, "zh" those without.
        benchmarks: name -> texts of its problems, with which the training problems are compared; see
            `rl.data.selection.comparable`.
        overlap: "report" counts the training problems that are a benchmark's, "drop" leaves them out too.
        seed: of the held-out choice and of the training order, in [0, 2**32).

    A training problem that, typography aside, is also held out is left out of training. `describe` counts all that
    is left out.

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
        answer_column: str | tuple[str, ...] = "answer",
        id_column: str | None = "id",
        answer_marker: str | None = None,
        answer_parser: str | None = None,
        unwrap: str | None = None,
        template: str = PLACE,
        chat: bool = True,
        repeated: Repeated = "error",
        language: Language = "any",
        benchmarks: Mapping[str, Iterable[str]] | None = None,
        overlap: Literal["report", "drop"] = "report",
        seed: int = 0,
    ):
        if held_out < 0:
            raise DataError(f"data.held_out={held_out}: must be 0 or more")
        reader = RowReader(
            prompt_column, answer_column, id_column, answer_marker, answer_parser, template, unwrap, chat
        )
        found = distinct(reader.read(path, split), repeated)
        spoken = [statement for statement in found.statements if in_language(statement.text, language)]
        usable, counts = _apart_from(benchmarks or {}, spoken, drop=overlap == "drop")
        candidates = (
            usable
            if held_out_path is None
            else distinct(reader.read(held_out_path, held_out_split), repeated).statements
        )
        chosen = sorted(held_out_order(len(candidates), seed)[:held_out])
        reserved = [candidates[index] for index in chosen]
        secret = {unadorned(statement.text) for statement in reserved}
        training = [
            statement for statement in usable if not secret or unadorned(statement.text) not in secret
        ]
        if not training:
            raise DataError(
                f"data.path={path!r}: none of its {len(found.statements)} problems is left to train on"
                f" (data.language={language}, data.overlap={overlap}, {len(reserved)} held out)"
            )
        taken_away = len(reserved) if held_out_path is None else 0
        self.held_out: tuple[Problem, ...] = tuple(statement.problem for statement in reserved)
        self._training = [statement.problem for statement in training]
        self.training_count = len(self._training)
        self._order = Order(self.training_count, seed)
        self._about: dict[str, str | int | bool | None] = {
            "source": path,
            "split": split,
            "held_out_source": held_out_path or path,
            "template": template,
            "chat": chat,
            "language": language,
            "rows": found.rows,
            "repeated_rows": found.repeated_rows,
            "contradictory": found.contradictory,
            "other_language": len(found.statements) - len(spoken),
            **counts,
            "also_held_out": len(usable) - len(training) - taken_away,
        }

    def training(self, position: int) -> Problem:
        return self._training[self._order[position]]

    def describe(self) -> dict[str, str | int | bool | None]:
        return self._about | {
            "training": self.training_count,
            "held_out": len(self.held_out),
            "content_hash": content_hash(self._training, self.held_out),
        }


def _apart_from(
    benchmarks: Mapping[str, Iterable[str]], statements: list[Statement], *, drop: bool
) -> tuple[list[Statement], dict[str, str | int | bool | None]]:
    """The statements without those of benchmarks, if these are to be dropped, and how many there were."""
    common = overlap(statements, benchmarks)
    counts: dict[str, str | int | bool | None] = {f"in_{name}": len(found) for name, found in common.items()}
    dropped = set().union(*common.values()) if drop else set()
    counts["dropped_as_benchmark"] = len(dropped)
    return [statement for index, statement in enumerate(statements) if index not in dropped], counts
