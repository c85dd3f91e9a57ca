"""Activations that were quantised where they are and travel to whoever owns the experts: a record of bytes for a row.

Where a row's scales depend on that row alone, its owner can quantise it, once for all its slots, and whoever computes
them multiplies the very operand that quantising there would give. A record has 9/16 of a byte an element and some
bytes for the row, against 2 bytes an element of BF16. It does not hold the row from before quantisation, which the
gradient of the weights needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quantize import QuantizedTensor
from kernels.quantizer_spec import Block, BlockScaleFormat, CodeLayout, Rounding, ScaleDomain
from kernels.spec import ExecutionSpec

BLOCK = 16
ALIGN = 16  # bytes, to which a record is rounded up
_OUTER = 4


@dataclass(frozen=True, eq=False)
class PackedRows:
    """T quantised rows of K elements, several of which may be one and the same record.

    records: uint8 [R, `record_size(K)`]: codes [K/2], the even element in the low nibble; the outer scale, float32;
        block scales [K/16]; 1 where the row holds values that are not finite, else 0; zeros
    width: K
    index: int64 [T], the record of each row
    """

    records: torch.Tensor
    width: int
    index: torch.Tensor

    @classmethod
    def of(cls, quantized: QuantizedTensor, bad: torch.Tensor) -> PackedRows:
        """A record for each row of activations, quantised under a spec that `can_pack`; bad: bool [R], of the rows that
        hold values that are not finite.
        """
        assert quantized.block_scales is not None and quantized.outer_scales is not None
        rows, half = quantized.codes.shape
        width, device = 2 * half, quantized.codes.device
        records = torch.empty(rows, record_size(width), dtype=torch.uint8, device=device)
        packed = cls(records, width, torch.arange(rows, device=device))
        packed.codes.view(torch.int64).copy_(quantized.codes.view(torch.int64))
        packed.outer_scales.copy_(quantized.outer_scales)
        packed.block_scales.copy_(quantized.block_scales)
        records[:, flag_at(width) + 1 :] = 0
        records[:, flag_at(width)].copy_(bad)
        return packed

    @property
    def shape(self) -> tuple[int, int]:
        """T and K."""
        return len(self.index), self.width

    @property
    def codes(self) -> torch.Tensor:
        """uint8 [R, K/2], a view."""
        return self.records[:, : self.width // 2]

    @property
    def outer_scales(self) -> torch.Tensor:
        """float32 [R, 1], a view."""
        return self.records[:, self.width // 2 : scales_at(self.width)].view(torch.float32)

    @property
    def block_scales(self) -> torch.Tensor:
        """uint8 [R, K/16], a view."""
        return self.records[:, scales_at(self.width) : flag_at(self.width)]

    @property
    def bad(self) -> torch.Tensor:
        """bool [R], whether the row holds values that are not finite."""
        return self.records[:, flag_at(self.width)] != 0

    def quantized(self) -> QuantizedTensor:
        """The records, R rows, apart from what is known of values that are not finite."""
        return QuantizedTensor(self.codes, self.block_scales, self.outer_scales)


def scales_at(width: int) -> int:
    """The byte of a record of so many elements where its block scales begin."""
    return width // 2 + _OUTER


def flag_at(width: int) -> int:
    """The byte that says whether the row is not finite."""
    return scales_at(width) + width // BLOCK


def record_size(width: int) -> int:
    """Bytes of the record of a row of so many elements."""
    return -(-(flag_at(width) + 1) // ALIGN) * ALIGN


def can_pack(spec: ExecutionSpec) -> bool:
    """Whether rows can travel as records under `spec`: two codes to a byte, an E4M3 scale for 16 elements of a row, an
    outer scale of the row's own, no random numbers.
    """
    own = spec.activation
    return (
        own is not None
        and own.outer_domain is ScaleDomain.TOKEN
        and own.block is Block.ROW_16
        and own.block_scale_format is BlockScaleFormat.E4M3
        and own.code_layout is CodeLayout.EVEN_LOW
        and own.rounding is not Rounding.STOCHASTIC
    )


def check_can_pack(spec: ExecutionSpec) -> None:
    """Raises ValueError unless `can_pack`."""
    if not can_pack(spec):
        raise ValueError(f"rows are not packed under {spec.name!r}: its activations are not NVFP4 by token")
