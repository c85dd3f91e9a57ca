"""The random Hadamard transform: a rotation of 16 elements that spreads outliers over them.

Two operands rotated along K have the product that they had before (up to rounding). The signs are those of
Transformer Engine (`transformer_engine/pytorch/tensor/nvfp4_tensor.py`), so that its recipe can be stated.
"""

from __future__ import annotations

import torch

SIZE = 16
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard_matrix(device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [16, 16], orthogonal and exact: signs on the diagonal times the Hadamard matrix, over 4."""
    matrix = torch.ones(1, 1, device=device)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.tensor(_SIGNS, dtype=torch.float32, device=device)[:, None] * matrix / 4


def hadamard_16(x: torch.Tensor) -> torch.Tensor:
    """[R, K], K a multiple of 16 -> float32 [R, K], each 16 elements of K rotated."""
    return (x.float().unflatten(-1, (-1, SIZE)) @ hadamard_matrix(x.device)).flatten(-2)
