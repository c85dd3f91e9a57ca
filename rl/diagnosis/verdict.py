"""What the study of boundaries says, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rl.diagnosis.boundaries import LayerResult
from rl.diagnosis.compare import PartDifference


def summary_of(results: Sequence[LayerResult]) -> str:
    """The verdict of a condition in one sentence or two."""
    wrong = [result for result in results if result.first is not None]
    if not wrong:
        text = (
            f"On the same input the expert layers examined ({len(results)}) are equal bit for bit in both engines:"
            " whatever gap there is comes from outside them, through their inputs."
        )
        outside = [f for f in results[0].diff if f.field.startswith("model.")]
        if outside:
            named = "; ".join(f"{f.field}: {f.left} against {f.right}" for f in outside)
            text += f" The specs differ in how the rest of the model is computed: {named}."
        if any(result.shared_scale for result in results):
            text += (
                " But the tokens of a batch share a scale (activation.outer_domain=tensor), and the engines cut"
                " batches differently: in a run the same token is quantised with another scale."
            )
        return text
    return sentence(wrong[0]) + (
        f" It is so in {len(wrong)} of the {len(results)} layers examined." if len(results) > 1 else ""
    )


def sentence(result: LayerResult) -> str:
    """What one layer shows."""
    [difference] = [d for d in result.differences if d.part == result.first]
    what = _amount(difference)
    text = f"Layer {result.layer}: the engines part at the {result.boundary}, in {result.first} ({what})."
    if result.fields:
        fields = "; ".join(f"{f.field}: {f.left} against {f.right}" for f in result.fields)
        text += f" Spec fields that do this: {fields}."
    elif result.diff:
        text += f" No single one of the {len(result.diff)} differing spec fields does this alone."
    for deviation in result.deviations:
        named = "; ".join(deviation.named) or "no single spec field explains it"
        text += f" The {deviation.engine} engine does not compute its own spec in {deviation.part}: {named}."
    if not result.diff and not result.deviations:
        text += " Both engines say that they run the same spec."
    return text


def _amount(difference: PartDifference) -> str:
    parts = []
    for value, name in (
        (difference.memory, "bytes in memory"),
        (difference.outer_scales, "outer scales"),
        (difference.scales, "block scales"),
        (difference.codes, "codes"),
    ):
        if value and not (name.startswith("bytes") and difference.boundary != "quantised operands"):
            parts.append(f"{100 * value:.3g} % of {name}")
    parts.append(
        f"{100 * difference.values:.3g} % of values, relative L2 {difference.relative_l2:.3g}"
        if difference.values
        else "no value"
    )
    return ", ".join(parts)
