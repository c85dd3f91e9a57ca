"""The conformance suite passes what conforms, and names the first difference of what does not."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import quantizer_adapters
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.catalogue import CATALOGUE, named_spec
from kernels.conformance import (
    Adapter,
    Outcome,
    Status,
    Subject,
    conformance,
    formula,
    layer_inputs,
    oracle,
    oracle_layer,
)
from kernels.conformance.__main__ import main
from kernels.conformance.backend import named_backend
from kernels.conformance.check import Bench, Kind, Mismatch, NotApplicable, Suite, expect_equal, perform
from kernels.conformance.reference_backend import ReferenceBackend
from kernels.conformance.suite import CHECKS, format_table
from kernels.experts import ExpertWeights
from kernels.quantize import QuantizedTensor, quantize_activation
from kernels.quantizer_spec import Element
from kernels.spec import ExecutionSpec

MINITE = named_spec("minite")
BY_NAME = {check.name: check for check in CHECKS}
REFERENCE = named_backend("reference")


def failures(outcomes: list[Outcome]) -> dict[str, str]:
    return {outcome.name: outcome.detail for outcome in outcomes if outcome.status is Status.FAIL}


# What passes.


@pytest.mark.slow
def test_the_reference_conforms_to_minite_in_more_than_28_bitwise_checks() -> None:
    outcomes = conformance(Subject.of_backend(REFERENCE, MINITE), MINITE)
    assert failures(outcomes) == {}
    bitwise = [o for o in outcomes if o.status is Status.PASS and o.kind is Kind.BITWISE]
    assert len(bitwise) >= 50
    assert [o.name for o in outcomes if o.kind is Kind.BOUND] == ["long K"]
    assert all(o.detail for o in outcomes if o.status is Status.NOT_APPLICABLE)


@pytest.mark.parametrize("name", [name for name in CATALOGUE if named_spec(name).weight is not None])
def test_the_reference_quantisers_conform_to_every_spec(name: str) -> None:
    spec = named_spec(name)
    subject = Subject.of_backend(REFERENCE, spec)
    outcomes = [perform(check, subject, spec) for check in CHECKS if check.group != "layer"]
    assert failures(outcomes) == {}
    assert sum(outcome.status is Status.PASS for outcome in outcomes) >= 28


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "minite"])
def test_the_reference_layer_conforms_to_every_spec(name: str) -> None:
    spec = named_spec(name)
    subject = Subject.of_backend(REFERENCE, spec)
    assert failures([perform(check, subject, spec) for check in CHECKS if check.group == "layer"]) == {}


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        (quantizer_adapters.TORCHAO, "torchao"),
        (quantizer_adapters.COMPRESSED_TENSORS, "compressed_tensors"),
    ],
    ids=["torchao", "compressed_tensors"],
)
def test_a_library_conforms_to_its_own_spec_and_to_no_other(adapter: Adapter, name: str) -> None:
    subject = Subject.of_adapter(adapter)
    outcomes = conformance(subject, named_spec(name))
    assert failures(outcomes) == {}
    assert sum(outcome.status is Status.PASS for outcome in outcomes) >= 20
    layer = [outcome for outcome in outcomes if outcome.group == "layer"]
    assert {outcome.status for outcome in layer} == {Status.NOT_APPLICABLE}
    for other in ("te_exact", "modelopt"):
        assert failures([perform(check, subject, named_spec(other)) for check in CHECKS[:10]])


# What fails: quantisers with one fault each, under minite.


def faulty(fault: str = "") -> Callable[[torch.Tensor], QuantizedTensor]:
    """minite's activation quantiser written plainly, with one fault."""
    calls = iter(range(1000))

    def quantize(x: torch.Tensor) -> QuantizedTensor:
        if fault == "not finite" or fault == "input changed":
            finite = x.nan_to_num(1.0)
        elif x.isfinite().all():
            finite = x
        else:
            raise ValueError("not finite")
        wide = finite.float()
        if fault == "strides ignored":
            wide = torch.as_strided(wide, x.shape, (x.shape[1], 1)) if x.is_contiguous() else wide.flip(0)
        blocks = wide.unflatten(-1, (wide.shape[1] // 16, 16))
        a = blocks.abs().amax(-1)
        amax = (a.amax() if len(x) else a.new_zeros(())).view(1, 1) if fault == "shared" else a.amax(-1, True)
        g = amax * torch.tensor(1 / 2688) if fault == "reciprocal of 2688" else amax / torch.tensor(2688.0)
        g = torch.where(amax < 2.0**-100, torch.tensor(0.0 if fault == "zero rule" else 1.0), g)
        raw = a * (1 / (6 * g)) if fault == "scale by reciprocal" else a / (6 * g)
        s = raw.nan_to_num(0).clamp(max=448).to(torch.float8_e4m3fn)
        step = ((raw if fault == "unrounded scale" else s.float()) * g).unsqueeze(-1)
        quotient = blocks * (1 / step) if fault == "reciprocal" else blocks / step
        if fault == "bf16 quotient":
            quotient = quotient.bfloat16().float()
        codes = round_codes(quotient.nan_to_num(0), away=fault == "ties away")
        if fault != "underflow":
            codes = torch.where((s.float() == 0).unsqueeze(-1), 0, codes)
        if fault == "sign of zero":
            codes = torch.where(codes == 8, 0, codes)
        codes = codes.to(torch.uint8).flatten(1)
        if fault == "last blocks":
            codes[:, x.shape[1] // 32 * 32 :] = 0
        if fault == "second tile":
            codes[128:] = 0
        if fault == "another call":
            codes[:1, :1] = next(calls)
        if fault == "input changed":
            x.mul_(2)
        even, odd = codes[:, 0::2], codes[:, 1::2]
        packed = odd + 16 * even if fault == "swapped nibbles" else even + 16 * odd
        return QuantizedTensor(packed, s.view(torch.uint8), g)

    return quantize


def round_codes(x: torch.Tensor, *, away: bool) -> torch.Tensor:
    boundaries = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    magnitude = x.abs().contiguous()
    up = torch.bucketize(magnitude, boundaries, right=True)  # ties to the upper code
    tie = (magnitude.unsqueeze(-1) == boundaries).any(-1)
    index = up if away else torch.where(tie & (up % 2 == 1), up - 1, up)
    return index + 8 * x.signbit()


FAULTS = {
    "reciprocal": "every significand",
    "unrounded scale": "element codes",
    "bf16 quotient": "element codes",
    "ties away": "element midpoints",
    "scale by reciprocal": "block scales",
    "reciprocal of 2688": "outer scales",
    "zero rule": "zero rows",
    "underflow": "subnormal scales",
    "sign of zero": "minus zero",
    "shared": "context swap",
    "swapped nibbles": "packed layout",
    "last blocks": "tail K",
    "second tile": "unaligned rows",
    "strides ignored": "views",
    "another call": "repeated calls",
    "input changed": "repeated calls",
    "not finite": "NaN and infinity",
}


def test_the_plain_quantiser_has_no_fault() -> None:
    outcomes = conformance(Subject.of_adapter(Adapter("plain", faulty())), MINITE)
    assert failures(outcomes) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_its_check_at_a_named_element(fault: str) -> None:
    check = BY_NAME[FAULTS[fault]]
    outcome = perform(check, Subject.of_adapter(Adapter(fault, faulty(fault))), MINITE)
    assert outcome.status is Status.FAIL
    assert re.search(r"\[\d+, \d+\]: expected .+found|expected (shape|to be refused)", outcome.detail)


def test_a_swizzle_that_is_off_by_one_block_is_found() -> None:
    spec = named_spec("te_per_token")
    assert spec.activation is not None
    quantizer = spec.activation

    def stored(quantized: QuantizedTensor, shift: int = 0) -> torch.Tensor:
        assert quantized.block_scales is not None
        scales = quantized.block_scales.numpy()
        return torch.from_numpy(oracle.stored_scales(scales, quantizer, len(scales))).roll(shift)

    right = Adapter("right", lambda x: quantize_activation(x, quantizer), stored)
    wrong = replace(right, stored_scales=lambda quantized: stored(quantized, 1))
    check = BY_NAME["scale order"]
    assert perform(check, Subject.of_adapter(right), spec).status is Status.PASS
    outcome = perform(check, Subject.of_adapter(wrong), spec)
    assert outcome.status is Status.FAIL
    assert outcome.detail.startswith("200 rows, 5 blocks: stored scales (swizzled_128x4)[0]: expected ")


# What fails: layers that follow another spec than they claim.


class Misreading(ReferenceBackend):
    """Computes `spec` with other values of some fields."""

    name = "misreading"

    def __init__(self, changes: dict[str, object]) -> None:
        self.changes = changes

    def forward(self, x, topk_ids, topk_weights, weights, spec):  # type: ignore[no-untyped-def]
        other = named_spec(spec.name, self.changes)
        prepared = reference.prepare(ExpertWeights.from_tensors(weights.tensors(), other), other)
        return reference.forward(x, topk_ids, topk_weights, prepared, other)


MISREADINGS = [
    ({"fc1_output": "fp32"}, "FC1 output cast"),
    ({"swiglu_output": "fp32"}, "SwiGLU"),
    ({"fc2_output": "fp32"}, "router coefficient"),
    ({"router_coefficient": "bf16"}, "router coefficient"),
    ({"router_product": "bf16"}, "router coefficient"),
    ({"router_position": "swiglu_output"}, "router coefficient"),
    ({"router_position": "swiglu_before_cast"}, "router coefficient"),
    ({"combine": "expert_order"}, "combine order"),
    ({"combine_sum": "bf16"}, "combine order"),
    ({"combine": "slot_order_fma"}, "two experts that cancel"),
    ({"epilogue": "(acc*gx)*gw"}, "epilogue association"),
    ({"activation.quotient": "x*(S/s)"}, "layer output"),
    ({"activation.outer_domain": "tensor"}, "layer: context swap"),
    ({"activation": "none"}, "products of all codes"),
    ({"output": "fp32"}, "layer output"),
    ({"operand": "bf16", "activation.non_finite": "saturate"}, "layer: NaN and infinity"),
]


@pytest.mark.parametrize(("changes", "name"), MISREADINGS, ids=[str(changes) for changes, _ in MISREADINGS])
def test_a_layer_that_misreads_a_field_fails_its_check(changes: dict[str, object], name: str) -> None:
    outcome = perform(BY_NAME[name], Subject.of_backend(Misreading(changes), MINITE), MINITE)
    assert outcome.status is Status.FAIL
    assert re.search(r"\[\d+, \d+\]: expected .+found|expected to be refused", outcome.detail)


@pytest.mark.parametrize("order", ["fp32_blocks_in_order", "fp32_tree", "fp32_gemm"])
def test_every_order_of_sums_conforms_to_a_spec_that_leaves_it_open(order: str) -> None:
    subject = Subject.of_backend(Misreading({"accumulation": order}), MINITE)
    for name in ("layer output", "long K"):
        assert perform(BY_NAME[name], subject, MINITE).status is Status.PASS


def test_another_order_of_sums_fails_where_the_spec_fixes_it() -> None:
    spec = named_spec("minite", {"accumulation": "fp32_tree"})

    class InOrder(ReferenceBackend):
        def forward(self, x, topk_ids, topk_weights, weights, spec):  # type: ignore[no-untyped-def]
            other = named_spec("minite", {"accumulation": "fp32_blocks_in_order"})
            prepared = reference.prepare(ExpertWeights.from_tensors(weights.tensors(), other), other)
            return reference.forward(x, topk_ids, topk_weights, prepared, other)

    check = BY_NAME["order along K"]
    right = perform(check, Subject.of_backend(REFERENCE, spec), spec)
    assert (right.status, right.kind) == (Status.PASS, Kind.BITWISE)
    assert perform(check, Subject.of_backend(InOrder(), spec), spec).status is Status.FAIL


def test_a_group_offset_that_ignores_empty_experts_fails_there_only() -> None:
    class Compacting(ReferenceBackend):
        """Takes the n-th weights for the n-th expert that has tokens."""

        def forward(self, x, topk_ids, topk_weights, weights, spec):  # type: ignore[no-untyped-def]
            ids = torch.unique(topk_ids, return_inverse=True)[1]
            return super().forward(x, ids, topk_weights, weights, spec)

    subject = Subject.of_backend(Compacting(), MINITE)
    assert perform(BY_NAME["layer output"], subject, MINITE).status is Status.PASS
    assert perform(BY_NAME["empty experts"], subject, MINITE).status is Status.FAIL


def test_a_fused_permutation_is_compared_with_the_separate_steps() -> None:
    class Fused(ReferenceBackend):
        shift = 0

        def permute_quantize(self, x, topk_ids, num_experts, spec):  # type: ignore[no-untyped-def]
            order = torch.argsort(topk_ids.flatten(), stable=True).roll(self.shift) // topk_ids.shape[1]
            return quantize_activation(x[order], spec)

    fused, check = Fused(), BY_NAME["fused against unfused"]
    assert perform(check, Subject.of_backend(fused, MINITE), MINITE).status is Status.PASS
    fused.shift = 1
    outcome = perform(check, Subject.of_backend(fused, MINITE), MINITE)
    assert outcome.status is Status.FAIL and outcome.detail.startswith("grouped rows: outer scales[0, 0]")


# The framework.


def test_what_does_not_apply_is_not_a_pass_and_an_error_is_a_failure() -> None:
    suite = Suite("example")

    @suite.check("reason")
    def reason(bench: Bench) -> None:
        """Does not apply."""
        raise NotApplicable("no blocks")

    @suite.check("error")
    def error(bench: Bench) -> None:
        """Raises."""
        raise RuntimeError("out of memory")

    @suite.check("within")
    def within(bench: Bench) -> None:
        """Passes within a bound."""
        bench.bound("1e-3")

    outcomes = [perform(check, Subject("nothing", torch.device("cpu")), MINITE) for check in suite.checks]
    assert [(o.status, o.detail) for o in outcomes] == [
        (Status.NOT_APPLICABLE, "no blocks"),
        (Status.FAIL, "RuntimeError: out of memory"),
        (Status.PASS, "1e-3"),
    ]
    table = format_table(outcomes, "nothing", MINITE)
    assert "0 bitwise and 1 bound checks passed, 1 failed, 1 do not apply" in table


@pytest.mark.parametrize(
    ("expected", "found", "message"),
    [
        ([[1.0, 2.0]], [[1.0, 3.0]], "x[0, 1]: expected 2.0, found 3.0 (1 of 2 differ)"),
        ([0.0], [-0.0], "x[0]: expected 0.0, found -0.0 (1 of 1 differ)"),
        ([1.0], [1.0, 1.0], "x: expected shape (1,), found (2,)"),
    ],
)
def test_the_first_difference_is_named(expected: list, found: list, message: str) -> None:
    with pytest.raises(Mismatch) as raised:
        expect_equal("x", np.array(expected), torch.tensor(found, dtype=torch.float64))
    assert str(raised.value) == message
    expect_equal("x", np.array([np.nan, 1.0]), torch.tensor([torch.nan, 1.0]))


# The oracle, against integers, fractions and PyTorch's own types.

FLOATS = st.floats(2.0**-30, 2.0**30, width=32)


@given(a=FLOATS, b=FLOATS, c=FLOATS)
@settings(max_examples=200, deadline=None)
def test_formulas_round_once_per_operation(a: float, b: float, c: float) -> None:
    def rounded(x: Fraction) -> Fraction:
        exponent = len(bin(x.numerator)) - len(bin(x.denominator)) - 25
        unit = Fraction(2) ** (exponent + 1 if x / Fraction(2) ** exponent >= 2**24 else exponent)
        unit = unit * 2 if x / unit >= 2**24 else unit
        return round(x / unit) * unit  # Python's round takes ties to even

    names = {key: np.float64(value) for key, value in {"a": a, "b": b, "c": c}.items()}
    x, y, z = Fraction(a), Fraction(b), Fraction(c)
    assert formula.evaluate("a/(b*c)", names) == float(rounded(x / rounded(y * z)))
    assert formula.evaluate("(a*b)*(1/c)", names) == float(rounded(rounded(x * y) * rounded(1 / z)))


@given(a=FLOATS, b=FLOATS, sign=st.sampled_from([-1, 1]), near=st.floats(0.5, 2.0, width=32))
@settings(max_examples=200, deadline=None)
def test_fma_rounds_once(a: float, b: float, sign: int, near: float) -> None:
    c = float(np.float32(-a * b * near)) * sign
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    found = float(oracle_layer.fp32_fma(np.float64(a), np.float64(b), np.float64(c)))
    below, above = (float(np.nextafter(np.float32(found), np.float32(way))) for way in (-np.inf, np.inf))
    distance = abs(Fraction(found) - exact)
    assert distance <= abs(Fraction(below) - exact) and distance <= abs(Fraction(above) - exact)


@pytest.mark.parametrize("binades", [4, 90], ids=["exact in float64", "not exact in float64"])
def test_products_are_summed_exactly(binades: int) -> None:
    rng = np.random.default_rng(0)
    x, weight = (layer_inputs.short(rng, rows, 96) for rows in (3, 5))
    x = np.ldexp(x, rng.integers(0, binades, x.shape))
    x[:, 40:80], weight[:, 40:80] = x[:, :40], -weight[:, :40]  # only the others are left of the sum
    x[:, 80:] = np.ldexp(x[:, 80:], -binades // 2)
    order = rng.permutation(96)
    x, weight = x[:, order], weight[:, order]
    expected = [[float(sum(map(Fraction, row * column))) for column in weight] for row in x]
    np.testing.assert_array_equal(
        oracle_layer._exact_sums(x, weight), np.float32(expected).astype(np.float64)
    )


def test_a_formula_that_is_not_understood_is_refused() -> None:
    for text in ("a**", "open('x')", "a.real", "d"):
        with pytest.raises(ValueError, match="not understood"):
            formula.evaluate(text, {"a": np.float64(1)})


def test_formats_and_bf16_are_those_of_torch() -> None:
    codes = torch.arange(127, dtype=torch.uint8)
    np.testing.assert_array_equal(
        oracle.VALUES[Element.E4M3], codes.view(torch.float8_e4m3fn).double().numpy()
    )
    assert oracle.VALUES[Element.E2M1].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [oracle.VALUES[e][-1] for e in (Element.E2M3, Element.E3M2)] == [7.5, 28]
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-60, 68).repeat(
        32
    )
    np.testing.assert_array_equal(formula.bf16(x.numpy()), x.bfloat16().double().numpy())
    scales = torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 500
    rounded = scales.clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(oracle.nearest_even(scales.double().numpy(), oracle.E4M3), rounded)


def test_the_oracle_on_a_row_that_was_computed_by_hand() -> None:
    """A = 2688, so g = 1; a second block with a = 21 has s = E4M3(3.5) = 3.5."""
    x = np.zeros((1, 32))
    x[0, [0, 1, 16, 17, 18, 19]] = [2688, -224, 21, -0.875, 2.625, 1e-3]
    assert MINITE.activation is not None
    found = oracle.quantize(x, MINITE.activation)
    assert found.decode is not None and found.block_scales is not None
    assert found.decode.item() == 1
    assert oracle.E4M3[found.block_scales[0]].tolist() == [448, 3.5]
    # quotients 6, -0.5 | 6, -0.25 (a tie: 0, sign kept), 0.75 (a tie: 1), 2.9e-4
    assert found.codes[0, [0, 1, 16, 17, 18, 19]].tolist() == [7, 9, 7, 8, 2, 0]


# The command.


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernels.conformance", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--spec", "nothing"], "no execution spec is called 'nothing'"),
        (["--spec", "minite[weight.outer_domain]"], "is not of the form field=value"),
        (["--spec", "minite[weight.outer_domain=all]"], "outer_domain='all' is not one of"),
        (["--backend", "nothing"], "no back end is called 'nothing'"),
        (["--backend", "kernels.packing:pack"], "is not a back end"),
        (["--quantizer", "kernels.nothing:x"], "cannot import 'kernels.nothing'"),
        (["--quantizer", "kernels.packing:x"], "has no attribute 'x'"),
        (["--quantizer", "kernels.packing"], "must be module:attribute"),
        (
            ["--quantizer", "kernels.packing:pack", "--backend", "reference"],
            "either --backend or --quantizer",
        ),
        (["--quantizer", "kernels.packing:pack", "--spec", "bf16"], "bf16 quantises no activations"),
        (
            ["--quantizer", "broken_adapters.raises:x"],
            "'broken_adapters.raises': RuntimeError: two lines",
        ),
        (["--quantizer", "broken_adapters.ends:x"], "cannot import 'broken_adapters.ends': SystemExit: 1"),
        (["--json", "/nothing/there.json"], "no folder /nothing"),
        (["--json", "/tmp"], "/tmp cannot be written: it is a folder"),
    ],
)
def test_a_bad_argument_ends_in_one_line_before_anything_is_checked(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken_adapters").mkdir()
    (tmp_path / "broken_adapters" / "raises.py").write_text("raise RuntimeError('two\\nlines')\n")
    (tmp_path / "broken_adapters" / "ends.py").write_text("raise SystemExit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("kernels.conformance.__main__.conformance", pytest.fail)
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_fault_makes_the_command_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert (
        main(["--quantizer", "quantizer_adapters:TORCHAO", "--spec", "te_exact", "--json", str(report)]) == 1
    )
    assert "FAIL" in capsys.readouterr().out
    checks = json.loads(report.read_text())[0]["checks"]
    assert len(checks) == len(CHECKS)
    assert {check["status"] for check in checks} == {"pass", "FAIL", "not applicable"}


def test_a_spec_is_named_with_its_overrides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: list[ExecutionSpec] = []

    def conformance_of(subject: Subject, spec: ExecutionSpec) -> list[Outcome]:
        checked.append(spec)
        return []

    monkeypatch.setattr("kernels.conformance.__main__.conformance", conformance_of)
    label = "minite[weight.outer_domain=expert]"
    assert main(["--spec", label]) == 0
    assert checked == [named_spec("minite", {"weight.outer_domain": "expert"})]
    assert f"reference under {label} ({checked[0].fingerprint})" in capsys.readouterr().out


def test_outcomes_that_cannot_be_written_end_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kernels.conformance.__main__.conformance", lambda subject, spec: [])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SystemExit) as raised:
        main(["--json", str(tmp_path / "report.json")])
    error = capsys.readouterr().err
    assert raised.value.code == 2
    assert "No space left on device" in error and error.count("\n") == 1


def test_the_command_runs() -> None:
    done = run_command("--quantizer", "kernels.conformance.reference_backend:nothing")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_backend_names_and_claims() -> None:
    class Other(ReferenceBackend):
        def claims(self, spec: ExecutionSpec) -> bool:
            return spec.name == "bf16"

    sys.modules[__name__].OTHER = Other()  # type: ignore[attr-defined]
    assert main(["--backend", f"{__name__}:OTHER", "--spec", "bf16"]) == 0
    with pytest.raises(SystemExit):
        main(["--backend", f"{__name__}:OTHER", "--spec", "minite"])
