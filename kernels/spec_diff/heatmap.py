"""All pairs of some execution specs: how far their layer outputs are apart, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernels.layer_input import LayerInput
from kernels.spec import ExecutionSpec
from kernels.spec_diff.sensitivity import relative_l2, run_layer


def pairwise_l2(data: LayerInput, specs: Sequence[ExecutionSpec]) -> list[list[float]]:
    """Row i, column j: the relative L2 distance of spec j's output from spec i's. Raises ValueError as `run_layer`."""
    outputs = [run_layer(data, spec).output for spec in specs]
    return [[relative_l2(left, right) for right in outputs] for left in outputs]


def draw(names: Sequence[str], matrix: Sequence[Sequence[float]], title: str, path: Path) -> None:
    """Write the matrix to `path` (PNG or PDF, by its ending): cells in per cent, colours on a logarithmic scale.

    A cell "0" has equal values; it is white.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    positive = [value for row in matrix for value in row if 0 < value < float("inf")]
    norm = LogNorm(min(positive, default=1e-6), max(positive, default=1.0))
    size = 2.5 + 0.48 * len(names)
    figure, axes = plt.subplots(figsize=(size + 1.5, size), layout="constrained")
    colours = plt.get_cmap("viridis").with_extremes(bad="white")
    image = axes.imshow([[value or float("nan") for value in row] for row in matrix], norm=norm, cmap=colours)
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            dark = value > 0 and norm(value) < 0.6
            axes.text(
                j, i, percent(value), ha="center", va="center", size=7, color="white" if dark else "black"
            )
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylabel("spec that the distance is relative to")
    axes.set_title(f"relative L2 distance of layer outputs, per cent\n{title}", fontsize=11)
    figure.colorbar(image, ax=axes, shrink=0.8, label="relative L2")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def percent(value: float) -> str:
    """Two digits that fit a cell, without the sign."""
    scaled = 100 * value
    if scaled == 0:
        return "0"
    if scaled < 0.01:
        return f"{scaled:.0e}".replace("e-0", "e-")
    if scaled < 0.995:
        return f"{scaled:.2f}"[1:]
    return f"{scaled:.1f}" if scaled < 9.95 else f"{scaled:.0f}"
