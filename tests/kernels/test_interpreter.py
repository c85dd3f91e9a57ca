"""What tests leave out of Triton's interpreter changes nothing about what kernels compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.triton_env import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels are compiled")
ROOT = Path(__file__).resolve().parents[2]
# Blocks of several shapes, types and kinds of pointer, casts, broadcasts, reductions, and integers that overflow.
PROGRAM = """
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels import interpreter


@triton.jit
def row_sum(x):
    return tl.sum(x, axis=1)


@triton.jit
def kernel(x, bits, out, largest, N: tl.constexpr, M: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    across = tl.arange(0, M)
    block = tl.load(x + at[:, None] * M + across[None, :], mask=across[None, :] < M - 1, other=1.0)
    wide = block.to(tl.float32) * 3 + at[:, None]
    word = tl.load(bits + at)
    mixed = (word * 16777619 + largest) ^ (word.to(tl.uint32, bitcast=True) >> 7).to(tl.int32)
    small = (word & 255).to(tl.uint8)
    half = (small.to(tl.float32) / 3).to(tl.float16)
    total = row_sum(wide) + tl.max(tl.where(wide > 0, wide, -wide), axis=1)
    tl.store(out + at * 4, total.to(tl.int32, bitcast=True))
    tl.store(out + at * 4 + 1, mixed)
    tl.store(out + at * 4 + 2, half.to(tl.int16, bitcast=True).to(tl.int32) - small)
    tl.store(out + at * 4 + 3, (small + 250).to(tl.int32) + (at // 3) % 5 - 1)


def run(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 8, generator=generator).to(dtype)
    bits = torch.randint(-(2**31), 2**31, (16,), dtype=torch.int32, generator=generator)
    out = torch.zeros(16, 4, dtype=torch.int32)
    kernel[(2,)](x, bits, out, 2**31 - 1, N=8, M=8)
    return out


types = torch.float32, torch.bfloat16, torch.float16
plain = [run(dtype) for dtype in types]
with pytest.MonkeyPatch.context() as patch:
    interpreter.quicken(patch)
    quick = [run(dtype) for dtype in types * 2]
assert plain[0].unique().numel() > 40 and not torch.equal(plain[0], plain[1])
assert all(torch.equal(own, other) for own, other in zip(plain * 2, quick, strict=True))
print("the same")
"""


def test_a_kernel_gives_the_same_bits(tmp_path: Path) -> None:
    """In a process of its own, as the session's interpreter is the quick one."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr


def test_types_are_those_that_triton_makes() -> None:
    import triton.language as tl

    for element in (tl.float32, tl.bfloat16, tl.int1, tl.uint8, tl.pointer_type(tl.int32)):
        for shape in ([4], [2, 8], [tl.constexpr(2), tl.constexpr(8)], tl.tuple([2, 8])):
            made = tl.block_type(element, shape)
            sizes = [tl.core._unwrap_if_constexpr(size) for size in shape]
            assert list(made.shape) == sizes and made.numel == torch.Size(sizes).numel()
            assert made.scalar is element and made.name == f"<{tl.tuple(sizes)}, {element}>"
            assert made == tl.block_type(element, sizes) and made != tl.block_type(element, [16])
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [3])
    with pytest.raises(TypeError, match="0d"):
        tl.block_type(tl.float32, [])
