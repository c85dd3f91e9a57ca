"""An expert layer shared out over ranks against the layer in one piece, without processes: the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest
import torch

from kernels import backends
from kernels.backends import REFERENCE, ExpertKernels
from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights
from kernels.guard import NonFiniteGuard
from kernels.shard import Shard
from kernels.slots import slot_spec
from kernels.spec import Combine, ExecutionSpec, FloatType
from sampler.expert_parallel import SharedExperts

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 9, 128, 128, 4, 3
SPECS = {
    name: named_spec(name)
    for name in ("minite", "minite_expert", "bf16", "fp32", "flashinfer_exact", "te_per_tensor", "te_exact")
} | {
    "expert order": replace(named_spec("minite"), combine=Combine.EXPERT_ORDER),
    "fma": replace(named_spec("minite"), combine=Combine.SLOT_ORDER_FMA),
    "wide rows": replace(named_spec("minite"), fc2_output=FloatType.FP32, output=FloatType.FP32),
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Layer:
    """x, ids, coefficients; zero: expert 0 gives FC2 rows of -0."""

    def __init__(self, spec: ExecutionSpec, kernels: ExpertKernels) -> None:
        g = torch.Generator().manual_seed(0)
        self.spec, self.kernels = spec, kernels
        x = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16()
        ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(1)[:, :TOP_K]
        ids[0], ids[1] = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0])  # of one rank alone
        p = torch.rand(TOKENS, TOP_K, generator=g).softmax(1)
        w13 = torch.randn(EXPERTS, 2 * FFN, HIDDEN, generator=g) / 8
        w2 = torch.randn(EXPERTS, HIDDEN, FFN, generator=g) / 6
        w2[0] = -1e-30  # products underflow to zeros of both signs
        self.slots = x.to(DEVICE), ids.to(DEVICE), p.to(DEVICE)
        self.masters = w13.to(DEVICE), w2.to(DEVICE)

    def whole(self) -> torch.Tensor:
        weights = self.kernels.quantize(*self.masters, self.spec)
        prepared = self.kernels.prepare(weights, self.spec, compact=True)
        return self.kernels.forward(*self.slots, prepared, self.spec, NonFiniteGuard(0, EXPERTS))

    def shared(self, ranks: int) -> list[torch.Tensor]:
        """The output on every rank."""
        shards = [Shard.even(0, EXPERTS, rank, ranks) for rank in range(ranks)]
        every = [self._own_slots(shard) for shard in shards]
        total = reduce(torch.add, every)
        x, ids, p = self.slots
        return [
            SharedExperts(shard, lambda own, own_slots=own_slots: self._sum(own, own_slots, total)).layer(
                x, ids, p, self._own_experts(shard), self.kernels, self.spec
            )
            for shard, own_slots in zip(shards, every, strict=True)
        ]

    def _sum(self, own: torch.Tensor, expected: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        assert torch.equal(own, expected)
        return total

    def _own_slots(self, shard: Shard) -> torch.Tensor:
        x, ids, p = self.slots
        found: list[torch.Tensor] = []

        def keep(own: torch.Tensor) -> torch.Tensor:
            found.append(own)
            return own

        SharedExperts(shard, keep).layer(x, ids, p, self._own_experts(shard), self.kernels, self.spec)
        return found[0]

    def _own_experts(self, shard: Shard):  # type: ignore[no-untyped-def]
        spec = slot_spec(self.spec)
        weights = self.kernels.quantize(*(shard.of(master) for master in self.masters), self.spec)
        prepared = self.kernels.prepare(ExpertWeights(weights.stored, spec), spec, compact=True)
        guard = NonFiniteGuard(0, shard.length, shard.start)
        return lambda rows, ids, p: self.kernels.forward(rows, ids, p, prepared, spec, guard)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    width = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(width), expected.view(width))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_every_rank_has_the_layer(name: str, ranks: int) -> None:
    layer = Layer(SPECS[name], REFERENCE)
    expected = layer.whole()
    assert expected.abs().max() > 0.01
    for found in layer.shared(ranks):
        assert_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU: minutes in Triton's interpreter"
)
@pytest.mark.parametrize("name", ["minite", "minite_expert"])
def test_every_rank_has_the_layer_of_the_kernels(name: str) -> None:
    """Which compute rows without an expert here, and are told that they count for nothing."""
    layer = Layer(named_spec(name), backends._triton("triton_emulated"))
    expected = layer.whole()
    for found in layer.shared(2):
        assert_equal(found, expected)
