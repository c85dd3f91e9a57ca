"""The product of BF16 matrices with an FP32 result, and its gradient, beside float64."""

from __future__ import annotations

import pytest
import torch

from learner.widened import _Product, widened_product

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_product_and_gradients_have_the_precision_of_fp32(device: str) -> None:
    """On a CPU, where nothing takes the place of FP32's product, the formulas alone."""
    generator = torch.Generator().manual_seed(0)
    a, narrow = (torch.randn(rows, 256, generator=generator).bfloat16().to(device) for rows in (40, 96))
    direction = torch.randn(40, 96, generator=generator).to(device)
    a.requires_grad_()
    weight = narrow.float().requires_grad_()
    found = _Product.apply(a, weight, narrow)
    exact = a.double() @ narrow.double().T
    assert found.dtype is torch.float32
    assert relative(found, exact) < 1e-6
    of_a, of_weight = torch.autograd.grad(found, (a, weight), direction)
    assert of_weight.dtype is torch.float32 and of_a.dtype is torch.bfloat16
    assert relative(of_weight, direction.double().T @ a.double()) < 2**-16
    assert relative(of_a, direction.double() @ narrow.double()) < 2**-8  # one rounding to BF16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_widened_matrices(device: str, dtype: torch.dtype) -> None:
    a = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    given = torch.randn(7, 64, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    narrow = given if dtype is torch.bfloat16 else None
    assert relative(widened_product(a, given.float(), narrow), a.double() @ given.double().T) < 1e-6


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())
