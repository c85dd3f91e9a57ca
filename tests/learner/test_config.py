from __future__ import annotations

import math
import subprocess
import sys

import pytest

from learner.config import CorrectionConfig, CriticConfig, KLConfig, LearnerConfig, ObjectiveConfig


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
        ("data_parallel", 0),
        ("tensor_parallel", 0),
        ("expert_parallel", 0),
        ("pipeline_parallel", 0),
        ("context_parallel", 2),
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
        ("dual_clip", 1.0),
        ("dual_clip", 1.28),
        ("dual_clip", math.inf),
        ("loss_aggregation", "mean"),
        ("max_response_tokens", 0),
        ("entropy_coefficient", -0.1),
    ],
)
def test_objective_config_names_field_value_and_rule(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"ObjectiveConfig\.{field}=.* must") as raised:
        ObjectiveConfig(**{field: value})
    assert repr(value) in str(raised.value)


def test_a_constant_length_is_needed_for_dr_grpo_alone() -> None:
    with pytest.raises(
        ValueError, match="max_response_tokens=None must be at least 1 with loss_aggregation=dr_grpo"
    ):
        ObjectiveConfig(loss_aggregation="dr_grpo")
    assert ObjectiveConfig(loss_aggregation="dr_grpo", max_response_tokens=8).max_response_tokens == 8


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (CorrectionConfig, "weight", "tokens"),
        (CorrectionConfig, "cap", 0.0),
        (CorrectionConfig, "token_band", (0.5,)),
        (CorrectionConfig, "token_band", (1.1, 2.0)),
        (CorrectionConfig, "sequence_band", (0.5, 0.9)),
        (CorrectionConfig, "sequence_band", (0.5, math.inf)),
        (CorrectionConfig, "veto", 0.0),
        (CorrectionConfig, "veto", 1.0),
        (KLConfig, "coefficient", -1.0),
        (KLConfig, "estimator", "k4"),
        (KLConfig, "place", "both"),
        (CriticConfig, "value_clip", 0.0),
        (CriticConfig, "lr_factor", 0.0),
        (CriticConfig, "warmup_iterations", -1),
    ],
)
def test_parts_of_the_objective_name_field_value_and_rule(config: type, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{config.__name__}\.{field}=.* must") as raised:
        config(**{field: value})
    assert repr(value) in str(raised.value)


def test_importing_the_configuration_imports_no_engine() -> None:
    code = "import sys, learner.config; sys.exit(any(m in sys.modules for m in ('torch', 'megatron')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
