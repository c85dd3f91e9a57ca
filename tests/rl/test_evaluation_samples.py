"""The file of samples: whatever a kill leaves of it, an evaluation goes on from there."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from rl.errors import DataError
from rl.evaluation.samples import Sample, SampleFile


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def sample(position: int, number: int, text: str = "so 1\u2028\u0085\n,\U0001f600", **changes) -> Sample:
    values = {"seed": 2**62, "response": text, "tokens": 4, "finish_reason": "stop", "correct": True}
    return Sample(f"p{position}", position, number, **{**values, **changes})


def test_samples_come_back_as_they_were(tmp_path: Path):
    written = [
        sample(0, 0),
        sample(0, 1, "", correct=False, error="no verdict within 10 s"),
        sample(1, 0, details={"instructions": 3.0, "strict": 1.0, "loose": 2.0}),
    ]
    SampleFile(tmp_path / "s.jsonl").append(written)
    assert list(SampleFile(tmp_path / "s.jsonl").samples.values()) == written
    # One line each, whatever is in a response.
    assert len((tmp_path / "s.jsonl").read_text().split("\n")) == 4


def test_after_a_kill_at_any_byte_the_whole_lines_are_kept_and_more_can_follow(tmp_path: Path, caplog):
    """Symptom: a half-written progress file."""
    path = tmp_path / "s.jsonl"
    lines = [sample(position, 0, "äx").line().encode() for position in range(3)]
    whole = b"".join(lines)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            file = SampleFile(path)
        kept = sum(len(b"".join(lines[: n + 1])) <= cut for n in range(3))
        assert [key for key in file.samples] == [(position, 0) for position in range(kept)]
        assert bool(caplog.records) == (len(b"".join(lines[:kept])) < cut)
        file.append([sample(9, 0)])
        assert list(SampleFile(path).samples) == [*file.samples]


def test_a_broken_line_before_the_last_is_named(tmp_path: Path):
    path = tmp_path / "s.jsonl"
    for broken in ("nonsense\n", "{}\n", "[1]\n", '{"problem": "x", "colour": "red"}\n'):
        path.write_text(sample(0, 0).line() + broken + sample(1, 0).line())
        with pytest.raises(DataError, match="line 2"):
            SampleFile(path)


def test_the_finished_file_is_in_the_order_of_the_problems(tmp_path: Path):
    """Symptom: a dump of validation samples without ids, in any order."""
    file = SampleFile(tmp_path / "s.jsonl")
    file.append([sample(2, 1), sample(2, 0), sample(0, 1), sample(0, 0)])
    file.sort()
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [(row["problem"], row["sample"]) for row in rows] == [("p0", 0), ("p0", 1), ("p2", 0), ("p2", 1)]
