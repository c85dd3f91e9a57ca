"""The reference expert layer: bit for bit against a second implementation, and independent of the batch."""

from __future__ import annotations

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from kernels import reference
from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import ExpertWeights
from kernels.reference import PreparedExperts, forward, prepare
from kernels.routing import Routing
from kernels.spec import ExecutionSpec

BF16_SPECS = ["minite", "minite_expert", "bf16"]
NVFP4_SPECS = ["minite", "minite_expert"]


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

    def oracle(self, spec: ExecutionSpec) -> np.ndarray:
        arrays = (
            t.double().numpy() for t in (self.x, self.ids, self.p, self.w13.bfloat16(), self.w2.bfloat16())
        )
        per_expert = spec.weight_scale_domain == "expert"
        return oracle.expert_layer(*arrays, per_expert=per_expert, quantized=spec.quantized).output


@pytest.mark.parametrize("name", BF16_SPECS)
@pytest.mark.parametrize("shape", [(9, 64, 48, 5, 3), (1, 32, 16, 2, 1), (12, 112, 80, 3, 2)], ids=str)
def test_output_equals_the_oracle_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    case, spec = Case(*shape), named_spec(name)
    output = case.forward(spec)
    assert output.dtype == torch.bfloat16
    np.testing.assert_array_equal(output.double().numpy(), case.oracle(spec))


@pytest.mark.parametrize("name", NVFP4_SPECS)
@pytest.mark.parametrize(("hidden", "ffn"), [(1040, 16), (32, 2064)])
def test_output_equals_the_oracle_for_products_longer_than_one_segment(
    name: str, hidden: int, ffn: int
) -> None:
    case, spec = Case(6, hidden, ffn, 2, 2), named_spec(name)
    np.testing.assert_array_equal(case.forward(spec).double().numpy(), case.oracle(spec))


@pytest.mark.parametrize("name", NVFP4_SPECS)
def test_output_equals_the_oracle_on_rows_of_very_different_size(name: str) -> None:
    case, spec = Case(16, 64, 48, 4, 2), named_spec(name)
    case.x = (case.x * torch.exp2(torch.arange(-24.0, 8, 2))[:, None]).bfloat16()
    case.x[3] = 0
    case.w13[1, 5] = 0
    case.w13[2] *= torch.exp2(torch.randint(-9, 9, (96, 4)).float()).repeat_interleave(16, dim=1)
    output = case.forward(spec)
    assert not output[3].any()
    np.testing.assert_array_equal(output.double().numpy(), case.oracle(spec))


@pytest.mark.parametrize(
    ("name", "low", "high"), [("minite", 0.1, 0.25), ("minite_expert", 0.1, 0.25), ("bf16", 1e-4, 5e-3)]
)
def test_distance_to_the_layer_in_float64(name: str, low: float, high: float) -> None:
    """The dense formula without rounding: quantisation moves the output as much as it should, and no more."""
    case = Case(40, 128, 96, 4, 2)
    x, p, w13, w2 = case.x.double(), case.p.double(), case.w13.double(), case.w2.double()
    exact = torch.zeros_like(x)
    for expert in range(4):
        gate, up = (x @ w13[expert].T).chunk(2, dim=1)
        coefficient = (p * (case.ids == expert)).sum(1, keepdim=True)
        exact += coefficient * ((gate * torch.sigmoid(gate) * up) @ w2[expert].T)
    error = (case.forward(named_spec(name)).double() - exact).norm() / exact.norm()
    assert low < error < high


def test_fp32_equals_transformers_mixtral() -> None:
    case, spec = Case(50, 64, 48, 4, 2), named_spec("fp32")
    config = MixtralConfig(hidden_size=64, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2)
    experts = MixtralExperts(config)
    experts.load_state_dict({"gate_up_proj": case.w13, "down_proj": case.w2})
    x = case.x.float()
    output = forward(x, case.ids, case.p, case.prepared(spec), spec)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, experts(x, case.ids, case.p), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BF16_SPECS)
def test_a_token_does_not_depend_on_the_batch(name: str) -> None:
    """Its output is the same bits for any number of other tokens, any order, and any number of threads."""
    case, spec = Case(200, 80, 144, 5, 2), named_spec(name)
    prepared = case.prepared(spec)
    torch.set_num_threads(1)
    whole = forward(case.x, case.ids, case.p, prepared, spec)
    assert torch.isfinite(whole).all() and whole.any()
    generator = torch.Generator().manual_seed(1)
    for size in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 100, 127, 199, 200):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows = torch.randperm(200, generator=generator)[:size]
            part = forward(case.x[rows], case.ids[rows], case.p[rows], prepared, spec)
            assert torch.equal(part, whole[rows]), (size, threads)


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


def test_a_tensor_wide_activation_scale_does_depend_on_the_batch() -> None:
    """The counterpart of the tests above: they would notice."""
    case, spec = Case(64, 64, 48, 4, 2), named_spec("minite", {"activation_scale_domain": "tensor"})
    prepared = case.prepared(spec)
    whole = forward(case.x, case.ids, case.p, prepared, spec)
    assert not torch.equal(forward(case.x[:1], case.ids[:1], case.p[:1], prepared, spec), whole[:1])


@pytest.mark.parametrize("width", [16, 1024, 1184])
def test_product_is_the_exact_sum_rounded_once(width: int) -> None:
    """Against integers, with operands at both ends of the range so that partial sums need all 53 bits."""
    g = torch.Generator().manual_seed(0)
    pool = torch.tensor(
        [2688.0, -2688.0, 2688.0, 2.0**-10, -(2.0**-10), 11 * 2.0**-10, 0.0, 1344.0]
    ).bfloat16()
    x, weight = (pool[torch.randint(8, (n, width), generator=g)] for n in (5, 300))
    x[0], weight[0] = 2688, 2688
    product = reference._product(x, weight, named_spec("minite"))
    scaled_x, scaled_w = ((t.double() * 1024).long().tolist() for t in (x, weight))
    for row in range(5):
        for column in (0, 1, 17, 255, 256, 299):
            exact = sum(a * b for a, b in zip(scaled_x[row], scaled_w[column], strict=True))
            assert abs(exact) < 2**53
            assert product[row, column].item() == np.float32(exact / 2**20)  # int / int is correctly rounded


def test_long_products_are_sums_of_exact_segments() -> None:
    """Small terms among large ones that cancel: partial sums pass 2^33, where the order of summation shows."""
    g = torch.Generator().manual_seed(0)
    small = (torch.rand(2048, generator=g) < 0.05).repeat(2)
    x = torch.full((1, 4096), 2688.0)
    weight = torch.full((64, 4096), 2688.0)
    weight[:, 2048:] = -2688.0
    x[:, small] = 2.0**-10
    weight[:, small] = torch.randint(16, (64, int(small.sum())), generator=g) * 2.0**-10
    product = reference._product(x.bfloat16(), weight.bfloat16(), named_spec("minite"))[0]
    terms = [[int(term) for term in row] for row in ((x * 1024).double() * (weight * 1024).double()).tolist()]
    for actual, row in zip(product.tolist(), terms, strict=True):
        expected = 0.0
        for start in range(0, 4096, 1024):
            expected += sum(row[start : start + 1024]) / 2**20
        assert actual == np.float32(expected)


def test_silu_is_correctly_rounded_for_every_bf16_wherever_it_stands() -> None:
    gates = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gates = gates[torch.isfinite(gates)]
    wide = gates.double().numpy().astype(np.longdouble)
    with np.errstate(over="ignore"):
        expected = (wide / (1 + np.exp(-wide))).astype(np.float32)
    for columns in (1, 17, 96, len(gates)):
        usable = len(gates) // columns * columns
        gate = gates[:usable].view(-1, columns)
        silu = reference._swiglu(torch.cat((gate, torch.ones_like(gate)), dim=1), named_spec("minite"))
        np.testing.assert_array_equal(silu.flatten().numpy(), expected[:usable])


def test_swiglu_rounds_silu_then_the_product() -> None:
    fc1 = torch.randn(50, 2 * 33, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
    gate, up = fc1.double().numpy()[:, :33], fc1.double().numpy()[:, 33:]
    expected = oracle.f32(oracle.f32(gate / (1 + np.exp(-gate))) * up)
    np.testing.assert_array_equal(reference._swiglu(fc1, named_spec("minite")).double().numpy(), expected)
    assert (expected != oracle.f32(gate / (1 + np.exp(-gate)) * up)).any()  # one rounding would differ


@pytest.mark.parametrize("name", NVFP4_SPECS)
def test_epilogue_multiplies_the_outer_scales_first(name: str) -> None:
    """Before the cast to BF16, which hides the association almost everywhere."""
    case, spec = Case(20, 64, 48, 1, 1), named_spec(name)
    routing = Routing.group(torch.zeros(20, 1, dtype=torch.long), 1)
    product = reference._grouped_linear(case.x.bfloat16(), None, routing, case.prepared(spec).w13, spec)
    actual = product.double().numpy()
    x = oracle.quantize(case.x.double().numpy())
    w = oracle.quantize(case.w13[0].bfloat16().double().numpy(), name == "minite_expert")
    accumulator = oracle.f32(x.decoded @ w.decoded.T)
    outer_x, outer_w = x.outer_scales, w.outer_scales.T
    np.testing.assert_array_equal(actual, oracle.f32(accumulator * oracle.f32(outer_x * outer_w)))
    assert (actual != oracle.f32(oracle.f32(accumulator * outer_x) * outer_w)).mean() > 0.1


def test_a_tensor_wide_activation_scale_is_that_of_the_rows_routed_to_an_expert() -> None:
    case, spec = Case(20, 64, 48, 3, 2), named_spec("minite", {"activation_scale_domain": "tensor"})
    routing = Routing.group(case.ids, 3)
    product = reference._grouped_linear(case.x, routing.tokens, routing, case.prepared(spec).w13, spec)
    for expert, own in routing.occupied():
        rows = case.x[(case.ids == expert).any(1)].double().numpy()
        x = oracle.quantize(rows, shared_scale=True)
        w = oracle.quantize(case.w13[expert].bfloat16().double().numpy())
        accumulator = oracle.f32(x.decoded @ w.decoded.T)
        expected = oracle.f32(accumulator * oracle.f32(x.outer_scales * w.outer_scales.T))
        np.testing.assert_array_equal(product[own].double().numpy(), expected)


def test_no_tokens() -> None:
    for name in CATALOGUE:
        spec = named_spec(name)
        case = Case(0, 32, 16, 2, 2)
        assert case.forward(spec).shape == (0, 32)


@pytest.mark.parametrize("name", NVFP4_SPECS)
def test_prepared_weights_are_exact_in_bf16(name: str) -> None:
    case, spec = Case(1, 64, 48, 3, 1), named_spec(name)
    prepared = case.prepared(spec)
    assert prepared.w13.elements.dtype == torch.bfloat16
    for expert in range(3):
        expected = oracle.quantize(oracle.bf16(case.w13[expert].double().numpy()), name == "minite_expert")
        np.testing.assert_array_equal(prepared.w13.elements[expert].double().numpy(), expected.decoded)


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
        ((x / 0, ids, p), "cannot quantise activation"),
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


def test_an_overflow_inside_the_layer_is_refused() -> None:
    case, spec = Case(4, 32, 16, 2, 2), named_spec("minite")
    case.x = case.x * 1e30
    case.w13 = case.w13 * 1e30
    with pytest.raises(ValueError, match="cannot quantise activation"):
        case.forward(spec)
