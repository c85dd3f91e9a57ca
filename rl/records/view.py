"""What the terminal shows of a run: a live panel, or one line an iteration where there is no terminal."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from rl.metrics import METRICS
from rl.records.history import Number
from rl.records.text import duration, quantity

ViewMode = Literal["auto", "live", "plain"]

# stage -> letter (where there is no colour) and colour, in the order of an iteration
STAGES = {
    "generate": ("g", "blue"),
    "reward": ("r", "bright_black"),
    "score": ("s", "green"),
    "update": ("u", "magenta"),
    "sync": ("y", "cyan"),
    "evaluate": ("e", "yellow"),
    "checkpoint": ("c", "white"),
}


def open_view(mode: ViewMode, title: str, total: int, console: Console | None = None) -> RunView:
    """The view of a run of `total` iterations; `auto` is live on a terminal that can move its cursor."""
    console = console or Console(highlight=False)
    if mode == "live" or (mode == "auto" and console.is_terminal and not console.is_dumb_terminal):
        return LiveView(title, total, console)
    return RunView(title, total, console)


class RunView:
    """One line an iteration, in ASCII, for pipes, files and CI. The base of the live view."""

    def __init__(self, title: str, total: int, console: Console):
        self.title = _encodable(title, console)
        self.total = total
        self.console = console
        self._seconds: deque[float] = deque(maxlen=10)
        self._done = 0

    def stage(self, name: str) -> None:
        """`name` (a stage of `STAGES`, or any text) begins."""

    def step(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Iteration `step` is over; 0 is the evaluation before the first."""
        self._note(step, metrics)
        parts = [f"{label} {value}" for label, value in _headline(metrics)]
        seconds = _stage_seconds(metrics)
        if "time/iteration" in metrics:
            stages = ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items())
            parts.append(f"{metrics['time/iteration']:.1f} s" + (f" ({stages})" if stages else ""))
        left = self._seconds_left()
        if left:
            parts.append(f"left {duration(left)}")
        width = len(str(self.total))
        self.message(f"[{step:{width}d}/{self.total}] " + " | ".join(parts))

    def message(self, text: str) -> None:
        """Show a line of text; what the terminal cannot encode becomes a question mark."""
        self.console.print(Text(_encodable(text, self.console)), soft_wrap=True)

    def log_handler(self) -> logging.Handler:
        """A handler that shows log records as messages and leaves a live display intact."""
        return _ViewHandler(self)

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, step: int, metrics: Mapping[str, Number]) -> None:
        self._done = step
        if "time/iteration" in metrics:
            self._seconds.append(metrics["time/iteration"])

    def _seconds_left(self) -> float:
        if not self._seconds:
            return 0.0
        return sum(self._seconds) / len(self._seconds) * max(0, self.total - self._done)


class LiveView(RunView):
    """A panel that is redrawn in place; the last state stays on the screen."""

    def __init__(self, title: str, total: int, console: Console):
        super().__init__(title, total, console)
        self._latest: dict[str, Number] = {}
        self._held_out_at = 0
        self._rewards: deque[float] = deque(maxlen=40)
        self._stage = ""
        self._started = self._stage_started = time.monotonic()
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=4)
        self._live.start()

    def stage(self, name: str) -> None:
        self._stage, self._stage_started = _encodable(name, self.console), time.monotonic()

    def step(self, step: int, metrics: Mapping[str, Number]) -> None:
        self._note(step, metrics)
        stale = [name for name in self._latest if METRICS[name].section == "time"]
        kept = {name: value for name, value in self._latest.items() if name not in stale}
        self._latest = kept | dict(metrics)
        if any(name.startswith("held_out/") for name in metrics):
            self._held_out_at = step
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        self._live.refresh()

    def close(self) -> None:
        self._stage = ""
        self._live.stop()

    def render(self) -> Group:
        """The panel as it stands."""
        now = time.monotonic()
        left = self._seconds_left()
        clock = f"{duration(now - self._started)} elapsed" + (f", {duration(left)} left" if left else "")
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim")
        rows.add_column(ratio=1)
        for label, value in _headline(self._latest):
            if label == "held-out":
                value += f"  (iteration {self._held_out_at})"
            line = Text(value)
            if label == "reward" and not self.console.options.ascii_only:
                line.append("  " + _sparkline(self._rewards), style="blue")
            rows.add_row(label, line)
        seconds = _stage_seconds(self._latest)
        if seconds:
            rows.add_row("time", StageBar(seconds))
            rows.add_row("", _stage_legend(seconds, self.console))
        if self._stage:
            rows.add_row("now", f"{self._stage}, {duration(now - self._stage_started)}")
        head = Table.grid(expand=True)
        head.add_row(Text.assemble((self.title, "bold"), f"  iteration {self._done}/{self.total}  {clock}"))
        head.add_row(ProgressBar(self.total, self._done, complete_style="blue", finished_style="green"))
        return Group(head, rows)


class StageBar:
    """The stages of an iteration as one bar over the width at hand, each as wide as its share of the time."""

    def __init__(self, seconds: Mapping[str, float]):
        self.seconds = seconds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total = sum(self.seconds.values()) or 1.0
        before = 0.0
        for stage, value in self.seconds.items():
            start = round(before / total * options.max_width)
            before += value
            cells = round(before / total * options.max_width) - start
            key, colour = _stage_key(stage, console)
            yield Segment(key * cells, Style(color=colour))
        yield Segment.line()


class _ViewHandler(logging.Handler):
    def __init__(self, view: RunView):
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._view.message(f"{record.levelname.lower()}: {record.getMessage()}")
        except Exception:
            self.handleError(record)


def _encodable(text: str, console: Console) -> str:
    return text.encode(console.encoding, "replace").decode(console.encoding)


def _headline(metrics: Mapping[str, Number]) -> list[tuple[str, str]]:
    """The few numbers that are always shown, of those that there are."""
    shown = []
    for label, *names in (
        ("reward", "reward/mean"),
        ("held-out", "held_out/reward", "held_out/accuracy"),
        ("gap p99", "gap/p99"),
        ("rate", "rate/tokens_per_second"),
    ):
        name = next((name for name in names if name in metrics), None)
        if name:
            shown.append((label, quantity(metrics[name], METRICS[name].unit)))
    return shown


def _stage_seconds(metrics: Mapping[str, Number]) -> dict[str, float]:
    return {stage: metrics[f"time/{stage}"] for stage in STAGES if f"time/{stage}" in metrics}


def _stage_legend(seconds: Mapping[str, float], console: Console) -> Columns:
    items = []
    for stage, value in seconds.items():
        key, colour = _stage_key(stage, console)
        items.append(Text.assemble((key, colour), f" {stage} {value:.1f}s"))
    return Columns(items, padding=(0, 2))


def _stage_key(stage: str, console: Console) -> tuple[str, str]:
    """The character and the style of a stage: a block, or a letter where colours cannot be shown."""
    letter, colour = STAGES[stage]
    coloured = console.color_system and not console.no_color and not console.options.ascii_only
    return ("█" if coloured else letter), colour


def _sparkline(values: deque[float]) -> str:
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = high - low or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int((value - low) / span * 8))] for value in values)
