from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.metrics import METRICS
from rl.records.history import comparable, cut_back, decode_line, encode_line, read_history

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
METRIC = st.dictionaries(st.sampled_from(sorted(METRICS)), NUMBERS, max_size=5)


@given(st.integers(0), METRIC)
def test_lines_come_back_as_they_were(step: int, metrics: dict[str, float | int]) -> None:
    line = encode_line(step, metrics)
    assert line.count("\n") == 1 and line.endswith("\n")
    found_step, found = decode_line(line)
    assert (found_step, found) == (step, metrics)
    assert all(type(found[name]) is type(metrics[name]) for name in metrics)


@given(st.lists(st.integers(0, 8)).map(sorted), st.integers(0, 8), st.integers(0, 30))
def test_cutting_back_keeps_exactly_the_steps_up_to_the_cut(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], cut: int, torn: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    lines = [encode_line(step, {"policy/loss": index / 7}) for index, step in enumerate(steps)]
    path.write_text("".join(lines) + encode_line(9, {"policy/loss": 1.0})[:torn])
    cut_back(path, cut)
    assert path.read_text() == "".join(line for line, at in zip(lines, steps, strict=True) if at <= cut)


def test_the_parts_of_a_step_add_up(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        encode_line(0, {"held_out/reward": 0.1})
        + encode_line(1, {"policy/loss": 0.5})
        + encode_line(1, {"held_out/reward": 0.2})
    )
    assert read_history(path) == {
        0: {"held_out/reward": 0.1},
        1: {"policy/loss": 0.5, "held_out/reward": 0.2},
    }


def test_a_line_cut_short_is_ignored_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = encode_line(1, {"policy/loss": 0.5})
    for end in range(len(good)):
        path.write_text(good + good[:end])
        assert read_history(path) == {1: {"policy/loss": 0.5}}
    path.write_text(good + good[:9] + "\n" + good)
    with pytest.raises(ValueError, match="line 2"):
        read_history(path)
    with pytest.raises(ValueError, match="line 2"):
        cut_back(path, 5)


def test_a_missing_file_is_an_empty_history(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    cut_back(path, 3)
    assert read_history(path) == {}
    assert not path.exists()


def test_comparable_leaves_out_what_is_volatile() -> None:
    history = {1: {"policy/loss": 0.5, "time/update": 1.0, "memory/driver": 3, "rate/tokens_per_second": 9.0}}
    assert comparable(history) == {1: {"policy/loss": 0.5}}
