"""Rows that are quantised before the layer gets them: the same bits as when it does that itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import backends, reference
from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import ExpertWeights
from kernels.guard import NonFiniteGuard
from kernels.layer_input import LayerShape, synthetic_layer
from kernels.packed_rows import PackedRows, can_pack, record_size
from kernels.quantize import quantize_activation
from kernels.quantizer_spec import ScaleDomain
from kernels.slots import slot_spec

SHAPE = LayerShape(tokens=7, hidden=48, ffn=32, experts=5, top_k=3)
PACKED = [name for name in CATALOGUE if can_pack(named_spec(name))]


def test_specs_whose_rows_stand_alone() -> None:
    assert {"minite", "minite_expert", "strict", "te_per_token"} <= set(PACKED)
    for name in PACKED:
        activation = named_spec(name).activation
        assert activation is not None and activation.outer_domain is ScaleDomain.TOKEN
    for name in ("te_per_tensor", "te_exact", "torchao", "mxfp4", "mxfp8", "fp8_per_token", "bf16"):
        assert not can_pack(named_spec(name))
        assert not backends.REFERENCE.packs(named_spec(name))
        with pytest.raises(ValueError, match=f"rows are not packed under '{name}'"):
            reference.pack_rows(torch.zeros(2, 32), named_spec(name))
    assert can_pack(slot_spec(named_spec("minite"))) and backends.REFERENCE.packs(named_spec("minite"))


@pytest.mark.parametrize("width", [16, 48, 64, 2048])
def test_a_record_holds_what_was_quantised(width: int) -> None:
    spec = named_spec("minite").activation
    assert spec is not None
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(width)).bfloat16()
    bad = torch.arange(6) == 4
    expected = quantize_activation(x, spec)
    packed = PackedRows.of(expected, bad)
    assert packed.shape == (6, width) and packed.records.shape == (6, record_size(width))
    found = packed.quantized()
    for part in ("codes", "block_scales", "outer_scales"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), part
    assert torch.equal(packed.bad, bad)
    assert record_size(2048) == 1168  # of 4096 bytes of BF16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PACKED)
def test_the_layer_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Of tokens, and of slots that share records in any order."""
    spec = named_spec(name)
    given = synthetic_layer(SHAPE, "heavy", 1)
    x, ids, p = given.x.to(dtype), given.topk_ids, given.topk_weights
    weights = ExpertWeights.quantize(given.w13, given.w2, spec)
    prepared = reference.prepare(weights, spec)
    packed = reference.pack_rows(x, spec)
    assert torch.equal(
        reference.forward(packed, ids, p, prepared, spec), reference.forward(x, ids, p, prepared, spec)
    )
    own = slot_spec(spec)
    prepared, index = reference.prepare(weights, own), torch.tensor([6, 0, 0, 3, 6, 2, 0, 5, 1])
    slots = (torch.arange(9)[:, None] % 5, torch.rand(9, 1))
    shared = replace(packed, index=index)
    found, expected = (reference.forward(rows, *slots, prepared, own) for rows in (shared, x[index]))
    assert torch.equal(found, expected)


def test_rows_that_are_not_finite_are_reported_as_ever() -> None:
    spec = named_spec("minite")
    given = synthetic_layer(SHAPE, "gaussian", 2)
    given.x[3, 5], given.x[5, 40] = torch.nan, torch.inf
    prepared = reference.prepare(ExpertWeights.quantize(given.w13, given.w2, spec), spec)
    messages = []
    for rows in (given.x, reference.pack_rows(given.x, spec)):
        guard = NonFiniteGuard(3, SHAPE.experts, first_expert=10)
        reference.forward(rows, given.topk_ids, given.topk_weights, prepared, spec, guard)
        with pytest.raises(ValueError, match="layer 3: FC1 input of expert 1") as raised:
            guard.check()
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    with pytest.raises(ValueError, match="rows of FC1 input held values that are not finite"):
        reference.forward(rows, given.topk_ids, given.topk_weights, prepared, spec)
