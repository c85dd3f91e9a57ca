"""Execution specs as values: fingerprints, differences, strict parsing, refused combinations."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.catalogue import CATALOGUE, named_spec
from kernels.labels import spec_from_label
from kernels.model_spec import ModelSpec
from kernels.quantizer_spec import QuantizerSpec
from kernels.spec import PARTS, QUANTIZERS, ExecutionSpec, Swiglu, format_diff, meanings, spec_diff

LAYER = [
    field.name
    for field in dataclasses.fields(ExecutionSpec)
    if field.name != "name" and field.name not in PARTS
]
INNER = [field.name for field in dataclasses.fields(QuantizerSpec)]
QUANTISED = [f"{role}.{name}" for role in QUANTIZERS for name in INNER]
DEGREES = [*LAYER, *QUANTISED]
# Every quantiser is present, so that every field is.
FULL = "te_per_tensor"
# Changing a spec must change these; a test that fails here says that stored fingerprints no longer match.
GOLDEN: dict[str, str] = {
    "minite": "3683dd5eb5837525",
    "minite_expert": "4d29d3fe16637d12",
    "strict": "18cef06c55602040",
    "minite_mxfp8_backward": "bf1618571c386444",
    "te_per_tensor": "7b7adf5b8de1546a",
    "te_per_tensor_2d": "916a5f4ae88b9e20",
    "te_exact": "781ae984c64e1675",
    "te_per_token": "606d162ac7fca444",
    "te_fast_math": "e4d94e9a59c5f701",
    "flashinfer_exact": "3b16758263e99943",
    "flashinfer_fast_0_7_2": "4c1dffe90fdc79f8",
    "flashinfer_fast_0_7_4": "c0d5144087ec7e2f",
    "vllm_cuda": "01701a05f8c2c253",
    "vllm_emulation": "16f259878a5924b9",
    "torchao": "985daa2d56c9967c",
    "mslk": "60ac0601f2d26e5e",
    "modelopt": "06c75ee04932f3ea",
    "compressed_tensors": "ae3a0dda724888e9",
    "four_over_six": "0a1683c316b8f3d1",
    "four_over_six_mae": "54402b9f2cc1aec8",
    "mxfp4": "a923fe4e1cdea726",
    "mxfp8": "6fb7457a17ce2ccd",
    "mxfp6_e2m3": "c0b919d925f6d882",
    "mxfp6_e3m2": "5d1ae670e62b7e98",
    "fp8_per_token": "08ed142e47a8ca0e",
    "bf16": "5c198b021949e912",
    "fp32": "be6e726782a1f830",
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_fingerprints_are_stable(name: str) -> None:
    assert named_spec(name).fingerprint == GOLDEN[name]


def test_fingerprints_are_those_of_the_catalogue_and_all_different() -> None:
    assert list(GOLDEN) == list(CATALOGUE) and len(set(GOLDEN.values())) == len(GOLDEN)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_fingerprints_are_stable_across_processes(hash_seed: str) -> None:
    program = (
        "import json; from kernels.catalogue import CATALOGUE, named_spec;"
        "print(json.dumps({name: named_spec(name).fingerprint for name in CATALOGUE}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    output = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(output.stdout) == GOLDEN


@pytest.mark.parametrize("python", ["python3.12", "python3.13", "python3.14"])
def test_fingerprints_are_stable_across_python_versions(python: str) -> None:
    if shutil.which(python) is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no {python} here")
    program = "import json; from kernels.catalogue import CATALOGUE, named_spec; "
    program += "print(json.dumps({name: named_spec(name).fingerprint for name in CATALOGUE}))"
    root = Path(__file__).parents[2]
    output = subprocess.run([python, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert json.loads(output.stdout) == GOLDEN


def test_fingerprint_is_the_hash_of_the_canonical_form() -> None:
    spec = named_spec(FULL)
    assert spec.fingerprint == hashlib.sha256(spec.canonical().encode()).hexdigest()[:16]
    schema, *lines = spec.canonical().splitlines()
    assert schema == "minite-execution-spec/3" and len(lines) == len(DEGREES)
    assert "activation.outer_domain=tensor" in lines and "weight.block_scale_max=448" in lines
    assert "activation=none" in named_spec("bf16").canonical().splitlines()


def test_the_name_is_a_label() -> None:
    spec = named_spec("minite")
    renamed = dataclasses.replace(spec, name="other")
    assert renamed == spec and hash(renamed) == hash(spec)
    assert renamed.fingerprint == spec.fingerprint and not spec_diff(renamed, spec)


def with_value(spec: ExecutionSpec, field: str, value: object) -> ExecutionSpec:
    """Past the constructors: some fields have one value only, and some values go with others."""
    changed = copy.copy(spec)
    role, _, inner = field.rpartition(".")
    if role:
        quantizer = copy.copy(getattr(spec, role))
        object.__setattr__(quantizer, inner, value)
        object.__setattr__(changed, role, quantizer)
    else:
        object.__setattr__(changed, field, value)
    return changed


@pytest.mark.parametrize("field", DEGREES)
def test_every_field_is_in_the_fingerprint_and_in_the_diff(field: str) -> None:
    spec = named_spec(FULL)
    changed = with_value(spec, field, "another value")
    assert changed.fingerprint != spec.fingerprint and changed != spec
    (difference,) = spec_diff(spec, changed)
    assert difference.field == field and difference.right == "another value"
    assert difference.left == spec.to_dict()[field]
    assert difference.meaning == meanings()[field] and difference.meaning


@pytest.mark.parametrize("field", DEGREES)
def test_values_of_a_field_have_different_fingerprints(field: str) -> None:
    spec = named_spec(FULL)
    kind: Any = type(value_of(spec, field))
    values = [0, 256, 448] if kind is int else list(kind)
    assert len({with_value(spec, field, value).fingerprint for value in values}) == len(values)


def value_of(spec: ExecutionSpec, field: str) -> object:
    role, _, inner = field.rpartition(".")
    return getattr(getattr(spec, role), inner) if role else getattr(spec, field)


@pytest.mark.parametrize("role", QUANTIZERS)
def test_a_missing_quantiser_is_one_difference(role: str) -> None:
    spec = named_spec(FULL)
    without = with_value(spec, role, None)
    assert without.fingerprint != spec.fingerprint
    (difference,) = spec_diff(spec, without)
    assert difference[:3] == (role, "e2m1/1x16", "none")


def test_an_override_can_reach_another_named_spec() -> None:
    spec = named_spec("minite", {"weight.outer_domain": "expert"})
    assert spec == named_spec("minite_expert") == named_spec("minite", {"weight": {"outer_domain": "expert"}})
    assert spec.name == "minite[weight.outer_domain=expert]"
    unquantised = {"activation": "none", "weight": "none", "epilogue": "none"}
    assert named_spec("minite", unquantised) == named_spec("bf16")


def test_diff_names_the_field_and_prints_both_values() -> None:
    left, right = named_spec("minite"), named_spec("minite_expert")
    (difference,) = spec_diff(left, right)
    assert difference[:3] == ("weight.outer_domain", "row", "expert")
    header, line = format_diff((difference,), "learner", "sampler").splitlines()
    assert header.split() == ["field", "learner", "sampler", "meaning"]
    assert line.split()[:3] == ["weight.outer_domain", "row", "expert"] and line.endswith(difference.meaning)
    assert header.index("sampler") == line.index("expert")
    assert format_diff(()) == ""


@pytest.mark.parametrize("name", CATALOGUE)
def test_dictionaries_round_trip(name: str) -> None:
    spec = named_spec(name)
    values = spec.to_dict()
    assert all(type(value) in (str, int) for value in values.values())
    again = ExecutionSpec.from_dict(json.loads(json.dumps(values)))
    assert again == spec and again.name == name and again.fingerprint == spec.fingerprint


@pytest.mark.parametrize("field", [*DEGREES, "name"])
def test_a_missing_field_is_refused(field: str) -> None:
    values = named_spec(FULL).to_dict()
    del values[field]
    with pytest.raises(ValueError, match=rf"missing fields \['{field.rpartition('.')[2]}'\]"):
        ExecutionSpec.from_dict(values)


@pytest.mark.parametrize("role", QUANTIZERS)
def test_a_quantiser_is_there_or_it_is_not(role: str) -> None:
    values = named_spec(FULL).to_dict()
    with pytest.raises(ValueError, match=f"give either {role}=none or all fields {role}"):
        ExecutionSpec.from_dict({**values, role: "none"})
    absent = {key: value for key, value in values.items() if not key.startswith(f"{role}.")}
    with pytest.raises(ValueError, match=f"give either {role}=none or all fields {role}"):
        ExecutionSpec.from_dict(absent)


@pytest.mark.parametrize("field", DEGREES)
def test_an_unknown_value_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field.rpartition('.')[2]}='nonsense'"):
        named_spec(FULL, {field: "nonsense"})


def test_an_unknown_field_or_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown fields \['hadamard'\]"):
        named_spec("minite", {"hadamard": "on"})
    with pytest.raises(ValueError, match=r"activation: .*unknown fields \['hadamard'\]"):
        named_spec("minite", {"activation.hadamard": "on"})
    with pytest.raises(ValueError, match=r"'nvfp4'; there are: minite, minite_expert, .*, bf16, fp32"):
        named_spec("nvfp4")
    with pytest.raises(ValueError, match="cannot be overridden"):
        named_spec("minite", {"name": "mine"})
    with pytest.raises(ValueError, match="block_scale_max=True is not of type int"):
        named_spec("minite", {"weight.block_scale_max": True})


@pytest.mark.parametrize("field", DEGREES)
def test_the_constructors_check_types(field: str) -> None:
    spec = named_spec(FULL)
    role, _, inner = field.rpartition(".")
    nothing: Any = {inner: None}
    with pytest.raises(TypeError, match=rf"{'QuantizerSpec' if role else 'ExecutionSpec'}\.{inner} must be"):
        dataclasses.replace(getattr(spec, role) if role else spec, **nothing)


def test_a_quantiser_of_another_type_is_refused() -> None:
    wrong: Any = "none"
    with pytest.raises(TypeError, match=r"ExecutionSpec\.weight must be a QuantizerSpec or None"):
        dataclasses.replace(named_spec("minite"), weight=wrong)


IMPOSSIBLE: list[tuple[str, dict[str, object], str]] = [
    ("minite", {"activation.block": "none"}, "block_scale_format=e4m3 with block=none"),
    ("minite", {"activation.outer_domain": "none"}, r"outer_scale=g=A/M,S=1/g with outer_domain=none"),
    ("fp8_per_token", {"activation.block": "1x32"}, "block_scale_format=none with block=1x32"),
    ("minite", {"activation.block_scale_format": "e8m0"}, "E8M0 block scales with an outer scale"),
    ("mxfp4", {"weight.block_scale_format": "e4m3"}, r"block_scale=2\^.* with block_scale_format=e4m3"),
    ("minite", {"weight.block_scale_max": 512}, "block_scale_max=512"),
    ("mxfp4", {"weight.block_scale_max": 448}, "block_scale_max=448 with block_scale_format=e8m0"),
    ("mxfp4", {"weight.block_scale_floor": "2^-9"}, r"block_scale_floor=2\^-9 without E4M3"),
    ("minite", {"weight.quotient": "x/s"}, "quotient=x/s with block=1x16"),
    ("mxfp4", {"weight.quotient": "x/g"}, "quotient=x/g with block=1x32"),
    ("minite", {"weight.selector": "4over6_mse", "weight.element": "e2m3"}, "needs E2M1"),
    ("minite", {"weight.code_layout": "byte"}, "code_layout=byte with element=e2m1"),
    ("minite", {"weight.underflow_codes": "s=0:factor=0"}, "underflow_codes=s=0:factor=0 with quotient=x/"),
    ("minite", {"weight.zero_group": "S=inf:S=1"}, "zero_group=S=inf:S=1 with outer_scale=g=A/M"),
    ("minite", {"activation.outer_domain": "row"}, "activation.outer_domain=row is not one of"),
    ("minite", {"weight.outer_domain": "token"}, "weight.outer_domain=token is not one of"),
    ("te_per_tensor", {"gradient.outer_domain": "expert"}, "gradient.outer_domain=expert is not one of"),
    ("minite", {"weight": "none"}, "activation is quantised and weight is not"),
    ("minite", {"activation.rounding": "stochastic"}, "must be a function of its operands"),
    ("minite", {"weight.rounding": "stochastic"}, "must be a function of its operands"),
    ("minite", {"weight.transform": "hadamard_16"}, "activation.transform and weight.transform differ"),
    (
        "minite",
        {"activation": "none", "weight.transform": "hadamard_16"},
        "weight.transform without activation",
    ),
    ("minite", {"epilogue": "none"}, "epilogue=none with outer scales present"),
    ("mxfp4", {"epilogue": "acc*(gx*gw)"}, "outer scales absent"),
    ("minite", {"epilogue": "acc*((Ax*Aw)*(1/(Mx*Mw)))"}, "needs outer_stored=A"),
    ("minite", {"backward": "quantized"}, "backward=quantized with gradient none"),
    ("te_per_tensor", {"gradient": "none"}, "backward=quantized with gradient none"),
    ("te_per_tensor", {"backward": "dequantized"}, "backward=dequantized with gradient quantised"),
    ("bf16", {"backward": "dequantized"}, "backward=dequantized with weight=none"),
    ("minite", {"operand": "fp32"}, "backward=bf16_straight_through with operand=fp32"),
    ("fp32", {"operand": "bf16"}, "backward=fp32 with operand=bf16"),
    (
        "minite",
        {"combine": "slot_order_fma", "router_position": "swiglu_output"},
        "combine=slot_order_fma with",
    ),
    ("minite", {"combine": "slot_order_fma", "combine_sum": "bf16"}, "rounds neither product nor sum"),
    ("minite", {"combine": "slot_order_fma", "router_product": "bf16"}, "rounds neither product nor sum"),
    ("strict", {"activation": "none"}, "model given, but activation has no blocks scaled in e4m3"),
    ("strict", {"activation.outer_domain": "tensor"}, "model given with activation.outer_domain=tensor"),
    ("strict", {"accumulation": "fp32_gemm"}, "model given with accumulation=fp32_gemm"),
    ("strict", {"combine": "any_order"}, "model given with combine=any_order"),
    ("strict", {"swiglu": "library_silu(gate)*up"}, "model given with swiglu=library_silu"),
    ("strict", {"fc1_output": "fp32"}, "model given with .* fc1_output=fp32"),
    (
        "strict",
        {"activation.transform": "hadamard_16", "weight.transform": "hadamard_16"},
        "model given with activation.transform=hadamard_16",
    ),
]


MODEL = [field.name for field in dataclasses.fields(ModelSpec)]


@pytest.mark.parametrize("field", MODEL)
def test_every_field_of_a_strict_model_is_in_the_fingerprint_and_in_the_diff(field: str) -> None:
    strict = named_spec("strict")
    [other] = [value for value in ModelSpec.types()[field] if value != getattr(strict.model, field)]
    changed = named_spec("strict", {"model": {field: other}})
    assert changed.fingerprint != strict.fingerprint and changed != strict
    (difference,) = spec_diff(strict, changed)
    assert difference[:3] == (f"model.{field}", str(getattr(strict.model, field)), str(other))
    assert difference.meaning == meanings()[f"model.{field}"] and difference.meaning
    assert spec_from_label(changed.name) == changed


def test_a_spec_without_a_model_says_nothing_of_it() -> None:
    minite, strict = named_spec("minite"), named_spec("strict")
    assert "model" not in minite.canonical() and not any(key.startswith("model") for key in minite.to_dict())
    assert strict.canonical().startswith(minite.canonical())
    assert not minite.strict and strict.strict
    (difference,) = spec_diff(minite, strict)
    assert difference[:3] == ("model", "none", "strict")
    assert named_spec("strict", {"model": "none"}) == minite
    with pytest.raises(ValueError, match=r"model: .*missing fields \['attention', "):
        named_spec("minite", {"model.norm": "library"})
    wrong: Any = "strict"
    with pytest.raises(TypeError, match=r"ExecutionSpec\.model must be a ModelSpec or None"):
        dataclasses.replace(minite, model=wrong)


@pytest.mark.parametrize(("name", "overrides", "sentence"), IMPOSSIBLE)
def test_combinations_that_nothing_computes_are_refused(
    name: str, overrides: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"impossible .*{sentence}"):
        named_spec(name, overrides)


def test_all_contradictions_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"epilogue=none .*operand=fp32"):
        named_spec("minite", {"operand": "fp32", "epilogue": "none"})


@pytest.mark.parametrize(
    ("name", "multiple"),
    [("minite", 16), ("mxfp8", 32), ("fp8_per_token", 1), ("bf16", 1), ("te_per_tensor_2d", 16)],
)
def test_widths_are_multiples_of_blocks(name: str, multiple: int) -> None:
    assert named_spec(name).width_multiple == multiple


def test_every_entry_names_its_source() -> None:
    for name, entry in CATALOGUE.items():
        assert entry.source.library and entry.source.version, name


def test_specs_are_frozen() -> None:
    spec: Any = named_spec("minite")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.swiglu = Swiglu.FP32_LIBRARY_SILU
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.weight.element = "e2m3"
    values: Any = CATALOGUE["minite"].values
    with pytest.raises(TypeError):
        values["weight.element"] = "e2m3"
