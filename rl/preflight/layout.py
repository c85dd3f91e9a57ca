"""What cannot be in the way in which the learner's ranks share out the model and the batch."""

from __future__ import annotations

from collections.abc import Iterator

from learner.families.architecture import Architecture
from learner.layout import Layout


def layout_problems(layout: Layout, model: Architecture, sequences: int) -> Iterator[str]:
    """What does not divide. sequences: of one update."""
    tensor, expert, pipeline, data = layout.tensor, layout.expert, layout.pipeline, layout.data
    for what, value in (
        ("attention heads", model.heads),
        ("key-value heads", model.kv_heads),
        ("entries of the vocabulary", model.vocab),
    ):
        if value % tensor:
            yield f"learner.tensor_parallel={tensor} does not divide the model's {value} {what}"
    if model.experts % expert:
        yield f"learner.expert_parallel={expert} does not divide the model's {model.experts} experts"
    if tensor * data % expert:
        yield (
            f"learner.expert_parallel={expert} does not divide the {tensor * data} ranks of a pipeline stage"
            f" (tensor_parallel={tensor} x data_parallel={data})"
        )
    if model.layers % pipeline:
        yield f"learner.pipeline_parallel={pipeline} does not divide the model's {model.layers} layers"
    if sequences < data:
        yield (
            f"learner.data_parallel={data} is more than the {sequences} sequences of an update: a rank would have"
            " nothing to learn from"
        )
