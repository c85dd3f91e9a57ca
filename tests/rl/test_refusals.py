"""Wrong input to the command: one line on stderr, exit status 2, no run folder, no engine started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.train import main


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Path]:
    files = {
        "empty": "",
        "no_answer": json.dumps({"id": "1", "problem": "What is 1 + 1?"}),
        "long": "\n".join(
            json.dumps({"id": str(n), "problem": "1+1=" * (1 + 100 * (n == 1)), "answer": "2"})
            for n in range(3)
        ),
    }
    for name, text in files.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    return {path.stem: path for path in tmp_path.iterdir()}


CASES = {
    "unknown key": (["learner.lrr=1"], "learner.lrr"),
    "wrong type": (["run.iterations=many"], "run.iterations='many'"),
    "missing model folder": (["model=folder", "model.path=/nowhere/model"], "model.path='/nowhere/model'"),
    "model of another type": (["model=folder", "model.path={model}"], "llama"),
    "unknown family": (["model.family=gpt9"], "gpt9"),
    "width no multiple of 16": (["model.hf_config.hidden_size=120"], "hidden size 120"),
    "expert width no multiple of 16": (["model.hf_config.moe_intermediate_size=40"], "expert FFN width 40"),
    "head width that vLLM lacks": (["model.hf_config.head_dim=16"], "head"),
    "experts per rank": (["learner.expert_parallel=3"], "expert_parallel=3"),
    "unknown specification": (["spec.name=fp3"], "fp3"),
    "unknown field of a specification": (["+spec.learner.colour=red"], "colour"),
    "too many BF16 layers": (["spec.first_layers_bf16=5"], "first_layers_bf16=5"),
    "missing reward function": (
        ["reward.function=rl.rewards.arithmetic:nothing"],
        "rl.rewards.arithmetic:nothing",
    ),
    "missing reward module": (["reward.function=no_such_module:score"], "no_such_module"),
    "parser without a use": (["reward.parser=boxed"], "reward.parser='boxed'"),
    "context beyond the model": (["sampler.max_model_len=4096"], "sampler.max_model_len=4096"),
    "what the plan refuses": (["algorithm.expected_length=64"], "algorithm.expected_length=64 is more"),
    "prompt longer than the context": (["sampler.max_model_len=12"], "prompt of 6 tokens"),
    "too many held out": (["data.held_out=6000"], "data.held_out=6000"),
    "missing data file": (["data=gsm8k", "data.path=/nowhere/rows.jsonl"], "/nowhere/rows.jsonl"),
    "empty data set": (["data=gsm8k", "data.path={empty}"], "empty"),
    "missing column": (["data=gsm8k", "data.path={no_answer}"], "answer"),
    "advantages without their critic": (["algorithm.advantage.estimator=gae"], "algorithm.objective.critic"),
    "warm-up without an end": (
        ["algorithm=ppo", "algorithm.objective.critic.warmup_iterations=150"],
        "warmup_iterations=150",
    ),
    "a section as a switch": (
        ["algorithm.partial_rollouts=true"],
        "algorithm.partial_rollouts=True: its keys are set one by one: algorithm.partial_rollouts.token_budget=VALUE\n",
    ),
    "unknown codec": (["sync.codec=zip"], "sync.codec='zip'"),
    "buckets of nothing": (["sync.bucket_mib=0"], "sync.bucket_mib=0"),
    "no sampler": (["run.samplers=0"], "run.samplers=0"),
    "heads that cannot be cut": (["learner.tensor_parallel=3"], "learner.tensor_parallel=3 does not divide"),
    "experts for too few processes": (
        ["learner.expert_parallel=2"],
        "expert_parallel=2 must divide tensor_parallel x data_parallel = 1",
    ),
    "layers that make no stages": (
        ["learner.pipeline_parallel=16"],
        "learner.pipeline_parallel=16 does not divide",
    ),
    "more replicas than rows": (
        ["learner.data_parallel=33"],
        "learner.data_parallel=33: an iteration may learn",
    ),
    "a sequence that is cut": (["learner.context_parallel=2"], "context_parallel=2 must be 1"),
    "seed below zero": (["run.seed=-1"], "run.seed=-1"),
    "greedy training": (["algorithm.sampling.temperature=0"], "algorithm.sampling.temperature=0"),
    "more experts a token than there are": (["model.hf_config.num_experts_per_tok=9"], "9 experts a token"),
    "heads that cannot share keys": (["model.hf_config.num_attention_heads=3"], "3 attention heads"),
    "cache that cannot be written": (["run.cache_dir=/proc/nope"], "run.cache_dir=/proc/nope"),
    "a strict nucleus": (["spec=strict", "algorithm.sampling.top_p=0.9"], "algorithm.sampling.top_p=0.9"),
    "replay under a strict spec": (
        ["spec=strict", "algorithm.routing_replay=r3"],
        "algorithm.routing_replay=r3",
    ),
    "rows cut under a strict spec": (
        ["spec=strict", "learner.tensor_parallel=2"],
        "learner.tensor_parallel=2",
    ),
    "a strict sampler of several processes": (
        ["spec=strict", "sampler.tensor_parallel=2"],
        "sampler.tensor_parallel=2: a strict spec fixes the order of every sum",
    ),
    "a stock sampler of several processes": (
        ["sampler.stock=true", "spec.allow_difference=true", "sampler.tensor_parallel=2"],
        "sampler.tensor_parallel=2: a stock engine has one process",
    ),
    "heads of a sampler that cannot be cut": (
        ["sampler.tensor_parallel=3"],
        "tensor_parallel=3 does not divide the model's",
    ),
    "several nodes of a Ray of its own": (["cluster.nodes=2"], "cluster.nodes=2: a Ray of the run's own"),
    "BF16 layers beside strict ones": (["spec=strict", "spec.first_layers_bf16=1"], "for all layers alike"),
    "cut prompts without a strict spec": (["sampler.chunked_prefill=true"], "chunked_prefill=True"),
    "resume from nothing": (["run.resume=/nowhere/run"], "/nowhere/run"),
}


@pytest.mark.parametrize("overrides, named", CASES.values(), ids=CASES.keys())
def test_wrong_input_is_refused_before_anything_starts(
    overrides: list[str],
    named: str,
    rows: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    places = [f"run.output_dir={tmp_path / 'outputs'}", f"run.cache_dir={tmp_path / 'cache'}"]
    filled = [override.format(**rows) for override in overrides]
    assert main(["+recipe=tiny", *places, *filled]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert named in error
    assert error.count("\n") == 1
    assert not (tmp_path / "outputs").exists()

    import ray

    assert not ray.is_initialized()


def test_an_overlong_row_of_a_file_is_named(
    rows: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With a tokenizer that comes with the model: here that of the tiny task, in a folder."""
    from learner.initialize import initialize
    from rl.data.arithmetic import Arithmetic

    folder = tmp_path / "tiny_model"
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"head_dim": 32, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    initialize(
        folder, {"model_type": "qwen3_moe", "vocab_size": 14, "max_position_embeddings": 64, **shape}, 0
    )
    Arithmetic(10, True, 1, 0).tokenizer().save_pretrained(folder)
    overrides = [
        "model=folder",
        f"model.path={folder}",
        "model.warm_start.steps=0",
        "data=file",
        "data.chat=false",
    ]
    overrides += [f"data.path={rows['long']}", "data.held_out=0", f"run.output_dir={tmp_path / 'outputs'}"]
    assert main(["+recipe=tiny", *overrides]) == 2
    assert "problem '1'" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


def test_show_config_prints_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["+recipe=tiny", f"run.output_dir={tmp_path / 'outputs'}", "--show-config"]) == 0
    assert "group_size: 8" in capsys.readouterr().out
    assert not (tmp_path / "outputs").exists()
