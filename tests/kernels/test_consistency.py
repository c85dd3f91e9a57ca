"""The consistency suite, run as another project's continuous integration runs it: in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = ["-p", "kernels.consistency.plugin", "--pyargs", "kernels.consistency"]
ROOT = Path(__file__).resolve().parents[2]
MODULE = """
from dataclasses import replace

import torch

from kernels.catalogue import named_spec
from kernels.conformance import Adapter
from kernels.quantize import quantize_activation

MINITE, FLASHINFER, TENSOR = (
    named_spec(name).activation for name in ("minite", "flashinfer_exact", "torchao")
)


def learner(x):
    return quantize_activation(x, MINITE)


def other_library(x):
    return quantize_activation(x, FLASHINFER)


def per_tensor(x):
    return quantize_activation(x, TENSOR)


def other_zero_bytes(x):
    found = quantize_activation(x, MINITE)
    scales = found.block_scales.masked_fill(found.block_scales == 0, 1)  # 2^-9, with codes 0
    return replace(found, block_scales=scales)


def nan_becomes_zero(x):
    return quantize_activation(x.nan_to_num(0.0), MINITE)


def zero_becomes_something(x):
    found = quantize_activation(x, MINITE)
    zero = (x == 0).all(1)
    found.codes[zero] = 0x77
    found.block_scales[zero] = 1
    return found


SAMPLER = Adapter("the sampler", learner)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with quantisers and a configuration of its own."""
    (tmp_path / "engines.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return tmp_path


def run(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{project}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITE, *options]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


def failed(done: subprocess.CompletedProcess[str]) -> set[str]:
    return set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE))


def sides(learner: str, sampler: str) -> list[str]:
    return ["--learner-quantizer", f"engines:{learner}", "--sampler-quantizer", f"engines:{sampler}"]


def test_equal_quantisers_pass(project: Path) -> None:
    done = run(project, *sides("learner", "SAMPLER"))
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b37 passed", done.stdout)


@pytest.mark.slow
def test_equal_quantisers_pass_their_spec_and_fail_another(project: Path) -> None:
    done = run(project, *sides("learner", "SAMPLER"), "--spec", "minite")
    assert done.returncode == 0, done.stdout
    done = run(project, *sides("learner", "SAMPLER"), "--spec", "te_per_token", "-k", "conforms")
    assert done.returncode == 1
    assert failed(done) == {"test_conforms_to_the_spec"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "tests"),
    [
        ("other_library", {"test_both_give_the_same_bytes", "test_both_decode_to_the_same_values"}),
        ("other_zero_bytes", {"test_both_give_the_same_bytes"}),
        ("per_tensor", {"test_a_row_does_not_depend_on_the_rows_beside_it"}),
        ("nan_becomes_zero", {"test_both_treat_a_value_that_is_not_finite_alike"}),
        ("zero_becomes_something", {"test_zeros_decode_to_zeros"}),
    ],
)
def test_a_sampler_that_differs_fails(project: Path, sampler: str, tests: set[str]) -> None:
    done = run(project, *sides("learner", sampler))
    assert done.returncode == 1, done.stdout + done.stderr
    assert tests <= failed(done)
    assert re.search(r"\[\d+, \d+\]", done.stdout)
    if sampler == "other_zero_bytes":
        assert "test_both_decode_to_the_same_values" not in failed(done)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "kernels.consistency needs --learner-quantizer MODULE:NAME"),
        (sides("nothing", "learner"), "module 'engines' has no attribute 'nothing'"),
        (
            [*sides("learner", "learner"), "--spec", "bf16", "-k", "spec"],
            "bf16 does not quantise activations",
        ),
    ],
    ids=["no option", "no function", "no quantiser in the spec"],
)
def test_a_missing_or_wrong_option_is_named(project: Path, options: list[str], message: str) -> None:
    done = run(project, *options)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
