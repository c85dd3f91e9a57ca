from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console

from rl.records.text import duration, quantity
from rl.records.view import LiveView, RunView, open_view

METRICS = {
    "reward/mean": 0.4123,
    "gap/p99": 0.0125,
    "rate/tokens_per_second": 178.4,
    "time/generate": 2.0,
    "time/update": 1.5,
    "time/iteration": 4.0,
}


def _console(**options) -> Console:
    return Console(file=io.StringIO(), highlight=False, **options)


def _run(view: RunView, iterations: int = 3) -> str:
    with view:
        view.step(0, {"held_out/reward": 0.25})
        for step in range(1, iterations + 1):
            for stage in ("generate", "update"):
                view.stage(stage)
            view.step(step, METRICS)
    return view.console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [10, 80, 300])
def test_without_a_terminal_there_is_one_line_an_iteration(width: int) -> None:
    view = open_view("auto", "tiny/now", 10, _console(width=width))
    lines = _run(view).splitlines()
    assert lines == [
        "[ 0/10] held-out 0.25",
        *(
            f"[ {step}/10] reward 0.4123 | gap p99 0.0125 nat | rate 178.4 tokens/s"
            f" | 4.0 s (generate 2.0, update 1.5) | left {(10 - step) * 4}s"
            for step in (1, 2, 3)
        ),
    ]
    assert all(line.isascii() for line in lines)


def test_the_mode_follows_the_terminal() -> None:
    for mode, options, kind in (
        ("auto", {}, RunView),
        ("auto", {"force_terminal": True}, LiveView),
        ("auto", {"force_terminal": True, "_environ": {"TERM": "dumb"}}, RunView),
        ("plain", {"force_terminal": True}, RunView),
        ("live", {}, LiveView),
    ):
        with open_view(mode, "tiny", 3, _console(**options)) as view:  # type: ignore[arg-type]
            assert type(view) is kind, (mode, options)


def _screen(view: LiveView, width: int) -> list[str]:
    """What the panel looks like on a terminal of that width."""
    console = _console(width=width, force_terminal=True, no_color=view.console.no_color, color_system=None)
    console.print(view.render())
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    return text.splitlines()


@pytest.mark.parametrize("width", [4, 20, 40, 80, 200])
def test_the_live_view_fits_its_terminal(width: int) -> None:
    view = LiveView("tiny/now", 10, _console(width=width, force_terminal=True))
    _run(view, 12)
    lines = _screen(view, width)
    assert max(len(line) for line in lines) <= width
    if width >= 40:
        text = "\n".join(lines)
        for shown in ("iteration 12/10", "0.4123", "0.25  (iteration 0)", "0.0125 nat", "generate 2.0s"):
            assert shown in text


def test_the_live_view_shows_stage_shares_without_colour() -> None:
    view = LiveView("tiny", 10, _console(width=45, force_terminal=True, no_color=True))
    _run(view)
    bar = next(line for line in _screen(view, 45) if "gg" in line)
    assert bar.count("g") / bar.count("u") == pytest.approx(2.0 / 1.5, rel=0.1)


@pytest.mark.parametrize("mode", ["plain", "live"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_will_do(mode: str, encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = Console(file=stream, force_terminal=mode == "live", width=60)
    with open_view(mode, "wärme→", 10, console) as view:  # type: ignore[arg-type]
        view.stage("prüfen→")
        view.step(1, METRICS)
        view.message("größer → kleiner")
    stream.flush()
    assert "0.4123" in raw.getvalue().decode(encoding)


def test_messages_keep_their_brackets_and_log_records_are_messages() -> None:
    view = RunView("tiny", 10, _console(width=30))
    view.message("[bold]weights[/bold] of a long, long line that is not wrapped")
    logger = logging.getLogger("test_records_view")
    logger.addHandler(view.log_handler())
    logger.warning("checkpoint %s is skipped", "[x]")
    assert view.console.file.getvalue() == (  # type: ignore[attr-defined]
        "[bold]weights[/bold] of a long, long line that is not wrapped\nwarning: checkpoint [x] is skipped\n"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (273600, "3d04h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.123456, "", "0.1235"),
        (0, "nat", "0 nat"),
        (-1.25e-7, "nat", "-1.250e-07 nat"),
        (0.8828125, "share", "88.28 %"),
        (1234567, "tokens", "1,234,567 tokens"),
        (12345.6, "", "12,346"),
        (1843200, "bytes", "1.8 MiB"),
    ],
)
def test_quantities(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text
