"""The consistency suite, run as another project's continuous integration runs it: in processes of its own."""

from __future__ import annotations

import json
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


# Runs of the suite one after another in a process, whose start takes longer than they do.
RUNS = """
import contextlib, io, json, sys

import pytest

def run(options):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(options)
    return int(code), said.getvalue()

print(json.dumps([run(options) for options in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with quantisers and a configuration of its own."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "engines.py").write_text(MODULE)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return folder


def process(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{project}"}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def runs(project: Path) -> dict[str, tuple[int, str]]:
    """Exit status and output of the suite by what `RUN_OPTIONS` calls it."""
    options = [["-q", "-p", "no:cacheprovider", *SUITE, *own] for own in RUN_OPTIONS.values()]
    done = process(project, "-c", RUNS, json.dumps(options))
    assert done.returncode == 0, done.stderr
    return dict(zip(RUN_OPTIONS, map(tuple, json.loads(done.stdout)), strict=True))


def failed(output: str) -> set[str]:
    return set(re.findall(r"^FAILED \S+::(\w+)", output, re.MULTILINE))


def sides(learner: str, sampler: str) -> list[str]:
    return ["--learner-quantizer", f"engines:{learner}", "--sampler-quantizer", f"engines:{sampler}"]


DIFFERENT = {
    "other_library": {"test_both_give_the_same_bytes", "test_both_decode_to_the_same_values"},
    "other_zero_bytes": {"test_both_give_the_same_bytes"},
    "per_tensor": {"test_a_row_does_not_depend_on_the_rows_beside_it"},
    "nan_becomes_zero": {"test_both_treat_a_value_that_is_not_finite_alike"},
    "zero_becomes_something": {"test_zeros_decode_to_zeros"},
}
REFUSED = {
    "no option": ([], "kernels.consistency needs --learner-quantizer MODULE:NAME"),
    "no function": (sides("nothing", "learner"), "module 'engines' has no attribute 'nothing'"),
    "no quantiser in the spec": (
        [*sides("learner", "learner"), "--spec", "bf16", "-k", "spec"],
        "bf16 does not quantise activations",
    ),
}
RUN_OPTIONS = {
    "its spec": [*sides("learner", "SAMPLER"), "--spec", "minite"],
    "another spec": [*sides("learner", "SAMPLER"), "--spec", "te_per_token", "-k", "conforms"],
    **{name: sides("learner", name) for name in DIFFERENT},
    **{name: options for name, (options, _) in REFUSED.items()},
}


def test_equal_quantisers_pass(project: Path) -> None:
    """By the command that the README gives."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITE, *sides("learner", "SAMPLER")]
    done = process(project, *command)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b37 passed", done.stdout)


@pytest.mark.slow
def test_equal_quantisers_pass_their_spec_and_fail_another(runs: dict[str, tuple[int, str]]) -> None:
    code, output = runs["its spec"]
    assert code == 0, output
    code, output = runs["another spec"]
    assert code == 1
    assert failed(output) == {"test_conforms_to_the_spec"}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", DIFFERENT)
def test_a_sampler_that_differs_fails(sampler: str, runs: dict[str, tuple[int, str]]) -> None:
    code, output = runs[sampler]
    assert code == 1, output
    assert DIFFERENT[sampler] <= failed(output)
    assert re.search(r"\[\d+, \d+\]", output)
    if sampler == "other_zero_bytes":
        assert "test_both_decode_to_the_same_values" not in failed(output)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_missing_or_wrong_option_is_named(name: str, runs: dict[str, tuple[int, str]]) -> None:
    code, output = runs[name]
    assert code != 0
    assert REFUSED[name][1] in output
