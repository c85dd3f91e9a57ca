"""Configuration: every wrong key, value or combination is refused before anything starts, in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl.compose import check_config, differing_keys, from_yaml, load_config, recipes, to_yaml
from rl.errors import ConfigError

TINY = "+recipe=tiny"

WRONG = {
    "unknown key": ([TINY, "learner.lrr=1"], "learner.lrr"),
    "unknown recipe": (["+recipe=nope"], "nope"),
    "no recipe": ([], "+recipe="),
    "not a number": ([TINY, "learner.lr=fast"], "learner.lr='fast'"),
    "negative rate": ([TINY, "learner.lr=-1"], "lr=-1"),
    "group of one": ([TINY, "algorithm.group_size=1"], "algorithm.group_size=1"),
    "indivisible batch": ([TINY, "algorithm.updates_per_iteration=5"], "algorithm.updates_per_iteration=5"),
    "floor above the batch": ([TINY, "algorithm.min_groups=99"], "algorithm.min_groups=99"),
    "parallel learner": ([TINY, "learner.expert_parallel=3"], "expert_parallel=3"),
    "temperature": ([TINY, "algorithm.sampling.temperature=-1"], "temperature=-1"),
    "unknown W&B mode": ([TINY, "logging.wandb=sometimes"], "logging.wandb='sometimes'"),
    "folder without path": ([TINY, "model=folder"], "model.path"),
    "data without path": ([TINY, "data=gsm8k"], "data"),
    "name with a slash": ([TINY, "run.name=a/b"], "run.name='a/b'"),
    "unknown group option": ([TINY, "spec=fp3"], "fp3"),
}


@pytest.mark.parametrize("overrides, named", WRONG.values(), ids=WRONG.keys())
def test_wrong_configurations_are_refused_by_name(overrides: list[str], named: str):
    with pytest.raises(ConfigError) as refusal:
        load_config(overrides)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("recipe", recipes())
def test_every_recipe_composes_and_survives_yaml(recipe: str):
    config = load_config([f"+recipe={recipe}", *(["data.path=rows.jsonl"] if "gsm8k" in recipe else [])])
    assert check_config(yaml.safe_load(to_yaml(config))) == config


def test_overrides_reach_their_key_and_only_that():
    plain, changed = load_config([TINY]), load_config([TINY, "learner.lr=3e-4", "spec=bf16"])
    assert differing_keys(plain, changed) == {"learner.lr": (1e-4, 3e-4), "spec.name": ("minite", "bf16")}


def test_one_side_of_the_specification_can_be_overridden():
    config = load_config([TINY, "+spec.sampler.weight.outer_domain=expert"])
    assert config.spec.sampler == {"weight": {"outer_domain": "expert"}}


def test_a_saved_configuration_takes_overrides_and_refuses_unknown_keys(tmp_path: Path):
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(load_config([TINY])))
    assert from_yaml(saved, ["run.iterations=7"]).run.iterations == 7
    with pytest.raises(ConfigError, match="itterations"):
        from_yaml(saved, ["run.itterations=7"])


def test_configuration_needs_neither_torch_nor_an_engine():
    code = "import sys, rl.compose; print(sorted({'torch', 'vllm', 'megatron', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
