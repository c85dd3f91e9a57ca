from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from learner.config import ObjectiveConfig
from learner.policy import Policy
from tests.learner.conftest import MakeFolder, Sequences, config, precision_map
from tests.learner.test_policy import make_batch, weights

SETTINGS = {"warmup_steps": 6, "weight_decay": 0.1}


def advance(policy: Policy, sequences: Sequences) -> dict[str, float]:
    policy.supervised_step(*sequences)
    return policy.update(make_batch(policy, sequences), ObjectiveConfig(), 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    model_folder: MakeFolder, sequences: Sequences, tmp_path: Path, dtype: str
) -> None:
    def fresh(seed: int) -> Policy:
        return Policy(
            model_folder("qwen3_moe"), precision_map("minite"), config(dtype=dtype, **SETTINGS), seed
        )

    whole = fresh(seed=1)
    advance(whole, sequences)
    whole.checkpoint(tmp_path / "step")
    expected = advance(whole, sequences)
    expected_draw = torch.rand(3)

    resumed = fresh(seed=2)
    advance(resumed, sequences)
    advance(resumed, sequences)  # moments, masters and steps that the checkpoint must replace
    resumed.restore(tmp_path / "step")
    assert resumed.steps == 2
    assert advance(resumed, sequences) == expected
    assert torch.equal(torch.rand(3), expected_draw)
    assert all(torch.equal(w, weights(resumed)[name]) for name, w in weights(whole).items())
    state = resumed.optimizer.state()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.optimizer.state().items())
    exported = dict(resumed.export())
    assert all(torch.equal(tensor, exported[name]) for name, tensor in whole.export())


def test_a_checkpoint_of_a_run_that_has_not_stepped(
    model_folder: MakeFolder, sequences: Sequences, tmp_path: Path
) -> None:
    first, second = (Policy(model_folder("mixtral"), precision_map("fp32"), config(), 0) for _ in range(2))
    first.checkpoint(tmp_path / "start")
    advance(second, sequences)
    second.restore(tmp_path / "start")
    assert advance(second, sequences) == advance(first, sequences)


def test_a_checkpoint_holds_no_pickle(model_folder: MakeFolder, tmp_path: Path) -> None:
    Policy(model_folder("mixtral"), precision_map("fp32"), config(), 0).checkpoint(tmp_path / "c")
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert names == ["optimizer.safetensors", "rng.safetensors", "state.json", "weights.safetensors"]


def test_a_checkpoint_of_another_run_is_refused(
    model_folder: MakeFolder, sequences: Sequences, tmp_path: Path
) -> None:
    policy = Policy(model_folder("mixtral"), precision_map("minite"), config(), 0)
    policy.checkpoint(tmp_path / "c")
    with pytest.raises(FileExistsError):
        policy.checkpoint(tmp_path / "c")
    with pytest.raises(FileNotFoundError, match=r"no state\.json"):
        policy.restore(tmp_path / "nothing")

    others = {
        "precision_map": Policy(model_folder("mixtral"), precision_map("bf16"), config(), 0),
        "architecture": Policy(model_folder("qwen3_moe"), precision_map("minite"), config(), 0),
        "dtype": Policy(model_folder("mixtral"), precision_map("minite"), config(dtype="bfloat16"), 0),
    }
    for difference, other in others.items():
        before = weights(other)
        with pytest.raises(ValueError, match=f"does not belong to this learner.*{difference}"):
            other.restore(tmp_path / "c")
        assert all(torch.equal(w, before[name]) for name, w in weights(other).items())

    state = json.loads((tmp_path / "c" / "state.json").read_text())
    (tmp_path / "c" / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(ValueError, match="format 99, expected 1"):
        policy.restore(tmp_path / "c")
