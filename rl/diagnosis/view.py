"""What the terminal shows of a diagnosis when it is done."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable

from rl.diagnosis import tables
from rl.diagnosis.summary import Summary


def print_summary(console: Console, summary: Summary) -> None:
    """The gap, the verdicts and what the controls moved; the rest is in the report."""
    if summary.gaps:
        for table in tables.gap_tables(summary.gaps, summary.bootstrap.confidence, digits=3):
            _print(console, table)
    for verdict in summary.verdicts:
        console.print(f"{verdict.label}: {verdict.text}")
    for result in summary.routing:
        fc1, fc2 = ([getattr(one, name).value for one in result.depths] for name in ("fc1", "fc2"))
        console.print(
            f"routing fixed under {result.label}: relative L2 of FC1 {min(fc1):.3g} to {max(fc1):.3g}, of FC2"
            f" {min(fc2):.3g} to {max(fc2):.3g} over {len(fc1)} depths, {result.invalid_experts} invalid experts"
        )
    if summary.scale:
        _print(console, tables.scale_table(summary.scale))
    if summary.attribution:
        found = summary.attribution
        end = found.forwards[-1].abs_mean if found.forwards else found.start_abs_mean
        console.print(
            f"attribution, {found.left} to {found.right} on {tables.size_of(found)}: mean |d| from"
            f" {found.start_abs_mean:.3g} to {end:.3g} nat, in {len(found.forwards)} steps"
        )
    for note in summary.notes:
        console.print(f"note: {note}")


def _print(console: Console, table: tables.Table) -> None:
    shown = RichTable(title=table.title, title_justify="left")
    for number, heading in enumerate(table.headings):
        shown.add_column(heading, justify="right" if number else "left")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
