"""The execution specification: a frozen value that says how an expert layer is computed, and, if it is strict, the rest
of the model as well.

"NVFP4" names a storage format. It leaves open over what a scale is taken, which quantity is stored, in which
order it is multiplied and divided, where casts and the router coefficient enter, and in which order experts
are summed. `ExecutionSpec` has one field per such degree of freedom, so that two engines can be compared by
value: quantisers of activations, weights and gradients (`kernels.quantizer_spec`) and the composition of the
layer.

Every value of every enum runs in `kernels.reference`; a value that cannot run does not exist. To add one, add
the member, its branch in the reference, and its rule in `contradictions`.

Notation: gx, gw outer decode scales of activation and weight; Ax, Aw largest magnitudes of their outer groups;
Mx, Mw as M in `kernels.quantizer_spec`; acc the sum of products along K; p the router coefficient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

from kernels.fields import PlainValue, degree, parse
from kernels.model_spec import ModelSpec
from kernels.quantizer_spec import (
    ACTIVATION_DOMAINS,
    WEIGHT_DOMAINS,
    BlockScaleFormat,
    OuterStored,
    QuantizerSpec,
    Rounding,
    ScaleDomain,
    Transform,
)


class FloatType(StrEnum):
    BF16 = "bf16"
    FP32 = "fp32"


class Accumulation(StrEnum):
    """The sum of products along K. Products are exact; the sum is rounded to FP32 as follows."""

    ANY_ORDER = "fp32_any_order"  # in FP32 or wider, in any order
    BLOCKS_IN_ORDER = "fp32_blocks_in_order"  # each 16 elements exactly, then ((b0 + b1) + b2) + ...
    TREE = "fp32_tree"  # each 16 elements exactly, then pairwise: (b0 + b1) + (b2 + b3), ...
    GEMM = "fp32_gemm"  # the library's FP32 matrix product


class Epilogue(StrEnum):
    """Association of the outer scales with the accumulator, each product rounded to FP32."""

    NONE = "none"
    OUTER_PRODUCT_FIRST = "acc*(gx*gw)"
    ACTIVATION_FIRST = "(acc*gx)*gw"
    AMAX_ALPHA = "acc*((Ax*Aw)*(1/(Mx*Mw)))"  # one factor, as a GEMM takes it
    AMAX_AFTER = "(acc*(1/(Mx*Mw)))*(Ax*Aw)"  # FP32 GEMM output, multiplied afterwards


class Swiglu(StrEnum):
    FP32_ROUNDED_SILU = "fp32(silu(gate))*up"  # silu correctly rounded to FP32, then one FP32 product
    FP32_LIBRARY_SILU = "library_silu(gate)*up"  # the library's FP32 silu


class RouterPosition(StrEnum):
    """What the router coefficient multiplies."""

    FC2_OUTPUT = "fc2_output"
    SWIGLU_BEFORE_CAST = "swiglu_before_cast"  # in FP32, ahead of the cast to the SwiGLU output's type
    SWIGLU_OUTPUT = "swiglu_output"  # the cast value; FC2 takes the product in the product's type


class Combine(StrEnum):
    """How a token's expert outputs, already multiplied by p, are summed."""

    SLOT_ORDER = "slot_order"  # ((p0*y0 + p1*y1) + p2*y2) + ..., each product and sum rounded, no FMA
    SLOT_ORDER_FMA = "slot_order_fma"  # fma(p2, y2, fma(p1, y1, p0*y0))
    EXPERT_ORDER = "expert_order"  # as slot_order, in ascending order of expert ids
    ANY_ORDER = "any_order"  # atomics; the reference takes slot order


class Backward(StrEnum):
    """Operands of the gradient's products; quantisation counts as the identity."""

    BF16_STRAIGHT_THROUGH = "bf16_straight_through"  # BF16 operands from before quantisation
    DEQUANTIZED = "dequantized"  # the values that the forward multiplied, decoded to BF16
    QUANTIZED = "quantized"  # gradient, activations and weights through the gradient's quantiser
    FP32 = "fp32"


@dataclass(frozen=True, kw_only=True)
class ExecutionSpec:
    """How an expert layer is computed, one field per degree of freedom.

    `name` is a label: it takes no part in equality, hash, fingerprint or diff. A quantiser that is None leaves
    its operand in `operand`. In plain form the fields of a quantiser are `activation.element` and so on, or
    `activation` with the value "none". With `model` the spec is strict: it covers the whole model. Its plain form is
    `model.linear` and so on; without it there is nothing of it in the plain form, nor in the fingerprint.

    Raises TypeError for a value of the wrong type, ValueError for fields that contradict each other.
    """

    name: str = field(compare=False)
    activation: QuantizerSpec | None = degree("quantiser of the inputs of FC1 and FC2, along K")
    weight: QuantizerSpec | None = degree("quantiser of both weights, along K")
    gradient: QuantizerSpec | None = degree("quantiser of the operands of the gradient's products")
    operand: FloatType = degree("type to which expert input and weights are cast first")
    accumulation: Accumulation = degree("sum of products along K")
    epilogue: Epilogue = degree("association of the outer scales with the accumulator")
    fc1_output: FloatType = degree("type of the FC1 output, cast once from FP32")
    swiglu: Swiglu = degree("arithmetic of silu(gate)*up; gate is the first half of FC1's output")
    swiglu_output: FloatType = degree("type of the SwiGLU output, before it is quantised for FC2")
    fc2_output: FloatType = degree("type of an FC2 output row, cast once from FP32")
    router_position: RouterPosition = degree("what the router coefficient multiplies")
    router_coefficient: FloatType = degree("type to which the router coefficient is cast first")
    router_product: FloatType = degree("type to which its product is rounded")
    combine: Combine = degree("order in which a token's expert outputs are summed")
    combine_sum: FloatType = degree("type of that sum, rounded at every addition")
    output: FloatType = degree("type of the layer's output, cast once from the sum")
    backward: Backward = degree("operands and precision of the gradient")
    model: ModelSpec | None = field(default=None, metadata={"meaning": "what is not in the experts"})

    def __post_init__(self) -> None:
        for key, kind in _LAYER_TYPES.items():
            if type(getattr(self, key)) is not kind:
                raise TypeError(f"ExecutionSpec.{key} must be {kind.__name__}, got {getattr(self, key)!r}")
        for role in QUANTIZERS:
            if not isinstance(getattr(self, role), QuantizerSpec | None):
                raise TypeError(f"ExecutionSpec.{role} must be a QuantizerSpec or None")
        if not isinstance(self.model, ModelSpec | None):
            raise TypeError("ExecutionSpec.model must be a ModelSpec or None")
        problems = _contradictions(self)
        if problems:
            raise ValueError(f"impossible execution spec {self.name!r}: " + "; ".join(problems))

    @property
    def quantized(self) -> bool:
        """Whether the weights are quantised."""
        return self.weight is not None

    @property
    def strict(self) -> bool:
        """Whether the whole model is specified, so that two engines can agree to the bit."""
        return self.model is not None

    @property
    def width_multiple(self) -> int:
        """The widths of FC1's and FC2's inputs must be multiples of this."""
        return max((q.width_multiple for q in (self.activation, self.weight) if q is not None), default=1)

    def canonical(self) -> str:
        """One `field=value` line per degree of freedom, in the order of declaration, after a schema line."""
        lines = [f"{key}={value}" for key, value in self.to_dict().items() if key != "name"]
        return "\n".join([_SCHEMA, *lines])

    @property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of SHA-256 of `canonical()`."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, PlainValue]:
        """Plain values under dotted names, `name` included; `from_dict` is the inverse."""
        plain: dict[str, PlainValue] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, QuantizerSpec | ModelSpec):
                plain |= {f"{entry.name}.{key}": inner for key, inner in value.to_dict().items()}
            elif entry.name != "model":
                plain[entry.name] = "none" if value is None else str(value)
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> ExecutionSpec:
        """Raises ValueError for an unknown or missing field and for a value that its field does not have."""
        layer: dict[str, Any] = {}
        rest = dict(values)
        rest.setdefault("model", "none" if not any(key.startswith("model.") for key in values) else None)
        for role, kind in PARTS.items():
            inner = {
                key.removeprefix(f"{role}."): rest.pop(key) for key in values if key.startswith(f"{role}.")
            }
            absent = rest.pop(role, None) == "none"
            if absent is bool(inner):
                raise ValueError(f"execution spec: give either {role}=none or all fields {role}.*")
            try:
                layer[role] = kind.from_dict(inner) if inner else None
            except ValueError as error:
                raise ValueError(f"execution spec: {role}: {error}") from error
        known = {"name": str} | _LAYER_TYPES
        unknown, missing = sorted(rest.keys() - known.keys()), sorted(known.keys() - rest.keys())
        if unknown or missing:
            raise ValueError(f"execution spec: unknown fields {unknown}, missing fields {missing}")
        try:
            layer |= {key: parse(key, kind, rest[key]) for key, kind in known.items()}
        except ValueError as error:
            raise ValueError(f"execution spec: {error}") from error
        return cls(**layer)


QUANTIZERS = ("activation", "weight", "gradient")
PARTS: dict[str, type[QuantizerSpec] | type[ModelSpec]] = {
    **dict.fromkeys(QUANTIZERS, QuantizerSpec),
    "model": ModelSpec,
}  # fields that are specifications themselves, or None
_SCHEMA = "minite-execution-spec/3"
_LAYER_TYPES: dict[str, type] = {
    "operand": FloatType,
    "accumulation": Accumulation,
    "epilogue": Epilogue,
    "fc1_output": FloatType,
    "swiglu": Swiglu,
    "swiglu_output": FloatType,
    "fc2_output": FloatType,
    "router_position": RouterPosition,
    "router_coefficient": FloatType,
    "router_product": FloatType,
    "combine": Combine,
    "combine_sum": FloatType,
    "output": FloatType,
    "backward": Backward,
}


def _contradictions(spec: ExecutionSpec) -> list[str]:
    problems = []

    def require(condition: bool, sentence: str) -> None:
        if not condition:
            problems.append(sentence)

    activation, weight, gradient = spec.activation, spec.weight, spec.gradient
    for role, quantizer, domains in (
        ("activation", activation, ACTIVATION_DOMAINS),
        ("weight", weight, WEIGHT_DOMAINS),
        ("gradient", gradient, ACTIVATION_DOMAINS),
    ):
        if quantizer is not None:
            found = quantizer.outer_domain
            require(found in domains, f"{role}.outer_domain={found} is not one of: {', '.join(domains)}")
    require(weight is not None or activation is None, "activation is quantised and weight is not")
    for role, quantizer in (("activation", activation), ("weight", weight)):
        if quantizer is not None:
            require(
                quantizer.rounding is Rounding.NEAREST_EVEN,
                f"{role}.rounding={quantizer.rounding}: the forward must be a function of its operands",
            )
    if activation is not None and weight is not None:
        require(activation.transform is weight.transform, "activation.transform and weight.transform differ")
    else:
        require(weight is None or weight.transform == "none", "weight.transform without activation")

    scaled = any(q is not None and q.outer_domain is not ScaleDomain.NONE for q in (activation, weight))
    require(
        (spec.epilogue is not Epilogue.NONE) is scaled,
        f"epilogue={spec.epilogue} with outer scales {'present' if scaled else 'absent'}",
    )
    if spec.epilogue in (Epilogue.AMAX_ALPHA, Epilogue.AMAX_AFTER):
        amax = all(q is not None and q.outer_stored is OuterStored.AMAX for q in (activation, weight))
        require(amax, f"epilogue={spec.epilogue} needs outer_stored=A of activation and weight")

    quantized = spec.backward is Backward.QUANTIZED
    require(
        quantized is (gradient is not None),
        f"backward={spec.backward} with gradient {'none' if gradient is None else 'quantised'}",
    )
    require(
        spec.backward is not Backward.DEQUANTIZED or spec.quantized, "backward=dequantized with weight=none"
    )

    if spec.model is not None:
        for role, quantizer in (("activation", activation), ("weight", weight)):
            # With others the sums in FP64 are not exact in every case (see `kernels.accumulate`).
            block = quantizer is not None and quantizer.block_scale_format is BlockScaleFormat.E4M3
            require(block, f"model given, but {role} has no blocks scaled in e4m3")
            if quantizer is not None:
                rotated = quantizer.transform is not Transform.NONE
                require(not rotated, f"model given with {role}.transform={quantizer.transform}")
        if activation is not None:
            alone = activation.outer_domain is not ScaleDomain.TENSOR
            require(alone, f"model given with activation.outer_domain={activation.outer_domain}")
        require(
            spec.accumulation is not Accumulation.GEMM, f"model given with accumulation={spec.accumulation}"
        )
        require(spec.combine is not Combine.ANY_ORDER, f"model given with combine={spec.combine}")
        fixed = spec.swiglu is Swiglu.FP32_ROUNDED_SILU and spec.fc1_output is FloatType.BF16
        require(fixed, f"model given with swiglu={spec.swiglu} and fc1_output={spec.fc1_output}")

    full = spec.operand is FloatType.FP32
    require(full is (spec.backward is Backward.FP32), f"backward={spec.backward} with operand={spec.operand}")
    before_fc2 = spec.router_position is not RouterPosition.FC2_OUTPUT
    require(
        not before_fc2 or spec.combine is not Combine.SLOT_ORDER_FMA,
        f"combine={spec.combine} with router_position={spec.router_position}",
    )
    if spec.combine is Combine.SLOT_ORDER_FMA:
        wide = spec.router_product is FloatType.FP32 and spec.combine_sum is FloatType.FP32
        require(wide, "combine=slot_order_fma rounds neither product nor sum to bf16")
    return problems


def meanings() -> dict[str, str]:
    """What each field of the plain form decides, by its name."""
    layer = {entry.name: entry.metadata["meaning"] for entry in fields(ExecutionSpec) if entry.name != "name"}
    inner = {f"{role}.{name}": meaning for role, kind in PARTS.items() for name, meaning in kind.degrees()}
    return layer | inner


class FieldDifference(NamedTuple):
    """A degree of freedom in which two specs differ."""

    field: str
    left: PlainValue
    right: PlainValue
    meaning: str


def spec_diff(left: ExecutionSpec, right: ExecutionSpec) -> tuple[FieldDifference, ...]:
    """The degrees of freedom that differ, in order of declaration; empty when the specs are equal.

    A quantiser that only one of them has is one difference, `activation: none`, against its format; so is `model`.
    """
    differences = []
    for entry in fields(ExecutionSpec):
        if entry.name == "name":
            continue
        a, b = getattr(left, entry.name), getattr(right, entry.name)
        if isinstance(a, QuantizerSpec | ModelSpec) and type(a) is type(b):
            for inner in type(a).degrees():
                pair = getattr(a, inner.name), getattr(b, inner.name)
                if pair[0] != pair[1]:
                    name = f"{entry.name}.{inner.name}"
                    differences.append(FieldDifference(name, _plain(pair[0]), _plain(pair[1]), inner.meaning))
        elif a != b:
            meaning = entry.metadata["meaning"]
            differences.append(FieldDifference(entry.name, _plain(a), _plain(b), meaning))
    return tuple(differences)


def _plain(value: object) -> PlainValue:
    if isinstance(value, QuantizerSpec):
        return f"{value.element}/{value.block}"
    if isinstance(value, ModelSpec):
        return "strict"
    return value if type(value) is int else "none" if value is None else str(value)


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
