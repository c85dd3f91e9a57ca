"""Device functions: E2M1 and E4M3 codes, encoded and decoded, and the rounding to BF16.

A *word* is a uint32 that holds two 16-bit numbers, the even element in the low half, or eight E2M1 codes, the first in
the lowest nibble. A *block* is 16 elements with one scale.

Everything here gives the same bits compiled and in the interpreter. Where the fast instruction does not exist there (or
rounds otherwise), a function has two bodies, chosen by `COMPILED`; the interpreter cannot run inline PTX, does not fuse
`tl.fma`, truncates where it casts to BF16 and has no right cast to E4M3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)

# High bytes of the f16 numbers 0, 0.5, 1, 1.5 and 2, 3, 4, 6, the magnitudes of E2M1; their low bytes are zero.
MAGNITUDES_LOW = tl.constexpr(0x3E3C3800)
MAGNITUDES_HIGH = tl.constexpr(0x46444240)
INTEGER = tl.constexpr(8388608.0)  # 2^23: from here to 2^24 FP32 numbers are the integers
INFINITY_BITS = tl.constexpr(0x7F800000)
ZERO_GROUP_BELOW = tl.constexpr(7.888609052210118e-31)  # 2^-100


def as_stored(out: torch.Tensor) -> torch.Tensor:
    """bfloat16 as the kernels store it: in the interpreter, whose cast truncates, as its bits."""
    return out if COMPILED.value else out.view(torch.int16)


# $0: what was found; $1: where; $2: the least.
_WAIT_UNTIL = tl.constexpr("""{
    .reg .pred less;
again:
    ld.relaxed.gpu.global.s32 $0, [$1];
    setp.lt.s32 less, $0, $2;
    @less nanosleep.u32 200;
    @less bra again;
    fence.acq_rel.gpu;
}""")


@triton.jit
def wait_for_kernel_before():
    """For kernels launched with `launch_pdl`, which start while the kernel before them ends (programmatic dependent
    launch): ahead of the first use of what that one makes. Then lets the next kernel start, so that whatever is two
    kernels back is complete from the beginning, unless the kernel between calls `let_next_kernel_start` before.
    """
    if COMPILED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next_kernel_start():
    """Ahead of `wait_for_kernel_before` or `wait_until`: the next kernel may then start while this one still waits, and
    while those that it waits for are at work. Ahead of its own wait it must read nothing that any of these makes, and
    write nothing that they read.
    """
    if COMPILED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_until(counter, least):
    """Waits until the int32 at each `counter` is `least` or more, where programs of a kernel before this one count with
    `report_finished`; what they stored before they did can then be read. All of those programs must have started:
    that is so for kernels that were let start by `let_next_kernel_start` or `wait_for_kernel_before` in each of them.
    Counters serve once: a kernel that is complete before any of those starts must have set them to zero.
    """
    if COMPILED:
        tl.inline_asm_elementwise(_WAIT_UNTIL, "=&r,l,r", [counter.to(tl.int64), least], tl.int32, False, 1)
        tl.debug_barrier()  # a thread may have waited for some of them only


@triton.jit
def report_finished(counter, mask=None):
    """Adds one to the int32 at `counter`, once all that this program has stored can be read by who sees it."""
    if COMPILED:
        tl.debug_barrier()
    tl.atomic_add(counter, 1, mask=mask, sem="release")


@triton.jit
def end_behind_kernel_before():
    """Last in a kernel that waits for parts of the kernel before it only: it then ends after that one, so that who
    waits for its end can rely on both. The programs with the largest first number alone wait.
    """
    if COMPILED:  # noqa: SIM102  # known when the kernel is compiled, unlike what follows
        if tl.program_id(0) == tl.num_programs(0) - 1:
            tl.extra.cuda.gdc_wait()


@triton.jit
def permute_bytes(a, b, selector):
    """PTX `prmt`: byte i of the result is byte n of the eight bytes (a, b), n the low three bits of nibble i of
    `selector`, or eight copies of that byte's top bit where the nibble's fourth bit is set. uint32 all.
    """
    if COMPILED:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], tl.uint32, True, 1
        )
    result = tl.zeros_like(a)
    for i in tl.static_range(4):
        choice = (selector >> (4 * i)) & 15
        source = tl.where((choice & 4) != 0, b, a)
        byte = (source >> ((choice & 3) * 8)) & 255
        byte = tl.where((choice & 8) != 0, (byte >> 7) * 255, byte)
        result |= byte << (8 * i)
    return result


@triton.jit
def saturating_fma(a, b, c):
    """a * b + c clamped to [0, 1], float32; a * b must be exact."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.float32, True, 1
        )
    return tl.minimum(tl.maximum(a * b + c, 0.0), 1.0)


@triton.jit
def larger_bf16(a, b):
    """Words of BF16 numbers -> the larger magnitude of each half, with any sign; NaN where either is NaN."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1
        )
    high = tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)
    return high | tl.maximum(a & 0x7FFF, b & 0x7FFF)


@triton.jit
def scale_bf16(word, power):
    """A word of BF16 numbers times a power of two (float32): exact, unless a product is subnormal."""
    if COMPILED:
        factor = power.to(tl.uint32, bitcast=True)
        factor = factor | (factor >> 16)
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [word, factor], tl.uint32, True, 1
        )
    low = (bf16_low(word) * power).to(tl.uint32, bitcast=True)
    high = (bf16_high(word) * power).to(tl.uint32, bitcast=True)
    return (low >> 16) | (high & 0xFFFF0000)


@triton.jit
def approximate_reciprocal(x):
    """1/x to about one unit in the last place; for results that are checked or need no more."""
    if COMPILED:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def round_bf16(x):
    """float32 -> the bits of the nearest BF16 number, ties to even, in the low half of a uint32."""
    if COMPILED:
        return x.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded)


@triton.jit
def pack_bf16(low, high):
    """Two float32 -> a word of the nearest BF16 numbers, ties to even."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], tl.uint32, True, 1
        )
    return round_bf16(low) | (round_bf16(high) << 16)


@triton.jit
def bf16_low(word):
    """The low half of a word as float32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_high(word):
    """The high half of a word as float32."""
    return (word & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def to_f32(x):
    """bfloat16 or float32 -> float32, exact: the interpreter's own cast loses subnormal numbers."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def multiply_f16(a, b):
    """Words of two f16 numbers: their products, each rounded once."""
    if COMPILED:
        return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)
    low = _f16(a & 0xFFFF) * _f16(b & 0xFFFF)
    high = _f16(a >> 16) * _f16(b >> 16)
    return low.to(tl.uint16, bitcast=True).to(tl.uint32) | (
        high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    )


@triton.jit
def _f16(bits):
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def e4m3_encode(x):
    """float32 >= 0, no NaN -> E4M3 byte (uint32): nearest, ties to even mantissa, saturating at 448."""
    bits = x.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, which is the step of FP32 numbers at 2^14.
    subnormal = (x + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, subnormal, normal)
    return tl.where(bits >= 0x43E00000, 0x7E, code)


@triton.jit
def e4m3_to_f32(code):
    """E4M3 byte of a number >= 0 (an unsigned integer) -> its value, exact."""
    code = code.to(tl.uint32)
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def e4m3_to_f16(code):
    """E4M3 byte of a number >= 0 (an unsigned integer) -> its value, exact."""
    # An f16 number of the same fields is 2^-8 of it, subnormal ones included.
    return (code.to(tl.uint16) << 7).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def nibble_to_f16(code):
    """E2M1 code 0 to 15 (any integer type) -> f16 of 2^-14 times its value, exact (the smallest are subnormal)."""
    code = code.to(tl.uint16)
    return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.float16, bitcast=True)


@triton.jit
def codes_to_f16(codes):
    """A word of eight E2M1 codes -> four words of their values as f16, exact: elements 0 and 1, ..., 6 and 7."""
    w0, w1, w2, w3 = magnitudes_to_f16(codes)
    w0 |= ((codes << 12) & 0x8000) | ((codes << 24) & 0x80000000)
    w1 |= ((codes << 4) & 0x8000) | ((codes << 16) & 0x80000000)
    w2 |= ((codes >> 4) & 0x8000) | ((codes << 8) & 0x80000000)
    w3 |= ((codes >> 12) & 0x8000) | (codes & 0x80000000)
    return w0, w1, w2, w3


@triton.jit
def magnitudes_to_f16(codes):
    """As `codes_to_f16`, of the codes without their signs."""
    low_table = tl.full(codes.shape, MAGNITUDES_LOW, tl.uint32)
    high_table = tl.full(codes.shape, MAGNITUDES_HIGH, tl.uint32)
    zero = tl.zeros_like(codes)
    low = permute_bytes(low_table, high_table, codes & 0x7777)
    high = permute_bytes(low_table, high_table, (codes >> 16) & 0x7777)
    return (
        permute_bytes(low, zero, 0x1404),
        permute_bytes(low, zero, 0x3424),
        permute_bytes(high, zero, 0x1404),
        permute_bytes(high, zero, 0x3424),
    )


@triton.jit
def to_bf16(x):
    """float32 -> bfloat16, nearest-even; in the interpreter its bits, for `as_stored`."""
    if COMPILED:
        return x.to(tl.bfloat16)
    else:
        return round_bf16(x).to(tl.int16)


@triton.jit
def both_halves(bits):
    """f16 or BF16 bits in the low half of a uint32 -> the same in both halves."""
    return bits | (bits << 16)


@triton.jit
def append_index(codes, x, divisor, reciprocal, DIVIDE: tl.constexpr):
    """2^23 + n, float32 -> 2^23 + 16 n + the index of the E2M1 magnitude nearest to fl(x / divisor). 0 <= n < 2^15.

    x: float32 >= 0; divisor in [1, 2), reciprocal = fl(1 / divisor). Unless DIVIDE, x must be a BF16 number: the
    quotient is then the corrected product with the reciprocal (Markstein, "Computation of elementary functions on the
    IBM RISC System/6000 processor", 1990). That can miss the correctly rounded quotient by one unit, but not where it
    matters: a test goes through every divisor and every significand of x.
    """
    if COMPILED and not DIVIDE:
        quotient = x * reciprocal
        quotient = tl.fma(tl.fma(quotient, 0.0 - divisor, x), reciprocal, quotient)
    else:
        quotient = tl.div_rn(x, divisor)
    # Steps of 1/2 from 0 to 2, of 1 from 2 to 4, of 2 from 4 to 6. Each piece, mapped to [0, 1], is a whole and even
    # number of steps long, so that adding the pieces to an even integer one by one rounds ties to the even index.
    below_2 = saturating_fma(quotient, 0.5, 0.0)
    below_4 = saturating_fma(quotient, 0.5, -1.0)
    below_6 = saturating_fma(quotient, 0.5, -2.0)
    codes = tl.fma(codes, 16.0, INTEGER - 16.0 * INTEGER)
    codes = tl.fma(below_2, 4.0, codes)
    codes = tl.fma(below_4, 2.0, codes)
    return codes + below_6


@triton.jit
def encode_magnitudes(x0, x1, x2, x3, x4, x5, x6, x7, divisor, reciprocal, DIVIDE: tl.constexpr):
    """Eight numbers as `append_index` takes them -> a word of their codes, without signs."""
    low = tl.full(x0.shape, INTEGER, tl.float32)
    high = append_index(low, x7, divisor, reciprocal, DIVIDE)
    low = append_index(low, x3, divisor, reciprocal, DIVIDE)
    high = append_index(high, x6, divisor, reciprocal, DIVIDE)
    low = append_index(low, x2, divisor, reciprocal, DIVIDE)
    high = append_index(high, x5, divisor, reciprocal, DIVIDE)
    low = append_index(low, x1, divisor, reciprocal, DIVIDE)
    high = append_index(high, x4, divisor, reciprocal, DIVIDE)
    low = append_index(low, x0, divisor, reciprocal, DIVIDE)
    return permute_bytes(low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True), 0x5410)


@triton.jit
def signs_of_bf16(w0, w1, w2, w3):
    """Words of eight BF16 numbers -> their signs, at the sign bits of a word of codes."""
    low = permute_bytes(w0, w1, 0xD9FB)  # signs of: w0 high, w1 high, w0 low, w1 low
    high = permute_bytes(w2, w3, 0xD9FB)
    odd = permute_bytes(low, high, 0x5410)
    even = permute_bytes(low, high, 0x7632)
    return (odd & 0x80808080) | (even & 0x08080808)
