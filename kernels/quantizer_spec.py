"""How one operand of an expert product is quantised: a frozen value with one field per degree of freedom.

Notation, used by the members below and in `kernels.quantize`:

    x  an element, widened to FP32          E  the largest element value (6 for E2M1)
    a  the largest |x| of its block         M  E times the largest block scale (2688 for NVFP4)
    A  the largest |x| of its outer group   S, g  outer encode and decode scale
    s  the block scale after rounding to its format

Each arithmetic operation in a formula is one FP32 operation, rounded to nearest even, in the order that the
parentheses give; `rcp~` is the hardware's approximate reciprocal, which the reference takes as correctly
rounded with subnormal operands and results flushed to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernels.fields import Specification, degree


class Element(StrEnum):
    E2M1 = "e2m1"
    E2M3 = "e2m3"
    E3M2 = "e3m2"
    E4M3 = "e4m3"


class Block(StrEnum):
    """The elements that share a block scale: rows x elements along K."""

    NONE = "none"
    ROW_16 = "1x16"
    ROW_32 = "1x32"
    TILE_16 = "16x16"


class BlockScaleFormat(StrEnum):
    NONE = "none"
    E4M3 = "e4m3"
    E8M0 = "e8m0"


class ScaleDomain(StrEnum):
    """The elements that share an outer scale."""

    NONE = "none"
    TOKEN = "token"  # activations: one row
    TENSOR = "tensor"  # activations: all rows routed to an expert
    ROW = "row"  # weights: one output feature
    EXPERT = "expert"  # weights: one expert's matrix; the gate and up halves share it
    EXPERT_HALF = "expert_half"  # weights: as `expert`, but gate and up each have their own


ACTIVATION_DOMAINS = (ScaleDomain.NONE, ScaleDomain.TOKEN, ScaleDomain.TENSOR)
WEIGHT_DOMAINS = (ScaleDomain.NONE, ScaleDomain.ROW, ScaleDomain.EXPERT, ScaleDomain.EXPERT_HALF)


class OuterScale(StrEnum):
    """From A to the encode scale S, which saturates at the largest FP32 number, and the decode scale g."""

    NONE = "none"
    DECODE_DIVIDED = "g=A/M,S=1/g"
    DECODE_MULTIPLIED = "g=A*(1/M),S=rcp~(g)"  # a subnormal g is flushed to zero
    ENCODE_DIVIDED = "S=M/A,g=1/S"
    ENCODE_MULTIPLIED = "S=(1/A)*M,g=1/S"  # what PyTorch makes of a number divided by a tensor


class OuterStored(StrEnum):
    """The quantity that travels with the operand and enters the epilogue."""

    NONE = "none"
    AMAX = "A"
    ENCODE = "S"
    DECODE = "g"


class ZeroGroup(StrEnum):
    """Outer groups without a usable largest magnitude."""

    NONE = "none"
    UNIT_BELOW_2POW_MINUS_100 = "A<2^-100:g=1"
    UNIT_ENCODE = "A=0:S=1"
    UNIT_DECODE = "A=0:g=1"
    LARGEST_ENCODE = "A=0:S=max"
    ZERO = "g=0:S=0"
    AT_LEAST_1E_MINUS_8 = "A>=1e-8"
    UNIT_IF_OVERFLOW = "S=inf:S=1"  # A = 0, any A so small that S exceeds FP32, and an S that is NaN
    COMPUTED = "computed"  # whatever the formulas give for A = 0


class BlockScale(StrEnum):
    """The block scale before it is rounded to its format (E4M3: nearest even, saturating)."""

    NONE = "none"
    A_DIV_EG = "a/(E*g)"
    A_DIV_E_DIV_G = "(a/E)/g"
    A_DIV_E_MUL_S = "(a/E)*S"
    A_MUL_S_INV_E = "a*(S*(1/E))"
    A_INV_E_MUL_S = "(a*(1/E))*S"
    A_RCP_E_MUL_S = "(a*rcp~(E))*S"
    POWER_FLOOR = "2^(floor(log2(a))-floor(log2(E)))"  # OCP Microscaling Formats, section 6.3
    POWER_CEIL = "2^ceil(log2(a/E))"  # no element saturates


class BlockScaleFloor(StrEnum):
    """Smallest block scale, applied before rounding."""

    NONE = "none"
    SMALLEST_NORMAL = "2^-6"
    SMALLEST = "2^-9"


class ZeroBlock(StrEnum):
    """The stored scale of a block that has no other."""

    COMPUTED = "computed"
    UNIT_IF_ZERO = "a=0:s=1"  # also where the scale is zero before its floor and rounding
    EIGHTH_IF_BYTE_ZERO = "s=0:s=1/8"
    NONE = "none"


class ElementQuotient(StrEnum):
    """What is rounded to the element format.

    The factor of `x*(1/(s*(1/S)))` saturates at the largest FP32 number, that of `x*bf16(S/s)` at the largest of BF16.
    """

    X_DIV_SG = "x/(s*g)"
    X_DIV_S_OVER_S = "x/(s/S)"
    X_MUL_INV_S_INV_S = "x*(1/(s*(1/S)))"
    X_MUL_RCP_S_RCP_S = "x*rcp~(s*rcp~(S))"
    X_MUL_S_OVER_S = "x*(S/s)"
    X_MUL_INV_G_OVER_S = "x*((1/g)/s)"
    X_MUL_BF16_S_OVER_S = "x*bf16(S/s)"  # exact for a BF16 x
    X_DIV_S = "x/s"
    X_DIV_G = "x/g"


class UnderflowCodes(StrEnum):
    """Elements whose block scale is zero: codes 0, or what the quotient gives (saturated codes).

    A factor of 0 gives zeros with the signs of the elements, and NaN where the element is NaN.
    """

    NONE = "none"
    ZERO_IF_BYTE_ZERO = "s=0:codes=0"
    ZERO_FACTOR_IF_BYTE_ZERO = "s=0:factor=0"
    ZERO_FACTOR_IF_AMAX_ZERO = "a=0:factor=0"
    COMPUTED = "computed"


class Selector(StrEnum):
    """Largest code of a block: always E, or 4 where that has the smaller error (4over6, arXiv:2512.02010)."""

    LARGEST = "E"
    FOUR_OVER_SIX_MAE = "4over6_mae"
    FOUR_OVER_SIX_MSE = "4over6_mse"


class Rounding(StrEnum):
    NEAREST_EVEN = "nearest_even"
    STOCHASTIC = "stochastic"  # up with the probability that keeps the expectation, from a seed


class NonFinite(StrEnum):
    REFUSE = "refuse"
    SATURATE = "saturate"  # NaN has no part in a or A, and is coded as +E; infinity saturates
    PROPAGATE = "propagate"  # into the scales of its groups, by the formulas; then the codes mean nothing


class NegativeZero(StrEnum):
    """The code of a quotient that is minus zero. A negative quotient that rounds to zero keeps its sign."""

    KEEP = "keep"
    POSITIVE = "positive"


class Transform(StrEnum):
    """Rotation of both operands along K before quantisation; their product does not change."""

    NONE = "none"
    HADAMARD_16 = "hadamard_16"


class CodeLayout(StrEnum):
    EVEN_LOW = "even_low"  # two 4-bit codes to a byte, the even element in the low nibble
    BYTE = "byte"  # one code to a byte


class ScaleLayout(StrEnum):
    NONE = "none"
    LINEAR = "linear"  # [rows, blocks along K]
    SWIZZLED_128X4 = "swizzled_128x4"  # the tensor cores' order, padded to 128 rows and 4 blocks


@dataclass(frozen=True, kw_only=True)
class QuantizerSpec(Specification):
    """One field per degree of freedom of a quantiser. Raises as `Specification` does."""

    element: Element = degree("element format")
    block: Block = degree("elements that share a block scale (rows x elements along K)")
    block_scale_format: BlockScaleFormat = degree("format of block scales")
    block_scale_max: int = degree("largest block scale that the outer scale aims at; 0: no such scale")
    outer_domain: ScaleDomain = degree("elements that share an outer scale")
    outer_scale: OuterScale = degree("from the group's largest magnitude to its scales")
    outer_stored: OuterStored = degree("outer quantity that is stored and enters the epilogue")
    zero_group: ZeroGroup = degree("outer scale of a group of zeros")
    block_scale: BlockScale = degree("block scale before rounding")
    block_scale_floor: BlockScaleFloor = degree("smallest block scale")
    zero_block: ZeroBlock = degree("stored scale of a block of zeros")
    quotient: ElementQuotient = degree("what is rounded to the element format")
    underflow_codes: UnderflowCodes = degree("codes of a block whose scale is zero")
    selector: Selector = degree("choice of the largest code in a block")
    rounding: Rounding = degree("rounding of elements; ties to the even code")
    non_finite: NonFinite = degree("NaN and infinity")
    negative_zero: NegativeZero = degree("sign of minus zero")
    transform: Transform = degree("rotation before quantisation")
    code_layout: CodeLayout = degree("order of codes in memory")
    scale_layout: ScaleLayout = degree("order of block scales in memory")

    def contradictions(self) -> list[str]:
        problems = []

        def require(condition: bool, sentence: str) -> None:
            if not condition:
                problems.append(sentence)

        blocks = self.block is not Block.NONE
        outer = self.outer_domain is not ScaleDomain.NONE
        for key in ("block_scale_format", "block_scale", "zero_block", "underflow_codes", "scale_layout"):
            value = getattr(self, key)
            require((value != "none") is blocks, f"{key}={value} with block={self.block}")
        for key in ("outer_scale", "outer_stored", "zero_group"):
            value = getattr(self, key)
            require((value != "none") is outer, f"{key}={value} with outer_domain={self.outer_domain}")
        require(blocks or outer, "neither block nor outer scales")
        own_rows = self.outer_domain in (ScaleDomain.TOKEN, ScaleDomain.ROW)
        require(
            not (own_rows and self.block is Block.TILE_16),
            f"block={self.block} with outer_domain={self.outer_domain}: a block would have several outer scales",
        )

        e4m3, e8m0 = (
            self.block_scale_format is kind for kind in (BlockScaleFormat.E4M3, BlockScaleFormat.E8M0)
        )
        powers = self.block_scale in (BlockScale.POWER_FLOOR, BlockScale.POWER_CEIL)
        require(
            powers is e8m0,
            f"block_scale={self.block_scale} with block_scale_format={self.block_scale_format}",
        )
        require(not (e8m0 and outer), "E8M0 block scales with an outer scale")
        require(
            self.block_scale_max in ((256, 448) if e4m3 else (0,)),
            f"block_scale_max={self.block_scale_max} with block_scale_format={self.block_scale_format}",
        )
        floored = self.block_scale_floor is not BlockScaleFloor.NONE
        require(e4m3 or not floored, f"block_scale_floor={self.block_scale_floor} without E4M3 block scales")

        own = {ElementQuotient.X_DIV_S: blocks and not outer, ElementQuotient.X_DIV_G: outer and not blocks}
        fits = own.get(self.quotient, blocks and outer)
        require(
            fits, f"quotient={self.quotient} with block={self.block} and outer_domain={self.outer_domain}"
        )
        factor = self.underflow_codes.value.endswith("factor=0")
        require(
            not factor or self.quotient.value.startswith("x*"),
            f"underflow_codes={self.underflow_codes} with quotient={self.quotient}",
        )
        overflow = self.zero_group is ZeroGroup.UNIT_IF_OVERFLOW
        encodes = self.outer_scale in (OuterScale.ENCODE_DIVIDED, OuterScale.ENCODE_MULTIPLIED)
        require(not overflow or encodes, f"zero_group={self.zero_group} with outer_scale={self.outer_scale}")
        four = self.element is Element.E2M1
        selects = self.selector is not Selector.LARGEST
        require(not selects or (four and e4m3), f"selector={self.selector} needs E2M1 with E4M3 block scales")
        packed = self.code_layout is CodeLayout.EVEN_LOW
        require(packed is four, f"code_layout={self.code_layout} with element={self.element}")
        return problems

    @property
    def width_multiple(self) -> int:
        """Every K must be a multiple of this."""
        return {"none": 1, "1x16": 16, "1x32": 32, "16x16": 16}[self.block]
