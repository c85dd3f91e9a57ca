"""Experts that come in any order are handed over once, when their layer is complete, and hold no memory then."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from sampler.loading import IncomingExperts, shape_only

E, H, F = 3, 4, 2
SHAPES = {"w13_weight": (E, 2 * F, H), "w2_weight": (E, H, F)}
PIECES = list(itertools.product(range(E), ("w1", "w2", "w3")))


def load(
    param: nn.Parameter, loaded: torch.Tensor, name: str, shard: str, expert: int, success: bool
) -> bool | None:
    """As vLLM's loader writes one matrix of one expert."""
    own = param.data[expert]
    {"w1": own[:F], "w3": own[F:], "w2": own}[shard].copy_(loaded)
    return True if success else None


def parameters() -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(shape_only(shape, torch.float32), requires_grad=False)
        for name, shape in SHAPES.items()
    }


def held(made: Mapping[str, nn.Parameter]) -> int:
    return sum(own.data.untyped_storage().nbytes() for own in made.values())


def test_a_complete_layer_is_handed_over_and_nothing_stays() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    got: list[dict[str, torch.Tensor]] = []
    made = parameters()
    incoming = IncomingExperts(
        "layer", made, load, lambda loaded: got.append({name: t.clone() for name, t in loaded.items()})
    )
    assert held(made) == 8 and {name: tuple(p.shape) for name, p in made.items()} == SHAPES
    order = PIECES.copy()
    random.Random(1).shuffle(order)
    for number, (expert, shard) in enumerate(order):
        assert len(got) == 0 and held(made) == (8 if number == 0 else 4 * 3 * E * H * F)
        name = "w2_weight" if shard == "w2" else "w13_weight"
        own = whole[name][expert]
        piece = {"w1": own[:F], "w3": own[F:], "w2": own}[shard]
        assert incoming(made[name], piece, name, shard_id=shard, expert_id=expert, return_success=True)
    [found] = got
    assert all(torch.equal(found[name], whole[name]) for name in SHAPES)
    assert held(made) == 8
    incoming.close()


def test_what_lacks_or_comes_twice_is_named() -> None:
    made = parameters()
    incoming = IncomingExperts("layer 7", made, load, lambda loaded: None)
    incoming(made["w2_weight"], torch.zeros(H, F), "w2_weight", "w2", 0)
    with pytest.raises(ValueError, match="layer 7: w2 of expert 0 came twice"):
        incoming(made["w2_weight"], torch.zeros(H, F), "w2_weight", "w2", 0)
    with pytest.raises(
        ValueError, match="layer 7: the checkpoint lacks experts: w1 of expert 0, of 8 matrices"
    ):
        incoming.close()
