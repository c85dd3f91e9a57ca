"""The execution specification: a frozen value that says how an expert layer is computed.

"NVFP4" names a storage format. It leaves open over what a scale is taken, which quantity is stored, in which
order it is multiplied and divided, where casts and the router coefficient enter, and in which order experts
are summed. `ExecutionSpec` has one field per such degree of freedom, so that two engines can be compared by
value.

Every value of every enum below runs in `kernels.reference`; a value that cannot run does not exist. To add
one, add the member, its branch in the reference, and its rule in `_contradictions`.

Notation: x an element widened to FP32, a the largest |x| of its block, A the largest |x| of its outer group,
g the outer decode scale, s the block scale after rounding to E4M3, p the router coefficient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple, get_type_hints


class Format(StrEnum):
    """Element format of both operands of the two expert products."""

    NVFP4 = "nvfp4"  # E2M1 elements, one E4M3 scale per block, FP32 outer scales
    BF16 = "bf16"
    FP32 = "fp32"


class FloatType(StrEnum):
    BF16 = "bf16"
    FP32 = "fp32"


class BlockScaleFormat(StrEnum):
    NONE = "none"
    E4M3 = "e4m3"


class ActivationScaleDomain(StrEnum):
    NONE = "none"
    TOKEN = "token"  # one per row of the operand
    TENSOR = "tensor"  # one for all rows routed to an expert


class WeightScaleDomain(StrEnum):
    NONE = "none"
    ROW = "row"  # one per output feature
    EXPERT = "expert"  # one per expert and matrix; the gate and up halves share it


class OuterScale(StrEnum):
    NONE = "none"
    DECODE_AMAX_DIV_2688 = "decode=A/2688"


class ZeroGroup(StrEnum):
    NONE = "none"
    UNIT_SCALE_BELOW_2POW_MINUS_100 = "A<2^-100:g=1"


class BlockScale(StrEnum):
    NONE = "none"
    A_DIV_6G = "e4m3(a/(6*g))"


class BlockUnderflow(StrEnum):
    NONE = "none"
    ZERO_CODES = "byte=0:codes=0"


class Element(StrEnum):
    NONE = "none"
    X_DIV_SG = "e2m1(x/(s*g))"


class NegativeZero(StrEnum):
    NONE = "none"
    KEEP = "keep"


class Accumulation(StrEnum):
    FP32_ANY_ORDER = "fp32_any_order"  # exact products, summed in FP32 or wider, in any order
    FP32_GEMM = "fp32_gemm"  # the library's FP32 matrix product


class Epilogue(StrEnum):
    NONE = "none"
    OUTER_PRODUCT_FIRST = "acc*(gx*gw)"


class Swiglu(StrEnum):
    FP32_ROUNDED_SILU = "fp32(silu(gate))*up"  # silu correctly rounded to FP32, then one FP32 product
    FP32_LIBRARY_SILU = "library_silu(gate)*up"  # the library's FP32 silu


class RouterPosition(StrEnum):
    FC2_OUTPUT = "fc2_output"


class Combine(StrEnum):
    SLOT_ORDER = "slot_order"  # ((p0*y0 + p1*y1) + p2*y2) + ..., each product and sum rounded, no FMA


class NibbleOrder(StrEnum):
    NONE = "none"
    EVEN_LOW = "even_low"


class ScaleLayout(StrEnum):
    NONE = "none"
    LINEAR = "linear"  # [rows, K/16]


class Backward(StrEnum):
    BF16_STRAIGHT_THROUGH = "bf16_straight_through"
    FP32 = "fp32"


def _degree(meaning: str, quantized_only: bool = False) -> dict[str, str | bool]:
    return {"meaning": meaning, "quantized_only": quantized_only}


@dataclass(frozen=True, kw_only=True)
class ExecutionSpec:
    """How an expert layer is computed, one field per degree of freedom.

    `name` is a label: it takes no part in equality, hash, fingerprint or diff. Fields that describe
    quantisation are "none" (block_size: 0) unless `format` is nvfp4.

    Raises TypeError for a value of the wrong type, ValueError for fields that contradict each other.
    """

    name: str = field(compare=False)
    format: Format = field(metadata=_degree("element format of both operands of FC1 and FC2"))
    operand: FloatType = field(metadata=_degree("type to which expert input and weights are cast first"))
    block_size: int = field(
        metadata=_degree("elements along K that share a block scale", quantized_only=True)
    )
    block_scale_format: BlockScaleFormat = field(
        metadata=_degree("format of block scales", quantized_only=True)
    )
    activation_scale_domain: ActivationScaleDomain = field(
        metadata=_degree("elements that share an activation's outer scale", quantized_only=True)
    )
    weight_scale_domain: WeightScaleDomain = field(
        metadata=_degree("elements that share a weight's outer scale", quantized_only=True)
    )
    outer_scale: OuterScale = field(
        metadata=_degree(
            "stored outer quantity: the decode scale g, by one FP32 division", quantized_only=True
        )
    )
    zero_group: ZeroGroup = field(
        metadata=_degree("outer groups that are zero, and their scale", quantized_only=True)
    )
    block_scale: BlockScale = field(
        metadata=_degree(
            "block scale: one FP32 product, one FP32 division, E4M3 nearest-even saturating",
            quantized_only=True,
        )
    )
    block_underflow: BlockUnderflow = field(
        metadata=_degree("codes of a block whose scale is zero", quantized_only=True)
    )
    element: Element = field(
        metadata=_degree(
            "element: one FP32 product, one FP32 division, E2M1 nearest-even saturating", quantized_only=True
        )
    )
    negative_zero: NegativeZero = field(
        metadata=_degree("sign of an element that is, or rounds to, minus zero", quantized_only=True)
    )
    accumulation: Accumulation = field(metadata=_degree("sum of products along K"))
    epilogue: Epilogue = field(
        metadata=_degree("association of the outer scales with the accumulator, in FP32", quantized_only=True)
    )
    fc1_output: FloatType = field(metadata=_degree("type of the FC1 output, cast once from FP32"))
    swiglu: Swiglu = field(
        metadata=_degree("arithmetic of silu(gate)*up; gate is the first half of FC1's output")
    )
    swiglu_output: FloatType = field(
        metadata=_degree("type of the SwiGLU output, before it is quantised for FC2")
    )
    fc2_output: FloatType = field(metadata=_degree("type of an FC2 output row, cast once from FP32"))
    router_position: RouterPosition = field(metadata=_degree("what the router coefficient multiplies"))
    router_product: FloatType = field(metadata=_degree("type of the router coefficient and of its product"))
    combine: Combine = field(metadata=_degree("order in which a token's expert outputs are summed"))
    combine_sum: FloatType = field(metadata=_degree("type of that sum"))
    output: FloatType = field(metadata=_degree("type of the layer's output, cast once from the sum"))
    nibble_order: NibbleOrder = field(
        metadata=_degree("position of the even element in its byte", quantized_only=True)
    )
    scale_layout: ScaleLayout = field(
        metadata=_degree("order of block scales in memory", quantized_only=True)
    )
    backward: Backward = field(metadata=_degree("operands and precision of the gradient"))

    def __post_init__(self) -> None:
        for key, kind in _types().items():
            if type(getattr(self, key)) is not kind:
                raise TypeError(f"ExecutionSpec.{key} must be {kind.__name__}, got {getattr(self, key)!r}")
        problems = list(_contradictions(self))
        if problems:
            raise ValueError(f"impossible execution spec {self.name!r}: " + "; ".join(problems))

    def canonical(self) -> str:
        """One `field=value` line per degree of freedom, in the order of declaration, after a schema line."""
        lines = [f"{key}={value}" for key, value in self.to_dict().items() if key != "name"]
        return "\n".join([_SCHEMA, *lines])

    @property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of SHA-256 of `canonical()`."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, str | int | bool]:
        """Plain values, `name` included; `from_dict` is the inverse."""
        values = {key: getattr(self, key) for key in _types()}
        return {key: str(value) if isinstance(value, str) else value for key, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> ExecutionSpec:
        """Raises ValueError for an unknown or missing field and for a value that its field does not have."""
        types = _types()
        unknown, missing = sorted(values.keys() - types.keys()), sorted(types.keys() - values.keys())
        if unknown or missing:
            raise ValueError(f"execution spec: unknown fields {unknown}, missing fields {missing}")
        return cls(**{key: _parse(key, kind, values[key]) for key, kind in types.items()})

    @property
    def quantized(self) -> bool:
        return self.format is Format.NVFP4


_SCHEMA = "minite-execution-spec/1"


def _types() -> dict[str, type]:
    return get_type_hints(ExecutionSpec)


def _parse(key: str, kind: type, value: object) -> Any:
    if issubclass(kind, StrEnum):
        if value not in list(kind):
            raise ValueError(f"execution spec: {key}={value!r} is not one of: {', '.join(kind)}")
        return kind(str(value))
    if type(value) is not kind:
        raise ValueError(f"execution spec: {key}={value!r} is not of type {kind.__name__}")
    return value


def _contradictions(spec: ExecutionSpec) -> Iterator[str]:
    """What `spec` asks for and `kernels.reference` cannot compute."""
    for entry in _degrees():
        value = getattr(spec, entry.name)
        absent = value in ("none", 0)
        if entry.metadata["quantized_only"] and absent is spec.quantized:
            rule = (
                "needs a value" if spec.quantized else f"must be {'0' if value.__class__ is int else 'none'}"
            )
            yield f"{entry.name}={value} {rule} with format={spec.format}"
    if spec.quantized and spec.block_size not in (0, 16):
        yield f"block_size={spec.block_size} must be 16"

    full = spec.format is Format.FP32
    storage = FloatType.FP32 if full else FloatType.BF16
    required = {
        "operand": storage,
        "accumulation": Accumulation.FP32_GEMM if full else Accumulation.FP32_ANY_ORDER,
        "fc1_output": storage,
        "swiglu": Swiglu.FP32_LIBRARY_SILU if full else Swiglu.FP32_ROUNDED_SILU,
        "swiglu_output": storage,
        "fc2_output": storage,
        "router_product": FloatType.FP32,
        "combine_sum": FloatType.FP32,
        "output": storage,
        "backward": Backward.FP32 if full else Backward.BF16_STRAIGHT_THROUGH,
    }
    for key, value in required.items():
        if getattr(spec, key) is not value:
            yield f"{key}={getattr(spec, key)} must be {value} with format={spec.format}"


def _degrees() -> list[Any]:
    return [entry for entry in fields(ExecutionSpec) if entry.name != "name"]


class FieldDifference(NamedTuple):
    """A degree of freedom in which two specs differ."""

    field: str
    left: str | int | bool
    right: str | int | bool
    meaning: str


def spec_diff(left: ExecutionSpec, right: ExecutionSpec) -> tuple[FieldDifference, ...]:
    """The degrees of freedom that differ, in order of declaration; empty when the specs are equal."""
    a, b = left.to_dict(), right.to_dict()
    return tuple(
        FieldDifference(entry.name, a[entry.name], b[entry.name], entry.metadata["meaning"])
        for entry in _degrees()
        if a[entry.name] != b[entry.name]
    )


def format_diff(
    differences: tuple[FieldDifference, ...], left_name: str = "left", right_name: str = "right"
) -> str:
    """A plain-text table of `spec_diff`; the empty string when nothing differs."""
    if not differences:
        return ""
    rows: list[tuple[str, ...]] = [("field", left_name, right_name, "meaning")]
    rows += [tuple(str(cell) for cell in difference) for difference in differences]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[3]])
        for row in rows
    )
