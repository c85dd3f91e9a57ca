"""Requests, their refusal, and reproducibility."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sampler.config import SamplingConfig
from sampler.engine import Sampler
from tests.sampler.conftest import MAX_LEN, VOCAB, MakeModel, MakeSampler, prompts

SEEDS = [[2**62 + 10 * i + j for j in range(3)] for i in range(6)]


@pytest.fixture(scope="module")
def sampler(sampler_for: MakeSampler) -> Sampler:
    return sampler_for("qwen3_moe", "minite")


def test_a_fresh_process_writes_the_same(sampler: Sampler, model_folder: MakeModel) -> None:
    """Tokens and log-probabilities bitwise, though this process has generated before. The process itself:
    threads as configured, nothing listening beyond loopback, memory.
    """
    sampling = SamplingConfig(max_tokens=12, temperature=0.9)
    sampler.generate(prompts(3), SEEDS[:3], sampling)
    here = sampler.generate(prompts(), SEEDS, sampling)
    script = Path(__file__).with_name("generate_once.py")
    root = str(script.parents[2])
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": root}
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    request = json.dumps({"prompts": prompts(), "seeds": SEEDS, "max_tokens": 12, "temperature": 0.9})
    done = subprocess.run(
        [sys.executable, str(script), str(model_folder("qwen3_moe"))],
        input=request,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    there = json.loads(done.stdout.splitlines()[-1])
    assert there["responses"] == [[[list(c.token_ids), list(c.logp)] for c in own] for own in here]
    assert there["threads"] == [1, 2]  # as configured, and still to be changed
    assert all(ipaddress.ip_address(address).is_loopback for address in there["listening"])
    assert there["engine_mib"] < 600  # vLLM itself; the cache has 16, the model less than one


def test_seeds_decide(sampler: Sampler) -> None:
    prompt = prompts()[1]
    sampling = SamplingConfig(max_tokens=12)
    [[one, same, other]] = sampler.generate([prompt], [[7, 7, 8]], sampling)
    assert one == same
    assert one.token_ids != other.token_ids
    first, second = sampler.generate([prompt, prompts()[2]], [[8], []], sampling)
    assert [c.token_ids for c in first] == [other.token_ids]
    assert second == []


def test_stop_tokens_end_a_response_and_belong_to_it(sampler: Sampler) -> None:
    """Only those asked for: the model's own end-of-sequence token is one like any other."""
    seeds = [list(range(40))]
    sampling = SamplingConfig(max_tokens=20)
    [free] = sampler.generate(prompts()[:1], seeds, sampling)
    assert any(5 in c.token_ids for c in free)
    assert {(len(c.token_ids), c.finish_reason) for c in free} == {(20, "length")}
    stopping = SamplingConfig(max_tokens=20, stop_token_ids=(5, 11))
    [stopped] = sampler.generate(prompts()[:1], seeds, stopping)
    for whole, cut in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(whole.token_ids) if token in (5, 11)]
        expected = whole.token_ids[: ends[0] + 1] if ends else whole.token_ids
        assert cut.token_ids == expected
        assert cut.finish_reason == ("stop" if ends else "length")
        assert len(cut.logp) == len(cut.token_ids)


def test_greedy(sampler_for: MakeSampler) -> None:
    """The likeliest token each time, with its log-probability at temperature 1."""
    sampler = sampler_for("qwen3_moe", "fp32")
    responses = sampler.generate(prompts(), [[1, 2]] * 6, SamplingConfig(max_tokens=4, temperature=0))
    for prompt, (one, two) in zip(prompts(), responses, strict=True):
        assert one.token_ids == two.token_ids
        sequences = [[*prompt, token] for token in range(VOCAB)]
        scores = torch.tensor(sampler.score(sequences, [len(prompt)] * VOCAB))[:, 0]
        assert int(scores.argmax()) == one.token_ids[0]
        assert one.logp[0] == pytest.approx(scores.max().item(), abs=2e-5)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompts": [[1], []], "seeds": [[0], [0]]}, r"prompts\[1\] has 0 tokens"),
    (
        {"prompts": [[1] * 89], "seeds": [[0]]},
        rf"prompts\[0\] has 89 tokens, must have 1 to 88 \(max_model_len={MAX_LEN}, max_tokens=8\)",
    ),
    ({"prompts": [[1, VOCAB]], "seeds": [[0]]}, rf"prompts\[0\] holds token ids outside \[0, {VOCAB}\)"),
    ({"prompts": [[1]], "seeds": []}, r"1 prompts need as many lists of seeds, got 0"),
    ({"prompts": [[1]], "seeds": [[0]], "limits": []}, r"1 prompts need .* and limits, got 0"),
    ({"prompts": [[1]], "seeds": [[0]], "limits": [0]}, r"limits must be at least 1, got 0"),
    (
        {"prompts": [[1] * 94], "seeds": [[0]], "limits": [3]},
        r"prompts\[0\] has 94 tokens, must have 1 to 93",
    ),
    ({"prompts": [[1]], "seeds": [[-1]]}, r"seeds must lie in"),
    ({"prompts": [[1]], "seeds": [[2**63]]}, r"seeds must lie in"),
]


@pytest.mark.parametrize(("request_", "message"), REFUSED)
def test_refused_requests(request_: dict[str, Any], message: str, sampler: Sampler) -> None:
    calls = sampler.report().expert_calls
    with pytest.raises(ValueError, match=message):
        sampler.generate(**request_, sampling=SamplingConfig(max_tokens=8))
    assert sampler.report().expert_calls == calls


@pytest.mark.parametrize(
    ("sequence", "length", "message"),
    [
        ([1, 2, 3], 0, r"prompt_lengths\[0\]=0 must lie in \[1, 2\]"),
        ([1, 2, 3], 3, r"prompt_lengths\[0\]=3 must lie in \[1, 2\]"),
        ([1] * (MAX_LEN + 1), 1, r"sequences\[0\] has 97 tokens, must have 1 to 96"),
    ],
)
def test_refused_scores(sequence: list[int], length: int, message: str, sampler: Sampler) -> None:
    with pytest.raises(ValueError, match=message):
        sampler.score([sequence], [length])


def test_scores_have_a_temperature(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match=r"temperature=0 must be positive"):
        sampler.score([[1, 2]], [1], temperature=0)


def test_non_finite_log_probabilities_are_an_error(sampler_for: MakeSampler) -> None:
    sampler = sampler_for("qwen3_moe", "fp32")
    weight = sampler._model.lm_head.weight.data
    saved = weight[3].clone()
    weight[3] = torch.inf
    try:
        with pytest.raises(FloatingPointError, match="not all finite"):
            sampler.generate(prompts(), SEEDS, SamplingConfig(max_tokens=2))
    finally:
        weight[3] = saved


def test_what_a_quantiser_refuses_is_named_by_layer_and_expert(sampler_for: MakeSampler) -> None:
    """Nothing computed from it is returned, and the next call does not know of it."""
    sampler = sampler_for("qwen3_moe", "minite")
    expected = sampler.generate(prompts(), SEEDS, SamplingConfig(max_tokens=2))
    weight = sampler._model.model.layers[1].post_attention_layernorm.weight.data
    saved = weight[3].clone()
    weight[3] = torch.inf
    try:
        for call in (
            lambda: sampler.generate(prompts(), SEEDS, SamplingConfig(max_tokens=2)),
            lambda: sampler.score([[1, 2, 3]], [1]),
        ):
            with pytest.raises(ValueError, match=r"reached a quantiser: layer 1: FC1 input of expert \d"):
                call()
    finally:
        weight[3] = saved
    assert sampler.generate(prompts(), SEEDS, SamplingConfig(max_tokens=2)) == expected
