"""What every oracle returns, and how ours is brought to the same form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.packing import unpack
from kernels.quantize import QuantizedTensor, quantize_activation
from kernels.quantizer_spec import CodeLayout, QuantizerSpec

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True)
class Result:
    """codes uint8 [R, K], one to an element; scales uint8 [R, K/16]; outer float32, the quantity that is stored,
    as many values as there are groups, or None."""

    codes: np.ndarray
    scales: np.ndarray | None
    outer: np.ndarray | None = None

    def rows(self, keep: np.ndarray) -> Result:
        """The rows for which the bool [R] `keep` holds; outer scales as they are."""
        return Result(self.codes[keep], None if self.scales is None else self.scales[keep], self.outer)


def of_tensors(
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    outer: torch.Tensor | None = None,
    *,
    packed: bool = True,
) -> Result:
    """Torch tensors, codes two to a byte when `packed`, scales of any 8-bit type."""
    return Result(
        (unpack(codes.view(torch.uint8)) if packed else codes.view(torch.uint8)).numpy(),
        None if scales is None else scales.view(torch.uint8).numpy(),
        None if outer is None else outer.float().flatten().numpy(),
    )


def ours(x: torch.Tensor, spec: QuantizerSpec) -> Result:
    return of_quantized(quantize_activation(x, spec), spec)


def of_quantized(quantized: QuantizedTensor, spec: QuantizerSpec) -> Result:
    packed = spec.code_layout is CodeLayout.EVEN_LOW
    return of_tensors(quantized.codes, quantized.block_scales, quantized.outer_scales, packed=packed)


def assert_same_bytes(actual: Result, expected: Result) -> None:
    """Outer scales, block scales and codes, bit for bit."""
    if expected.outer is not None and actual.outer is not None:
        np.testing.assert_array_equal(
            actual.outer.view(np.uint32), expected.outer.view(np.uint32), "outer scales"
        )
    np.testing.assert_array_equal(actual.scales, expected.scales, "block scales")
    np.testing.assert_array_equal(actual.codes, expected.codes, "codes")


def decoded(result: Result, scale_values: np.ndarray) -> np.ndarray:
    """float64 [R, K]: code times block scale. scale_values: by byte."""
    values = np.concatenate([E2M1, -E2M1])[result.codes]
    scales = scale_values[result.scales]
    return values * scales.repeat(values.shape[1] // scales.shape[1], 1)


def assert_same_values(actual: Result, expected: Result, scale_values: np.ndarray) -> None:
    """The second level: code times block scale; scale bytes of blocks that decode to zero are free."""
    np.testing.assert_array_equal(decoded(actual, scale_values), decoded(expected, scale_values))
