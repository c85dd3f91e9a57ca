"""Grouped products, the product of few rows, and the weights' layouts, against float64 and each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.quantize import QuantizedTensor, decode, quantize_weight
from kernels.triton import grouped_gemm as grouped_product
from kernels.triton.decode_gemm import decode_gemm
from kernels.triton.grouped_gemm import grouped_gemm
from kernels.triton.grouping import ExpertGroups, group
from kernels.triton.matrix import ExpertMatrix
from kernels.triton.operand import GroupedOperand
from kernels.triton.packed_gemm import packed_gemm
from kernels.triton.quantize import permute_quantize
from kernels.triton.tuning import EMULATED, FEW_ROWS, PACKED, GroupedTile
from tests.kernels.triton_env import DEVICE, GPU

SPEC = named_spec("minite")
assert SPEC.activation is not None and SPEC.weight is not None
SHAPES = [(4, 128, 128), (2, 256, 256), (2, 48, 80)]  # experts, N, K; the last fits no tile
Shape, Ids = tuple[int, int, int], tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Case:
    operand: GroupedOperand
    matrix: ExpertMatrix
    groups: ExpertGroups
    weight: QuantizedTensor

    def out(self) -> torch.Tensor:
        return torch.full(
            (self.groups.rows, self.matrix.shape[1]), torch.nan, dtype=torch.bfloat16, device=DEVICE
        )


@cache
def weight_of(shape: Shape) -> tuple[QuantizedTensor, ExpertMatrix]:
    """On the CPU, and on the device with its decoded form, which the interpreter takes seconds to make."""
    weight = quantize_weight(
        torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16(), SPEC.weight
    )
    parts = (weight.codes, weight.block_scales, weight.outer_scales)
    return weight, ExpertMatrix.of(QuantizedTensor(*(t.to(DEVICE) for t in parts)), native=False)


@cache
def make(shape: Shape, ids: Ids, align: int = 128) -> Case:
    experts, _, width = shape
    x = torch.randn(len(ids), width, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots = torch.tensor(ids, dtype=torch.int64, device=DEVICE).view(len(ids), len(ids[0]) if ids else 2)
    groups = group(slots, experts, align)
    operand = permute_quantize(x.to(DEVICE), groups, SPEC.activation, packed=False, decoded=True)
    weight, matrix = weight_of(shape)
    return Case(operand, matrix, groups, weight)


def bounds(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 limits of every used row: float64 products of the decoded operands, 1e-6 of the summed magnitudes away."""
    used = (case.groups.slot_of_row >= 0).cpu()
    expert = case.groups.expert_of_row().cpu()[used]
    assert case.operand.decoded is not None
    a = case.operand.decoded.cpu()[used].double()
    w = decode(case.weight, SPEC.weight).double()[expert]
    outer = case.operand.outer_scales.cpu()[used, None] * case.weight.outer_scales[expert]
    exact = torch.einsum("rk,rnk->rn", a, w) * outer
    slack = 1e-6 * torch.einsum("rk,rnk->rn", a.abs(), w.abs()) * outer
    return (exact - slack).bfloat16(), (exact + slack).bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
def test_grouped_product_is_within_1e_6_of_float64(shape: Shape) -> None:
    """One expert has more rows than a tile, others have none."""
    case = make(shape, ((0,),) * (130 if shape[0] > 2 else 5) + ((shape[0] - 1,),) * 3)
    out = grouped_gemm(case.operand, case.matrix, case.groups, out=case.out()).cpu()
    low, high = bounds(case)
    used = (case.groups.slot_of_row >= 0).cpu()
    assert ((out[used] >= low) & (out[used] <= high)).all()
    padding = ~used & (torch.arange(case.groups.rows) < int(case.groups.starts[-1]))
    assert not out[padding].any()


@pytest.mark.parametrize(
    ("shape", "count", "rows"),
    [
        (SHAPES[0], 19, 16),
        (SHAPES[0], 19, 32),
        (SHAPES[1], 19, 16),
        (SHAPES[0], 19, 64),
        (SHAPES[1], 130, 128),
        *(pytest.param((4, 256, 1024), 150, rows, marks=GPU) for rows in (*FEW_ROWS, *PACKED)),
    ],
)
def test_products_that_read_4_bits_have_the_bits_of_the_grouped_one(
    shape: Shape, count: int, rows: int
) -> None:
    ids = ((0,),) * count + ((shape[0] - 1,),)
    many, own = make(shape, ids), make(shape, ids, align=rows)
    expected = grouped_gemm(many.operand, many.matrix, many.groups, out=many.out())
    product = decode_gemm if rows in FEW_ROWS else packed_gemm
    out = product(own.operand, own.matrix, own.groups, out=own.out())
    assert torch.equal(
        out[own.groups.row_of_slot.flatten().long()], expected[many.groups.row_of_slot.flatten().long()]
    )
    if rows in PACKED:
        padding = (own.groups.slot_of_row < 0).cpu() & (
            torch.arange(own.groups.rows) < int(own.groups.starts[-1])
        )
        assert padding.any() and not out.cpu()[padding].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [*FEW_ROWS, *PACKED])
def test_products_that_read_4_bits_repeat_beside_other_work(rows: int) -> None:
    """The tensor core reads decoded weights some time after a product is launched, and later where others keep it busy:
    what decodes the next ones too early shows in some of many calls.
    """
    shape = (16, 1536, 2048)
    ids = torch.randint(16, (16 * 8 * rows, 1), generator=torch.Generator().manual_seed(0)).tolist()
    case, many = (make(shape, tuple(map(tuple, ids)), align) for align in (rows, 128))
    product = decode_gemm if rows in FEW_ROWS else packed_gemm
    used = [own.groups.row_of_slot.flatten().long() for own in (case, many)]
    expected = grouped_gemm(many.operand, many.matrix, many.groups, out=many.out())[used[1]]
    side, a, out = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE).bfloat16(), case.out()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(60):
        if i % 2:
            with torch.cuda.stream(side):
                a @ a
        product(case.operand, case.matrix, case.groups, out=out.fill_(torch.nan))
        wrong += (out[used[0]] != expected).sum()
    assert not wrong


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("shape", [(2, 256, 128), (2, 48, 80)])
def test_decoded_weights(shape: Shape, compact: bool) -> None:
    """Also of a matrix that was taken apart, as operators do; a compact one holds 4.5 bits an element, if tiles fit."""
    case = make(shape, ((0,),))
    on_device = QuantizedTensor(
        *(t.to(DEVICE) for t in (case.weight.codes, case.weight.block_scales, case.weight.outer_scales))
    )
    matrix = ExpertMatrix.of(on_device, native=False, compact=compact)
    again = ExpertMatrix.from_tensors(matrix.tensors())
    expected = decode(case.weight, SPEC.weight).half()
    for own in (matrix, again):
        assert own.shape == shape
        assert torch.equal(own.elements().cpu(), expected)
    assert matrix.compact == again.compact == (compact and shape[1] % 128 == 0)
    held = sum(tensor.nbytes for tensor in matrix.tensors()[1:])
    if matrix.decoded is None:
        assert held * 16 == expected.numel() * 9
    derived = case.matrix.derived()
    assert derived.keys() == matrix.derived().keys()
    assert all(torch.equal(derived[name], tensor) for name, tensor in matrix.derived().items())


@pytest.mark.parametrize("packed", [False, True])
def test_a_compact_weight_gives_the_same_product(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as it is, or decoded first."""
    monkeypatch.setattr(grouped_product, "reads_packed", lambda *_, compact: packed)
    case = make((4, 128, 128), ((0,), (3,), (0,)))
    compact = replace(case.matrix, decoded=None)
    expected = grouped_gemm(case.operand, case.matrix, case.groups, out=case.out())
    used = case.groups.slot_of_row >= 0
    assert torch.equal(grouped_gemm(case.operand, compact, case.groups, out=case.out())[used], expected[used])


def test_no_tokens() -> None:
    case, few = make((2, 128, 128), ()), make((2, 128, 128), (), align=16)
    assert grouped_gemm(case.operand, case.matrix, case.groups, out=case.out()).shape == (0, 128)
    assert decode_gemm(few.operand, few.matrix, few.groups, out=few.out()).shape == (0, 128)
    assert packed_gemm(case.operand, case.matrix, case.groups, out=case.out()).shape == (0, 128)


def test_what_does_not_fit_is_refused() -> None:
    case, other = make((2, 128, 128), ((0,),)), make((2, 48, 80), ((0,),))
    with pytest.raises(ValueError, match="must be contiguous"):
        grouped_gemm(case.operand, other.matrix, case.groups, out=case.out())
    for product in (decode_gemm, packed_gemm):
        with pytest.raises(ValueError, match="multiples of 128"):
            product(other.operand, other.matrix, other.groups, out=other.out())
    with pytest.raises(ValueError, match="other form"):
        grouped_gemm(replace(case.operand, decoded=None), case.matrix, case.groups, out=case.out())
    few = make((2, 128, 128), ((0,),), align=16)
    with pytest.raises(ValueError, match="aligned"):
        grouped_gemm(few.operand, few.matrix, few.groups, out=few.out())
    odd = make((2, 128, 128), ((0,),), align=8)
    for product in (decode_gemm, packed_gemm):
        with pytest.raises(ValueError, match=r"aligned to one of .*, got 8"):
            product(odd.operand, odd.matrix, odd.groups, out=odd.out())


@pytest.mark.parametrize("tile", [pytest.param(tile, marks=GPU) for tile in EMULATED])
def test_every_tile_gives_the_same_bits(tile: GroupedTile) -> None:
    case = make((4, 512, 384), tuple((i % 3, 3) for i in range(300)))
    expected = grouped_gemm(case.operand, case.matrix, case.groups, out=case.out(), tile=EMULATED[0])
    out = grouped_gemm(case.operand, case.matrix, case.groups, out=case.out(), tile=tile)
    used = case.groups.slot_of_row >= 0
    assert torch.equal(out[used], expected[used])
