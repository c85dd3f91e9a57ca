"""Causal attention over packed sequences, against each sequence alone in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.triton.outside.attention import attention
from kernels.triton.outside.attention_blocks import Blocks, Tile, Tiling
from kernels.triton.outside.attention_gradient import attention_gradient
from tests.kernels.triton_env import DEVICE

# Triton's interpreter does not round to bfloat16.
TYPES = [torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def operands(
    lengths: list[int], heads: int, groups: int, width: int, dtype: torch.dtype = torch.float16
) -> list[torch.Tensor]:
    """q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(width + heads)
    shapes = [(sum(lengths), count, width) for count in (heads, groups, groups, heads)]
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes]


def alone(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, float64: the result and the logarithms of the denominators, [L, heads, D] and [heads, L]."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def expected(
    tensors: list[torch.Tensor], lengths: list[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    q, k, v = (tensor.double().requires_grad_() for tensor in tensors[:3])
    parts = [alone(*own, scale) for own in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    out = torch.cat([part[0] for part in parts])
    out.backward(tensors[3].double())
    gradients = tuple(x.grad.cpu() for x in (q, k, v) if x.grad is not None)
    return out.detach().cpu(), torch.cat([part[1] for part in parts], 1).detach().cpu(), gradients


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Within the roundings of P and dS to the operands' type, which add up over the keys as independent errors do. A
    computation in PyTorch with these roundings has errors of a third of a unit of the sizes, and of 17 units at most;
    a wrong product has a hundred. What is exactly zero is so up to FP32's rounding.
    """
    unit, size = torch.finfo(found.dtype).eps, exact.square().mean().sqrt().clamp(min=1e-3)
    error = (found.cpu().double() - exact).abs()
    assert error.square().mean().sqrt() <= unit * size
    assert bool((error <= unit * (exact.abs() + 32 * size)).all()), error.max()


def computed(
    tensors: list[torch.Tensor], bounds: torch.Tensor, longest: int, scale: float
) -> tuple[torch.Tensor, ...]:
    q, k, v, d_out = tensors
    out, lse = attention(q, k, v, bounds, longest, scale)
    return out, lse, *attention_gradient(d_out, q, k, v, out, lse, bounds, longest, scale)


def right_at_every_call(tensors: list[torch.Tensor], lengths: list[int], scale: float) -> None:
    """Results and gradients, with the same bits in ten more calls."""
    bounds, longest = bounds_of(lengths), max(lengths)
    found = computed(tensors, bounds, longest, scale)
    wanted, _, exact = expected(tensors, lengths, scale)
    for own, right in zip((found[0], *found[2:]), (wanted, *exact), strict=True):
        close(own, right)
    for _ in range(10):
        again = computed(tensors, bounds, longest, scale)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("lengths", "heads", "groups", "width"),
    [
        ([1, 70, 3, 130], 4, 2, 64),
        ([1], 1, 1, 16),
        ([5, 300, 1], 2, 1, 16),
        ([130, 64], 2, 2, 128),
        ([33, 90], 1, 1, 256),
        ([70, 5, 130], 3, 1, 32),
    ],
)
def test_results_and_gradients_are_those_of_each_sequence_alone(
    lengths: list[int], heads: int, groups: int, width: int, dtype: torch.dtype
) -> None:
    tensors, scale = operands(lengths, heads, groups, width, dtype), width**-0.5
    out, lse, *gradients = computed(tensors, bounds_of(lengths), max(lengths), scale)
    wanted, denominators, exact = expected(tensors, lengths, scale)
    close(out, wanted)
    torch.testing.assert_close(lse.cpu().double(), denominators, rtol=1e-5, atol=1e-5)
    for found, right in zip(gradients, exact, strict=True):
        close(found, right)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("width", [64, 128, 256])
def test_long_sequences_and_many_programs_at_once(width: int) -> None:
    """Long loops of a full device, where copies ahead and products overlap."""
    lengths = [1500, 37, 900, 1300]
    tensors, scale = operands(lengths, 16, 2, width, torch.bfloat16), width**-0.5
    right_at_every_call(tensors, lengths, scale)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (9, 9), (8, 4), (14, 2)])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_numbers_of_heads_that_are_no_powers_of_two(heads: int, groups: int, width: int) -> None:
    """Several blocks of queries for each key, in more sequences than the device has processors."""
    lengths = torch.randint(100, 400, (160,), generator=torch.Generator().manual_seed(0)).tolist()
    tensors, scale = operands(lengths, heads, groups, width, torch.bfloat16), width**-0.5
    right_at_every_call(tensors, lengths, scale)


def test_a_sequence_has_the_same_bits_in_another_packing() -> None:
    lengths = [70, 130, 3]
    tensors = operands(lengths, 2, 1, 16)
    whole = computed(tensors, bounds_of(lengths), 130, 0.3)
    for order in ([2, 0, 1], [1]):
        parts = [[tensor.split(lengths)[i] for i in order] for tensor in tensors]
        found = computed([torch.cat(own) for own in parts], bounds_of([lengths[i] for i in order]), 200, 0.3)
        for which, (one, other) in enumerate(zip(whole, found, strict=True)):
            axis = 1 if which == 1 else 0
            again = torch.cat([one.split(lengths, axis)[i] for i in order], axis)
            assert torch.equal(again, other)


def test_tokens_may_be_rows_of_a_wider_matrix() -> None:
    lengths = [9, 21]
    q, k, v, d_out = operands(lengths, 2, 2, 16)
    bounds = bounds_of(lengths)
    wide = torch.full((30, 5, 16), torch.nan, dtype=q.dtype, device=DEVICE)
    wide[:, 3:] = v
    packed = computed([q, k, v, d_out], bounds, 21, 0.25)
    for view in (wide[:, 3:], v.transpose(0, 1).contiguous().transpose(0, 1)):
        assert not view.is_contiguous()
        for one, other in zip(packed, computed([q, k, view, d_out], bounds, 21, 0.25), strict=True):
            assert torch.equal(one, other)


def test_other_tiles_and_shared_blocks() -> None:
    lengths, scale = [40, 1, 77], 0.25
    tensors = operands(lengths, 4, 2, 32)
    bounds = bounds_of(lengths)
    blocks = Blocks(bounds, 77, 118)
    wanted, _, exact = expected(tensors, lengths, scale)
    tiles = Tiling(Tile(64, 16, 2, 4), Tile(32, 32, 3, 4), Tile(16, 64, 2, 4))
    out, lse = attention(*tensors[:3], bounds, 77, scale, blocks=blocks, tile=tiles.forward)
    close(out, wanted)
    gradients = attention_gradient(
        tensors[3], *tensors[:3], out, lse, bounds, 77, scale, blocks=blocks, tiles=tiles
    )
    for found, right in zip(gradients, exact, strict=True):
        close(found, right)


def test_blocks_cover_every_token_once_and_most_work_comes_first() -> None:
    lengths = [5, 64, 1, 33]
    blocks = Blocks(bounds_of(lengths), 64, sum(lengths))
    for table, work in (
        (blocks.of_queries(16), lambda start, end, first, _: first // 16 + 1),
        (blocks.of_keys(16), lambda start, end, first, _: -(-(end - start) // 16) - first // 16),
    ):
        rows = [row for row in table.tolist() if row[1]]
        covered = [
            t for start, end, first, _ in rows for t in range(start + first, min(start + first + 16, end))
        ]
        assert sorted(covered) == list(range(sum(lengths)))
        amounts = [work(*row) for row in rows]
        assert amounts == sorted(amounts, reverse=True)
        assert not table[len(rows) :].any()
    assert blocks.of_queries(16) is blocks.of_queries(16)


def test_no_tokens_give_nothing() -> None:
    tensors = operands([0], 2, 1, 16)
    out, lse, *gradients = computed(tensors, bounds_of([0]), 0, 1.0)
    assert out.shape == (0, 2, 16) and lse.shape == (2, 0)
    assert [tuple(x.shape) for x in gradients] == [(0, 2, 16), (0, 1, 16), (0, 1, 16)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 2, 16)}, "all bfloat16 or all float16, got torch.float32"),
        ({"k": torch.zeros(5, 1, 16).half()}, r"q must be \[T, heads, D\]"),
        ({"q": torch.zeros(4, 2, 24).half()}, r"got \(\(4, 2, 24\)"),
        ({name: torch.zeros(4, 1, 48).half() for name in "qkv"}, "wide, got 48"),
        (
            {name: torch.zeros(4, 2, 16).half() for name in "kv"} | {"q": torch.zeros(4, 3, 16).half()},
            "3 and 2",
        ),
        (
            {"bounds": torch.tensor([0, 4])},
            r"bounds must be int32 \[sequences \+ 1\], got torch.int64 \(2,\)",
        ),
        ({"bounds": torch.tensor([4]).int()}, r"got torch.int32 \(1,\)"),
        ({"longest": 3}, "1 sequences of at most 3 tokens do not hold 4"),
        ({"scale": 0.0}, "scale must be positive, got 0"),
        ({"scale": float("nan")}, "scale must be positive, got nan"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    q, k, v, _ = (tensor.cpu() for tensor in operands([4], 2, 1, 16))
    given: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "bounds": torch.tensor([0, 4]).int(),
        "longest": 4,
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        attention(**(given | change))


def test_results_and_blocks_that_do_not_fit_are_refused() -> None:
    q, k, v, d_out = operands([4], 2, 1, 16)
    bounds = bounds_of([4])
    out, lse = attention(q, k, v, bounds, 4, 1.0)
    with pytest.raises(ValueError, match=r"d_out must be torch.float16 \(4, 2, 16\) as q, got torch.float32"):
        attention_gradient(d_out.float(), q, k, v, out, lse, bounds, 4, 1.0)
    with pytest.raises(ValueError, match=r"lse must be contiguous float32 \(2, 4\)"):
        attention_gradient(d_out, q, k, v, out, lse.T, bounds, 4, 1.0)
    tile = Tile(16, 32, 2, 4)
    with pytest.raises(ValueError, match="own block must be a multiple"):
        attention(q, k, v, bounds, 4, 1.0, tile=tile)
    tiles = Tiling(tile, Tile(16, 16, 2, 4), Tile(32, 32, 2, 4))
    with pytest.raises(ValueError, match="blocks of queries must be a multiple"):
        attention_gradient(d_out, q, k, v, out, lse, bounds, 4, 1.0, tiles=tiles)
    with pytest.raises(ValueError, match="blocks must be of these bounds"):
        attention(q, k, v, bounds, 4, 1.0, blocks=Blocks(bounds_of([4]), 4, 4))
