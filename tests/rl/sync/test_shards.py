"""Samplers of several processes in a weight sync: every process keeps its part, and what it keeps is proved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.experts import OPERANDS, StoredLayout, derived_name, expert_layout, wire_name
from kernels.reference import prepare
from kernels.shard import Shard
from rl.actor_group import ActorGroup
from rl.config.cluster import SyncConfig
from rl.sync.protocol import AttestationError
from rl.sync.receiver import Receiver
from rl.sync.weight_sync import WeightSync
from tests.rl.sync.test_weight_sync import Local, in_process, learner_actor, sampler_actor
from tests.rl.sync.worlds import EXPERTS, MAP, Learner, Model, wanted

__all__ = ["in_process"]  # a fixture of all tests here
CODECS = ["packed", "delta", "bf16"]


def shards_of(rank: int, columns: bool) -> dict[str, Shard]:
    """Of two ranks, which hold four and three rows of the embedding (or half of its columns), and an expert each."""
    rows = Shard(0, 0, 4, 7) if rank == 0 else Shard(0, 4, 3, 7)
    shards = {"model.embed_tokens.weight": Shard.even(1, 32, rank, 2) if columns else rows}
    shards["odd"] = Shard(0, 0, 3, 3) if rank == 0 else Shard(0, 3, 0, 3)  # nothing is left for rank 1
    learner = Learner()
    for layer, weights in enumerate(learner._weights(MAP, StoredLayout.ROWS)):
        parts = [*expert_layout(EXPERTS, learner.hidden, learner.ffn, weights.spec), *OPERANDS]
        names = [wire_name(layer, part) for part in parts]
        names += [derived_name(layer, part) for part in prepare(weights, weights.spec).derived()]
        shards |= dict.fromkeys(names, Shard.even(0, EXPERTS, rank, 2))
    return shards


class PartOfModel(Model):
    """What one of two ranks holds."""

    def __init__(self, rank: int, columns: bool = False) -> None:
        self.own = shards_of(rank, columns)
        super().__init__(50)
        self.shards = self.own
        self._live = {
            name: self.own[name].of(tensor).clone() if name in self.own else tensor
            for name, tensor in self._live.items()
        }

    def holds(self, content: dict[str, torch.Tensor]) -> bool:
        held = {**self.tensors(), **self.refresh()}
        parts = {name: self.own[name].of(t) if name in self.own else t for name, t in content.items()}
        return held.keys() == parts.keys() and all(
            torch.equal(part.contiguous().view(torch.uint8), held[name].view(torch.uint8))
            for name, part in parts.items()
        )


def of_two_ranks(columns: bool = False) -> ActorGroup:
    members = []
    for rank in range(2):
        actor = sampler_actor(50)
        actor.receiver = Receiver(PartOfModel(rank, columns))
        members.append(Local(actor))
    return ActorGroup(members, frozenset())  # type: ignore[arg-type]


def holders(sampler: ActorGroup) -> Iterator[PartOfModel]:
    for member in sampler.members:
        yield member.actor.receiver.holder  # type: ignore[attr-defined]


def start(learner: Learner, *samplers: ActorGroup, codec: str) -> WeightSync:
    return WeightSync(Local(learner_actor(learner)), samplers, MAP, SyncConfig(codec=codec, bucket_mib=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_rank_holds_its_part_of_every_version(codec: str, columns: bool) -> None:
    learner, samplers = Learner(), [of_two_ranks(columns), of_two_ranks(columns)]
    sync = start(learner, *samplers, codec=codec)
    for version in (1, 2, 3):
        learner.step()
        metrics = sync.sync(version)
        for sampler in samplers:
            assert all(holder.holds(wanted(learner)) for holder in holders(sampler))
            assert len({member.held() for member in sampler.members}) == 1
    if codec == "delta":
        assert 0 < metrics["sync/changed_share"] < 0.3


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", wire_name(0, "w2.codes")])
def test_another_ranks_part_is_not_taken_for_the_own(codec: str, name: str) -> None:
    """As a receiver would hold it that cuts at the wrong place."""
    learner, sampler = Learner(), of_two_ranks(columns=True)
    sync = start(learner, sampler, codec=codec)
    sync.sync(1)
    holder = list(holders(sampler))[1]
    others = shards_of(0, columns=True)
    travelling = (name, name.replace("w2.codes", "w2.weight"))  # packed, or as operands
    holder.shards = {**holder.shards, **{key: others[key] for key in travelling}}
    learner.step(every=1)
    with pytest.raises(
        AttestationError, match=rf"sampler 0, rank 1, holds other bytes than were sent: .*{name}"
    ):
        sync.sync(2)
    assert all(holder.closed is not None for holder in holders(sampler))


@pytest.mark.parametrize("stage", ["begin", "receive", "end", "commit"])
def test_the_death_of_one_rank_is_that_of_its_sampler(stage: str) -> None:
    learner, samplers = Learner(), [of_two_ranks(), of_two_ranks()]
    sync = start(learner, *samplers, codec="delta")
    sync.sync(1)
    samplers[0].members[1].dies_in = stage  # type: ignore[attr-defined]
    learner.step()
    sync.sync(2)
    assert list(sync.lost()) == [0]
    assert all(holder.holds(wanted(learner)) for holder in holders(samplers[1]))
    again = of_two_ranks()
    sync.rejoin(0, again)
    assert all(holder.holds(wanted(learner)) and holder.version == 2 for holder in holders(again))
    learner.step()
    assert sync.sync(3)["sync/changed_share"] < 0.3
    assert all(holder.holds(wanted(learner)) for s in (again, samplers[1]) for holder in holders(s))


def test_samplers_that_share_out_otherwise_are_refused() -> None:
    with pytest.raises(ValueError, match="must share tensors out over their processes alike"):
        start(Learner(), of_two_ranks(), of_two_ranks(columns=True), codec="packed")


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))
def test_even_parts_put_together_are_the_whole(ranks: int, length: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = ranks * length
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    shards = [Shard.even(dim, shape[dim], rank, ranks) for rank in range(ranks)]
    parts = [shard.of(whole) for shard in shards]
    assert torch.equal(torch.cat(parts, dim), whole)
    assert all(
        shard.whole(tuple(part.shape)) == tuple(shape) for shard, part in zip(shards, parts, strict=True)
    )
    shape[dim] += 1
    with pytest.raises(ValueError, match="is no part of a tensor"):
        shards[0].of(torch.zeros(shape))


def test_what_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="7 cannot be cut into 2 equal parts"):
        Shard.even(0, 7, 0, 2)
