"""Slots grouped on the device against `kernels.routing` and against what the permutation must be."""

from __future__ import annotations

import pytest
import torch

from kernels.routing import Routing
from kernels.triton import grouping
from kernels.triton.grouping import ExpertGroups, capacity, group
from tests.kernels.triton_env import DEVICE

CASES = {
    "empty experts": (300, 3, 40, 128),
    "one token": (1, 2, 7, 128),
    "no tokens": (0, 2, 4, 128),
    "small alignment": (50, 8, 40, 16),
    "one expert": (70, 1, 1, 32),
}


def draw(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator) * torch.linspace(0.2, 1, experts)
    return scores.topk(top_k).indices if tokens else torch.zeros(0, top_k, dtype=torch.int64)


def check(groups: ExpertGroups, ids: torch.Tensor, experts: int, align: int) -> None:
    routing = Routing.group(ids, experts)
    rows: list[int] = []
    tiles: list[int] = []
    starts = []
    for expert in range(experts):
        starts.append(len(rows))
        own = routing.order[routing.offsets[expert] : routing.offsets[expert + 1]].tolist()
        rows += own + [-1] * (-len(own) % align)
        tiles += [expert] * (-(-len(own) // align))
    assert groups.starts.tolist() == [*starts, len(rows)]
    assert groups.counts.tolist() == [
        b - a for a, b in zip(routing.offsets, routing.offsets[1:], strict=False)
    ]
    assert groups.slot_of_row.tolist() == rows + [-1] * (groups.rows - len(rows))
    assert groups.tile_expert.tolist() == tiles + [-1] * (groups.rows // align - len(tiles))
    assert [rows[row] for row in groups.row_of_slot.flatten().tolist()] == list(range(ids.numel()))
    expert_of_row = groups.expert_of_row()[: len(rows)].cpu()
    assert torch.equal(expert_of_row[torch.tensor(rows) >= 0], routing.experts)


@pytest.fixture(params=["in one launch", "in several"], autouse=True)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in several":
        monkeypatch.setattr(grouping, "_FEW", 0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_groups(name: str, dtype: torch.dtype) -> None:
    tokens, top_k, experts, align = CASES[name]
    ids = draw(tokens, top_k, experts)
    groups = group(ids.to(dtype).to(DEVICE), experts, align)
    assert groups.rows == capacity(ids.numel(), experts, align)
    check(groups, ids, experts, align)


def test_all_slots_at_one_expert() -> None:
    ids = torch.full((129, 1), 2)
    check(group(ids.to(DEVICE), 4), ids, 4, 128)


def test_capacity_holds_the_worst_distribution() -> None:
    for slots, experts, align in ((5, 8, 128), (1000, 3, 16), (257, 64, 128)):
        spread = [1] * min(experts, slots)
        spread[0] += slots - len(spread)
        assert sum(-(-count // align) * align for count in spread) <= capacity(slots, experts, align)


def test_ids_that_do_not_exist_have_no_row() -> None:
    ids = torch.tensor([[0, 7], [-1, 1], [2, 0]])
    groups = group(ids.to(DEVICE), 3, 16)
    assert groups.row_of_slot.tolist() == [[0, -1], [-1, 16], [32, 1]]
    assert groups.counts.tolist() == [2, 1, 1]


@pytest.mark.parametrize(
    ("ids", "experts", "align"),
    [
        (torch.zeros(3, dtype=torch.int64), 4, 128),
        (torch.zeros(3, 0, dtype=torch.int64), 4, 128),
        (torch.zeros(3, 2), 4, 128),
        (torch.zeros(3, 2, dtype=torch.int64), 4, 48),
        (torch.zeros(3, 2, dtype=torch.int64), 0, 128),
    ],
)
def test_refusals(ids: torch.Tensor, experts: int, align: int) -> None:
    with pytest.raises(ValueError):
        group(ids.to(DEVICE), experts, align)
