from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from sampler.config import SamplerConfig, SamplingConfig

REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (SamplerConfig, {"dtype": "float16"}, r"SamplerConfig.dtype='float16' must be one of"),
    (SamplerConfig, {"max_model_len": 1}, r"max_model_len=1 must be at least 2"),
    (SamplerConfig, {"max_num_seqs": 0}, r"max_num_seqs=0 must be at least 1"),
    (SamplerConfig, {"max_num_batched_tokens": 100}, r"max_num_batched_tokens=100 .* max_num_seqs=128"),
    (SamplerConfig, {"max_model_len": 8192}, r"max_num_batched_tokens=4096 .* max_model_len=8192"),
    (SamplerConfig, {"kv_cache_gib": 0.0}, r"kv_cache_gib=0.0 must be positive"),
    (SamplerConfig, {"kv_cache_gib": float("inf")}, r"kv_cache_gib=inf must be positive and finite"),
    (SamplerConfig, {"threads": -1}, r"threads=-1 must not be negative"),
    (SamplerConfig, {"threads": "two"}, r"threads='two' must not be negative"),
    (
        SamplerConfig,
        {"expert_layout": "columns"},
        r"expert_layout='columns' must be one of auto, rows, tiles",
    ),
    (SamplerConfig, {"cuda_graph_sizes": (1, 2)}, r"cuda_graph_sizes=\(1, 2\) must be .* need device=cuda"),
    (
        SamplerConfig,
        {"device": "cuda", "cuda_graph_sizes": (1, 129)},
        r"cuda_graph_sizes=\(1, 129\) must be numbers of sequences from 1 to max_num_seqs, in ascending order",
    ),
    (SamplerConfig, {"device": "cuda", "cuda_graph_sizes": (2, 1)}, r"in ascending order"),
    (SamplerConfig, {"seed": -1}, r"seed=-1 must lie in"),
    (SamplingConfig, {"temperature": -0.5}, r"SamplingConfig.temperature=-0.5 must be 0 or lie in"),
    (SamplingConfig, {"temperature": 0.005}, r"temperature=0.005"),
    (SamplingConfig, {"temperature": 2.5}, r"temperature=2.5"),
    (SamplingConfig, {"temperature": float("nan")}, r"temperature=nan"),
    (SamplingConfig, {"top_p": 0.0}, r"top_p=0.0 must lie in \(0, 1\]"),
    (SamplingConfig, {"top_p": 1.1}, r"top_p=1.1"),
    (SamplingConfig, {"max_tokens": 0}, r"max_tokens=0 must be at least 1"),
    (SamplingConfig, {"stop_token_ids": (3, -1)}, r"stop_token_ids=\(3, -1\) must not be negative"),
]


@pytest.mark.parametrize(("config", "values", "message"), REFUSED)
def test_refused(config: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**values)


def test_settings_are_read_without_an_engine() -> None:
    check = "import sys, sampler.config; assert not {'torch', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
