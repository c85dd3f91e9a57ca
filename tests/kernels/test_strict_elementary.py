"""Exponential, logarithm, sums and what is made of them: against FP64, and bit for bit in any batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.catalogue import named_spec
from kernels.model_spec import Sums, TableType
from kernels.strict.elementary import exp, halves_sum, log
from kernels.strict.norm import rms_norm
from kernels.strict.rotary import RotaryTable
from kernels.strict.router import route
from kernels.strict.softmax import at_temperature, log_softmax
from kernels.swiglu import swiglu

TREE, LIBRARY = Sums.TREE, Sums.LIBRARY


def ulps(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error in units of the last place of FP32."""
    spacing = torch.exp2(exact.abs().log2().floor() - 23)
    return ((found.double() - exact).abs() / spacing).max().item()


def test_exponential() -> None:
    x = -torch.rand(200_003, generator=torch.Generator().manual_seed(0)) * 87
    x = torch.cat((x, -torch.logspace(-12, 0, 1000)))
    assert ulps(exp(x), x.double().exp()) < 2
    special = torch.tensor([0.0, -0.0, -87.5, -1e30, -torch.inf, torch.nan])
    assert exp(special)[:5].tolist() == [1, 1, 0, 0, 0] and exp(special)[5].isnan()
    assert torch.equal(exp(torch.empty(0, 3)), torch.empty(0, 3))


def test_logarithm() -> None:
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 100 + 1e-30
    x = torch.cat((x, torch.logspace(-37, 38, 1001), 1 + torch.logspace(-7, -1, 1000)))
    assert torch.equal(
        log(x), x.double().log().float()
    )  # correctly rounded, as FP64 has room for its own error
    special = log(torch.tensor([1.0, torch.inf, torch.nan]))
    assert special[:2].tolist() == [0, math.inf] and special[2].isnan()


def test_a_sum_by_halves_is_that_of_its_definition() -> None:
    def by_hand(values: list[float]) -> float:
        size = 1 << (len(values) - 1).bit_length()
        values = values + [0.0] * (size - len(values))
        while len(values) > 1:
            half = len(values) // 2
            values = [
                torch.tensor(a).add(torch.tensor(b)).item()
                for a, b in zip(values[:half], values[half:], strict=True)
            ]
        return values[0]

    for width in (1, 2, 3, 7, 16, 33):
        x = torch.randn(3, width) * torch.logspace(-3, 3, width)
        assert halves_sum(x)[:, 0].tolist() == [by_hand(row) for row in x.tolist()]
        assert torch.equal(halves_sum(F.pad(x, (0, 70))), halves_sum(x))


ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": lambda x: exp(-x.abs()),
    "log": lambda x: log(x.abs() + 1e-3),
    "halves_sum": halves_sum,
    "rms_norm": lambda x: rms_norm(x, torch.linspace(0.5, 2, x.shape[-1]), 1e-6, TREE),
    "rms_norm of BF16": lambda x: rms_norm(x.bfloat16(), torch.ones(x.shape[-1]).bfloat16(), 1e-6, TREE),
    "log_softmax": lambda x: log_softmax(x, TREE),
    "at_temperature": lambda x: at_temperature(x, torch.full_like(x[:, 0], 0.7)),
    "router": lambda x: route(x, 3, True, TREE)[1],
    "router over all": lambda x: route(x, 3, False, TREE)[1],
    "swiglu": lambda x: swiglu(torch.cat((x, x), 1).bfloat16(), named_spec("strict")),
}


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=12, deadline=None)
@given(begin=st.integers(0, 30), rows=st.integers(1, 33), width=st.sampled_from([5, 8, 96, 1000]))
def test_a_row_depends_on_nothing_else(name: str, begin: int, rows: int, width: int) -> None:
    """At another place in memory, behind other rows, where vectors end elsewhere."""
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(width)) * 3
    function = ROWS[name]
    whole, part = function(x), function(x[begin : begin + rows].clone())
    assert torch.equal(part, whole[begin : begin + rows])
    assert torch.equal(function(x[begin : begin + rows]), part)  # and in place


def test_rms_norm_is_that_of_the_formula() -> None:
    x, weight = torch.randn(7, 3, 100), torch.rand(100) + 0.5
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-3, TREE).double(), exact, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3, LIBRARY).double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", TableType)
def test_rotary_positions_turn_pairs_of_elements(kind: TableType) -> None:
    positions = torch.tensor([0, 1, 5, 700, 3])
    x = torch.randn(5, 2, 16)
    found = RotaryTable(16, 10000.0, kind).rotate(x, positions)
    pairs = torch.complex(*x.double().chunk(2, -1))
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(8).double() / 8)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    tolerance = 1e-6 if kind is TableType.FP32 else 2**-7
    assert (found - torch.cat((turned.real, turned.imag), -1)).abs().max() < tolerance * 5
    if kind is TableType.BF16:
        assert (found - torch.cat((turned.real, turned.imag), -1)).abs().max() > 1e-4


def test_an_entry_of_the_rotary_table_depends_on_its_position_alone() -> None:
    x, late, early = torch.randn(1, 1, 8), torch.tensor([900]), torch.tensor([3])
    grown, direct = (RotaryTable(8, 5000.0, TableType.FP32) for _ in range(2))
    grown.rotate(x, early)
    assert torch.equal(grown.rotate(x, late), direct.rotate(x, late))
    assert torch.equal(grown.rotate(x, early), RotaryTable(8, 5000.0, TableType.FP32).rotate(x, early))


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_coefficients_are_those_of_a_softmax(renormalize: bool) -> None:
    logits = torch.randn(50, 8)
    ids, coefficients = route(logits, 3, renormalize, TREE)
    values, expected = logits.double().topk(3)
    assert torch.equal(ids, expected)
    exact = values.softmax(-1) if renormalize else logits.double().softmax(-1).gather(1, ids)
    torch.testing.assert_close(coefficients.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(route(logits, 3, renormalize, LIBRARY)[1].double(), exact, rtol=1e-6, atol=0)


def test_ties_of_the_router_go_to_the_lower_expert() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5])
    ids, coefficients = route(logits, 3, True, TREE)
    assert ids.tolist() == [[1, 3, 0], [0, 1, 2]]
    assert coefficients[1].tolist() == pytest.approx([1 / 3] * 3)


def test_log_softmax_is_that_of_the_formula() -> None:
    logits = torch.randn(5, 1001) * 20
    logits[0, :500] = -torch.inf
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(log_softmax(logits, TREE).double(), exact, rtol=1e-6, atol=2e-6)
    assert log_softmax(logits.index_fill(1, torch.tensor([3]), torch.nan), TREE).isnan().all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, rule: log_softmax(x, rule),
        lambda x, rule: rms_norm(x, torch.linspace(0.5, 2, 12), 1e-5, rule),
        lambda x, rule: route(x, 4, True, rule)[1],
        lambda x, rule: route(x, 4, False, rule)[1],
    ],
)
def test_gradients_are_the_library_s(function: Callable[[torch.Tensor, Sums], torch.Tensor]) -> None:
    x, grads = torch.randn(6, 12), []
    for rule in Sums:
        operand = x.clone().requires_grad_()
        output = function(operand, rule)
        output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape))
        grads.append(operand.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_silu_of_every_bf16_number_is_correctly_rounded() -> None:
    """Against FP64, whose own error is 2^-29 of what the rounding to FP32 removes."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = bits[bits.isfinite()]
    found = swiglu(torch.stack((finite, torch.ones_like(finite)), 1), named_spec("strict"))[:, 0]
    x = finite.double()
    assert torch.equal(found, (x * torch.sigmoid(x)).float())
