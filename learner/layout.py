"""Where each parameter lies when processes share a model. Pure.

    tensor      attention and embeddings are cut within a layer; activations between them by tokens
    pipeline    layers are cut into stages of equally many
    data        replicas, each of which takes its own rows of every mini-batch
    expert      the experts of a layer are shared out over processes of one stage, whole: over any of tensor x data

Ranks are numbered as Megatron does: tensor, then data, then pipeline, the first of them fastest. Experts are cut by the
same numbers within a stage: expert shard r % expert of replica r // expert, with r = tensor rank + tensor x data rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from learner.config import LearnerConfig
from learner.families.architecture import Architecture
from learner.mapping import is_expert

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYERS = "decoder.layers."
# Which dimension tensor parallelism cuts, by the end of a parameter's name.
_TENSOR_CUT = {
    EMBEDDING: 0,
    HEAD: 0,
    ".self_attention.linear_qkv.weight": 0,  # whole key-value groups
    ".self_attention.linear_proj.weight": 1,
}


@dataclass(frozen=True)
class Box:
    """A block of a tensor: `shape` elements from `start` on, in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """What both have, in the coordinates of the whole tensor; None for nothing."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(end - a for end, a in zip(ends, start, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def within(self, outer: Box) -> Box:
        """The same block counted from the start of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)


@dataclass(frozen=True)
class Layout:
    """How many processes share what; see above. `expert` must divide `tensor` x `data`."""

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
    def stage_ranks(self) -> int:
        """Processes that hold the same layers."""
        return self.tensor * self.data

    @property
    def ranks(self) -> int:
        return self.stage_ranks * self.pipeline

    @property
    def expert_copies(self) -> int:
        """Processes that hold the same experts."""
        return self.stage_ranks // self.expert

    def layers_of(self, stage: int, layers: int) -> int:
        """Layers of a pipeline stage. The counts of all stages sum to `layers`."""
        return layers // self.pipeline + (stage < layers % self.pipeline)

    def __str__(self) -> str:
        return f"TP {self.tensor}, EP {self.expert}, PP {self.pipeline}, DP {self.data}"

    def problems(self, model: Architecture) -> Iterator[str]:
        """Why `model` cannot be shared like this."""
        if self.stage_ranks % self.expert:
            yield (
                f"expert_parallel={self.expert} must divide tensor_parallel x data_parallel = {self.stage_ranks}, the"
                " processes that hold the same layers"
            )
        for key, count, counted, number in (
            ("tensor_parallel", self.tensor, "key-value heads", model.kv_heads),
            ("tensor_parallel", self.tensor, "tokens of the vocabulary", model.vocab),
            ("expert_parallel", self.expert, "experts", model.experts),
            ("pipeline_parallel", self.pipeline, "layers", model.layers),
        ):
            if number % count:
                yield f"{key}={count} does not divide the model's {number} {counted}"

    def place(self, rank: int) -> Place:
        return Place(self, rank)

    def first_holder(self, name: str, model: Architecture) -> dict[int, int]:
        """The lowest rank that holds each shard of the parameter `name` (a global name), by the number of the shard."""
        stage = self.stage_of(name, model)
        return {shard: stage * self.stage_ranks + shard for shard in range(self.shards(name)[1])}

    def shards(self, name: str) -> tuple[int, int]:
        """The dimension in which a parameter is cut, and into how many parts."""
        if is_expert(name):
            return 0, self.expert
        cuts = [dim for end, dim in _TENSOR_CUT.items() if name.endswith(end)]
        return (cuts[0], self.tensor) if cuts else (0, 1)

    def stage_of(self, name: str, model: Architecture) -> int:
        """The first stage that holds a parameter."""
        if name.startswith(_LAYERS):
            return int(name.removeprefix(_LAYERS).split(".")[0]) // (model.layers // self.pipeline)
        return 0 if name == EMBEDDING else self.pipeline - 1


@dataclass(frozen=True)
class Place:
    """One process in a layout."""

    layout: Layout
    rank: int

    @property
    def stage(self) -> int:
        return self.rank // self.layout.stage_ranks

    @property
    def tensor(self) -> int:
        return self.rank % self.layout.tensor

    @property
    def data(self) -> int:
        return self.rank % self.layout.stage_ranks // self.layout.tensor

    @property
    def expert(self) -> int:
        return self.rank % self.layout.stage_ranks % self.layout.expert

    @property
    def first_stage(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.layout.pipeline - 1

    def layers(self, model: Architecture) -> range:
        """The layers that it holds."""
        count = model.layers // self.layout.pipeline
        return range(self.stage * count, (self.stage + 1) * count)

    def global_name(self, name: str, model: Architecture) -> str:
        """The name that a parameter of this process's model has in the whole model."""
        if name.startswith(_LAYERS):
            layer, rest = name.removeprefix(_LAYERS).split(".", 1)
            return f"{_LAYERS}{int(layer) + self.layers(model).start}.{rest}"
        # The last stage of a model with tied embeddings holds a copy of them as its output layer.
        return EMBEDDING if name == HEAD and model.tied_embeddings else name

    def shard(self, name: str) -> int:
        """Which shard of a parameter (a global name) it holds, if it holds any."""
        return self.expert if is_expert(name) else self.tensor % self.layout.shards(name)[1]

    def box(self, name: str, shape: tuple[int, ...]) -> Box:
        """The block that it holds of a parameter (a global name) of which it holds `shape`."""
        dim, _ = self.layout.shards(name)
        start = [0] * len(shape)
        if shape:
            start[dim] = self.shard(name) * shape[dim]
        return Box(tuple(start), shape)


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)
