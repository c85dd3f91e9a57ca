"""How far the hardware's `rcp.approx.ftz.f32` is from the correctly rounded reciprocal, over every mantissa.

The reference takes `rcp~` as correctly rounded (kernels/scales.py). A reciprocal's mantissa depends on the
operand's mantissa alone, so the 2^23 numbers in [1, 2) settle it for one architecture. Needs an NVIDIA GPU and Triton.

    python scripts/bench/approximate_reciprocal.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _reciprocal(source, target, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + index, mask=index < count, other=1.0)
    y = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(target + index, y, mask=index < count)


def approximate(x: torch.Tensor) -> torch.Tensor:
    """float32 on a GPU -> its approximate reciprocal, as the hardware computes it."""
    result = torch.empty_like(x)
    _reciprocal[(triton.cdiv(x.numel(), 1024),)](x, result, x.numel(), BLOCK=1024)
    return result


def main() -> None:
    one = torch.tensor(1.0).view(torch.int32).item()
    x = (torch.arange(2**23, dtype=torch.int32, device="cuda") + one).view(torch.float32)
    exact = (1.0 / x.double()).float()
    distance = approximate(x).view(torch.int32).sub(exact.view(torch.int32))
    print(torch.cuda.get_device_name())
    for units in distance.unique().tolist():
        print(f"{units:+d} ulp: {(distance == units).double().mean().item():.4%} of all mantissas")
    for value in (6.0, 2688.0, 448.0):
        own = torch.tensor([value], device="cuda")
        same = bool((approximate(own) == (1.0 / own.double()).float()).item())
        print(f"rcp~({value:g}) is the correctly rounded reciprocal: {same}")


if __name__ == "__main__":
    main()
