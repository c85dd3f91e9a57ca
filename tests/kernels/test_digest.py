"""Digests of tensors."""

from __future__ import annotations

import hashlib

import pytest
import torch

from kernels.digest import tensor_digest


def test_digest_of_a_known_tensor() -> None:
    expected = hashlib.sha256(b"torch.uint8(2, 2)" + bytes([1, 2, 3, 4])).hexdigest()
    assert tensor_digest(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_digest_sees_one_element_shape_and_dtype_but_not_strides(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    digest = tensor_digest(tensor)
    assert digest == tensor_digest(tensor.clone()) == tensor_digest(tensor.T.contiguous().T)
    changed = tensor.clone().view(torch.uint8)
    changed[3, -1] ^= 1
    others = [changed.view(dtype), tensor.reshape(6, 4), tensor.view(torch.uint8).view(torch.int8)]
    assert digest not in [tensor_digest(other) for other in others]


def test_digest_tells_zeros_apart_and_takes_scalars_and_parameters() -> None:
    assert tensor_digest(torch.tensor(0.0)) != tensor_digest(torch.tensor(-0.0))
    assert tensor_digest(torch.nn.Parameter(torch.ones(2))) == tensor_digest(torch.ones(2))
    assert tensor_digest(torch.zeros(0, 3)) != tensor_digest(torch.zeros(0, 4))
