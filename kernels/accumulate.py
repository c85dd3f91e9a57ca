"""The sum of products along K, as `Accumulation` says.

`fp32_any_order` leaves the order open. The reference takes the member of that family that depends on nothing else:
it sums in FP64 and rounds once. Where FP64 holds every partial sum exactly, the result depends neither on the BLAS
nor on the threads nor on the rows that share the call. K is cut into segments of 1024, whose sums are added in
order. Within a segment FP64 is exact for

    E2M1 x E4M3 scales   products are multiples of 2^-20, and partial sums below 1024 * 2688^2 < 2^33: 53 bits
    E4M3, no block scale multiples of 2^-18, below 1024 * 448^2 < 2^28: 46 bits
    E8M0 scales          as long as the products of two block scales in a segment lie within a factor of
                         2^35 (E2M1), 2^31 (E2M3), 2^25 (E3M2), 2^7 (E4M3)

and sums of segments as long as they stay below 2^33 (2^35 for E4M3). Beyond that, and for BF16 and FP32 operands,
FP64 sums in different orders differ by about 2^-52 of the terms' size. The FP32 rounding hides that except where a
sum lies that close to a rounding boundary: rare, but not excluded.

In the other orders 16 products are summed in FP64 and rounded to FP32, and all else is FP32 in a fixed order. The
16 products of quantised operands share their scales, so that FP64 is exact there under every format.
"""

from __future__ import annotations

from functools import reduce

import torch

from kernels.spec import Accumulation

_BLOCK = 16
_SEGMENT = 1024
_FEW_ROWS, _PART = 32, 256


def product(x: torch.Tensor, weight: torch.Tensor, accumulation: Accumulation) -> torch.Tensor:
    """[R, K] of any float type, [N, K] -> x @ weight.T, float32 [R, N].

    Every member but `fp32_gemm` gives a row the same bits whatever rows are beside it (within the limits above).
    """
    match accumulation:
        case Accumulation.GEMM:
            return x.float() @ weight.float().T
        case Accumulation.ANY_ORDER:
            return reduce(torch.add, map(_in_fp64, *_cut(x, weight, _SEGMENT))).float()
        case Accumulation.BLOCKS_IN_ORDER:
            return reduce(
                torch.add, (_in_fp64(a, b).float() for a, b in zip(*_cut(x, weight, _BLOCK), strict=True))
            )
        case Accumulation.TREE:
            return _pairwise(*_cut(x, weight, _BLOCK))


def _cut(
    x: torch.Tensor, weight: torch.Tensor, width: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    return x.split(width, dim=1), weight.split(width, dim=1)


def _in_fp64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    if x.device.type != "cpu" or len(x) > _FEW_ROWS:
        return wide @ weight.double().T
    # Where few rows meet a weight, time goes into widening it: part by part the FP64 copy stays in the cache.
    output = wide.new_empty(len(x), len(weight))
    for begin in range(0, len(weight), _PART):
        end = begin + _PART
        output[:, begin:end] = wide @ weight[begin:end].double().T
    return output


def _pairwise(x: tuple[torch.Tensor, ...], weight: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Neighbours are added first, then neighbouring sums, ...; what is left over at the end joins last."""
    if len(x) == 1:
        return _in_fp64(x[0], weight[0]).float()
    half = 1 << (len(x) - 1).bit_length() - 1  # the largest power of two below the number of blocks
    return _pairwise(x[:half], weight[:half]) + _pairwise(x[half:], weight[half:])
