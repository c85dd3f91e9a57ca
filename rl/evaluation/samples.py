"""Responses and verdicts, one JSON object a line, written as they come: an evaluation goes on from its file.

{"problem": "aime24-60", "position": 0, "sample": 2, "seed": ..., "response": "...", "tokens": 512,
 "finish_reason": "stop", "correct": true, "error": null, "details": {}}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rl.disk import append, room_for
from rl.errors import DataError
from rl.run_folder import write_atomically

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One response to one problem. position: the problem's place in the data set. tokens: of the response.

    error: why it could not be judged, else None; then it is neither right nor wrong. details: those of its score.
    """

    problem: str
    position: int
    sample: int
    seed: int
    response: str
    tokens: int
    finish_reason: str
    correct: bool
    error: str | None = None
    details: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        return self.position, self.sample

    def line(self) -> str:
        """One line, with its newline."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Sample:
        """The inverse of `line`. Raises ValueError for anything else."""
        try:
            return cls(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"not a sample: {line[:80]!r}") from error


class SampleFile:
    """The samples of one benchmark under one spec; what the file at `path` holds already is in `samples`.

    A last line that a kill cut short is removed, with a warning. Raises DataError when another line is broken.
    One writer at a time.
    """

    def __init__(self, path: Path):
        self.path = path
        self.samples: dict[tuple[int, int], Sample] = {}
        if path.exists():
            self._read()

    def append(self, samples: Iterable[Sample]) -> None:
        """Add samples; they are on disk when this returns. Raises DiskFull; then nothing has been added."""
        samples = list(samples)
        lines = "".join(sample.line() for sample in samples)
        with room_for(self.path), self.path.open("ab", buffering=0) as file:
            append(file, lines.encode())
        self.samples |= {sample.key: sample for sample in samples}

    def sort(self) -> None:
        """Put the lines in the order of problems and samples."""
        self.samples = dict(sorted(self.samples.items()))
        write_atomically(self.path, "".join(sample.line() for sample in self.samples.values()))

    def _read(self) -> None:
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        whole: list[str] = []
        for number, line in enumerate(lines, start=1):
            try:
                if not line.endswith("\n"):
                    raise ValueError("it has no end")
                sample = Sample.from_line(line)
            except ValueError as error:
                if number < len(lines):
                    raise DataError(f"{self.path}, line {number} is broken ({error}); remove it") from error
                log.warning("%s: its last line was cut short and is skipped", self.path)
                write_atomically(self.path, "".join(whole))
                return
            self.samples.setdefault(sample.key, sample)
            whole.append(line)
