"""A learner that stayed in the host's memory goes on as one that did not."""

from __future__ import annotations

import pytest
import torch

from learner.config import ObjectiveConfig
from learner.offload import offload, onload
from learner.policy import Policy
from tests.learner.conftest import MakeFolder, Sequences, config, precision_map
from tests.learner.test_policy import make_batch, make_policy, weights

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]


def stay(policy: Policy) -> None:
    before = {name: parameter.data_ptr() for name, parameter in policy.model.named_parameters()}
    left = offload(policy)
    tensors = [*policy.model.parameters(), *policy.optimizer.masters.values()]
    tensors += [value for state in policy.optimizer.adamw.state.values() for value in state.values()]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    assert all(policy.model.get_parameter(name).data_ptr() != before[name] for name in before)
    assert left < 2**26  # what the device keeps for its libraries
    onload(policy)
    assert all(tensor.device.type == policy.device.type for tensor in policy.model.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stay_on_the_host_changes_no_bit(
    model_folder: MakeFolder, sequences: Sequences, dtype: str, device: str
) -> None:
    folder = model_folder("mixtral")
    left, stayed = (make_policy(folder, "minite", dtype=dtype, device=device) for _ in range(2))
    batch = make_batch(left, sequences)
    stay(stayed)
    for _ in range(2):
        metrics = [policy.update(batch, ObjectiveConfig(), 1.0) for policy in (left, stayed)]
        assert metrics[0] == metrics[1]
        stay(stayed)
    own, other = weights(left), weights(stayed)
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert torch.equal(left.score(*sequences, 1.0).logp, stayed.score(*sequences, 1.0).logp)


def test_a_model_that_only_scores_gets_no_optimiser(model_folder: MakeFolder, sequences: Sequences) -> None:
    policy = Policy(model_folder("qwen3_moe"), precision_map("minite"), config(), seed=0)
    before = policy.score(*sequences, 1.0).logp
    offload(policy)
    onload(policy)
    assert "optimizer" not in vars(policy)
    assert torch.equal(policy.score(*sequences, 1.0).logp, before)
