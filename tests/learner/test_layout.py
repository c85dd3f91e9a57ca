"""Every element of every parameter is on some rank, and once among those that are the first to hold it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.config import LearnerConfig
from learner.families.architecture import Architecture
from learner.layout import Box, Layout
from learner.mapping import parameter_shapes

MODEL = Architecture(
    layers=4,
    hidden=8,
    heads=8,
    kv_heads=4,
    head_dim=2,
    experts=8,
    experts_per_token=2,
    expert_ffn=4,
    vocab=16,
    max_positions=8,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=False,
    qk_norm=True,
    renormalize_router=True,
)
SHAPES = parameter_shapes(MODEL)
SIZES = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tensor, data, pipeline = draw(SIZES), draw(SIZES), draw(SIZES)
    expert = draw(st.sampled_from([n for n in (1, 2, 4, 8) if tensor * data % n == 0]))
    return Layout(tensor, expert, pipeline, data)


def held(layout: Layout, rank: int, name: str) -> torch.Tensor:
    """bool like the parameter: what the rank holds of it."""
    place, shape = layout.place(rank), list(SHAPES[name])
    dim, count = layout.shards(name)
    shape[dim] //= count
    mask = torch.zeros(SHAPES[name], dtype=torch.bool)
    mask[place.box(name, tuple(shape)).slices] = True
    return mask


@given(layouts(), st.sampled_from(sorted(SHAPES)))
def test_first_holders_tile_each_parameter(layout: Layout, name: str) -> None:
    holders = layout.first_holder(name, MODEL)
    total = torch.stack([held(layout, rank, name).int() for rank in holders.values()]).sum(0)
    assert (total == 1).all()
    stage = layout.stage_of(name, MODEL)
    for shard, rank in holders.items():
        place = layout.place(rank)
        assert place.stage == stage and place.shard(name) == shard
        others = [
            r
            for r in range(layout.ranks)
            if layout.place(r).stage == stage and layout.place(r).shard(name) == shard
        ]
        assert rank == min(others)


@given(layouts())
def test_stages_share_the_layers_out_in_order(layout: Layout) -> None:
    places = [layout.place(rank) for rank in range(layout.ranks)]
    assert len({(p.tensor, p.data, p.stage) for p in places}) == layout.ranks
    for place in places:
        assert [place.stage] * len(place.layers(MODEL)) == [
            layout.stage_of(place.global_name(f"decoder.layers.{i}.mlp.router.weight", MODEL), MODEL)
            for i in range(len(place.layers(MODEL)))
        ]
    assert [layer for p in places if p.tensor == p.data == 0 for layer in p.layers(MODEL)] == list(range(4))


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 6), st.integers(0, 6), st.integers(1, 6)),
        min_size=1,
        max_size=3,
    )
)
def test_an_overlap_is_what_both_boxes_have(sides: list[tuple[int, int, int, int]]) -> None:
    left = Box(tuple(s[0] for s in sides), tuple(s[1] for s in sides))
    right = Box(tuple(s[2] for s in sides), tuple(s[3] for s in sides))
    masks = [torch.zeros([12] * len(sides), dtype=torch.bool) for _ in range(3)]
    masks[0][left.slices] = masks[1][right.slices] = True
    overlap = left.overlap(right)
    if overlap is not None:
        masks[2][overlap.slices] = True
        assert masks[2][left.slices][overlap.within(left).slices].all()
    assert torch.equal(masks[2], masks[0] & masks[1])


def test_what_does_not_divide_is_named() -> None:
    layout = Layout.of(LearnerConfig(tensor_parallel=3, expert_parallel=3, pipeline_parallel=5))
    assert list(layout.problems(MODEL)) == [
        "tensor_parallel=3 does not divide the model's 4 key-value heads",
        "tensor_parallel=3 does not divide the model's 16 tokens of the vocabulary",
        "expert_parallel=3 does not divide the model's 8 experts",
        "pipeline_parallel=5 does not divide the model's 4 layers",
    ]
