"""Execution specs as values: fingerprints, differences, strict parsing, refused combinations."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from typing import Any

import pytest

from kernels.catalogue import CATALOGUE, named_spec
from kernels.spec import ExecutionSpec, Format, format_diff, spec_diff

DEGREES = [field.name for field in dataclasses.fields(ExecutionSpec) if field.name != "name"]
# Changing a spec must change these; a test that fails here says that stored fingerprints no longer match.
GOLDEN = {
    "minite": "effe35d6f54bac65",
    "minite_expert": "b6028bfc9bf66f42",
    "bf16": "e1623585a124e338",
    "fp32": "2c6cdb9f0aa4a034",
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_fingerprints_are_stable(name: str) -> None:
    assert named_spec(name).fingerprint == GOLDEN[name]


def test_fingerprint_is_the_hash_of_the_canonical_form() -> None:
    spec = named_spec("minite")
    assert spec.fingerprint == hashlib.sha256(spec.canonical().encode()).hexdigest()[:16]
    lines = spec.canonical().splitlines()
    assert len(lines) == len(DEGREES) + 1
    assert "activation_scale_domain=token" in lines and "block_size=16" in lines


def test_the_name_is_a_label() -> None:
    spec = named_spec("minite")
    renamed = dataclasses.replace(spec, name="other")
    assert renamed == spec and hash(renamed) == hash(spec)
    assert renamed.fingerprint == spec.fingerprint and not spec_diff(renamed, spec)


@pytest.mark.parametrize("field", DEGREES)
def test_every_field_is_in_the_fingerprint_and_in_the_diff(field: str) -> None:
    spec = named_spec("minite")
    changed = copy.copy(spec)
    object.__setattr__(
        changed, field, "another value"
    )  # past the constructor: some fields have one value only
    assert changed.fingerprint != spec.fingerprint and changed != spec
    (difference,) = spec_diff(spec, changed)
    assert difference.field == field and difference.right == "another value"
    assert difference.left == spec.to_dict()[field] and difference.meaning


def test_values_that_a_field_can_take_have_different_fingerprints() -> None:
    specs = [named_spec(name) for name in CATALOGUE]
    specs.append(named_spec("minite", {"activation_scale_domain": "tensor"}))
    specs.append(named_spec("minite_expert", {"activation_scale_domain": "tensor"}))
    assert len({spec.fingerprint for spec in specs}) == len(specs) == 6


def test_an_override_can_reach_another_named_spec() -> None:
    spec = named_spec("minite", {"weight_scale_domain": "expert"})
    assert spec == named_spec("minite_expert")
    assert spec.name == "minite[weight_scale_domain=expert]"


def test_diff_names_the_field_and_prints_both_values() -> None:
    left, right = named_spec("minite"), named_spec("minite_expert")
    (difference,) = spec_diff(left, right)
    assert difference[:3] == ("weight_scale_domain", "row", "expert")
    header, line = format_diff((difference,), "learner", "sampler").splitlines()
    assert header.split() == ["field", "learner", "sampler", "meaning"]
    assert line.split()[:3] == ["weight_scale_domain", "row", "expert"] and line.endswith(difference.meaning)
    assert header.index("sampler") == line.index("expert")
    assert format_diff(()) == ""


@pytest.mark.parametrize("name", CATALOGUE)
def test_dictionaries_round_trip(name: str) -> None:
    spec = named_spec(name)
    values = spec.to_dict()
    assert all(type(value) in (str, int, bool) for value in values.values())
    assert ExecutionSpec.from_dict(values) == spec and ExecutionSpec.from_dict(values).name == name


@pytest.mark.parametrize("field", [*DEGREES, "name"])
def test_a_missing_field_is_refused(field: str) -> None:
    values = named_spec("minite").to_dict()
    del values[field]
    with pytest.raises(ValueError, match=rf"missing fields \['{field}'\]"):
        ExecutionSpec.from_dict(values)


@pytest.mark.parametrize("field", DEGREES)
def test_an_unknown_value_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}='nonsense'"):
        named_spec("minite", {field: "nonsense"})


def test_an_unknown_field_or_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown fields \['hadamard'\]"):
        named_spec("minite", {"hadamard": True})
    with pytest.raises(ValueError, match="'nvfp4'; there are: minite, minite_expert, bf16, fp32"):
        named_spec("nvfp4")
    with pytest.raises(ValueError, match="cannot be overridden"):
        named_spec("minite", {"name": "mine"})
    with pytest.raises(ValueError, match="block_size=True is not of type int"):
        named_spec("minite", {"block_size": True})


@pytest.mark.parametrize("field", DEGREES)
def test_the_constructor_checks_types(field: str) -> None:
    nothing: Any = {field: None}
    with pytest.raises(TypeError, match=rf"ExecutionSpec\.{field} must be"):
        dataclasses.replace(named_spec("minite"), **nothing)


QUANTIZED_ONLY = [
    field.name for field in dataclasses.fields(ExecutionSpec) if field.metadata.get("quantized_only")
]


@pytest.mark.parametrize("field", QUANTIZED_ONLY)
def test_quantisation_is_all_or_nothing(field: str) -> None:
    absent = 0 if field == "block_size" else "none"
    with pytest.raises(ValueError, match=f"{field}={absent} needs a value with format=nvfp4"):
        named_spec("minite", {field: absent})
    present = named_spec("minite").to_dict()[field]
    with pytest.raises(ValueError, match=rf"{field}=.* must be {absent} with format=bf16"):
        named_spec("bf16", {field: present})


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("minite", "block_size", 32),
        ("minite", "operand", "fp32"),
        ("minite", "accumulation", "fp32_gemm"),
        ("minite", "fc1_output", "fp32"),
        ("minite", "swiglu", "library_silu(gate)*up"),
        ("minite", "swiglu_output", "fp32"),
        ("minite", "fc2_output", "fp32"),
        ("minite", "router_product", "bf16"),
        ("minite", "combine_sum", "bf16"),
        ("minite", "output", "fp32"),
        ("minite", "backward", "fp32"),
        ("bf16", "format", "fp32"),
        ("fp32", "format", "bf16"),
        ("fp32", "output", "bf16"),
        ("minite", "format", "bf16"),
    ],
)
def test_combinations_that_nothing_computes_are_refused(name: str, field: str, value: object) -> None:
    with pytest.raises(ValueError, match="impossible execution spec"):
        named_spec(name, {field: value})


def test_all_contradictions_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"operand=fp32.*output=fp32"):
        named_spec("minite", {"operand": "fp32", "output": "fp32"})


def test_specs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        named_spec("minite").format = Format.BF16  # type: ignore[misc]
