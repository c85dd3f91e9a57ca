"""What drives engines in other processes loads none of them itself: a command starts sooner, and takes less memory."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from learner.batch import Scores

DRIVERS = [
    "rl.job",
    "rl.loop",
    "rl.plan",
    "rl.evaluation.session",
    "rl.diagnosis.session",
    "rl.sync.weight_sync",
]


def test_drivers_load_no_engine() -> None:
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {DRIVERS!r}];"
        "print([name for name in ('megatron', 'vllm') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_what_a_learner_answers_is_read_without_megatron() -> None:
    zero = torch.zeros(1, 1)
    answer = pickle.dumps(Scores(zero, zero, zero > 0))
    code = "import pickle, sys; pickle.load(sys.stdin.buffer); print('megatron' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], input=answer, capture_output=True, check=True)
    assert result.stdout.strip() == b"False"


@pytest.mark.parametrize("module", ["rl.nodes", "rl.records.wandb_mirror", "rl.records.report"])
def test_what_a_node_runs_to_say_what_it_is_and_what_only_reads_records_load_no_torch(module: str) -> None:
    code = f"import {module}, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
