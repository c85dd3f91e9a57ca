"""Evaluates the formulas as which the members of a spec's enums are written.

`"x*(1/(s*(1/S)))"` is parsed and computed, one FP32 operation at a time: the text of the spec is the expected
value's only source. Numbers are float64 arrays that hold FP32 values. A float64 sum, product or quotient of
FP32 values, rounded to FP32, is the correctly rounded one, because 53 bits are at least twice 24 plus 2.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping

import numpy as np

FP32_MAX = float(np.finfo(np.float32).max)
BF16_MAX = float.fromhex("0x1.fep127")
SMALLEST_NORMAL = 2.0**-126

Names = Mapping[str, np.ndarray]


def fp32(x: np.ndarray) -> np.ndarray:
    """float64 rounded to the nearest FP32 value, kept as float64; too large becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def bf16(x: np.ndarray) -> np.ndarray:
    """float64 that holds FP32 values, rounded to the nearest BF16 value (ties to even) by integer arithmetic."""
    single = np.ascontiguousarray(x, np.float32)
    bits = single.view(np.uint32).astype(np.uint64)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return np.where(np.isnan(single), np.nan, bits.view(np.float32).astype(np.float64))


def evaluate(formula: str, names: Names, *, saturate: bool = False) -> np.ndarray:
    """The value of `formula`, an expression in `names`, each operation rounded to FP32.

    `^` is a power, `rcp~` the approximate reciprocal. saturate: quotients by `/` that overflow, and factors before
    a cast to BF16, become the largest number of their format. Raises ValueError for what is not understood.
    """
    with np.errstate(all="ignore"):
        return _value(_parse(formula), names, saturate)


def assignments(formula: str, names: Names, largest: float = np.inf) -> dict[str, np.ndarray]:
    """`"S=M/A,g=1/S"` -> the names that it assigns, each of which the later ones may use; S at most `largest`."""
    found: dict[str, np.ndarray] = {}
    for part in formula.split(","):
        name, _, expression = part.partition("=")
        value = evaluate(expression, {**names, **found})
        found[name] = np.minimum(value, largest) if name == "S" else value
    return found


@functools.cache
def _parse(formula: str) -> ast.expr:
    try:
        return ast.parse(formula.replace("rcp~", "rcp").replace("^", "**"), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"formula {formula!r} is not understood") from error


def _value(node: ast.expr, names: Names, saturate: bool) -> np.ndarray:
    match node:
        case ast.Constant(value=int() | float() as number):
            return fp32(np.array(number, np.float64))
        case ast.Name(id=name) if name in names:
            return np.asarray(names[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names, saturate)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            operands = (_value(left, names, saturate), _value(right, names, saturate))
            result = fp32(_OPERATIONS[type(op)](*operands))
            return _largest(result) if saturate and isinstance(op, ast.Div) else result
        case ast.Call(func=ast.Name(id="rcp"), args=[argument]):
            return _approximate_reciprocal(_value(argument, names, saturate))
        case ast.Call(func=ast.Name(id="bf16"), args=[argument]):
            value = _value(argument, names, saturate)
            return bf16(np.clip(value, -BF16_MAX, BF16_MAX) if saturate else value)
        case ast.Call(func=ast.Name(id=way), args=[ast.Call(func=ast.Name(id="log2"), args=[argument])]) if (
            way in _LOG2
        ):
            return _LOG2[way](_value(argument, names, saturate))
    raise ValueError(f"formula part {ast.unparse(node)!r} is not understood; names are {sorted(names)}")


def _largest(x: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(x), np.sign(x) * FP32_MAX, x)


def _approximate_reciprocal(x: np.ndarray) -> np.ndarray:
    result = fp32(1 / np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(0.0, x), x))
    return np.where(np.abs(result) < SMALLEST_NORMAL, np.copysign(0.0, result), result)


def _floor_log2(x: np.ndarray) -> np.ndarray:
    """Exact floor(log2(x)); minus infinity for 0."""
    return np.where(x > 0, np.frexp(x)[1] - 1.0, -np.inf)


def _ceil_log2(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    return np.where(x > 0, exponent - (mantissa == 0.5), -np.inf)


_OPERATIONS: dict[type, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.Pow: np.power,
}
_LOG2 = {"floor": _floor_log2, "ceil": _ceil_log2}
