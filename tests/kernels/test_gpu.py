"""The reference computes the same bits on a GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import ExpertWeights
from kernels.quantize import quantize_activation, quantize_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 33, 96, 64, 5, 2


def heavy_tailed(*shape: int) -> torch.Tensor:
    rows = torch.exp2(torch.randint(-20, 20, (*shape[:-1], 1)).float())
    return (torch.distributions.StudentT(2.0).sample(shape) * rows).bfloat16()


@pytest.mark.parametrize(
    "name", [name for name in CATALOGUE if CATALOGUE[name].values.get("weight") != "none"]
)
def test_quantised_bytes(name: str) -> None:
    spec = named_spec(name)
    assert spec.activation is not None and spec.weight is not None
    torch.manual_seed(0)
    x, w = heavy_tailed(TOKENS, HIDDEN), heavy_tailed(EXPERTS, 2 * FFN, HIDDEN)
    x[3], w[1, 5] = 0.0, 0.0
    pairs = (
        (quantize_activation(x, spec.activation), quantize_activation(x.cuda(), spec.activation)),
        (quantize_weight(w, spec.weight), quantize_weight(w.cuda(), spec.weight)),
    )
    for cpu, gpu in pairs:
        for part in ("codes", "block_scales", "outer_scales"):
            expected, found = getattr(cpu, part), getattr(gpu, part)
            assert (expected is None) is (found is None)
            if expected is not None:
                assert torch.equal(found.cpu(), expected), part


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in ("bf16", "fp32")])
def test_layer_output(name: str) -> None:
    """Bitwise where the sum along K is exact in FP64; `bf16` and `fp32` depend on the library's order."""
    spec = named_spec(name)
    torch.manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    w13 = torch.randn(EXPERTS, 2 * FFN, HIDDEN).bfloat16() / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, FFN).bfloat16() / FFN**0.5
    ids = torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices
    coefficients = torch.rand(TOKENS, TOP_K).softmax(-1)

    def run(device: str) -> torch.Tensor:
        weights = ExpertWeights.quantize(w13.to(device), w2.to(device), spec)
        prepared = reference.prepare(weights, spec)
        return reference.forward(x.to(device), ids.to(device), coefficients.to(device), prepared, spec)

    expected, found = run("cpu"), run("cuda").cpu()
    if spec.activation is not None and spec.activation.block_scale_format == "e4m3":
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=2**-8, atol=2**-8)
