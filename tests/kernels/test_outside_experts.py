"""Kernels of the learner outside the experts: norms, rotary positions, and the gradient of choosing experts."""

from __future__ import annotations

import pytest
import torch

from kernels.triton.outside.choice import to_experts
from kernels.triton.outside.rms_norm import rms_norm, rms_norm_gradient
from kernels.triton.outside.rotary import rotate
from kernels.triton.outside.widen import widen
from tests.kernels.triton_env import DEVICE


def unfused(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """As Megatron-core and transformers compose it, every operation rounded to x's type."""
    cosines, sines = (torch.cat((table, table), -1)[:, None] for table in (cosines, sines))
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 2), (5, 3, 16), (37, 4, 128), (0, 2, 8)])
def test_rotation_has_the_bits_of_the_unfused_formula(tokens: int, heads: int, width: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x, gradient = (
        torch.randn(tokens, heads, width, generator=generator).bfloat16().to(DEVICE) for _ in range(2)
    )
    angles = torch.rand(tokens, width // 2, generator=generator) * 6.3
    tables = angles.cos().bfloat16().to(DEVICE), angles.sin().bfloat16().to(DEVICE)
    leaf = x.clone().requires_grad_()
    expected = unfused(leaf, *tables)
    expected.backward(gradient)
    assert torch.equal(rotate(x, *tables), expected.detach())
    assert leaf.grad is not None and torch.equal(rotate(gradient, *tables, back=True), leaf.grad)


def test_tokens_may_be_rows_of_a_wider_matrix() -> None:
    whole = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    tables = torch.full((6, 4), 0.5, dtype=torch.bfloat16, device=DEVICE), whole[:, 0, :4].clone()
    for part in (whole[:, 1:4], whole[:, ::2], whole.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(rotate(part, *tables), rotate(part.clone(), *tables))


def test_operands_that_do_not_fit_are_refused() -> None:
    x, table = torch.zeros(3, 1, 8, dtype=torch.bfloat16), torch.zeros(3, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"take bfloat16, got torch\.float32"):
        rotate(x.float(), table, table)
    with pytest.raises(ValueError, match=r"sines must be \[3, 4\], got \(2, 4\)"):
        rotate(x, table, table[:2])
    with pytest.raises(ValueError, match="power of two, got 12"):
        rotate(torch.zeros(3, 1, 12, dtype=torch.bfloat16), table, table)
    with pytest.raises(ValueError, match=r"float32 and int64 \[T, k\], got"):
        to_experts(torch.zeros(2, 2), torch.zeros(2, 3, dtype=torch.int64), 4)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 1, 1), (70, 6, 2), (33, 128, 8), (0, 4, 2)])
def test_values_stand_at_their_experts(tokens: int, experts: int, k: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k].to(DEVICE)
    values = torch.randn(tokens, k, generator=generator).to(DEVICE)
    expected = torch.zeros(tokens, experts, device=DEVICE).scatter(1, ids, values)
    assert torch.equal(to_experts(values, ids, experts), expected)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (70, 128), (0, 16), (9, 300), (3, 2048)])
def test_norm_and_gradient_are_those_in_float64(rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, d_normed = (torch.randn(rows, width, generator=generator).bfloat16() for _ in range(2))
    weight = (1 + torch.randn(width, generator=generator) / 4).bfloat16()
    exact, scale = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = torch.nn.functional.rms_norm(exact, (width,), scale, 1e-6)
    expected.backward(d_normed.double())
    normed, inverse = rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6)
    assert_rounded(normed, expected.detach())
    torch.testing.assert_close(
        inverse.cpu().double(), (x.double().square().mean(1) + 1e-6).rsqrt(), rtol=1e-6, atol=0
    )
    d_x, d_weight = rms_norm_gradient(d_normed.to(DEVICE), x.to(DEVICE), weight.to(DEVICE), inverse)
    assert exact.grad is not None and scale.grad is not None
    assert_rounded(d_x, exact.grad)
    assert_rounded(d_weight, scale.grad)


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Half a BF16 unit in the last place, and a little for FP32 sums."""
    error = (found.cpu().double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-5).all()


def test_a_norm_of_other_types_is_refused() -> None:
    x, weight = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16 \[R, W\] and \[W\], got torch\.float32"):
        rms_norm(x.float(), weight, 1e-6)
    with pytest.raises(ValueError, match=r"must be bfloat16 \(3, 8\), inverse \[3\]"):
        rms_norm_gradient(x[:2], x, weight, torch.ones(3))


@pytest.mark.parametrize("shape", [(5,), (3, 4097), (0, 2)])
def test_widened_numbers_are_exact_and_sums_are_those_of_float32(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).bfloat16().to(DEVICE)
    total = torch.randn(shape, generator=generator).to(DEVICE)
    assert torch.equal(widen(x), x.float())
    expected = total + x.float()
    assert widen(x, total) is total and torch.equal(total, expected)
    with pytest.raises(ValueError, match=r"float32 of the same shape, got torch\.float32"):
        widen(x.float())
    with pytest.raises(ValueError, match="must be contiguous"):
        widen(torch.zeros(4, 3, dtype=torch.bfloat16, device=DEVICE).T)
