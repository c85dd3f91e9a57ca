"""The learner on a GPU: under the specifications that `minite` is compared with, and its parts outside the experts."""

from __future__ import annotations

import pytest
import torch

from learner import attention
from learner.config import ObjectiveConfig
from learner.logprobs import nucleus
from learner.megatron_api import TransformerConfig
from learner.modules import RMSNorm
from learner.packing import Packing
from learner.rotary import Rotary, rotate
from learner.runtime import deterministic
from tests.learner.conftest import MakeFolder, Sequences
from tests.learner.test_policy import make_batch, make_policy, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = "cuda"
BACKENDS = {"bf16": "grouped_bf16", "te_per_tensor": "triton_per_tensor"}


@pytest.mark.parametrize("spec", BACKENDS)
def test_updates_repeat_bit_for_bit(model_folder: MakeFolder, sequences: Sequences, spec: str) -> None:
    ends = []
    for _ in range(2):
        policy = make_policy(model_folder("qwen3_moe"), spec, dtype="bfloat16", device=DEVICE)
        batch = make_batch(policy, sequences)
        torch.manual_seed(3)  # of stochastic rounding
        metrics = [policy.update(batch, ObjectiveConfig(), 1.0) for _ in range(2)]
        ends.append((metrics, weights(policy)))
        assert policy.report().backend == BACKENDS[spec]
    (first, own), (second, other) = ends
    assert first == second and first[0] != first[1]
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize("spec", BACKENDS)
def test_scores_are_near_those_of_the_reference(
    model_folder: MakeFolder, sequences: Sequences, spec: str
) -> None:
    """On a CPU. In two layers, roundings that fall otherwise move little; under 4-bit scales over a tensor more."""
    own, reference = (
        make_policy(model_folder("qwen3_moe"), spec, dtype="bfloat16", device=device).score(*sequences, 1.0)
        for device in (DEVICE, "cpu")
    )
    far = (own.logp - reference.logp)[sequences[2]].abs()
    assert far.median() < (0.02 if spec == "bf16" else 0.2)


def test_packed_attention_is_padded_attention() -> None:
    """Over packed sequences against FP64 over each alone, forward and gradient."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 70, 3, 130])
    packing = Packing.of(lengths, DEVICE)
    whole = torch.randn(int(lengths.sum()), 2, 3, 64, generator=generator).bfloat16().to(DEVICE)
    q = torch.randn(len(whole), 8, 64, generator=generator).bfloat16().to(DEVICE).requires_grad_()
    k, v = (whole[:, part, :2].requires_grad_() for part in range(2))  # views of a wider matrix
    gradient = torch.randn(q.shape, generator=generator).bfloat16().to(DEVICE)
    mixed = attention._packed(q, k, v, packing, 0.125)
    found = torch.autograd.grad(mixed, (q, k, v), gradient)
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected = attention._padded(*exact, packing, 0.125)
    grads = torch.autograd.grad(expected, exact, gradient.double())
    for own, other in zip((mixed, *found), (expected, *grads), strict=True):
        assert (own.double() - other).norm() < 4e-3 * other.norm()


def test_norms_and_rotary_positions_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(40, 6, 128, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    norm = RMSNorm(TransformerConfig(num_layers=1, hidden_size=128, num_attention_heads=1), 128, 1e-6)
    norm.weight = torch.nn.Parameter(torch.rand(128, generator=generator).bfloat16().to(DEVICE))
    leaf = x.clone().requires_grad_()
    normed = norm(leaf)
    expected = torch.nn.functional.rms_norm(leaf.float(), (128,), norm.weight.float(), 1e-6)
    for own, other in zip(
        (normed, *torch.autograd.grad(normed, (leaf, norm.weight), gradient)),
        (expected, *torch.autograd.grad(expected, (leaf, norm.weight), gradient.float())),
        strict=True,
    ):
        torch.testing.assert_close(own.float(), other.float(), rtol=2**-7, atol=1e-3)
    angles = torch.rand(40, 64, generator=generator).to(DEVICE) * 6
    rotary = Rotary(angles.cos().bfloat16(), angles.sin().bfloat16())
    first, second = x.chunk(2, -1)
    cosines, sines = (torch.cat((t, t), -1)[:, None] for t in (rotary.cosines, rotary.sines))
    assert torch.equal(rotate(x, rotary), x * cosines + torch.cat((-second, first), -1) * sines)


def test_a_nucleus_is_the_same_where_algorithms_must_be_deterministic() -> None:
    """Also of a single row, which torch would sum in any order."""
    logits = 3 * torch.randn(5, 4096, generator=torch.Generator().manual_seed(0))
    expected = nucleus(logits, 0.9)
    with deterministic():
        found = [nucleus(rows.to(DEVICE), 0.9) for rows in (logits, logits[:1])]
    for own in found:
        differ = (own.cpu() != expected[: len(own)]).sum(-1)
        assert int(differ.max()) <= 1  # at its edge alone, by the rounding of sums
