"""A learner's and a sampler's quantiser give the same bytes, the same values, and obey the same rules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.conformance import inputs
from kernels.conformance.backend import Adapter, Subject
from kernels.conformance.check import Check, Mismatch, Status, as_array, expect_equal, perform
from kernels.conformance.quantizer_checks import SUITE
from kernels.quantize import QuantizedTensor, dequantize
from kernels.quantizer_spec import QuantizerSpec
from kernels.spec import ExecutionSpec

# Every K is a multiple of 32, so that any format can take the rows.
INPUTS: dict[str, Callable[[QuantizerSpec], np.ndarray]] = {
    "random": lambda _: inputs.random(130, 288),
    "heavy-tailed": lambda _: inputs.heavy_tailed(130, 288),
    "one row": lambda _: inputs.random(1, 96, seed=1),
    "element midpoints": inputs.element_midpoints,
    "scale midpoints": lambda spec: inputs.largest_in_block(inputs.scale_midpoints(spec), spec),
    "subnormal scales": lambda spec: inputs.largest_in_block(np.ldexp(1.0, np.arange(-12, 10)), spec),
    "outer scales": lambda _: inputs.with_largest(inputs.significands((0, -9)), 64),
    "huge rows": lambda _: inputs.with_largest(np.array([2.0**100, 2.0**126, inputs.BF16_LARGEST]), 64),
    "tiny rows": lambda _: inputs.with_largest(np.array([1e-8, 2.0**-99, 2.0**-101, 2.0**-130]), 64),
    "zero rows": lambda _: _zeroed(slice(2, 4), slice(None)),
    "zero blocks": lambda _: _zeroed(slice(None), slice(32, 64)),
    "minus zero": lambda _: -np.abs(_zeroed(slice(2, 4), slice(0, 48))),
}


@pytest.mark.parametrize("name", INPUTS)
def test_both_give_the_same_bytes(
    name: str, learner: Adapter, sampler: Adapter, quantizer: QuantizerSpec
) -> None:
    x = _tensor(INPUTS[name](quantizer))
    _expect_same(learner.quantize(x.clone()), sampler.quantize(x.clone()), slice(None))


@pytest.mark.parametrize("name", INPUTS)
def test_both_decode_to_the_same_values(
    name: str, learner: Adapter, sampler: Adapter, quantizer: QuantizerSpec
) -> None:
    x = _tensor(INPUTS[name](quantizer))
    left, right = (dequantize(side.quantize(x.clone()), quantizer) for side in (learner, sampler))
    _report(lambda: expect_equal("decoded values", as_array(left) + 0.0, as_array(right) + 0.0))


@pytest.mark.parametrize("others", [1e4, 1e-4, 0.0], ids=["large", "small", "zero"])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    others: float, side: Adapter, quantizer: QuantizerSpec
) -> None:
    if inputs.shares_rows(quantizer):
        pytest.skip(inputs.shares_rows(quantizer))
    row = inputs.random(1, 96, seed=2)
    beside = inputs.bf16(inputs.random(40, 96, seed=3) * others)
    beside[17] = row
    _expect_same(side.quantize(_tensor(row)), side.quantize(_tensor(beside)), slice(17, 18))


def test_the_same_rows_give_the_same_bytes_again(side: Adapter) -> None:
    x = _tensor(inputs.heavy_tailed(64, 288))
    first = side.quantize(x.clone())
    _expect_same(first, side.quantize(x.clone()), slice(None))


def test_zeros_decode_to_zeros(side: Adapter, quantizer: QuantizerSpec) -> None:
    x = _tensor(_zeroed(slice(2, 4), slice(None)))
    values = dequantize(side.quantize(x.clone()), quantizer)
    wrong = (x == 0) & (values != 0)  # NaN is not 0 either
    assert not wrong.any(), f"{side.name}: x[{wrong.nonzero()[0].tolist()}] is 0 and decodes to another value"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_both_treat_a_value_that_is_not_finite_alike(
    value: float, learner: Adapter, sampler: Adapter
) -> None:
    x = _tensor(inputs.random(4, 96, seed=4))
    x[2, 37] = value
    found = [_or_refusal(side, x.clone()) for side in (learner, sampler)]
    refused = [side.name for side, result in zip((learner, sampler), found, strict=True) if result is None]
    assert len(refused) != 1, f"{refused[0]} refuses {value}, the other does not"
    if found[0] is not None and found[1] is not None:
        _expect_same(found[0], found[1], slice(None))


@pytest.mark.parametrize("check", SUITE.checks, ids=lambda check: check.name)
def test_conforms_to_the_spec(check: Check, side: Adapter, spec: ExecutionSpec) -> None:
    outcome = perform(check, Subject.of_adapter(side), spec)
    if outcome.status is Status.NOT_APPLICABLE:
        pytest.skip(outcome.detail)
    assert outcome.status is Status.PASS, f"{side.name}: {outcome.detail}"


def _tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).to(torch.bfloat16)


def _zeroed(rows: slice, columns: slice) -> np.ndarray:
    x = inputs.random(8, 96, seed=5)
    x[rows, columns] = 0
    return x


def _or_refusal(side: Adapter, x: torch.Tensor) -> QuantizedTensor | None:
    try:
        return side.quantize(x)
    except side.refuses:
        return None


def _expect_same(left: QuantizedTensor, right: QuantizedTensor, rows: slice) -> None:
    """All of `left` against rows `rows` of `right`."""

    def compare() -> None:
        for name in ("outer_scales", "block_scales", "codes"):
            one, other = getattr(left, name), getattr(right, name)
            if one is None or other is None:
                assert one is other, f"{name}: one side has none"
                continue
            shared = name == "outer_scales" and len(other) == 1
            expect_equal(name, as_array(one), as_array(other if shared else other[rows]))

    _report(compare)


def _report(compare: Callable[[], None]) -> None:
    try:
        compare()
    except Mismatch as difference:
        pytest.fail(f"expected is the learner's or the first call's: {difference}", pytrace=False)
