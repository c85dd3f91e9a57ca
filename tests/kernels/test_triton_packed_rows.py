"""Packed rows in Triton kernels against the reference and against the rows themselves, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.backends import _triton
from kernels.catalogue import named_spec
from kernels.guard import NonFiniteGuard
from kernels.layer_input import LayerShape
from kernels.packed_rows import PackedRows
from kernels.probe import listening
from kernels.slots import slot_spec
from kernels.triton import layer, tuning
from kernels.triton.grouping import group
from kernels.triton.packed_rows import permute_packed
from kernels.triton.quantize import permute_quantize
from tests.kernels.test_triton_layer import LARGE, NARROW, SMALL, TILED, TINY, Case, Seen, case_of
from tests.kernels.test_triton_quantize import SPEC, difficult
from tests.kernels.triton_env import DEVICE, GPU

MINITE = named_spec("minite")
WIDE = LayerShape(tokens=700, hidden=2048, ffn=768, experts=16, top_k=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(13, 96), (3, 208), (0, 32)])
def test_records_are_the_references(rows: int, width: int, dtype: torch.dtype) -> None:
    x = difficult(rows, width, seed=rows).clamp(-1e30, 1e30).to(dtype)
    found, expected = layer.pack_rows(x.to(DEVICE), MINITE), reference.pack_rows(x, MINITE)
    assert torch.equal(found.records.cpu(), expected.records) and found.width == expected.width


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "width", "align"),
    [(9, 2, 4, 96, 16), (5, 1, 3, 208, 16), pytest.param(3000, 3, 17, 2048, 128, marks=GPU)],
)
def test_grouped_rows_are_those_of_rows_that_come_as_they_are(
    tokens: int, top_k: int, experts: int, width: int, align: int, counted: bool
) -> None:
    """Records in any order, some of several rows, one of a row that is not finite, and ids that do not exist."""
    generator = torch.Generator().manual_seed(tokens)
    x = difficult(max(tokens // 2, 3), width, seed=tokens).bfloat16()
    x[1, 7] = float("nan")
    index = torch.randint(0, len(x), (tokens,), generator=generator)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator).to(DEVICE)
    x, index = x.to(DEVICE), index.to(DEVICE)
    packed = replace(layer.pack_rows(x, MINITE), index=index)
    rows_of_tokens = x[index]
    counts = [torch.zeros(experts, dtype=torch.int64, device=DEVICE) if counted else None for _ in range(2)]
    groups = group(ids, experts, align)  # after what `permute_quantize` reads
    expected = permute_quantize(
        rows_of_tokens, groups, SPEC, packed=False, decoded=True, bad_counts=counts[0]
    )
    found = permute_packed(packed, groups, counts[1])
    used = int(groups.starts[-1])
    rows = (
        groups.row_of_slot[groups.row_of_slot >= 0].long() if counted else torch.arange(used, device=DEVICE)
    )
    assert found.decoded is not None and expected.decoded is not None
    assert torch.equal(found.decoded[rows].view(torch.int16), expected.decoded[rows].view(torch.int16))
    assert torch.equal(found.bad[rows], expected.bad[rows]) and found.bad[rows].any()
    assert torch.equal(found.outer_scales[rows].nan_to_num(-1), expected.outer_scales[rows].nan_to_num(-1))
    if counts[0] is not None:
        assert torch.equal(counts[0], counts[1]) and counts[0].any()


def of_slots(case: Case) -> tuple[torch.Tensor, PackedRows, tuple[torch.Tensor, torch.Tensor]]:
    """A case's slots as the rank that owns the experts gets them: rows, packed rows; ids and coefficients [S, 1]."""
    top_k = case.ids.shape[1]
    index = torch.arange(len(case.x), device=DEVICE).repeat_interleave(top_k).flip(0)
    packed = replace(layer.pack_rows(case.x, case.spec), index=index)
    ids = case.ids.flatten().flip(0)[:, None]
    return case.x[index], packed, (ids, torch.ones(ids.shape, device=DEVICE))


@pytest.mark.parametrize(
    ("shape", "few", "name"),
    [
        pytest.param(TILED, True, "minite", id="few rows"),
        pytest.param(TINY, False, "minite_expert", id="many rows"),
        *(
            pytest.param(shape, few, name, marks=GPU)
            for shape, few in [
                (NARROW, False),
                *((s, few) for s in (SMALL, LARGE, WIDE) for few in (True, False)),
            ]
            for name in ("minite", "minite_expert")
        ),
    ],
)
def test_the_layer_has_the_same_bits(
    shape: LayerShape, few: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it shows on the way included."""
    monkeypatch.setattr(tuning, "reads_packed", lambda *_, **__: few)
    case = case_of(shape, name)
    rows, packed, slots = of_slots(case)
    own = slot_spec(case.spec)
    prepared = replace(case.prepared, spec=own)
    found, expected = Seen(), Seen()
    unheard = layer.forward(packed, *slots, prepared, own)
    outputs = []
    for x, seen in ((packed, found), (rows, expected)):
        with listening(seen):
            outputs.append(layer.forward(x, *slots, prepared, own))
    assert all(torch.equal(output, unheard) for output in outputs)
    assert found.tensors.keys() == expected.tensors.keys()
    for part, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[part], tensor), part
    for operand in expected.operands:
        for part in ("codes", "block_scales", "outer_scales"):
            of_packed, of_rows = (getattr(seen.grouped(operand), part) for seen in (found, expected))
            assert torch.equal(of_packed, of_rows), (operand, part)


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=GPU) for shape in (SMALL, LARGE, WIDE)])
def test_whole_tokens_have_the_same_bits(shape: LayerShape) -> None:
    case = case_of(shape, "minite")
    packed = layer.pack_rows(case.x, case.spec)
    assert torch.equal(layer.forward(packed, case.ids, case.p, case.prepared, case.spec), case.forward())


@pytest.mark.parametrize(("shape", "few"), [(TINY, False), pytest.param(SMALL, True, marks=GPU)])
def test_rows_that_are_not_finite_are_reported_as_ever(
    shape: LayerShape, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "reads_packed", lambda *_, **__: few)
    case = case_of(shape, "minite")
    x = case.x.clone()
    x[2, 5] = torch.nan
    messages = []
    for given in (x, layer.pack_rows(x, case.spec)):
        guard = NonFiniteGuard(7, shape.experts, first_expert=4)
        layer.forward(given, case.ids, case.p, case.prepared, case.spec, guard)
        with pytest.raises(ValueError, match=r"layer 7: FC1 input of expert") as raised:
            guard.check()
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_what_cannot_be_is_refused() -> None:
    case = case_of(TINY, "minite")
    packed = layer.pack_rows(case.x, MINITE)
    with pytest.raises(ValueError, match="does not compute 'te_per_token'"):
        layer.pack_rows(case.x, named_spec("te_per_token"))
    with pytest.raises(ValueError, match=r"records of 48 elements must be uint8 \[R, 32\]"):
        layer.forward(
            replace(packed, records=packed.records[:, :16]), case.ids, case.p, case.prepared, MINITE
        )
    with pytest.raises(ValueError, match="x must be"):
        layer.forward(replace(packed, width=32), case.ids, case.p, case.prepared, MINITE)
    native = layer.prepare(case.weights, MINITE, native=True)
    with pytest.raises(ValueError, match="the native products do not take"):
        layer.forward(packed, case.ids, case.p, native, MINITE)
    assert _triton("triton_native").pack_rows is None
    assert _triton("triton_emulated").packs(MINITE)
