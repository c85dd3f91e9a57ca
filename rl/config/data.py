"""The problems that are learned from: one dataclass a kind of source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field


@dataclass(frozen=True)
class ArithmeticData:
    """``a+b=`` over a character vocabulary; see `rl.data.arithmetic`."""

    source: Literal["arithmetic"]
    bound: int = 100
    reversed_digits: bool = True
    held_out: int = 128
    overlong: Literal["error", "drop"] = "error"


@dataclass(frozen=True)
class SumsData:
    """Sums asked in words, as a chat message; see `rl.data.sums`."""

    source: Literal["sums"]
    digits: int = 1
    held_out: int = 16
    overlong: Literal["error", "drop"] = "error"


@dataclass(frozen=True)
class BenchmarkProblems:
    """Where the problems of a benchmark stand, for comparison with training problems: file or hub name, column."""

    path: str
    split: str = "test"
    column: str = "problem"


@dataclass(frozen=True)
class FileData:
    """Problems from a JSONL or Parquet file or a hub data set; see `rl.data.files`."""

    source: Literal["file"]
    path: str
    split: str = "train"
    held_out_path: str | None = None
    held_out_split: str = "test"
    held_out: int = 32
    prompt_column: str = "problem"
    answer_column: str | tuple[str, ...] = "answer"
    id_column: str | None = "id"
    answer_marker: str | None = None
    answer_parser: str | None = None
    unwrap: str | None = None
    template: str = "{problem}"
    chat: bool = True
    repeated: Literal["error", "drop", "drop_similar"] = "error"
    language: Literal["any", "en", "zh"] = "any"
    benchmarks: dict[str, BenchmarkProblems] = field(default_factory=dict)
    overlap: Literal["report", "drop"] = "report"
    overlong: Literal["error", "drop"] = "error"


DataConfig = Annotated[ArithmeticData | SumsData | FileData, Field(discriminator="source")]
