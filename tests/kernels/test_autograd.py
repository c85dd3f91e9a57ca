"""Gradients of the expert layer: against float64 autograd of a straight-through graph, finite differences."""

from __future__ import annotations

import nvfp4_oracle as oracle
import pytest
import torch
import torch.nn.functional as F

from kernels.autograd import expert_layer
from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import ExpertWeights
from kernels.reference import PreparedExperts, forward, prepare
from kernels.spec import ExecutionSpec

T, HIDDEN, FFN, EXPERTS, TOP_K = 30, 64, 48, 5, 2
EMPTY = 3  # an expert that no token is routed to


class Case:
    def __init__(self, dtype: torch.dtype, master: torch.dtype = torch.float32) -> None:
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(T, HIDDEN, generator=g).to(dtype)
        scores = torch.rand(T, EXPERTS, generator=g)
        scores[:, EMPTY] = -1
        self.ids = scores.argsort(1, descending=True)[:, :TOP_K]
        self.p = torch.rand(T, TOP_K, generator=g).softmax(1)
        self.w13 = (torch.randn(EXPERTS, 2 * FFN, HIDDEN, generator=g) / HIDDEN**0.5).to(master)
        self.w2 = (torch.randn(EXPERTS, HIDDEN, FFN, generator=g) / FFN**0.5).to(master)
        self.d_output = torch.randn(T, HIDDEN, generator=g).to(dtype)

    def prepared(self, spec: ExecutionSpec) -> PreparedExperts:
        return prepare(ExpertWeights.quantize(self.w13, self.w2, spec), spec)

    def gradients(self, spec: ExecutionSpec) -> dict[str, torch.Tensor]:
        leaves = {name: getattr(self, name).clone().requires_grad_() for name in ("x", "p", "w13", "w2")}
        x, p, w13, w2 = leaves.values()
        output = expert_layer(x, self.ids, p, w13, w2, self.prepared(spec), spec)
        assert output.dtype == self.x.dtype
        output.backward(self.d_output)
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def straight_through(value: torch.Tensor, replacement: torch.Tensor) -> torch.Tensor:
    """The replacement's value with the gradient of `value`."""
    return value + (replacement - value).detach()


def float64_gradients(case: Case, spec: ExecutionSpec) -> dict[str, torch.Tensor]:
    """Autograd in float64 on BF16 operands, with the oracle's FC1, SwiGLU and FC2 put in straight-through."""
    operand = torch.float32 if spec.name == "fp32" else torch.bfloat16
    tensors = {"x": case.x.to(operand), "p": case.p, "w13": case.w13.to(operand), "w2": case.w2.to(operand)}
    leaves = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    x, p, w13, w2 = leaves.values()
    if spec.name == "fp32":
        inner = None
    else:
        arrays = (t.detach().numpy() for t in (x, case.ids, p, w13, w2))
        per_expert = spec.weight_scale_domain == "expert"
        inner = oracle.expert_layer(*arrays, per_expert=per_expert, quantized=spec.quantized)

    def put(value: torch.Tensor, name: str, t: int, j: int) -> torch.Tensor:
        return (
            value if inner is None else straight_through(value, torch.from_numpy(getattr(inner, name)[t, j]))
        )

    rows = []
    for t in range(T):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for j in range(TOP_K):
            expert = case.ids[t, j]
            gate, up = put(w13[expert] @ x[t], "fc1", t, j).chunk(2)
            act = put(F.silu(gate) * up, "swiglu", t, j)
            total = total + p[t, j] * put(w2[expert] @ act, "fc2", t, j)
        rows.append(total)
    torch.stack(rows).backward(case.d_output.double())
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["minite", "minite_expert", "bf16"])
def test_gradients_equal_float64_within_bf16_rounding(name: str, dtype: torch.dtype) -> None:
    """A BF16 rounding moves a vector by about 0.0016 of its length; roundings on a path add in squares."""
    case, spec = Case(dtype), named_spec(name)
    actual, expected = case.gradients(spec), float64_gradients(case, spec)
    roundings = {"x": 4 + (dtype == torch.bfloat16), "w13": 3, "w2": 1}
    for key, count in roundings.items():
        assert relative(actual[key], expected[key]) < 0.0018 * count**0.5, key
    assert relative(actual["p"], expected["p"]) < 1e-6
    assert actual["x"].dtype == dtype and actual["w13"].dtype == actual["w2"].dtype == torch.float32


def test_fp32_gradients_equal_float64() -> None:
    case, spec = Case(torch.float32), named_spec("fp32")
    actual, expected = case.gradients(spec), float64_gradients(case, spec)
    for key in ("x", "p", "w13", "w2"):
        torch.testing.assert_close(actual[key].double(), expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "tolerance"), [("fp32", 1e-4), ("minite", 0.02)])
def test_router_gradient_equals_finite_differences(name: str, tolerance: float) -> None:
    """The layer is linear in the coefficients, so that a large step only averages out output rounding."""
    case, spec = Case(torch.float32), named_spec(name)
    prepared, analytic = case.prepared(spec), case.gradients(spec)["p"]
    numeric = torch.zeros_like(case.p, dtype=torch.float64)
    step = 2.0
    for j in range(TOP_K):  # tokens do not interact: all of them move at once
        ends = []
        for sign in (1, -1):
            p = case.p.clone()
            p[:, j] += sign * step
            output = forward(case.x, case.ids, p, prepared, spec).double()
            ends.append((output * case.d_output.double()).sum(1))
        numeric[:, j] = (ends[0] - ends[1]) / (2 * step)
    assert relative(analytic, numeric) < tolerance


@pytest.mark.parametrize("name", CATALOGUE)
def test_forward_equals_the_reference(name: str) -> None:
    case, spec = Case(torch.bfloat16), named_spec(name)
    prepared = case.prepared(spec)
    output = expert_layer(case.x, case.ids, case.p, case.w13, case.w2, prepared, spec)
    assert torch.equal(output, forward(case.x, case.ids, case.p, prepared, spec).bfloat16())


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_expert_without_tokens_has_zero_gradients(name: str) -> None:
    gradients = Case(torch.bfloat16).gradients(named_spec(name))
    for key in ("w13", "w2"):
        assert not gradients[key][EMPTY].any()
        assert all(gradients[key][expert].any() for expert in range(EXPERTS) if expert != EMPTY)


def test_no_tokens() -> None:
    case, spec = Case(torch.bfloat16), named_spec("minite")
    x, w13, w2 = case.x[:0].requires_grad_(), case.w13.requires_grad_(), case.w2.requires_grad_()
    expert_layer(x, case.ids[:0], case.p[:0], w13, w2, case.prepared(spec), spec).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, HIDDEN)
    assert w13.grad is not None and not w13.grad.any() and w2.grad is not None and not w2.grad.any()


def test_bf16_masters_get_bf16_gradients() -> None:
    case, spec = Case(torch.bfloat16, master=torch.bfloat16), named_spec("minite")
    wide = Case(torch.bfloat16)
    wide.w13, wide.w2 = case.w13.float(), case.w2.float()
    narrow_gradients, wide_gradients = case.gradients(spec), wide.gradients(spec)
    for key in ("w13", "w2"):
        assert narrow_gradients[key].dtype == torch.bfloat16
        assert torch.equal(narrow_gradients[key], wide_gradients[key].bfloat16())


def test_forward_reads_the_prepared_weights_and_backward_the_masters() -> None:
    case, spec = Case(torch.bfloat16), named_spec("minite")
    prepared = case.prepared(spec)
    x = case.x.clone().requires_grad_()
    zeros13, zeros2 = torch.zeros_like(case.w13), torch.zeros_like(case.w2)
    output = expert_layer(x, case.ids, case.p, zeros13, zeros2, prepared, spec)
    assert torch.equal(output, forward(case.x, case.ids, case.p, prepared, spec))
    output.backward(case.d_output)
    assert x.grad is not None and not x.grad.any()


def test_masters_that_change_before_backward_are_noticed() -> None:
    case, spec = Case(torch.bfloat16), named_spec("minite")
    w13 = case.w13.requires_grad_()
    output = expert_layer(case.x, case.ids, case.p, w13, case.w2, case.prepared(spec), spec)
    with torch.no_grad():
        w13.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(case.d_output)


def test_saved_activations_are_bf16() -> None:
    case, spec = Case(torch.float32), named_spec("minite")
    w13, w2 = case.w13.requires_grad_(), case.w2.requires_grad_()
    x, prepared = case.x.requires_grad_(), case.prepared(spec)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        expert_layer(x, case.ids, case.p, w13, w2, prepared, spec)
    others = [t for t in saved if t.data_ptr() not in (w13.data_ptr(), w2.data_ptr(), case.p.data_ptr())]
    widths = {HIDDEN: T, 2 * FFN: T * TOP_K, FFN: T * TOP_K}
    assert len(others) == 4 and all(t.dtype == torch.bfloat16 for t in others)
    assert all(len(t) in (widths[t.shape[1]], T * TOP_K) for t in others)


def test_masters_of_another_shape_are_refused() -> None:
    case, spec = Case(torch.bfloat16), named_spec("minite")
    with pytest.raises(ValueError, match=r"w2 must be \(5, 64, 48\) as it was prepared"):
        expert_layer(case.x, case.ids, case.p, case.w13, case.w2[:4], case.prepared(spec), spec)
