"""The learner on a GPU under the specifications that `minite` is compared with."""

from __future__ import annotations

import pytest
import torch

from learner.config import ObjectiveConfig
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
