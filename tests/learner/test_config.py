from __future__ import annotations

import math
import subprocess
import sys

import pytest

from learner.config import LearnerConfig, ObjectiveConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float16"),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("threads", -1),
        ("lr", 0.0),
        ("lr", math.nan),
        ("lr", "1e-6"),
        ("betas", (0.9,)),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("grad_clip", -1.0),
        ("warmup_steps", -1),
        ("micro_batch_tokens", 0),
        ("logits_bytes", 0),
        ("tensor_parallel", 2),
        ("expert_parallel", 2),
        ("pipeline_parallel", 2),
    ],
)
def test_learner_config_names_field_value_and_rule(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"LearnerConfig\.{field}=.* must") as raised:
        LearnerConfig(**{field: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_low", 0.0),
        ("clip_low", 1.0),
        ("clip_high", 0.0),
        ("clip_high", math.inf),
        ("tis_cap", 0.0),
        ("loss_aggregation", "sequence_mean"),
    ],
)
def test_objective_config_names_field_value_and_rule(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"ObjectiveConfig\.{field}=.* must") as raised:
        ObjectiveConfig(**{field: value})
    assert repr(value) in str(raised.value)


def test_truncated_importance_sampling_can_be_off() -> None:
    assert ObjectiveConfig(tis_cap=None).tis_cap is None


def test_importing_the_configuration_imports_no_engine() -> None:
    code = "import sys, learner.config; sys.exit(any(m in sys.modules for m in ('torch', 'megatron')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
