"""The layer with one scale for all of an expert's rows, in Triton kernels, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels import autograd, quantize, reference, slots
from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import ExpertWeights
from kernels.layer_input import LayerShape, synthetic_layer
from kernels.probe import Shown, listening
from kernels.quantizer_spec import Rounding, Transform
from kernels.routing import Routing
from kernels.spec import ExecutionSpec
from kernels.triton import per_tensor, per_tensor_layer
from kernels.triton.grouping import group
from kernels.triton.permute import permute
from tests.kernels.triton_env import DEVICE, GPU

SMALL = LayerShape(tokens=9, hidden=96, ffn=48, experts=4, top_k=2)
TINY = LayerShape(tokens=4, hidden=96, ffn=48, experts=2, top_k=2)
PAIR = LayerShape(tokens=2, hidden=32, ffn=16, experts=2, top_k=1)  # every row costs the interpreter time
LARGE = LayerShape(tokens=1500, hidden=512, ffn=256, experts=8, top_k=4)
STOCHASTIC = named_spec("te_per_tensor")
NEAREST = named_spec("te_per_tensor", {"gradient.rounding": "nearest_even"})
EXACT = named_spec("te_exact")
GRADIENT = NEAREST.gradient


def awkward_rows(rows: int, width: int) -> torch.Tensor:
    """bfloat16 of many sizes, with zeros, minus zeros, a row of zeros, NaN and infinities."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-30, 8, (rows, 1), generator=generator).float())
    x = (torch.randn(rows, width, generator=generator) * sizes).bfloat16()
    x[1], x[4] = 0, x[4].mul(2.0**-118)  # FP32 holds what comes of the latter as subnormal numbers
    x[2, 3], x[2, 4], x[3, 16:32] = torch.nan, -0.0, 0
    return x


def grouped(rows: torch.Tensor, ids: torch.Tensor, experts: int) -> tuple:
    """The groups of ids [T, k], the grouped rows on the device, and which of them each expert has."""
    groups = group(ids.to(DEVICE), experts)
    own = permute(rows.to(DEVICE), groups)
    used = groups.slot_of_row >= 0
    return groups, own, [used & (groups.expert_of_row() == expert) for expert in range(experts)]


@pytest.mark.parametrize("infinite", [False, True])
def test_rows_are_coded_as_the_reference_codes_them(infinite: bool) -> None:
    quantizer = STOCHASTIC.activation
    assert quantizer is not None
    x = awkward_rows(6, 96)
    if infinite:
        x[0, 5] = torch.inf
    ids = torch.tensor([[0, 2], [2, 1], [2, 0], [0, 2], [4, 1], [2, 4]])
    groups, rows, owners = grouped(x, ids, 5)
    found = per_tensor.quantize_rows(rows, groups)
    for expert, own in enumerate(owners):
        expected = quantize.quantize_activation(rows[own].cpu(), quantizer)
        assert torch.equal(found.elements[own].cpu().float(), quantize.decode(expected, quantizer))
        assert expected.outer_scales is not None
        assert found.amax[expert].cpu() == expected.outer_scales
        assert found.decode_scale()[expert].cpu() == quantize.decode_scale(expected, quantizer)


@pytest.mark.parametrize("rotate", [False, True])
def test_columns_are_coded_as_the_reference_codes_them(rotate: bool) -> None:
    assert GRADIENT is not None
    quantizer = GRADIENT if rotate else replace(GRADIENT, transform=Transform.NONE)
    x = awkward_rows(20, 48).nan_to_num()
    groups, rows, _ = grouped(x, torch.arange(20)[:, None] % 7 // 5, 2)
    found = per_tensor.quantize_columns(rows, groups, rotate=rotate)
    starts = groups.starts.tolist()
    for expert in range(2):
        own = slice(starts[expert], starts[expert + 1])
        expected = quantize.quantize_activation(rows[own].T.contiguous().cpu(), quantizer)
        decoded = quantize.decode(expected, quantizer).T
        same = (found.elements[own].cpu().float() == decoded).float().mean()
        assert same == 1 if not rotate else same > 0.99  # sums of 16 rotated elements are the library's


def test_weights_are_coded_as_the_reference_codes_them() -> None:
    given = synthetic_layer(SMALL, "heavy", 3)
    given.w13[1] = 0
    expected = ExpertWeights.quantize(given.w13, given.w2, STOCHASTIC).tensors()
    found = per_tensor_layer.quantize(given.w13.to(DEVICE), given.w2.to(DEVICE), STOCHASTIC).tensors()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key].cpu(), tensor) for key, tensor in expected.items())
    assert GRADIENT is not None
    quantizer = replace(GRADIENT, transform=Transform.NONE)
    transposed = per_tensor.transposed_weight(given.w13.bfloat16().to(DEVICE))
    for expert, weight in enumerate(given.w13.bfloat16()):
        own = quantize.quantize_activation(weight.T.contiguous(), quantizer)
        assert torch.equal(transposed.elements[expert].cpu().float(), quantize.decode(own, quantizer))


def test_stochastic_rounding_is_a_function_of_the_seed_and_right_on_average() -> None:
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    groups, rows, (own,) = grouped(x, torch.zeros(8, 1, dtype=torch.int64), 1)

    def error(seeds: list[int | None], of: Callable[..., per_tensor.Decoded]) -> torch.Tensor:
        """Of the mean of the decoded rows."""
        coded = [of(rows, groups, seed=seed) for seed in seeds]
        mean = torch.stack([c.elements.float() * c.decode_scale() for c in coded]).mean(0)
        return mean[own].cpu() - x.float()

    for of in (per_tensor.quantize_rows, partial(per_tensor.quantize_columns, rotate=False)):
        first = error([2**60 + 7], of)
        assert torch.equal(first, error([2**60 + 7], of))
        assert not torch.equal(first, error([2**60 + 8], of))
        mean = error([2**60 + seed for seed in range(6)], of)
        assert mean.norm() < 0.5 * first.norm() and mean.norm() < 0.8 * error([None], of).norm()


class Case:
    def __init__(self, shape: LayerShape, spec: ExecutionSpec) -> None:
        self.spec = spec
        self.on_cpu = synthetic_layer(shape, "gaussian", 0)
        self.weights = ExpertWeights.quantize(self.on_cpu.w13, self.on_cpu.w2, spec)
        on_device = {name: tensor.to(DEVICE) for name, tensor in self.weights.tensors().items()}
        self.prepared = per_tensor_layer.prepare(ExpertWeights.from_tensors(on_device, spec), spec)
        given = self.on_cpu
        self.x, self.ids, self.p = (t.to(DEVICE) for t in (given.x, given.topk_ids, given.topk_weights))

    def forward(self) -> torch.Tensor:
        return per_tensor_layer.forward(self.x, self.ids, self.p, self.prepared, self.spec)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", [TINY, pytest.param(SMALL, marks=GPU), pytest.param(LARGE, marks=GPU)])
def test_every_step_is_the_references(shape: LayerShape) -> None:
    """But for the order of sums along K, whose FP32 roundings move few BF16 results."""
    case = Case(shape, STOCHASTIC)
    shown: dict[str, torch.Tensor] = {}
    operands: list[Shown] = []  # FC1's, expert by expert

    def listen(name: str, value: torch.Tensor | Shown) -> None:
        if isinstance(value, torch.Tensor):
            shown[name] = value
        elif name == "FC1 input":
            operands.append(value)

    with listening(listen):
        output = case.forward().cpu()
    found, rows = list(operands), dict(shown)
    operands.clear()
    given = case.on_cpu
    prepared = reference.prepare(case.weights, case.spec)
    routing = Routing.group(given.topk_ids, shape.experts)
    expected = reference.expert_rows(given.x, routing, prepared, given.topk_weights)
    with listening(listen):
        reference.expert_rows(given.x.bfloat16(), routing, prepared, given.topk_weights)
    assert len(found) == len(operands) > 0
    for own, other in zip(found, operands, strict=True):
        assert own.rows is other.rows is None
        for part in ("codes", "block_scales", "outer_scales"):
            assert torch.equal(getattr(own.quantized, part).cpu(), getattr(other.quantized, part))
    shown = rows
    for name in ("fc1", "swiglu", "fc2"):
        own = getattr(expected, name)
        assert shown[name].shape == own.shape and shown[name].dtype == own.dtype
        assert relative(shown[name], own) < 3e-3
        assert (shown[name].cpu() == own).float().mean() > 0.95
    whole = reference.forward(given.x, given.topk_ids, given.topk_weights, prepared, case.spec)
    assert relative(output, whole) < 3e-3 and (output == whole).float().mean() > 0.95


def gradients(case: Case, of: object, master: torch.dtype, seed: int | None = None) -> list[torch.Tensor]:
    given, own = case.on_cpu, of is not autograd
    device = DEVICE if own else torch.device("cpu")
    prepared = case.prepared if own else reference.prepare(case.weights, case.spec)
    leaves = [given.x, given.topk_weights, given.w13.to(master), given.w2.to(master)]
    leaves = [leaf.detach().to(device, copy=True).requires_grad_() for leaf in leaves]
    x, p, w13, w2 = leaves
    output = of.expert_layer(x, given.topk_ids.to(device), p, w13, w2, prepared, case.spec, seed=seed)
    d_output = torch.randn(given.x.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return list(torch.autograd.grad(output, leaves, d_output.to(device)))


@pytest.mark.parametrize("shape", [PAIR, pytest.param(SMALL, marks=GPU), pytest.param(LARGE, marks=GPU)])
@pytest.mark.parametrize("master", [torch.float32, pytest.param(torch.bfloat16, marks=GPU)])
@pytest.mark.parametrize(
    "spec",
    [pytest.param(NEAREST, id="quantised"), pytest.param(EXACT, id="bf16", marks=GPU)],
)
def test_gradients(shape: LayerShape, master: torch.dtype, spec: ExecutionSpec) -> None:
    """The reference's. A BF16 rounding that falls otherwise can move a 4-bit code, and one scale is over all rows."""
    case = Case(shape, spec)
    found = gradients(case, per_tensor_layer, master)
    bound = 4e-3 if spec is EXACT else 4e-2
    for own, other in zip(found, gradients(case, autograd, master), strict=True):
        assert own.dtype == other.dtype and relative(own, other) < bound


@pytest.mark.parametrize("shape", [pytest.param(SMALL, marks=GPU), pytest.param(LARGE, marks=GPU)])
def test_stochastic_gradients(shape: LayerShape) -> None:
    case = Case(shape, STOCHASTIC)
    first, again, other = (gradients(case, per_tensor_layer, torch.bfloat16, seed) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[2], other[2])
    nearest = gradients(Case(shape, NEAREST), per_tensor_layer, torch.bfloat16)
    for own, close in zip(first, nearest, strict=True):
        assert relative(own, close.cpu()) < 0.5


def test_a_seed_is_needed_where_gradients_are_wanted() -> None:
    with pytest.raises(ValueError, match="'te_per_tensor' rounds gradients stochastically and needs a seed"):
        gradients(Case(PAIR, STOCHASTIC), per_tensor_layer, torch.float32)


def test_which_specs_are_computed() -> None:
    computed = []
    for name in CATALOGUE:
        try:
            per_tensor_layer.check_spec(named_spec(name))
        except ValueError as error:
            assert "does not compute" in str(error) and "computed is" in str(error)
        else:
            computed.append(name)
    assert computed == ["te_per_tensor", "te_exact"]
    with pytest.raises(ValueError, match=r"weight\.block=16x16, computed is 1x16"):
        per_tensor_layer.check_spec(named_spec("te_per_tensor_2d"))
    assert GRADIENT is not None and GRADIENT.rounding is Rounding.NEAREST_EVEN
    per_tensor_layer.check_spec(NEAREST)


def test_slots_computed_elsewhere_give_the_same_bits() -> None:
    """As expert parallelism has them, where one rank owns all experts."""
    case = Case(TINY, STOCHASTIC)
    spec = slots.slot_spec(STOCHASTIC)
    rows = slots.spread(case.x, TINY.top_k, spec)
    p = slots.slot_coefficients(case.p, STOCHASTIC)
    rows = per_tensor_layer.forward(rows, case.ids.view(-1, 1), p, case.prepared, spec)
    assert torch.equal(slots.gather(rows, case.ids, case.p, STOCHASTIC), case.forward())


def test_no_tokens_and_unknown_experts() -> None:
    case = Case(PAIR, EXACT)
    none = per_tensor_layer.forward(case.x[:0], case.ids[:0], case.p[:0], case.prepared, EXACT)
    assert none.shape == (0, 32)
    w13, w2 = (w.to(DEVICE).requires_grad_() for w in (case.on_cpu.w13, case.on_cpu.w2))
    output = per_tensor_layer.expert_layer(
        case.x[:0], case.ids[:0], case.p[:0], w13, w2, case.prepared, EXACT
    )
    assert not any(g.any() for g in torch.autograd.grad(output.sum(), (w13, w2)))
    with pytest.raises(ValueError, match=r"expert ids must be in \[0, 2\)"):
        per_tensor_layer.forward(case.x, case.ids + 1, case.p, case.prepared, EXACT)
