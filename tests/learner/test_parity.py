"""The model against transformers, with experts in FP32: same logits, same gradients."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner import convert
from learner.folders import read_state
from learner.policy import Policy
from tests.learner.conftest import MakeFolder, Sequences, config, hidden_states, precision_map


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def logits(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    return hidden_states(policy, tokens).float() @ policy.model.output_weight.float().T


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_logits_and_gradients(
    model_folder: MakeFolder, sequences: Sequences, tmp_path: Path, family: str, tied: bool
) -> None:
    folder = model_folder(family, tie_word_embeddings=tied)
    theirs = transformers_model(folder)
    policy = Policy(folder, precision_map("fp32"), config(), seed=0)
    tokens = sequences[0]

    expected, found = theirs(input_ids=tokens).logits, logits(policy, tokens)
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() < 1e-4

    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    ours = dict(convert.to_hf({name: p.grad for name, p in policy.model.named_parameters()}, policy.rules))
    # transformers' own writer turns its gradients, stored as if they were weights, into checkpoint names.
    gradients = copy.deepcopy(theirs)
    with torch.no_grad():
        for parameter, source in zip(gradients.parameters(), theirs.parameters(), strict=True):
            parameter.copy_(source.grad)
    gradients.save_pretrained(tmp_path / "gradients")
    reference = read_state(tmp_path / "gradients")
    assert ours.keys() == reference.keys()
    for name, gradient in reference.items():
        assert relative(ours[name], gradient) < 1e-4, name


def test_router_without_renormalisation(model_folder: MakeFolder, sequences: Sequences) -> None:
    folder = model_folder("qwen3_moe", norm_topk_prob=False)
    policy = Policy(folder, precision_map("fp32"), config(), seed=0)
    expected = transformers_model(folder)(input_ids=sequences[0]).logits
    assert (logits(policy, sequences[0]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_bfloat16(model_folder: MakeFolder, sequences: Sequences, family: str) -> None:
    """A BF16 model under the BF16 spec is as near to the FP32 model as transformers' BF16 model is.

    Compared at the median token: rounding sends some tokens to another expert, in either implementation.
    """
    folder = model_folder(family)
    exact = transformers_model(folder)(input_ids=sequences[0]).logits
    theirs = transformers_model(folder, torch.bfloat16)(input_ids=sequences[0]).logits.float()
    policy = Policy(folder, precision_map("bf16"), config(dtype="bfloat16"), seed=0)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}

    def error(found: torch.Tensor) -> float:
        return ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).median().item()

    ours = error(logits(policy, sequences[0]))
    assert 1e-3 < ours < 0.02
    assert ours < 1.2 * error(theirs)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_saved_folder_loads_in_transformers_with_equal_logits(
    model_folder: MakeFolder, sequences: Sequences, tmp_path: Path, family: str
) -> None:
    source = model_folder(family)
    (source / "tokenizer_config.json").write_text('{"marker": 1}')
    policy = Policy(source, precision_map("fp32"), config(), seed=0)
    policy.supervised_step(*sequences)
    policy.save_hf(tmp_path / "saved")
    expected = transformers_model(tmp_path / "saved")(input_ids=sequences[0]).logits
    assert (logits(policy, sequences[0]) - expected).abs().max() < 1e-4
    assert (expected - transformers_model(source)(input_ids=sequences[0]).logits).abs().max() > 1e-2
    assert (tmp_path / "saved" / "tokenizer_config.json").read_text() == '{"marker": 1}'
    again = Policy(tmp_path / "saved", precision_map("fp32"), config(), seed=0)
    assert torch.equal(logits(again, sequences[0]), logits(policy, sequences[0]))
    with pytest.raises(FileExistsError):
        policy.save_hf(tmp_path / "saved")
