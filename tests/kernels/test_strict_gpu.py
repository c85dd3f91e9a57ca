"""The strict operators compute the same bits on a GPU as on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.model_spec import TableType
from kernels.strict.attention import attention
from kernels.strict.elementary import exp, halves_sum, log
from kernels.strict.linear import Weight, linear
from kernels.strict.norm import rms_norm
from kernels.strict.rotary import RotaryTable
from kernels.strict.router import route
from kernels.strict.softmax import at_temperature, log_softmax

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MODEL = named_spec("strict").model
assert MODEL is not None
Operator = Callable[..., torch.Tensor]


def spread(*shape: int, low: int = -12, high: int = 12) -> torch.Tensor:
    """Numbers of both signs, over powers of two from `low` to `high`."""
    return torch.randn(shape) * torch.exp2(torch.randint(low, high, shape).float())


def same(operator: Operator, *operands: torch.Tensor) -> None:
    expected, found = operator(*operands), operator(*(x.cuda() for x in operands))
    assert expected.isfinite().all() and torch.equal(found.cpu(), expected)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_exponential_and_logarithm() -> None:
    """Of more elements than are computed together on a CPU, and of all sizes; 0 and the ends of the range, too."""
    negative = -torch.rand(300_001) * 100
    edges = torch.tensor([0.0, -0.0, -1e-40, -87.0, -87.00001, -1e30])
    same(exp, torch.cat((negative, -spread(100_000, low=-30, high=5).abs(), edges)))
    same(log, torch.cat((spread(300_001, low=-100, high=100).abs(), torch.tensor([1.0, 2.0**-126, 3.4e38]))))


@pytest.mark.parametrize("width", [1, 3, 576, 1000, 49152])
def test_sums(width: int) -> None:
    same(halves_sum, spread(7, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 64, 48), (33, 576, 1536), (5, 2500, 130)])
def test_products(rows: int, width: int, out: int, dtype: torch.dtype) -> None:
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, Weight(), MODEL.linear)

    same(product, spread(rows, width).to(dtype), spread(out, width).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype: torch.dtype) -> None:
    """Grouped queries at the end of cached sequences of different lengths, and more keys than a segment."""
    for queries, keys in ((1, 40), (17, 90), (3, 1100)):
        query, key, value = (
            spread(3, length, heads, 64, low=-3, high=3).to(dtype)
            for length, heads in ((queries, 9), (keys, 3), (keys, 3))
        )
        first = torch.tensor([0, 11, keys - queries])
        same(lambda q, k, v, f: attention(q, k, v, f, 0.125, MODEL.attention), query, key, value, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_positions(dtype: torch.dtype) -> None:
    x, weight = spread(50, 576).to(dtype), spread(576, low=-2, high=2).to(dtype)
    same(lambda x, w: rms_norm(x, w, 1e-5, MODEL.norm), x, weight)
    table = RotaryTable(64, 10_000.0, TableType.FP32)
    same(table.rotate, spread(50, 9, 64).to(dtype), torch.randint(5000, (50,)))


def test_coefficients_and_log_probabilities() -> None:
    logits = spread(200, 16, low=-4, high=4)
    logits[3, 5] = logits[3, 9] = logits[3].max() + 1  # a tie
    for renormalize in (True, False):
        for part in (0, 1):
            same(lambda x, part=part, r=renormalize: route(x, 4, r, MODEL.router)[part], logits)
    wide, temperature = spread(9, 49152, low=-6, high=3), torch.linspace(0.3, 2.0, 9)
    same(lambda x, t: log_softmax(at_temperature(x, t), MODEL.log_softmax), wide, temperature)
