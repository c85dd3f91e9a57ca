"""The expert layer in Triton kernels against the reference, and against itself in other company."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache

import pytest
import torch

from kernels import autograd, reference
from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights
from kernels.gradient_error import exact_gradients
from kernels.guard import NonFiniteGuard
from kernels.layer_input import LayerInput, LayerShape, synthetic_layer
from kernels.probe import Shown, listening
from kernels.quantize import QuantizedTensor, quantize_activation
from kernels.spec import ExecutionSpec
from kernels.triton import layer, ops, tuning
from kernels.triton.gradient_products import product_errors
from tests.kernels.triton_env import DEVICE, GPU

SMALL = LayerShape(tokens=9, hidden=128, ffn=128, experts=4, top_k=2)
LARGE = LayerShape(tokens=1500, hidden=512, ffn=256, experts=8, top_k=4)
# Quick in the interpreter, whose time goes by rows, padding included, and by experts:
NARROW = LayerShape(tokens=5, hidden=96, ffn=48, experts=3, top_k=1)  # fits no tile
TINY = LayerShape(tokens=5, hidden=48, ffn=16, experts=3, top_k=2)  # nor does this
TILED = LayerShape(tokens=5, hidden=128, ffn=128, experts=2, top_k=2)
SHAPES = [TILED, NARROW, pytest.param(SMALL, marks=GPU), pytest.param(LARGE, marks=GPU)]
SPECS = ("minite", "minite_expert")


class Case:
    def __init__(self, shape: LayerShape, spec: ExecutionSpec, seed: int = 0) -> None:
        self.spec = spec
        self.on_cpu = synthetic_layer(shape, "gaussian", seed)
        self.weights = ExpertWeights.quantize(self.on_cpu.w13, self.on_cpu.w2, spec)
        on_device = {name: tensor.to(DEVICE) for name, tensor in self.weights.tensors().items()}
        self.prepared = layer.prepare(ExpertWeights.from_tensors(on_device, spec), spec)
        self.x, self.ids, self.p = (
            t.to(DEVICE) for t in (self.on_cpu.x, self.on_cpu.topk_ids, self.on_cpu.topk_weights)
        )

    def forward(self, rows: slice = slice(None), guard: NonFiniteGuard | None = None) -> torch.Tensor:
        return layer.forward(self.x[rows], self.ids[rows], self.p[rows], self.prepared, self.spec, guard)

    def reference(self) -> torch.Tensor:
        given = self.on_cpu
        prepared = reference.prepare(self.weights, self.spec)
        return reference.forward(given.x, given.topk_ids, given.topk_weights, prepared, self.spec)


@cache
def case_of(shape: LayerShape, name: str) -> Case:
    """Shared by tests that change nothing in it."""
    return Case(shape, named_spec(name))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SPECS)
def test_forward_is_the_references(shape: LayerShape, name: str) -> None:
    """But for the order of sums along K, whose FP32 roundings move few BF16 outputs."""
    case = case_of(shape, name)
    found, expected = case.forward().cpu(), case.reference()
    assert relative(found, expected) < 2e-3
    assert (found == expected).float().mean() > 0.95


@pytest.mark.parametrize(
    "shape, few",
    [
        pytest.param(TILED, True, id="few rows"),
        pytest.param(TINY, False, id="many rows"),
        *(pytest.param(shape, few, marks=GPU) for shape in (SMALL, LARGE) for few in (True, False)),
    ],
)
def test_what_is_shown_on_the_way_is_the_references(
    shape: LayerShape, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In grouped order, without padding: quantised operands bit for bit (FC2's input as the reference quantises the
    SwiGLU that was shown), FC1, SwiGLU and FC2 but for the order of sums. The output is that of a layer nobody hears.
    """
    monkeypatch.setattr(tuning, "reads_packed", lambda *_, **__: few)
    case = case_of(shape, "minite")
    found, expected = Seen(), Seen()
    unheard = case.forward()
    with listening(found):
        output = case.forward()
    with listening(expected):
        in_reference = case.reference()
    assert torch.equal(output, unheard)
    assert relative(output, in_reference) < 3e-3
    assert found.tensors.keys() == {"fc1", "swiglu", "fc2"}
    for name, tensor in found.tensors.items():
        own = expected.tensors[name]
        assert tensor.shape == own.shape and tensor.dtype == own.dtype
        assert relative(tensor, own) < 3e-3
    spec = case.spec.activation
    assert spec is not None
    for name, of_reference in (
        ("FC1 input", expected.grouped("FC1 input")),
        ("FC2 input", quantize_activation(found.tensors["swiglu"].cpu(), spec)),
    ):
        own = found.grouped(name)
        for part in ("codes", "block_scales", "outer_scales"):
            assert torch.equal(getattr(own, part), getattr(of_reference, part)), (name, part)


def test_a_listener_changes_nothing_about_values_that_are_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "reads_packed", lambda *_, **__: True)
    case = Case(TILED, named_spec("minite"))
    case.x[1, 3] = torch.nan
    guard = NonFiniteGuard(0, len(case.on_cpu.w13))
    with listening(lambda name, value: None):
        case.forward(guard=guard)
    with pytest.raises(ValueError, match="FC1 input"):
        guard.check()


class Seen:
    """A listener: tensors by name, and the quantised operands."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.operands: dict[str, Shown] = {}

    def __call__(self, name: str, value: torch.Tensor | Shown) -> None:
        kept = self.operands if isinstance(value, Shown) else self.tensors
        assert name not in kept
        kept[str(name)] = value  # type: ignore[assignment]

    def grouped(self, name: str) -> QuantizedTensor:
        """On the CPU, in grouped order."""
        shown = self.operands[name]
        parts = shown.quantized.codes, shown.quantized.block_scales, shown.quantized.outer_scales
        rows = slice(None) if shown.rows is None else shown.rows
        return QuantizedTensor(*(part[rows].cpu() for part in parts if part is not None))


@pytest.mark.parametrize("shape", [TILED, pytest.param(LARGE, marks=GPU)])
def test_a_token_has_the_same_bits_in_any_company(shape: LayerShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the product of many rows or of few, in tiles of any size, alone or not."""
    case = case_of(shape, "minite")
    monkeypatch.setattr(tuning, "reads_packed", lambda *_, **__: True)
    alone = case.forward(slice(3, 5))
    by_tile = []
    for rows in (*tuning.FEW_ROWS, *tuning.PACKED):
        monkeypatch.setattr(tuning, "tile_rows", lambda *_, rows=rows: rows)
        by_tile.append(case.forward())
    monkeypatch.setattr(tuning, "reads_packed", lambda *_, **__: False)
    many = case.forward()
    assert torch.equal(many[3:5], alone) and all(torch.equal(many, own) for own in by_tile)


@pytest.mark.parametrize(
    "tokens", [5, *(pytest.param(count, marks=GPU) for count in (100, 700, 3000, 16000))]
)
def test_weights_in_4_bits_alone_give_the_same_bits(tokens: int) -> None:
    """In tiles of any size, and decoded first; beside decoded ones, which many rows take."""
    experts = 2 if tokens == 5 else 8
    case = Case(LayerShape(tokens, hidden=128, ffn=128, experts=experts, top_k=1), named_spec("minite"))
    expected = case.forward()
    w13, w2 = (replace(matrix, decoded=None) for matrix in (case.prepared.w13, case.prepared.w2))
    compact = replace(case.prepared, w13=w13, w2=w2)
    assert torch.equal(layer.forward(case.x, case.ids, case.p, compact, case.spec), expected)


@pytest.mark.parametrize("shape", [NARROW, pytest.param(SMALL, marks=GPU), pytest.param(LARGE, marks=GPU)])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_gradients(shape: LayerShape, master: torch.dtype) -> None:
    """Against the reference's; and each weight gradient, a single product, against float64."""
    case = case_of(shape, "minite")
    given = case.on_cpu
    d_output = torch.randn(given.x.shape, generator=torch.Generator().manual_seed(1)).bfloat16()

    def gradients(function: object, prepared: object, device: torch.device | str) -> list[torch.Tensor]:
        leaves = [
            t.to(device) for t in (given.x, given.topk_weights, given.w13.to(master), given.w2.to(master))
        ]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        x, p, w13, w2 = leaves
        output = function(x, given.topk_ids.to(device), p, w13, w2, prepared, case.spec)
        return list(torch.autograd.grad(output, leaves, d_output.to(device)))

    expected = gradients(autograd.expert_layer, reference.prepare(case.weights, case.spec), "cpu")
    found = gradients(layer.expert_layer, case.prepared, DEVICE)
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype
        assert relative(own, other) < 4e-3
    if master is torch.float32 or DEVICE.type == "cuda":
        again = gradients(layer.expert_layer, case.prepared, DEVICE)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    exact = exact_gradients(given, d_output, case.spec)
    assert relative(found[3], exact.w2) < (2e-3 if master is torch.float32 else 2.5e-3)


@pytest.mark.parametrize("shape", [TINY, pytest.param(LARGE, marks=GPU)])
def test_each_product_of_the_gradient_is_within_2e_3_of_float64(shape: LayerShape) -> None:
    """At its own operands; FP32 sums without a further rounding are much closer."""
    on_cpu = synthetic_layer(shape, "gaussian", 0)
    tensors = (on_cpu.x, on_cpu.topk_ids, on_cpu.topk_weights, on_cpu.w13, on_cpu.w2)
    given = LayerInput(*(tensor.to(DEVICE) for tensor in tensors), on_cpu.label)
    d_output = torch.randn(on_cpu.x.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    errors = product_errors(given, d_output, torch.float32)
    assert max(errors.values()) < 2e-3
    assert max(errors["FC1 wgrad"], errors["FC2 wgrad"]) < 1e-6
    assert max(product_errors(given, d_output, torch.bfloat16).values()) < 2e-3


def test_arguments_may_have_strides() -> None:
    """Views and transposed tensors give the gradients of contiguous ones."""
    case = case_of(TINY, "minite")
    d_output = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)

    def gradients(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        leaves = [case.x.bfloat16(), case.p, *(w.to(DEVICE) for w in (case.on_cpu.w13, case.on_cpu.w2))]
        x, p, w13, w2 = (change(leaf).requires_grad_() for leaf in leaves)
        output = layer.expert_layer(x, change(case.ids), p, w13, w2, case.prepared, case.spec)
        return list(torch.autograd.grad(output, (x, p, w13, w2), change(d_output)))

    expected = gradients(torch.Tensor.clone)
    transposed = gradients(lambda t: t.transpose(0, 1).contiguous().transpose(0, 1))
    widened = gradients(lambda t: torch.cat((t, t), dim=-1)[..., : t.shape[-1]])
    for own, other, third in zip(expected, transposed, widened, strict=True):
        assert torch.equal(own, other) and torch.equal(own, third)


def test_an_expert_without_tokens_gets_zero_gradients() -> None:
    case = case_of(TINY, "minite")
    ids = torch.zeros_like(case.ids)
    ids[2:] = 2
    w13, w2 = (w.to(DEVICE).requires_grad_() for w in (case.on_cpu.w13, case.on_cpu.w2))
    layer.expert_layer(case.x, ids, case.p, w13, w2, case.prepared, case.spec).sum().backward()
    for gradient in (w13.grad, w2.grad):
        assert gradient is not None
        assert not gradient[1].any() and gradient[0].any() and gradient[2].any()


@pytest.mark.parametrize("shape", [TINY, TILED])
def test_values_that_are_not_finite(shape: LayerShape) -> None:
    """By the product of many rows, and by that of few."""
    case = copy(case_of(shape, "minite"))
    case.x = case.x.clone()
    case.x[2, 5] = torch.nan
    guard = NonFiniteGuard(7, shape.experts)
    case.forward(guard=guard)
    with pytest.raises(ValueError, match=r"layer 7: FC1 input of expert"):
        guard.check()
    guard.check()
    with pytest.raises(ValueError, match="not finite"):
        case.forward()


def test_arguments_that_do_not_fit() -> None:
    case = case_of(NARROW, "minite")
    with pytest.raises(ValueError, match=r"expert ids must be in \[0, 3\)"):
        layer.forward(case.x, case.ids + 2, case.p, case.prepared, case.spec)
    with pytest.raises(ValueError, match="prepared under"):
        layer.forward(case.x, case.ids, case.p, case.prepared, named_spec("minite_expert"))
    with pytest.raises(ValueError, match="x must be"):
        layer.forward(case.x[:, :64], case.ids, case.p, case.prepared, case.spec)
    for name in ("te_exact", "bf16", "minite_mxfp8_backward"):
        with pytest.raises(ValueError, match="does not compute"):
            layer.check_spec(named_spec(name))


def test_no_tokens() -> None:
    case = case_of(NARROW, "minite")
    assert case.forward(slice(0, 0)).shape == (0, 96)


@pytest.mark.parametrize("name", SPECS)
def test_quantised_weights_are_the_references(name: str) -> None:
    spec = named_spec(name)
    given: LayerInput = synthetic_layer(NARROW, "heavy", 3)
    expected = ExpertWeights.quantize(given.w13, given.w2, spec).tensors()
    found = layer.quantize(given.w13.to(DEVICE), given.w2.to(DEVICE), spec).tensors()
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key].cpu(), tensor), key


@pytest.mark.parametrize("shape", [pytest.param(LARGE, marks=GPU), pytest.param(SMALL, marks=GPU)])
def test_cuda_graph(shape: LayerShape) -> None:
    case = Case(shape, named_spec("minite"))
    guard = NonFiniteGuard(0, shape.experts)
    expected = case.forward(guard=guard)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = case.forward(guard=guard)
    case.x.copy_(case.x.flip(0)), case.ids.copy_(case.ids.flip(0)), case.p.copy_(case.p.flip(0))
    graph.replay()
    assert torch.equal(output, expected.flip(0))
    guard.check()


@pytest.mark.parametrize("shape", [pytest.param(SMALL, marks=GPU)])
def test_operators_follow_pytorchs_rules(shape: LayerShape) -> None:
    case = case_of(shape, "minite")
    matrices = case.prepared.w13.tensors(), case.prepared.w2.tensors()
    torch.library.opcheck(ops.experts, (case.x, case.ids, case.p, *matrices))
    masters = [w.to(DEVICE).requires_grad_() for w in (case.on_cpu.w13, case.on_cpu.w2)]
    # Its rows that no slot uses hold anything, so that two runs cannot be compared whole.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        ops.experts_for_gradient, (case.x, case.ids, case.p, *masters, *matrices), test_utils=utilities
    )


@pytest.mark.parametrize("shape", [pytest.param(SMALL, marks=GPU)])
def test_compiled(shape: LayerShape) -> None:
    """`torch.compile` without a break, the same bits."""
    case = case_of(shape, "minite")
    matrices = case.prepared.w13.tensors(), case.prepared.w2.tensors()
    w13, w2 = (w.to(DEVICE).requires_grad_() for w in (case.on_cpu.w13, case.on_cpu.w2))

    def run(x: torch.Tensor) -> torch.Tensor:
        return ops.experts_for_gradient(x, case.ids, case.p, w13, w2, *matrices)[0] * 2

    expected = torch.autograd.grad(run(case.x).sum(), (w13, w2))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case.x), run(case.x))
    found = torch.autograd.grad(compiled(case.x).sum(), (w13, w2))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
