"""How the learner's ranks share out the model and the batch, and what of that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from learner.config import LearnerConfig
from learner.families.architecture import Architecture


@dataclass(frozen=True)
class Layout:
    """Megatron's: ranks = tensor x pipeline x data; the experts of a stage are spread over `expert` of its
    tensor x data ranks, and each of these experts is whole on its rank.
    """

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    data: int = 1

    @classmethod
    def of(cls, config: LearnerConfig) -> Layout:
        return cls(
            config.tensor_parallel, config.expert_parallel, config.pipeline_parallel, config.data_parallel
        )

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same experts."""
        return self.tensor * self.data // self.expert

    def layers_of(self, stage: int, layers: int) -> int:
        """Layers of a pipeline stage. The counts of all stages sum to `layers`."""
        return layers // self.pipeline + (stage < layers % self.pipeline)

    def __str__(self) -> str:
        return f"TP {self.tensor}, EP {self.expert}, PP {self.pipeline}, DP {self.data}"


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
