"""A process of its own for test_engine: reads a request, writes the responses and what the process is like."""

from __future__ import annotations

import json
import sys

import psutil
import torch

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from sampler.config import SamplingConfig
from sampler.engine import Sampler
from tests.sampler.conftest import LAYERS, tiny_config

request = json.load(sys.stdin)
process = psutil.Process()
before = process.memory_info().rss
sampler = Sampler(sys.argv[1], PrecisionMap.resolve(LAYERS, named_spec("minite")), tiny_config())
sampling = SamplingConfig(max_tokens=request["max_tokens"], temperature=request["temperature"])
responses = sampler.generate(request["prompts"], request["seeds"], sampling)
threads = [torch.get_num_threads()]
torch.set_num_threads(2)
threads.append(torch.get_num_threads())
print(
    json.dumps(
        {
            "responses": [[[c.token_ids, c.logp] for c in own] for own in responses],
            "threads": threads,
            "listening": [c.laddr.ip for c in process.net_connections("inet") if c.status == "LISTEN"],
            "engine_mib": (process.memory_info().rss - before) / 2**20,
        }
    )
)
