"""Where two execution specs differ, and what each difference moves.

    python -m kernels.spec_diff A B                        fields, and what each moves alone, on synthetic layers
    python -m kernels.spec_diff A B --layer FILE           the same on a layer from a safetensors file
    python -m kernels.spec_diff --heatmap FILE.png         layer outputs of all pairs of the catalogue
    python -m kernels.spec_diff --table                    how much single fields weigh

A and B are names of the catalogue, with overrides in brackets if any: minite[weight.outer_domain=expert].
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.catalogue import CATALOGUE
from kernels.command import check_output, end_quietly
from kernels.labels import spec_from_label
from kernels.layer_input import ROW_SIGMA, LayerInput, LayerShape, load_layer, synthetic_layer
from kernels.spec import ExecutionSpec, format_diff, spec_diff
from kernels.spec_diff.changes import Change, single_changes
from kernels.spec_diff.field_sizes import SHAPE, format_sizes, measure_sizes
from kernels.spec_diff.heatmap import draw, pairwise_l2
from kernels.spec_diff.sensitivity import Move, OperandMove, measure, run_layer
from kernels.spec_diff.tables import align, percent

_BACKWARD_ONLY = ("gradient", "backward")
_HEADER = (
    "field",
    "operand",
    "memory",
    "scales",
    "codes",
    "values",
    "values L2",
    "output L2",
    "BF16 outputs",
)
_LEGEND = """\
Shares that differ from A: memory, bytes as stored; scales, block-scale bytes; codes; values, decoded; BF16 outputs.
L2: norm of the difference over the norm under A. FC2's input is compared behind A's FC1 output."""


@dataclass(frozen=True)
class MeasuredChange:
    """change: None for all fields together. same_as: an earlier field whose change, with others, is this one."""

    change: Change | None
    move: Move
    same_as: str | None


def measure_changes(data: LayerInput, left: ExecutionSpec, right: ExecutionSpec) -> list[MeasuredChange]:
    """Every differing field alone, then all of them together. Raises ValueError where a spec refuses the data."""
    base = run_layer(data, left)
    seen: dict[ExecutionSpec, MeasuredChange] = {}
    measured = []
    for change in single_changes(left, right):
        first = seen.get(change.spec)
        if first is None:
            one = MeasuredChange(change, measure(data, base, run_layer(data, change.spec)), None)
            seen[change.spec] = one
        else:
            assert first.change is not None
            one = MeasuredChange(change, first.move, first.change.difference.field)
        measured.append(one)
    return [*measured, MeasuredChange(None, measure(data, base, run_layer(data, right)), None)]


def format_changes(measured: Sequence[MeasuredChange]) -> str:
    """A plain-text table: one line for each operand that a field moves, or one where it moves none."""
    rows: list[tuple[str, ...]] = [_HEADER]
    notes: dict[int, str] = {}
    for one in measured:
        field = "all together" if one.change is None else one.change.difference.field
        if one.same_as is not None:
            rows.append((field, *("",) * (len(_HEADER) - 1)))
            notes[len(rows) - 1] = f"  the same fields together as for {one.same_as}"
            continue
        output = (percent(one.move.output.relative_l2), percent(one.move.output.differing))
        moved = [(name, _cells(move)) for name, move in one.move.operands.items() if _moves(move)]
        for name, cells in moved or [("none", ("0",) * 5)]:
            rows.append((field, name, *cells, *output))
            field, output = "", ("", "")
        if one.change is not None:
            notes[len(rows) - 1] = _note(one.change)
    lines = align(rows)
    return "\n".join(line + notes.get(number, "") for number, line in enumerate(lines))


def _cells(move: OperandMove) -> tuple[str, ...]:
    return tuple(percent(v) for v in (move.memory, move.scales, move.codes, move.values, move.relative_l2))


def _moves(move: OperandMove) -> bool:
    return bool(move.memory or move.scales or move.codes or move.values)


def _note(change: Change) -> str:
    note = f"\n    with {', '.join(change.others)}" if change.others else ""
    if all(field.split(".")[0] in _BACKWARD_ONLY for field in (change.difference.field, *change.others)):
        note += "\n    not read by the forward"
    return note


def to_json(data: LayerInput, measured: Sequence[MeasuredChange]) -> dict[str, Any]:
    """Plain values: what was measured on, and one entry for each change, all together last."""
    changes = []
    for one in measured:
        difference = None if one.change is None else one.change.difference._asdict()
        others = [] if one.change is None else list(one.change.others)
        changes.append({"change": difference, "with": others, "same_as": one.same_as, **asdict(one.move)})
    return {"data": data.label, "changes": changes}


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for arguments that cannot be used, with one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        _check_options(options)
        if options.heatmap:
            _heatmap(options)
        elif options.table:
            _table(options)
        else:
            _compare(options)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"spec_diff: {error}", file=sys.stderr)
        return 2
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together and for files that could not be written."""
    mode = "--heatmap" if options.heatmap else "--table" if options.table else "A B"
    unused = {
        "A and B": options.left is not None and mode != "A B",
        "--specs": options.specs is not None and mode != "--heatmap",
        "--layer": options.layer is not None and mode == "--table",
        "--json": options.json is not None and mode == "--table",
    }
    for name in (name for name, given in unused.items() if given):
        raise ValueError(f"{name} has no use with {mode}")
    for file in (options.json, options.heatmap):
        if file is not None:
            check_output(file)


def _compare(options: argparse.Namespace) -> None:
    if options.left is None or options.right is None:
        raise ValueError("give two specs, A and B, or one of --heatmap and --table")
    left, right = spec_from_label(options.left), spec_from_label(options.right)
    print(f"A  {left.name}  {left.fingerprint}\nB  {right.name}  {right.fingerprint}\n")
    differences = spec_diff(left, right)
    print(format_diff(differences, "A", "B") or "No field differs.")
    reports = []
    for data in _inputs(options) if differences else ():
        measured = measure_changes(data, left, right)
        print(f"\nOne field at a time from A's value to B's, on {data.label}:\n\n{format_changes(measured)}")
        reports.append(to_json(data, measured))
    if differences:
        print(f"\n{_LEGEND}")
    if options.json:
        specs = {
            side: {"fingerprint": spec.fingerprint, **spec.to_dict()}
            for side, spec in (("A", left), ("B", right))
        }
        fields = [difference._asdict() for difference in differences]
        options.json.write_text(
            json.dumps({**specs, "differences": fields, "measured": reports}, indent=1) + "\n"
        )


def _heatmap(options: argparse.Namespace) -> None:
    specs = [spec_from_label(label) for label in options.specs or CATALOGUE]
    data = _inputs(options)[0]
    matrix = pairwise_l2(data, specs)
    draw([spec.name for spec in specs], matrix, data.label, options.heatmap)
    if options.json:
        report = {"data": data.label, "specs": [spec.name for spec in specs], "relative_l2": matrix}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{options.heatmap}: {len(specs)} specs, {data.label}")


def _table(options: argparse.Namespace) -> None:
    distributions = [options.distribution] if options.distribution else list(ROW_SIGMA)
    shape = _shape(options, SHAPE)
    sizes = {name: measure_sizes(synthetic_layer(shape, name, options.seed)) for name in distributions}
    print(f"{shape}, seed {options.seed}\n\n{format_sizes(sizes)}")


def _inputs(options: argparse.Namespace) -> list[LayerInput]:
    if options.layer:
        return [load_layer(options.layer)]
    names = [options.distribution] if options.distribution else ["gaussian", "heavy"]
    return [synthetic_layer(_shape(options, LayerShape()), name, options.seed) for name in names]


def _shape(options: argparse.Namespace, default: LayerShape) -> LayerShape:
    given = {name: getattr(options, name) for name in asdict(default) if getattr(options, name) is not None}
    return replace(default, **given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.spec_diff",
        description="Where two execution specs differ, and what each difference moves.",
    )
    parser.add_argument("left", nargs="?", metavar="A", help="a spec: name, or name[field=value,...]")
    parser.add_argument("right", nargs="?", metavar="B", help="another")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--heatmap", type=Path, metavar="FILE", help="draw all pairs of specs into a PNG or PDF"
    )
    modes.add_argument("--table", action="store_true", help="measure a list of single fields, as Markdown")
    parser.add_argument(
        "--specs", nargs="+", metavar="SPEC", help="those in the heat map (default: the catalogue)"
    )
    parser.add_argument(
        "--layer", type=Path, metavar="FILE", help="safetensors: x, topk_ids, topk_weights, w13, w2"
    )
    parser.add_argument(
        "--distribution", choices=list(ROW_SIGMA), help="synthetic activations (default: several)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of synthetic layers (default: 0)")
    for name, default in asdict(LayerShape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"default: {default}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers too")
    return parser


if __name__ == "__main__":
    raise SystemExit(end_quietly(main))
