"""What a strict execution spec adds to the experts': how everything else of the model is computed.

Two engines that share it compute every log-probability with the same operations in the same order. Each field has a
value that depends on nothing but the row's own operands, and another that a library decides, or that rounds elsewhere;
`kernels.strict` computes both. What has no field has no freedom: the embedding is a look-up, a residual is one addition
in the model's type, and every operation that is not a sum is rounded as IEEE 754 says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernels.fields import Specification, degree


class Products(StrEnum):
    """A sum of products."""

    EXACT = "exact_fixed_point"  # operands in fixed point, summed without rounding (see `kernels.strict.fixed_point`)
    LIBRARY = "library"


class Sums(StrEnum):
    """A sum along a row."""

    TREE = "fp32_halves"  # halves are added to each other until one element is left, every addition in FP32
    LIBRARY = "library"


class TableType(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Specification):
    """How a model computes what is not in its experts, one field per degree of freedom."""

    linear: Products = degree("products of projections, router and output layer")
    attention: Products = degree("both products of attention: scores, and the mean of the values")
    norm: Sums = degree("sum of squares in RMS norms, those of queries and keys too")
    rotary: TableType = degree("type to which cosines and sines of the positions are rounded")
    router: Sums = degree("sum in the softmax that gives router coefficients")
    log_softmax: Sums = degree("sum over the vocabulary in log-probabilities")
