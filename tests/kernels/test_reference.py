"""The reference expert layer: bit for bit against a second implementation, and independent of the batch."""

from __future__ import annotations

from typing import Any

import layer_oracle
import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import ExpertWeights
from kernels.grouped import grouped_linear, grouped_operand
from kernels.guard import Operand
from kernels.quantizer_spec import Block, BlockScaleFormat, ScaleDomain
from kernels.reference import PreparedExperts, expert_rows, forward, prepare
from kernels.routing import Routing
from kernels.spec import Accumulation, Combine, Epilogue, ExecutionSpec, FloatType, RouterPosition
from kernels.swiglu import swiglu

NVFP4_SPECS = ["minite", "minite_expert"]
WEIGHT_ONLY = {"activation": "none"}
HALVES = {"weight": {"outer_domain": "expert_half"}}


def variants() -> dict[str, ExecutionSpec]:
    """Every spec of the catalogue, and `minite` or another with every value of each layer field that can be."""
    specs = {name: named_spec(name) for name in CATALOGUE}

    def add(name: str, **changes: Any) -> None:
        spec = named_spec(name, changes)
        specs[spec.name] = spec

    for order in Accumulation:
        for name in ("minite", "mxfp8", "fp8_per_token", "bf16"):
            add(name, accumulation=str(order))
    for epilogue in Epilogue:
        if epilogue is not Epilogue.NONE:
            add("te_per_token", epilogue=str(epilogue))
    for position in RouterPosition:
        for kind in FloatType:
            add(
                "minite",
                router_position=str(position),
                router_product=str(kind),
                router_coefficient=str(kind),
            )
    for order in Combine:
        add("minite", combine=str(order))
        if order is not Combine.SLOT_ORDER_FMA:
            add("minite", combine=str(order), combine_sum="bf16", router_product="bf16")
    add("minite", **HALVES)
    add("te_exact", **HALVES)
    for name in ("minite", "mxfp4", "fp8_per_token", "te_exact"):
        add(name, **WEIGHT_ONLY, **({"epilogue": "acc*(gx*gw)"} if name == "te_exact" else {}))
    add("minite", operand="fp32", backward="fp32", fc1_output="fp32", swiglu_output="fp32", fc2_output="fp32")
    add("minite", activation={"transform": "hadamard_16"}, weight={"transform": "hadamard_16"})
    add("te_exact", activation={"block": "16x16"})
    return specs


SPECS = variants()
# What lets other tokens into a token's result, and library sums whose order is not known.
PER_TENSOR = {
    name
    for name, spec in SPECS.items()
    if spec.activation is not None
    and (spec.activation.outer_domain is ScaleDomain.TENSOR or spec.activation.block is Block.TILE_16)
}
LIBRARY = {name for name, spec in SPECS.items() if spec.accumulation is Accumulation.GEMM}


class Case:
    """Random weights and tokens; weights 1/sqrt(K) in size so that activations stay near one."""

    def __init__(self, tokens: int, hidden: int, ffn: int, experts: int, top_k: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(tokens, hidden, generator=g).bfloat16()
        self.ids = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k]
        self.p = torch.rand(tokens, top_k, generator=g).softmax(1)
        self.w13 = torch.randn(experts, 2 * ffn, hidden, generator=g) / hidden**0.5
        self.w2 = torch.randn(experts, hidden, ffn, generator=g) / ffn**0.5

    def prepared(self, spec: ExecutionSpec) -> PreparedExperts:
        return prepare(ExpertWeights.quantize(self.w13, self.w2, spec), spec)

    def forward(self, spec: ExecutionSpec) -> torch.Tensor:
        return forward(self.x, self.ids, self.p, self.prepared(spec), spec)

    def nvfp4_oracle(self, spec: ExecutionSpec) -> np.ndarray:
        arrays = (
            t.double().numpy() for t in (self.x, self.ids, self.p, self.w13.bfloat16(), self.w2.bfloat16())
        )
        per_expert = spec.weight is not None and spec.weight.outer_domain is ScaleDomain.EXPERT
        return oracle.expert_layer(*arrays, per_expert=per_expert, quantized=spec.quantized).output


@pytest.mark.parametrize("name", [name for name in SPECS if name not in LIBRARY])
def test_every_spec_equals_a_second_implementation_bit_for_bit(name: str) -> None:
    """The last expert is empty, expert 0 has one token, and the spread of the rows is large."""
    spec, case = SPECS[name], Case(11, 96, 64, 5, 2)
    case.x = (case.x * torch.exp2(torch.arange(-5.0, 6))[:, None]).bfloat16()
    case.ids = torch.tensor([[1, 2], [3, 1], [2, 3]]).repeat(4, 1)[:11]
    case.ids[4, 1] = 0
    expected = layer_oracle.expert_layer(case.x, case.ids, case.p, case.w13, case.w2, spec)
    routing = Routing.group(case.ids, 5)
    rows = expert_rows(case.x.to(torch.bfloat16), routing, case.prepared(spec), case.p)
    for part, actual in (("fc1", rows.fc1), ("act", rows.swiglu), ("fc2", rows.fc2)):
        np.testing.assert_array_equal(
            routing.by_token(actual).double().numpy(), getattr(expected, part), part
        )
    output = case.forward(spec)
    assert output.isfinite().all() and output[-1].any()
    np.testing.assert_array_equal(output.double().numpy(), expected.output)


@pytest.mark.parametrize("name", sorted(LIBRARY))
def test_library_sums_equal_a_second_implementation_within_their_rounding(name: str) -> None:
    spec, case = SPECS[name], Case(11, 96, 64, 5, 2)
    expected = layer_oracle.expert_layer(case.x, case.ids, case.p, case.w13, case.w2, spec).output
    error = np.linalg.norm(case.forward(spec).double().numpy() - expected) / np.linalg.norm(expected)
    assert error < (1e-6 if name == "fp32" else 5e-3)


def test_every_value_of_every_layer_field_is_among_the_specs() -> None:
    for field, kind in (
        ("accumulation", Accumulation),
        ("epilogue", Epilogue),
        ("router_position", RouterPosition),
        ("combine", Combine),
        ("combine_sum", FloatType),
    ):
        assert {getattr(spec, field) for spec in SPECS.values()} == set(kind), field


@pytest.mark.parametrize("name", ["minite", "minite_expert", "bf16"])
@pytest.mark.parametrize("shape", [(9, 64, 48, 5, 3), (1, 32, 16, 2, 1), (12, 112, 80, 3, 2)], ids=str)
def test_output_equals_the_nvfp4_oracle_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    """This one has a quantiser of its own too."""
    case, spec = Case(*shape), named_spec(name)
    output = case.forward(spec)
    assert output.dtype == torch.bfloat16
    np.testing.assert_array_equal(output.double().numpy(), case.nvfp4_oracle(spec))


@pytest.mark.parametrize("name", NVFP4_SPECS)
@pytest.mark.parametrize(("hidden", "ffn"), [(1040, 16), (32, 2064)])
def test_products_longer_than_one_segment(name: str, hidden: int, ffn: int) -> None:
    case, spec = Case(6, hidden, ffn, 2, 2), named_spec(name)
    np.testing.assert_array_equal(case.forward(spec).double().numpy(), case.nvfp4_oracle(spec))


@pytest.mark.parametrize("name", NVFP4_SPECS)
def test_rows_of_very_different_size(name: str) -> None:
    case, spec = Case(16, 64, 48, 4, 2), named_spec(name)
    case.x = (case.x * torch.exp2(torch.arange(-24.0, 8, 2))[:, None]).bfloat16()
    case.x[3] = 0
    case.w13[1, 5] = 0
    case.w13[2] *= torch.exp2(torch.randint(-9, 9, (96, 4)).float()).repeat_interleave(16, dim=1)
    output = case.forward(spec)
    assert not output[3].any()
    np.testing.assert_array_equal(output.double().numpy(), case.nvfp4_oracle(spec))


@pytest.mark.parametrize("name", CATALOGUE)
def test_distance_to_the_layer_in_float64(name: str) -> None:
    """The dense formula without rounding: quantisation moves the output as much as it should, and no more."""
    spec, case = named_spec(name), Case(40, 128, 96, 4, 2)
    x, p, w13, w2 = case.x.double(), case.p.double(), case.w13.double(), case.w2.double()
    exact = torch.zeros_like(x)
    for expert in range(4):
        gate, up = (x @ w13[expert].T).chunk(2, dim=1)
        coefficient = (p * (case.ids == expert)).sum(1, keepdim=True)
        exact += coefficient * ((gate * torch.sigmoid(gate) * up) @ w2[expert].T)
    error = (case.forward(spec).double() - exact).norm() / exact.norm()
    assert _distance(spec)[0] < error < _distance(spec)[1]


def _distance(spec: ExecutionSpec) -> tuple[float, float]:
    if spec.activation is None:
        return (1e-9, 1e-6) if spec.operand is FloatType.FP32 else (1e-4, 5e-3)
    if spec.activation.element == "e2m1":
        powers = spec.activation.block_scale_format is BlockScaleFormat.E8M0
        return (0.25, 0.35) if powers else (0.1, 0.26)
    return (0.1, 0.16) if spec.activation.element == "e3m2" else (0.03, 0.08)


def test_fp32_equals_transformers_mixtral() -> None:
    case, spec = Case(50, 64, 48, 4, 2), named_spec("fp32")
    config = MixtralConfig(hidden_size=64, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2)
    experts = MixtralExperts(config)
    experts.load_state_dict({"gate_up_proj": case.w13, "down_proj": case.w2})
    x = case.x.float()
    output = forward(x, case.ids, case.p, case.prepared(spec), spec)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, experts(x, case.ids, case.p), rtol=1e-5, atol=1e-6)


SIZES = ((1, 1), (2, 2), (8, 1), (5, 3), (16, 2), (33, 1), (17, 2), (3, 1), (64, 3), (70, 1))


@pytest.mark.parametrize("name", [name for name in SPECS if name not in LIBRARY | PER_TENSOR])
def test_a_token_does_not_depend_on_the_batch(name: str) -> None:
    """Its output is the same bits for any number of other tokens, any order, and any number of threads."""
    case, spec = Case(70, 96, 160, 5, 2), SPECS[name]
    prepared = case.prepared(spec)
    whole = forward(case.x, case.ids, case.p, prepared, spec)
    assert torch.isfinite(whole).all() and whole.any()
    generator = torch.Generator().manual_seed(1)
    for size, threads in SIZES if name in NVFP4_SPECS else SIZES[::3]:
        torch.set_num_threads(threads)
        rows = torch.randperm(70, generator=generator)[:size]
        part = forward(case.x[rows], case.ids[rows], case.p[rows], prepared, spec)
        assert torch.equal(part, whole[rows]), (size, threads)


@pytest.mark.parametrize("name", sorted(PER_TENSOR))
def test_a_tensor_wide_activation_scale_depends_on_the_batch(name: str) -> None:
    """The counterpart of the test above: it would notice."""
    case, spec = Case(70, 96, 160, 5, 2), SPECS[name]
    prepared = case.prepared(spec)
    whole = forward(case.x, case.ids, case.p, prepared, spec)
    alone = torch.cat(
        [forward(case.x[i : i + 1], case.ids[i : i + 1], case.p[i : i + 1], prepared, spec) for i in range(8)]
    )
    assert not torch.equal(alone, whole[:8])


@pytest.mark.parametrize("name", NVFP4_SPECS)
@pytest.mark.parametrize(("hidden", "ffn"), [(1296, 32), (64, 2064)])
def test_a_token_does_not_depend_on_the_batch_for_long_products(name: str, hidden: int, ffn: int) -> None:
    case, spec = Case(24, hidden, ffn, 3, 2), named_spec(name)
    prepared = case.prepared(spec)
    whole = forward(case.x, case.ids, case.p, prepared, spec)
    for size in (1, 2, 5, 13):
        assert torch.equal(
            forward(case.x[:size], case.ids[:size], case.p[:size], prepared, spec), whole[:size]
        )


def test_a_token_does_not_depend_on_where_the_others_are_routed() -> None:
    case, spec = Case(64, 64, 48, 4, 2), named_spec("minite")
    prepared = case.prepared(spec)
    alone = forward(case.x[:1], case.ids[:1], case.p[:1], prepared, spec)
    for expert in range(4):  # all others to one expert: the rest are empty, or hold the first token only
        ids = case.ids.clone()
        ids[1:] = expert
        assert torch.equal(forward(case.x, ids, case.p, prepared, spec)[:1], alone)


@pytest.mark.parametrize("name", SPECS)
def test_one_token_and_none(name: str) -> None:
    spec = SPECS[name]
    case = Case(1, 32, 32, 4, 2)
    expected = layer_oracle.expert_layer(case.x, case.ids, case.p, case.w13, case.w2, spec).output
    np.testing.assert_allclose(case.forward(spec).double().numpy(), expected, rtol=2e-2, atol=1e-3)
    empty = forward(case.x[:0], case.ids[:0], case.p[:0], case.prepared(spec), spec)
    assert empty.shape == (0, 32) and empty.dtype == case.forward(spec).dtype


def test_silu_is_correctly_rounded_for_every_bf16_wherever_it_stands() -> None:
    gates = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gates = gates[torch.isfinite(gates)]
    wide = gates.double().numpy().astype(np.longdouble)
    with np.errstate(over="ignore"):
        expected = (wide / (1 + np.exp(-wide))).astype(np.float32)
    for columns in (1, 17, 96, len(gates)):
        usable = len(gates) // columns * columns
        gate = gates[:usable].view(-1, columns)
        silu = swiglu(torch.cat((gate, torch.ones_like(gate)), dim=1), named_spec("minite"))
        np.testing.assert_array_equal(silu.flatten().numpy(), expected[:usable])


def test_swiglu_rounds_silu_then_the_product() -> None:
    fc1 = torch.randn(50, 2 * 33, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
    gate, up = fc1.double().numpy()[:, :33], fc1.double().numpy()[:, 33:]
    expected = oracle.f32(oracle.f32(gate / (1 + np.exp(-gate))) * up)
    np.testing.assert_array_equal(swiglu(fc1, named_spec("minite")).double().numpy(), expected)
    assert (expected != oracle.f32(gate / (1 + np.exp(-gate)) * up)).any()  # one rounding would differ


def test_epilogues_differ_before_the_cast_that_hides_it() -> None:
    case = Case(20, 64, 48, 1, 1)
    routing = Routing.group(torch.zeros(20, 1, dtype=torch.long), 1)
    products = {}
    for epilogue in Epilogue:
        if epilogue is not Epilogue.NONE:
            spec = named_spec("te_per_token", {"epilogue": str(epilogue)})
            operand = grouped_operand(case.x, None, routing, spec, Operand.FC1_INPUT)
            products[epilogue] = grouped_linear(operand, routing, case.prepared(spec).w13, spec)
    reference = products.pop(Epilogue.OUTER_PRODUCT_FIRST)
    for product in products.values():
        assert 0.05 < (product != reference).float().mean() < 0.9
        torch.testing.assert_close(product, reference, rtol=1e-6, atol=0)


def test_gate_and_up_halves_have_outer_scales_of_their_own() -> None:
    """With a gate 100 times smaller, the shared scale is that of the up rows, and its own fits better."""
    case = Case(30, 64, 48, 2, 1)
    case.w13[:, :48] /= 100
    shared, own = (named_spec("minite", {"weight": {"outer_domain": d}}) for d in ("expert", "expert_half"))
    prepared = case.prepared(own)
    assert prepared.w13.outer_scales is not None and prepared.w2.outer_scales is not None
    assert prepared.w13.outer_scales.shape == (2, 96) and prepared.w2.outer_scales.shape == (2, 1)
    amax = case.w13.bfloat16().float().abs().view(2, 2, -1).amax(-1)
    torch.testing.assert_close(prepared.w13.outer_scales[:, [0, 95]], amax / 2688, rtol=1e-6, atol=0)
    assert not torch.equal(case.forward(own), case.forward(shared))


def test_a_tensor_wide_activation_scale_is_that_of_the_rows_routed_to_an_expert() -> None:
    case, spec = Case(20, 64, 48, 3, 2), named_spec("minite", {"activation.outer_domain": "tensor"})
    routing = Routing.group(case.ids, 3)
    operand = grouped_operand(case.x, routing.tokens, routing, spec, Operand.FC1_INPUT)
    product = grouped_linear(operand, routing, case.prepared(spec).w13, spec)
    for expert, own in routing.occupied():
        rows = case.x[(case.ids == expert).any(1)].double().numpy()
        x = oracle.quantize(rows, shared_scale=True)
        w = oracle.quantize(case.w13[expert].bfloat16().double().numpy())
        accumulator = oracle.f32(x.decoded @ w.decoded.T)
        expected = oracle.f32(accumulator * oracle.f32(x.outer_scales * w.outer_scales.T))
        np.testing.assert_array_equal(product[own].double().numpy(), expected)


def test_a_rotation_of_both_operands_leaves_the_product() -> None:
    """Up to quantisation: as far from the unquantised layer as without it."""
    case, plain = Case(40, 128, 96, 3, 2), named_spec("minite")
    rotated = named_spec("minite", {role: {"transform": "hadamard_16"} for role in ("activation", "weight")})
    exact = case.forward(named_spec("fp32")).double()
    errors = [(case.forward(spec).double() - exact).norm() / exact.norm() for spec in (plain, rotated)]
    assert 0.8 < errors[1] / errors[0] < 1.25


@pytest.mark.parametrize("name", NVFP4_SPECS)
def test_prepared_weights_are_exact_in_bf16(name: str) -> None:
    case, spec = Case(1, 64, 48, 3, 1), named_spec(name)
    prepared = case.prepared(spec)
    assert prepared.w13.elements.dtype == torch.bfloat16
    for expert in range(3):
        expected = oracle.quantize(oracle.bf16(case.w13[expert].double().numpy()), name == "minite_expert")
        np.testing.assert_array_equal(prepared.w13.elements[expert].double().numpy(), expected.decoded)


def test_power_of_two_scales_below_the_range_of_bf16_are_exact() -> None:
    case, spec = Case(4, 32, 32, 2, 1), named_spec("mxfp8", {"operand": "fp32", "backward": "fp32"})
    case.w13 *= 2.0**-124
    case.w13[:, :, ::2] *= 2.0**-9
    prepared = case.prepared(spec)
    stored = ExpertWeights.quantize(case.w13, case.w2, spec).tensors()
    scales = torch.exp2(stored["w13.block_scales"].double() - 127)
    values = stored["w13.codes"].view(torch.float8_e4m3fn).double() * scales.repeat_interleave(32, dim=-1)
    assert torch.equal(prepared.w13.elements.double(), values)
    assert not torch.equal(values.bfloat16().double(), values)


def test_inputs_that_do_not_fit_are_refused() -> None:
    case, spec = Case(4, 32, 16, 2, 2), named_spec("minite")
    prepared = case.prepared(spec)
    x, ids, p = case.x, case.ids, case.p
    for bad, message in [
        ((x[:, :16], ids, p), r"x must be \[T, 32\]"),
        ((x, ids[:3], p), r"topk_ids must be \[4, k\]"),
        ((x, ids[:, :0], p[:, :0]), "k >= 1"),
        ((x, ids, p[:, :1]), r"topk_weights must be float32 \(4, 2\)"),
        ((x, ids, p.bfloat16()), "topk_weights must be float32"),
        ((x, ids + 1, p), r"expert ids must be in \[0, 2\)"),
        ((x / 0, ids, p), "cannot quantise FC1 input"),
    ]:
        with pytest.raises(ValueError, match=message):
            forward(*bad, prepared, spec)
    with pytest.raises(ValueError, match="prepared under 'minite', the call asks for 'minite_expert'"):
        forward(x, ids, p, prepared, named_spec("minite_expert"))
    weights = ExpertWeights.quantize(case.w13, case.w2, spec)
    for other, message in [
        ("bf16", "under 'bf16' need w13.weight"),
        ("minite_expert", "w13.outer_scales is"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare(weights, named_spec(other))


def test_rows_need_the_coefficients_where_they_are_multiplied_ahead_of_fc2() -> None:
    case, spec = Case(4, 32, 16, 2, 2), named_spec("te_exact")
    with pytest.raises(ValueError, match="'te_exact' multiplies router coefficients ahead of FC2"):
        expert_rows(case.x, Routing.group(case.ids, 2), case.prepared(spec))
