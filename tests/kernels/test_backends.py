"""The choice of a back end, and what its kernels compile to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kernels import backends
from kernels.catalogue import CATALOGUE, named_spec


@pytest.fixture(autouse=True)
def fresh() -> None:
    backends._choose.cache_clear()


def test_reference_on_a_cpu_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    spec = named_spec("minite")
    assert backends.choose(spec, "cpu") is backends.choose(spec, "cpu") is backends.REFERENCE
    assert capsys.readouterr().out.count("reference") == 1


def test_what_cannot_be_is_refused() -> None:
    spec = named_spec("minite")
    with pytest.raises(ValueError, match="no back end is called 'cutlass'"):
        backends.choose(spec, "cpu", "cutlass")
    with pytest.raises(ValueError, match="not on cpu"):
        backends.choose(spec, "cpu", "triton_emulated")


def test_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def chosen(capability: tuple[int, int], spec: str = "minite", name: str | None = None) -> str:
        backends._choose.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return backends.choose(named_spec(spec), "cuda", name).name

    assert chosen((9, 0)) == chosen((9, 0), "minite_expert") == "triton_emulated"
    assert chosen((10, 0)) == chosen((10, 3)) == "triton_native"
    assert chosen((10, 0), name="triton_emulated") == "triton_emulated"
    assert chosen((9, 0), "bf16") == chosen((10, 0), "bf16") == "grouped_bf16"
    assert chosen((9, 0), "te_exact") == chosen((10, 3), "te_per_tensor") == "triton_per_tensor"
    assert chosen((9, 0), "mxfp8") == chosen((9, 0), "te_per_tensor_2d") == "reference"
    assert chosen((8, 0), name="reference") == "reference"
    assert chosen((9, 0), "strict") == "reference"
    with pytest.raises(ValueError, match="triton_emulated sums products in an order of its own"):
        chosen((9, 0), "strict", "triton_emulated")
    with pytest.raises(ValueError, match="does not compute 'te_exact'"):
        chosen((9, 0), "te_exact", "triton_emulated")
    with pytest.raises(
        ValueError, match="the grouped BF16 layer does not compute 'minite': activation=quantised"
    ):
        chosen((9, 0), "minite", "grouped_bf16")
    with pytest.raises(ValueError, match=r"not on \(8, 0\)"):
        chosen((8, 0))
    with pytest.raises(ValueError, match="triton_native does not run"):
        chosen((9, 0), name="triton_native")


@pytest.mark.parametrize("name", CATALOGUE)
def test_what_a_plan_says_is_what_is_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for capability in ((9, 0), (10, 3)):
        backends._choose.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=capability: own)
        planned = backends.gpu_backend(named_spec(name), native=capability > (9, 0))
        assert planned == backends.choose(named_spec(name), "cuda").name


@pytest.mark.parametrize("name", CATALOGUE)
def test_no_two_back_ends_compute_a_spec(name: str) -> None:
    pytest.importorskip("triton")
    able = [family.names for family in backends.FAMILIES if family.problem(named_spec(name)) is None]
    assert len(able) <= 1


def test_compile_check() -> None:
    """In a process of its own: kernels that were defined for the interpreter cannot be compiled."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "kernels.compile_check"], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "kind::mxf4nvf4" in run.stdout and "wgmma" in run.stdout and "FAILS" not in run.stdout
