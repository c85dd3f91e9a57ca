"""Configuration: every wrong key, value or combination is refused before anything starts, in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kernels.catalogue import CATALOGUE
from rl.compose import (
    check_config,
    compose_defaults,
    differing_keys,
    from_yaml,
    load_config,
    recipes,
    to_yaml,
)
from rl.config import Config
from rl.config.model import SpecConfig
from rl.errors import ConfigError
from rl.evaluation.config import EvaluateConfig
from rl.override_errors import known_keys, near_keys

TINY = "+recipe=tiny"

WRONG = {
    "unknown key": ([TINY, "learner.lrr=1"], "learner.lrr=1: no such key; near it: learner.lr"),
    "unknown section": ([TINY, "lerner.lr=1"], "lerner.lr=1: no such key; near it: learner.lr"),
    "unknown key, appended": ([TINY, "+learner.lrr=1"], "learner.lrr=1: no such key; near it: learner.lr"),
    "key without its section": ([TINY, "group_size=4"], "near it: algorithm.group_size"),
    "unknown group": ([TINY, "algorthm=grpo"], "algorthm=grpo: no such key; near it: algorithm"),
    "key of another choice": ([TINY, "data.path=rows"], "data.path=rows: the chosen data has no such key"),
    "unknown entry of a mapping": (
        [TINY, "model.hf_config.depth=3"],
        "a new one is written +model.hf_config.depth=",
    ),
    "unknown key of the data": ([TINY, "+data.bond=9"], "data.bond=9: no such key; near it: data.bound"),
    "unknown recipe": (["+recipe=nope"], f"recipe=nope: no such choice; there are: {', '.join(recipes())}"),
    "unknown preset": (
        [TINY, "algorithm=nope"],
        "algorithm=nope: no such choice; there are: dapo, dr_grpo, grpo, ppo",
    ),
    "group without presets": ([TINY, "learner=fast"], "learner=fast: learner has no presets"),
    "group set to a number": ([TINY, "algorithm=3"], "algorithm=3: a group takes the name of a choice"),
    "missing choice": (["data=math"], "model=NAME is needed; there are: folder, "),
    "unknown reference": ([TINY, "run.name=${nothing}"], "nothing"),
    "no recipe": ([], "+recipe="),
    "not a number": ([TINY, "learner.lr=fast"], "learner.lr='fast'"),
    "negative rate": ([TINY, "learner.lr=-1"], "lr=-1"),
    "group of one": ([TINY, "algorithm.group_size=1"], "algorithm.group_size=1"),
    "indivisible batch": ([TINY, "algorithm.updates_per_iteration=5"], "algorithm.updates_per_iteration=5"),
    "floor above the batch": ([TINY, "algorithm.min_groups=99"], "algorithm.min_groups=99"),
    "parallel learner": ([TINY, "learner.expert_parallel=0"], "expert_parallel=0"),
    "temperature": ([TINY, "algorithm.sampling.temperature=-1"], "temperature=-1"),
    "unknown W&B mode": ([TINY, "logging.wandb=sometimes"], "logging.wandb='sometimes'"),
    "folder without path": ([TINY, "model=folder"], "model.path"),
    "data without path": ([TINY, "data=gsm8k"], "data.path: a value is needed"),
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


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_spec_of_the_catalogue_can_be_chosen(name: str):
    assert load_config([TINY, f"spec={name}"]).spec == SpecConfig(name=name)


def test_an_unknown_spec_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="spec=nope: no such choice; there are: ") as refusal:
        load_config([TINY, "spec=nope"])
    assert set(str(refusal.value).partition("there are: ")[2].split(", ")) == set(CATALOGUE)


def test_near_keys_are_spelled_alike_and_few():
    known = known_keys(Config)
    assert near_keys("learner.lr", known)[0] == "learner.lr"
    assert near_keys("sampler.temperature", known) == [
        "algorithm.sampling.temperature",
        "evaluation.temperature",
    ]
    assert near_keys("zebra", known) == []
    assert all(len(near_keys(key, known)) <= 3 for key in known)


def test_known_keys_are_those_of_the_configuration_and_of_every_choice():
    known = known_keys(Config)
    assert {
        "learner",
        "learner.lr",
        "data.bound",
        "data.digits",
        "algorithm.objective.critic.lr_factor",
    } <= known.keys()
    assert "data.source.path" not in known and "evaluation.protocol.samples" not in known


def test_keys_of_another_command_are_near_its_own():
    overrides = ["checkpoint=x", "protocol.aime24.sample=3"]
    with pytest.raises(
        ConfigError, match=r"protocol\.aime24\.sample=3: .*near it: protocol\.aime24\.samples"
    ):
        compose_defaults("evaluate", EvaluateConfig, overrides)


def test_one_side_of_the_specification_can_be_overridden():
    config = load_config([TINY, "+spec.sampler.weight.outer_domain=expert"])
    assert config.spec.sampler == {"weight": {"outer_domain": "expert"}}


def test_a_saved_configuration_takes_overrides_and_refuses_unknown_keys(tmp_path: Path):
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(load_config([TINY])))
    assert from_yaml(saved, ["run.iterations=7"]).run.iterations == 7
    assert from_yaml(saved, ["+run.iterations=7"]).run.iterations == 7
    with pytest.raises(ConfigError, match=r"run\.itterations=7: no such key; near it: run\.iterations$"):
        from_yaml(saved, ["run.itterations=7"])


def test_configuration_needs_neither_torch_nor_an_engine():
    code = "import sys, rl.compose; print(sorted({'torch', 'vllm', 'megatron', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
