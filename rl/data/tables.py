"""JSONL and Parquet files and data sets of the Hugging Face hub as rows, all read by `datasets`.

Reading forks no process; it is meant to be done by the driver before Ray starts. Local files need no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_BATCH = 1000  # rows decoded at a time: far quicker than row by row


def load_table(path: str, split: str) -> Dataset:
    """The rows of a local file (.jsonl, .json, .parquet) or of a hub data set.

    `path` is a file, the hub's ``owner/name``, or ``owner/name:subset``; `split` is that of a hub data set, a local
    file has none. Raises DataError for a missing or unreadable file, an unreachable hub and an empty data set.
    """
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
                raise _empty(path)
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
    if not len(loaded):
        raise _empty(path)
    return loaded


def rows(path: str, split: str, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row with the words that name it in an error; other columns (figures, solutions) are not decoded.

    A dotted column stands for the whole column that it enters; see `value`. Raises DataError for what `load_table`
    refuses and for a column that is missing.
    """
    table = load_table(path, split)
    tops = sorted({column.split(".")[0] for column in columns})
    missing = [column for column in columns if column.split(".")[0] not in table.column_names]
    if missing:
        raise DataError(
            f"{path!r} has no column {', '.join(map(repr, missing))}; it has {', '.join(table.column_names)}"
        )
    number = 0
    for batch in table.select_columns(tops).iter(batch_size=_BATCH):
        for cells in zip(*(batch[name] for name in tops), strict=True):
            yield f"{path!r} row {number}", dict(zip(tops, cells, strict=True))
            number += 1


def read_column(path: str, split: str, column: str) -> list[str]:
    """The text of one column, row by row. Raises DataError."""
    return [text(row, column, where) for where, row in rows(path, split, [column])]


def value(row: Mapping[str, Any], column: str, where: str) -> Any:
    """What stands in `column`, where dots enter nested columns. Raises DataError when nothing does."""
    found: Any = row
    for name in column.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None:
        raise DataError(f"{where} has no value in column {column!r}")
    return found


def text(row: Mapping[str, Any], column: str, where: str) -> str:
    """The text or number in `column`, as text. Raises DataError for anything else and for blank text."""
    found = value(row, column, where)
    if not isinstance(found, str | int | float) or not str(found).strip():
        raise DataError(f"{where}: column {column!r} must hold text or a number, found {found!r}")
    return str(found)


def _empty(path: str) -> DataError:
    return DataError(f"{path!r} is empty: a data set must have at least one row")
