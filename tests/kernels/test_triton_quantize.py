"""The Triton quantisers against `kernels.quantize`, bit for bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import codec_e2m1, codec_e4m3
from kernels.catalogue import named_spec
from kernels.packing import unpack
from kernels.quantize import QuantizedTensor, decode, quantize_activation
from kernels.quantize import quantize_weight as reference_weight
from kernels.swizzle import swizzle_128x4
from kernels.triton import codec, quantize
from kernels.triton.grouping import ExpertGroups, group
from kernels.triton.operand import GroupedOperand
from kernels.triton.quantize import permute_quantize, quantize_rows
from kernels.triton.weights import quantize_weight
from tests.kernels.triton_env import DEVICE

SPEC = named_spec("minite").activation
assert SPEC is not None
WEIGHT = {name: named_spec(name).weight for name in ("minite", "minite_expert")}


def difficult(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """float32 rows and blocks of many sizes, zero blocks and a zero row, minus zeros, and a row below 2^-100."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    blocks = torch.randint(-14, 4, (rows, width // 16, 1), generator=generator)
    x = torch.ldexp(x.view(rows, width // 16, 16), blocks).view(rows, width)
    x = torch.ldexp(x, torch.randint(-60, 60, (rows, 1), generator=generator))
    x[:, 3::7] = 0.0
    x[:, 5::11] *= -0.0
    if rows > 4:
        x[0] = 0.0
        x[1] = torch.ldexp(torch.randn(width, generator=generator), torch.tensor(-108))
        x[2, :16] = 0.0
        x[3] = torch.ldexp(x[3].sign(), torch.tensor(-100))
    return x


def assert_same(found: QuantizedTensor, expected: QuantizedTensor) -> None:
    for part in ("outer_scales", "block_scales", "codes"):
        assert torch.equal(getattr(found, part).cpu(), getattr(expected, part)), part


@triton.jit
def _encode_scales(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, codec.e4m3_encode(tl.load(x + at)).to(tl.uint8))


@triton.jit
def _decode_scales(codes, out, out16, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, codec.e4m3_to_f32(tl.load(codes + at)))
    tl.store(out16 + at, codec.e4m3_to_f16(tl.load(codes + at)))


@triton.jit
def _decode_codes(codes, out, out16, N: tl.constexpr):
    at = tl.arange(0, N)
    word = tl.load(codes + at).to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = codec.codes_to_f16(word)
    tl.store(out + at * 4, w0.to(tl.int32, bitcast=True))
    tl.store(out + at * 4 + 1, w1.to(tl.int32, bitcast=True))
    tl.store(out + at * 4 + 2, w2.to(tl.int32, bitcast=True))
    tl.store(out + at * 4 + 3, w3.to(tl.int32, bitcast=True))
    tl.store(out16 + at, codec.nibble_to_f16(word & 15))


@triton.jit
def _round(x, out, packed, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(out + at, codec.round_bf16(value).to(tl.int32, bitcast=True))
    tl.store(packed + at, codec.pack_bf16(value, -value).to(tl.int32, bitcast=True))


def test_scales_are_encoded_to_nearest_even() -> None:
    steps = codec_e4m3.decode(torch.arange(127, dtype=torch.uint8))
    middles = (steps[1:] + steps[:-1]) / 2
    x = torch.cat(
        (steps, middles, middles * (1 + 2**-23), middles * (1 - 2**-23), torch.tensor([449.0, 1e30]))
    )
    x = torch.nn.functional.pad(x, (0, 512 - len(x)))
    out = torch.empty(512, dtype=torch.uint8, device=DEVICE)
    _encode_scales[(1,)](x.to(DEVICE), out, N=512)
    assert torch.equal(out.cpu(), codec_e4m3.encode(x))


def test_every_scale_is_decoded() -> None:
    codes = torch.arange(128, dtype=torch.uint8)
    codes[127] = 0
    out = torch.empty(128, device=DEVICE)
    out16 = torch.empty(128, dtype=torch.float16, device=DEVICE)
    _decode_scales[(1,)](codes.to(DEVICE), out, out16, N=128)
    assert torch.equal(out.cpu(), codec_e4m3.decode(codes))
    assert torch.equal(out16.cpu().float(), codec_e4m3.decode(codes))


def test_codes_are_decoded() -> None:
    codes = torch.randint(
        -(2**31), 2**31, (256,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    out = torch.empty(1024, dtype=torch.int32, device=DEVICE)
    out16 = torch.empty(256, dtype=torch.float16, device=DEVICE)
    _decode_codes[(1,)](codes.to(DEVICE), out, out16, N=256)
    nibbles = unpack(codes.view(torch.uint8)[None])[0]
    values = codec_e2m1.decode(nibbles, torch.float16)
    assert torch.equal(out.cpu(), values.view(torch.int32))
    assert torch.equal(torch.ldexp(out16.cpu().float(), torch.tensor(14)), values[::8].float())


def test_rounding_to_bf16() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.ldexp(
        torch.randn(1024, generator=generator), torch.randint(-140, 120, (1024,), generator=generator)
    )
    x[:6] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, float("inf"), -0.0, 1e-40])
    out, packed = (torch.empty(1024, dtype=torch.int32, device=DEVICE) for _ in range(2))
    _round[(1,)](x.to(DEVICE), out, packed, N=1024)
    assert torch.equal(out.cpu().to(torch.int16).view(torch.bfloat16), x.bfloat16())
    assert torch.equal(packed.cpu().view(torch.bfloat16).view(-1, 2), torch.stack((x, -x), 1).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(40, 96), (9, 208), (1, 512), (33, 16), (0, 32)])
def test_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    x = difficult(rows, width, seed=rows).to(dtype)
    assert_same(quantize_rows(x.to(DEVICE), SPEC), quantize_activation(x, SPEC))


def test_extreme_rows() -> None:
    """Largest and smallest numbers, and the rows around 2^-100."""
    largest = torch.finfo(torch.bfloat16).max
    scales = torch.tensor([largest, 2.0**126, 2.0**-99, 2.0**-100, 2.0**-101, 2.0**-126, 2.0**-133]).double()
    x = torch.rand(len(scales), 48, generator=torch.Generator().manual_seed(2)).double()
    x[:, 7] = 1.0
    x = (x * scales[:, None]).bfloat16()
    assert_same(quantize_rows(x.to(DEVICE), SPEC), quantize_activation(x, SPEC))


def test_element_ties() -> None:
    """Quotients that are midpoints of two codes and a BF16 step beside them, for many scales."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    near = torch.cat((middles, middles * (1 + 2**-7)))
    blocks = torch.stack([near * (1 + i / 8) * 2.0**e for e in range(-3, 4) for i in range(8)])
    x = blocks.reshape(7, 128).bfloat16()
    x[:, 0] = 2688.0
    assert_same(quantize_rows(x.to(DEVICE), SPEC), quantize_activation(x, SPEC))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.sampled_from([16, 48, 80]), bf16=st.booleans())
def test_random_bit_patterns(seed: int, width: int, bf16: bool) -> None:
    """Any finite numbers at all."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (8, width), dtype=torch.int32, generator=generator)
    x = bits.view(torch.float32)
    x = x.bfloat16() if bf16 else x
    x = torch.where(x.isfinite(), x, torch.zeros_like(x))
    assert_same(quantize_rows(x.to(DEVICE), SPEC), quantize_activation(x, SPEC))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_are_not_finite(value: float, dtype: torch.dtype) -> None:
    x = difficult(8, 64, seed=3).to(dtype)
    x[5, 17] = value
    with pytest.raises(ValueError, match=r"cannot quantise FC1 input \(8, 64\)"):
        quantize_rows(x.to(DEVICE), SPEC, what="FC1 input")
    found: list[torch.Tensor] = []
    quantized = quantize_rows(x.to(DEVICE), SPEC, on_non_finite=found.append)
    assert found[0].tolist() == [row == 5 for row in range(8)]
    assert not quantized.codes[5].any() and quantized.outer_scales[5].isnan()
    rest = torch.arange(8) != 5
    expected = quantize_activation(x[rest], SPEC)
    assert torch.equal(quantized.codes.cpu()[rest], expected.codes)


def expand(rows: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """Rows of tokens -> grouped rows up to the last one in use, with zeros in padding."""
    slots = groups.slot_of_row[: int(groups.starts[-1])].cpu()
    grouped = rows[(slots // groups.row_of_slot.shape[1]).clamp(min=0).long()]
    grouped[slots < 0] = 0
    return grouped


def assert_operand(operand: GroupedOperand, groups: ExpertGroups, expected: QuantizedTensor) -> None:
    used = int(groups.starts[-1])
    assert torch.equal(operand.outer_scales[:used].cpu(), expand(expected.outer_scales[:, 0], groups))
    assert not operand.bad[:used].any()
    if operand.decoded is not None:
        assert torch.equal(operand.decoded[:used].cpu(), expand(decode(expected, SPEC).half(), groups))
    assert (operand.codes is None) is (operand.block_scales is None)
    if operand.codes is not None and operand.block_scales is not None:
        assert torch.equal(operand.codes[:used].cpu(), expand(expected.codes, groups))
        scales = expand(expected.block_scales, groups)
        swizzled = swizzle_128x4(scales)
        assert torch.equal(operand.block_scales[: len(swizzled)].cpu(), swizzled)


CASES = {
    "unaligned groups, empty experts": (21, 3, 9, 96, 128),
    "one token": (1, 2, 5, 208, 128),
    "small alignment": (20, 2, 6, 80, 16),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("packed", "decoded"), [(True, True), (True, False), (False, True)])
def test_permuted(name: str, packed: bool, decoded: bool) -> None:
    tokens, top_k, experts, width, align = CASES[name]
    x = difficult(tokens, width, seed=tokens).bfloat16()
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts - 2, generator=generator).topk(top_k).indices
    groups = group(ids.to(DEVICE), experts, align)
    operand = permute_quantize(x.to(DEVICE), groups, SPEC, packed=packed, decoded=decoded)
    assert (operand.codes is not None, operand.decoded is not None) == (packed, decoded)
    assert_operand(operand, groups, quantize_activation(x, SPEC))


def test_permuted_fp32() -> None:
    x = difficult(7, 48, seed=5)
    ids = torch.tensor([[0, 2]]).expand(7, 2).contiguous()
    groups = group(ids.to(DEVICE), 3, 16)
    operand = permute_quantize(x.to(DEVICE), groups, SPEC, packed=True, decoded=True)
    assert_operand(operand, groups, quantize_activation(x, SPEC))


def test_no_tokens() -> None:
    groups = group(torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), 4)
    operand = permute_quantize(torch.zeros(0, 32, device=DEVICE), groups, SPEC, packed=True, decoded=True)
    assert operand.codes is not None and operand.codes.shape == (0, 16)


def test_permuted_rows_that_are_not_finite() -> None:
    x = difficult(6, 32, seed=6).bfloat16()
    x[4, 9] = float("nan")
    ids = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 0], [1, 0], [0, 1]])
    groups = group(ids.to(DEVICE), 3, 16)
    operand = permute_quantize(x.to(DEVICE), groups, SPEC, packed=False, decoded=True)
    used = int(groups.starts[-1])
    assert operand.bad[:used].nonzero().flatten().tolist() == sorted(groups.row_of_slot[4].tolist())


@pytest.mark.parametrize("name", WEIGHT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights(name: str, dtype: torch.dtype) -> None:
    weight = difficult(3 * 8, 80, seed=7).view(3, 8, 80).to(dtype)
    weight[1] = 0
    found = quantize_weight(weight.to(DEVICE), WEIGHT[name], halves=True)
    assert_same(found, reference_weight(weight, WEIGHT[name], halves=True))


@pytest.mark.parametrize("name", WEIGHT)
def test_weights_that_are_not_finite(name: str) -> None:
    weight = torch.ones(3, 4, 32)
    weight[1, 2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"weight of expert 1 .*1 NaN and 0 infinite"):
        quantize_weight(weight.to(DEVICE), WEIGHT[name])


@pytest.mark.parametrize("own_slots", [512, 0])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(6, 3, 7), (1, 1, 1), (5, 8, 32)])
def test_few_rows(
    tokens: int, top_k: int, experts: int, own_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one launch as in two, ids that do not exist and rows that are not finite included; these are counted."""
    monkeypatch.setattr(quantize, "_OWN_SLOTS", own_slots)
    x = difficult(tokens, 48, seed=tokens)
    x[-1, 5] = float("inf")
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
    ids[-1, 0] = 0
    counts = torch.zeros(experts, dtype=torch.int64, device=DEVICE)
    groups = group(ids.to(DEVICE), experts, 16)
    form = {"packed": False, "decoded": True}
    found = permute_quantize(x.to(DEVICE), groups, SPEC, **form, bad_counts=counts)
    expected = permute_quantize(x.to(DEVICE), groups, SPEC, **form)
    rows = groups.row_of_slot[groups.row_of_slot >= 0].long()
    assert found.decoded is not None and expected.decoded is not None
    assert torch.equal(found.decoded[rows], expected.decoded[rows])
    assert torch.equal(found.bad[rows], expected.bad[rows])
    assert torch.equal(found.outer_scales[rows].nan_to_num(-1), expected.outer_scales[rows].nan_to_num(-1))
    last = ids[-1][(ids[-1] >= 0) & (ids[-1] < experts)]
    assert torch.equal(counts.cpu(), torch.bincount(last, minlength=experts))


def test_refusals() -> None:
    x = torch.zeros(4, 32, device=DEVICE)
    groups = group(torch.zeros(4, 1, dtype=torch.int64, device=DEVICE), 2, 16)
    other = named_spec("te_per_token").activation
    per_tensor = named_spec("te_exact").activation
    for call, message in (
        (lambda: quantize_rows(x[:, :24], SPEC), "multiple of 16"),
        (lambda: quantize_rows(x.half(), SPEC), "bfloat16 or float32"),
        (lambda: quantize_rows(x, other), "outer_scale"),
        (lambda: quantize_rows(x, per_tensor), "outer_domain=tensor"),
        (lambda: permute_quantize(x[:3], groups, SPEC, packed=True, decoded=False), "of 4 tokens"),
        (lambda: permute_quantize(x, groups, SPEC, packed=False, decoded=False), "packed codes"),
        (lambda: quantize_weight(x, WEIGHT["minite"]), r"\[E, N, K\]"),
        (lambda: quantize_weight(x[None], SPEC), "outer_domain=token"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@triton.jit
def _count_differences(counts, DIVISORS: tl.constexpr, X: tl.constexpr):
    """Codes by the corrected product against codes by division: some divisors, every BF16 significand, 6 binades."""
    divisor = tl.program_id(0) * DIVISORS + tl.arange(0, DIVISORS)
    divisor = (divisor | 0x3F800000).to(tl.float32, bitcast=True)[:, None]
    reciprocal = tl.div_rn(tl.full((DIVISORS, 1), 1.0, tl.float32), divisor)
    number = tl.arange(0, X)
    start = tl.full((DIVISORS, X), codec.INTEGER, tl.float32)
    total = 0
    for binade in range(-3, 4):
        x = (((number % 128) << 16) + (127 + binade << 23)).to(tl.float32, bitcast=True)[None, :]
        fast = codec.append_index(start, x, divisor, reciprocal, False)
        exact = codec.append_index(start, x, divisor, reciprocal, True)
        total += tl.sum(tl.sum((fast != exact).to(tl.int32), axis=1), axis=0)
    tl.atomic_add(counts, total)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_every_divisor_and_significand() -> None:
    counts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _count_differences[(2**23 // 32,)](counts, DIVISORS=32, X=128, enable_fp_fusion=False)
    assert counts.item() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("width", [768, 2048, 7168])
def test_large_on_gpu(width: int) -> None:
    x = difficult(2000, width, seed=width).bfloat16()
    expected = quantize_activation(x, SPEC)
    assert_same(quantize_rows(x.to(DEVICE), SPEC), expected)
    ids = torch.rand(2000, 128, generator=torch.Generator().manual_seed(0)).topk(8).indices
    groups = group(ids.to(DEVICE), 128)
    assert_operand(permute_quantize(x.to(DEVICE), groups, SPEC, packed=True, decoded=True), groups, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_under_a_cuda_graph() -> None:
    x = difficult(200, 256, seed=1).bfloat16().to(DEVICE)
    ids = torch.rand(200, 16, device=DEVICE).topk(4).indices

    def run() -> tuple[ExpertGroups, GroupedOperand]:
        groups = group(ids, 16)
        return groups, permute_quantize(x, groups, SPEC, packed=True, decoded=True)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        groups, operand = run()
    for seed in (1, 2):
        torch.manual_seed(seed)
        ids.copy_(torch.rand(200, 16, device=DEVICE).topk(4).indices)
        x.copy_(difficult(200, 256, seed=seed).bfloat16())
        graph.replay()
        assert_operand(operand, groups, quantize_activation(x.cpu(), SPEC))
