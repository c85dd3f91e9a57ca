"""The layer without quantisers in Triton kernels and grouped BF16 products, against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels import autograd, reference, slots
from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import ExpertWeights
from kernels.gradient_error import exact_gradients
from kernels.guard import NonFiniteGuard
from kernels.layer_input import LayerShape, synthetic_layer
from kernels.probe import listening
from kernels.routing import Routing
from kernels.triton import plain_layer
from kernels.triton.grouping import group
from kernels.triton.permute import permute
from kernels.triton.swiglu import swiglu
from tests.kernels.triton_env import DEVICE, GPU

SMALL = LayerShape(tokens=9, hidden=96, ffn=48, experts=4, top_k=2)
TINY = LayerShape(tokens=5, hidden=32, ffn=16, experts=3, top_k=1)
PAIR = LayerShape(tokens=2, hidden=32, ffn=16, experts=2, top_k=1)  # every row costs the interpreter time
LARGE = LayerShape(tokens=1500, hidden=512, ffn=256, experts=8, top_k=4)
SHAPES = [SMALL, TINY, pytest.param(LARGE, marks=GPU)]
SPEC = named_spec("bf16")


class Case:
    def __init__(self, shape: LayerShape) -> None:
        self.on_cpu = synthetic_layer(shape, "gaussian", 0)
        self.weights = ExpertWeights.quantize(self.on_cpu.w13, self.on_cpu.w2, SPEC)
        on_device = {name: tensor.to(DEVICE) for name, tensor in self.weights.tensors().items()}
        self.prepared = plain_layer.prepare(ExpertWeights.from_tensors(on_device, SPEC), SPEC)
        given = self.on_cpu
        self.x, self.ids, self.p = (t.to(DEVICE) for t in (given.x, given.topk_ids, given.topk_weights))

    def forward(self, rows: slice = slice(None), guard: NonFiniteGuard | None = None) -> torch.Tensor:
        return plain_layer.forward(self.x[rows], self.ids[rows], self.p[rows], self.prepared, SPEC, guard)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_is_the_references(shape: LayerShape) -> None:
    """FC1, SwiGLU and FC2 in grouped order, and the output: but for the order of sums along K, whose FP32 roundings
    move few BF16 results; SwiGLU of the same FC1 output bit for bit.
    """
    case = Case(shape)
    shown: dict[str, torch.Tensor] = {}
    with listening(lambda name, value: shown.update({name: value})):
        output = case.forward().cpu()
    given = case.on_cpu
    prepared = reference.prepare(case.weights, SPEC)
    routing = Routing.group(given.topk_ids, shape.experts)
    expected = reference.expert_rows(given.x, routing, prepared, given.topk_weights)
    operands = {"FC1 input": given.x.bfloat16()[routing.tokens], "FC2 input": expected.swiglu}
    assert shown.keys() == {"fc1", "swiglu", "fc2", *operands}
    assert torch.equal(shown["FC1 input"].cpu(), operands["FC1 input"])
    assert torch.equal(shown["FC2 input"], shown["swiglu"])
    for name in ("fc1", "swiglu", "fc2"):
        own = getattr(expected, name)
        assert shown[name].shape == own.shape and shown[name].dtype == own.dtype
        assert relative(shown[name], own) < 2e-3
        assert (shown[name].cpu() == own).float().mean() > 0.95
    whole = reference.forward(given.x, given.topk_ids, given.topk_weights, prepared, SPEC)
    assert relative(output, whole) < 2e-3 and (output == whole).float().mean() > 0.95


def test_swiglu_and_permutation_bit_for_bit() -> None:
    from kernels.swiglu import fc2_input

    ids = torch.tensor([[2, 0], [0, 3], [2, 3]], device=DEVICE)
    groups = group(ids, 4, 16)
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows = permute(x, groups)
    used = groups.slot_of_row[: int(groups.starts[4])].cpu()
    expected = x.cpu().bfloat16()[used.clamp(min=0) // 2] * (used >= 0)[:, None]
    assert torch.equal(rows[: len(used)].cpu(), expected)
    fc1 = torch.randn(groups.rows, 96, generator=torch.Generator().manual_seed(1)).mul(30).bfloat16()
    found = swiglu(fc1.to(DEVICE), groups)[: len(used)].cpu()
    assert torch.equal(found, fc2_input(fc1[: len(used)], None, SPEC) * (used >= 0)[:, None])


@pytest.mark.parametrize("shape", [PAIR, pytest.param(SMALL, marks=GPU), pytest.param(LARGE, marks=GPU)])
@pytest.mark.parametrize("master", [torch.float32, pytest.param(torch.bfloat16, marks=GPU)])
def test_gradients(shape: LayerShape, master: torch.dtype) -> None:
    """Against the reference's, and that of FC2's weight, a single product, against float64; twice the same bits."""
    case = Case(shape)
    given = case.on_cpu
    d_output = torch.randn(given.x.shape, generator=torch.Generator().manual_seed(1)).bfloat16()

    def gradients(function: object, prepared: object, device: torch.device | str) -> list[torch.Tensor]:
        leaves = [given.x, given.topk_weights, given.w13.to(master), given.w2.to(master)]
        leaves = [leaf.detach().to(device, copy=True).requires_grad_() for leaf in leaves]
        x, p, w13, w2 = leaves
        output = function(x, given.topk_ids.to(device), p, w13, w2, prepared, SPEC)
        return list(torch.autograd.grad(output, leaves, d_output.to(device)))

    expected = gradients(autograd.expert_layer, reference.prepare(case.weights, SPEC), "cpu")
    found = gradients(plain_layer.expert_layer, case.prepared, DEVICE)
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype and relative(own, other) < 4e-3
    again = gradients(plain_layer.expert_layer, case.prepared, DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    exact = exact_gradients(given, d_output, SPEC)
    assert relative(found[3], exact.w2) < (2e-3 if master is torch.float32 else 2.5e-3)


def test_without_tokens_gradients_are_zero() -> None:
    """As on a rank that no slot reaches."""
    case = Case(TINY)
    leaves = [case.x[:0], case.p[:0], *(w.to(DEVICE) for w in (case.on_cpu.w13, case.on_cpu.w2))]
    x, p, w13, w2 = (leaf.detach().requires_grad_() for leaf in leaves)
    output = plain_layer.expert_layer(x, case.ids[:0], p, w13, w2, case.prepared, SPEC)
    found = torch.autograd.grad(output.sum(), (x, p, w13, w2))
    assert [g.shape for g in found] == [leaf.shape for leaf in leaves]
    assert not found[2].any() and not found[3].any()


def test_which_specs_are_computed() -> None:
    computed = []
    for name in CATALOGUE:
        try:
            plain_layer.check_spec(named_spec(name))
        except ValueError as error:
            assert "does not compute" in str(error) and "=" in str(error)
        else:
            computed.append(name)
    assert computed == ["bf16"]
    for change in ({"combine": "expert_order"}, {"accumulation": "fp32_tree"}, {"router_product": "bf16"}):
        with pytest.raises(ValueError, match=f"{next(iter(change))}="):
            plain_layer.check_spec(named_spec("bf16", change))


def test_arguments_that_do_not_fit() -> None:
    case = Case(TINY)
    with pytest.raises(ValueError, match=r"expert ids must be in \[0, 3\)"):
        plain_layer.forward(case.x, case.ids + 2, case.p, case.prepared, SPEC)
    with pytest.raises(ValueError, match="x must be"):
        plain_layer.forward(case.x[:, :16], case.ids, case.p, case.prepared, SPEC)
    odd = ExpertWeights.quantize(torch.zeros(2, 16, 24), torch.zeros(2, 24, 8), SPEC)
    with pytest.raises(ValueError, match="multiples of 16, got hidden 24 and expert FFN 8"):
        plain_layer.prepare(odd, SPEC)
    assert case.forward(slice(0, 0)).shape == (0, 32)


def test_nan_goes_through_and_unknown_experts_make_nan() -> None:
    case = Case(TINY)
    guard = NonFiniteGuard(0, 3)
    case.x[2, 5] = torch.nan
    case.ids[3, 0] = 7
    output = case.forward(guard=guard)
    assert output[2].isnan().all() and output[3].isnan().all()
    assert output[[0, 1, 4]].isfinite().all()
    guard.check()


def test_slots_computed_elsewhere_give_the_same_bits() -> None:
    """As expert parallelism has them, where one rank owns all experts."""
    case = Case(SMALL)
    spec = slots.slot_spec(SPEC)
    rows = slots.spread(case.x, SMALL.top_k, spec)
    p = slots.slot_coefficients(case.p, SPEC)
    rows = plain_layer.forward(rows, case.ids.view(-1, 1), p, case.prepared, spec)
    assert torch.equal(slots.gather(rows, case.ids, case.p, SPEC), case.forward())


@pytest.mark.parametrize("tokens", [3, pytest.param(64, marks=GPU), pytest.param(1024, marks=GPU)])
def test_a_token_has_the_same_bits_in_any_company(tokens: int) -> None:
    """In calls of few rows, whose groups are aligned otherwise, and of many."""
    case = Case(LARGE if DEVICE.type == "cuda" else SMALL)
    assert torch.equal(case.forward()[:tokens], case.forward(slice(0, tokens)))


@pytest.mark.parametrize("shape", [pytest.param(LARGE, marks=GPU), pytest.param(SMALL, marks=GPU)])
def test_cuda_graph(shape: LayerShape) -> None:
    case = Case(shape)
    guard = NonFiniteGuard(0, shape.experts)
    expected = case.forward(guard=guard)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = case.forward(guard=guard)
    case.x.copy_(case.x.flip(0)), case.ids.copy_(case.ids.flip(0)), case.p.copy_(case.p.flip(0))
    graph.replay()
    assert torch.equal(output, expected.flip(0))


@pytest.mark.parametrize("shape", [pytest.param(SMALL, marks=GPU)])
def test_operator_follows_pytorchs_rules(shape: LayerShape) -> None:
    case = Case(shape)
    torch.library.opcheck(
        plain_layer.experts, (case.x, case.ids, case.p, case.prepared.w13, case.prepared.w2)
    )
