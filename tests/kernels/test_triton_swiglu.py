"""SwiGLU fused with its quantiser, and the combination, against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernels import combine as reference_combine
from kernels import slots
from kernels.catalogue import named_spec
from kernels.quantize import decode, quantize_activation
from kernels.routing import Routing
from kernels.swiglu import swiglu
from kernels.swizzle import unswizzle_128x4
from kernels.triton.combine import collect, combine
from kernels.triton.grouping import ExpertGroups, group
from kernels.triton.swiglu import swiglu_quantize
from tests.kernels.triton_env import DEVICE

MINITE = named_spec("minite")
SPEC = MINITE.activation
assert SPEC is not None


def grouped(rows: torch.Tensor, groups: ExpertGroups, fill: float = float("nan")) -> torch.Tensor:
    """Rows of slots in grouped order, without padding -> with it, on the device."""
    full = torch.full((groups.rows, rows.shape[1]), fill, dtype=rows.dtype, device=DEVICE)
    full[groups.slot_of_row >= 0] = rows.to(DEVICE)
    return full


def sample(slots: int, ffn: int, seed: int) -> torch.Tensor:
    """BF16 [slots, 2 ffn] over many binades."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(slots, 2 * ffn, generator=generator)
    return torch.ldexp(x, torch.randint(-9, 7, x.shape, generator=generator)).bfloat16()


def compare(fc1: torch.Tensor, groups: ExpertGroups, packed: bool, decoded: bool, keep: bool) -> None:
    operand, act = swiglu_quantize(
        grouped(fc1, groups), groups, SPEC, packed=packed, decoded=decoded, keep_act=keep
    )
    expected_act = swiglu(fc1, MINITE).bfloat16()
    expected = quantize_activation(expected_act, SPEC)
    slots = groups.slot_of_row.cpu()
    used, padding = slots >= 0, (slots < 0) & (torch.arange(groups.rows) < int(groups.starts[-1]))
    forms = [
        (act, expected_act),
        (operand.outer_scales, expected.outer_scales[:, 0]),
        (operand.codes, expected.codes),
        (operand.decoded, decode(expected, SPEC).half()),
        (operand.bad, torch.zeros(len(fc1), dtype=torch.bool)),
    ]
    for found, wanted in forms:
        if found is not None:
            assert torch.equal(found.cpu()[used], wanted)
            assert not found.cpu()[padding].any()
    assert (act is None, operand.codes is None, operand.decoded is None) == (
        not keep,
        not packed,
        not decoded,
    )
    if operand.block_scales is not None:
        scales = unswizzle_128x4(operand.block_scales.cpu(), groups.rows, fc1.shape[1] // 32)
        assert torch.equal(scales[used], expected.block_scales)
        assert not scales[padding].any()


CASES = {"unaligned groups": (19, 3, 7, 80, 16), "one token": (1, 2, 4, 48, 128)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("packed", "decoded", "keep"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_swiglu(name: str, packed: bool, decoded: bool, keep: bool) -> None:
    tokens, top_k, experts, ffn, align = CASES[name]
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(top_k).indices
    groups = group(ids.to(DEVICE), experts, align)
    compare(sample(tokens * top_k, ffn, seed=tokens), groups, packed, decoded, keep)


@pytest.mark.parametrize("up", [1.0, 1.0859375])
def test_every_finite_gate(up: float) -> None:
    """All BF16 gates, those whose silu is subnormal included, in one SwiGLU of 16 rows."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    gates = bits.view(torch.bfloat16).clone()
    gates[~gates.isfinite() | (gates > 1e38)] = 0
    fc1 = torch.cat((gates.view(16, 4096), torch.full((16, 4096), up).bfloat16()), 1)
    compare(fc1, group(torch.zeros(16, 1, dtype=torch.int64, device=DEVICE), 1, 16), False, True, True)


def test_rows_that_are_not_finite() -> None:
    fc1 = sample(6, 32, seed=3)
    fc1[1, 40] = float("inf")
    fc1[4, 3] = float("nan")
    groups = group(torch.zeros(6, 1, dtype=torch.int64, device=DEVICE), 2, 16)
    operand, _ = swiglu_quantize(
        grouped(fc1, groups), groups, SPEC, packed=True, decoded=False, keep_act=False
    )
    assert operand.bad[:16].nonzero().flatten().tolist() == [1, 4]


@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(9, 4, 96), (1, 1, 2048), (3, 8, 130), (0, 2, 64)])
def test_combine(tokens: int, top_k: int, hidden: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, 11, generator=generator)
    ids = scores.topk(top_k).indices if tokens else torch.zeros(0, top_k, dtype=torch.int64)
    coefficients = torch.rand(tokens, top_k, generator=generator)
    fc2 = sample(tokens * top_k, hidden // 2, seed=hidden)
    groups = group(ids.to(DEVICE), 11, 16)
    found = combine(grouped(fc2, groups), groups, coefficients.to(DEVICE), MINITE)
    expected = reference_combine.combine(fc2, Routing.group(ids, 11), coefficients, MINITE)
    assert torch.equal(found.cpu(), expected)


def test_rows_in_another_order_are_combined() -> None:
    """As ranks get them back that own the tokens, in BF16, or in FP32 from a layer whose tokens are that."""
    generator = torch.Generator().manual_seed(5)
    rows, p = sample(21, 24, seed=5), torch.rand(7, 3, generator=generator)
    places = torch.randperm(21, generator=generator).view(7, 3)
    ids = torch.rand(7, 5, generator=generator).topk(3).indices
    expected = slots.collect(rows, places, ids, p, MINITE)
    for own in (rows, rows.float()):
        given = [tensor.to(DEVICE) for tensor in (own, places, ids, p)]
        for found in (collect(*given, MINITE), collect(*given, named_spec("bf16"))):
            assert torch.equal(found.cpu(), expected)
    in_order = slots.gather(rows[places.flatten()], ids, p, MINITE)
    assert torch.equal(expected, in_order)


def test_a_slot_without_a_row_is_not_silent() -> None:
    ids = torch.tensor([[0, 1], [1, 5]], device=DEVICE)
    groups = group(ids, 2, 16)
    fc2 = torch.ones(groups.rows, 8, dtype=torch.bfloat16, device=DEVICE)
    found = combine(fc2, groups, torch.ones(2, 2, device=DEVICE), MINITE)
    assert found[0].tolist() == [2.0] * 8 and found[1].isnan().all()


def test_refusals() -> None:
    groups = group(torch.zeros(4, 1, dtype=torch.int64, device=DEVICE), 2, 16)
    rows = torch.zeros(groups.rows, 64, dtype=torch.bfloat16, device=DEVICE)
    ones = torch.ones(4, 1, device=DEVICE)

    def quantize(fc1: torch.Tensor) -> object:
        return swiglu_quantize(fc1, groups, SPEC, packed=True, decoded=False, keep_act=False)

    for call, message in (
        (lambda: quantize(rows.float()), "bfloat16"),
        (lambda: quantize(rows[:, :48]), "multiple of 16"),
        (lambda: quantize(rows[1:]), "rows"),
        (lambda: combine(rows, groups, ones.double(), MINITE), "float32"),
        (lambda: combine(rows, groups, ones, named_spec("te_exact")), "does not compute 'te_exact'"),
        (lambda: combine(rows[1:], groups, ones, MINITE), "rows"),
        (lambda: combine(rows, groups, ones.repeat(1, 2)[:, :1], MINITE, overlap=True), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_large_on_gpu() -> None:
    """8.4 million products: thousands of them need the table."""
    ids = torch.rand(1024, 16, generator=torch.Generator().manual_seed(0)).topk(8).indices
    compare(sample(8192, 1024, seed=9), group(ids.to(DEVICE), 16), True, True, True)
