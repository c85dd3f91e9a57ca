"""The presets under configs/algorithm against the published recipes, and the rules on an algorithm's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.config import KLConfig, ObjectiveConfig
from rl.compose import CONFIG_DIR, load_config
from rl.config.algorithm import AdvantageConfig, AlgorithmConfig, ShapingConfig
from rl.errors import ConfigError
from sampler.config import SamplingConfig

PRESETS = sorted(path.stem for path in Path(CONFIG_DIR / "algorithm").glob("*.yaml"))


def preset(name: str, *overrides: str) -> AlgorithmConfig:
    """With nothing of a recipe in it."""
    groups = ["model=tiny_qwen3_moe", "data=arithmetic", f"algorithm={name}"]
    return load_config([*groups, *overrides]).algorithm


def test_dapo_is_the_published_recipe():
    found = preset("dapo")
    assert found == AlgorithmConfig(
        prompts_per_iteration=512,
        prompts_per_round=3 * 512,
        group_size=16,
        updates_per_iteration=16,  # mini-batches of 32 prompts
        dynamic_sampling=True,
        max_rounds=10,
        shaping=ShapingConfig(overlong_buffer=4096, overlong_factor=1.0, truncated="keep"),
        advantage=AdvantageConfig(estimator="grpo"),
        objective=ObjectiveConfig(
            clip_low=0.2,
            clip_high=0.28,
            dual_clip=10.0,
            loss_aggregation="token_mean",
            entropy_coefficient=0.0,
            kl=KLConfig(coefficient=0.0),
        ),
        sampling=SamplingConfig(temperature=1.0, top_p=1.0, max_tokens=20_480),
    )
    assert not found.needs_reference


def test_grpo_has_its_kl_penalty_and_sequence_means():
    found = preset("grpo")
    assert found.objective.kl == KLConfig(coefficient=0.04, estimator="k3", place="loss")
    assert found.objective.loss_aggregation == "sequence_mean" and found.advantage.estimator == "grpo"
    assert found.needs_reference and not found.dynamic_sampling


def test_dr_grpo_divides_by_the_longest_possible_response():
    found = preset("dr_grpo", "algorithm.sampling.max_tokens=77")
    assert found.objective.max_response_tokens == 77
    assert found.advantage.estimator == found.objective.loss_aggregation == "dr_grpo"


def test_ppo_has_a_critic_and_one_response_a_prompt():
    found = preset("ppo")
    assert found.advantage == AdvantageConfig(estimator="gae", whiten=True, gamma=1.0, lam=1.0)
    assert found.objective.critic is not None and found.group_size == 1


# What a recipe sets of an algorithm; where a key is a section, some of it.
SIZES = (
    "prompts_per_iteration",
    "prompts_per_round",
    "group_size",
    "updates_per_iteration",
    "min_groups",
    "max_rounds",
)


@pytest.mark.parametrize("recipe", ["tiny", "smollm2", "smollm2_gsm8k"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_recipe_decides_the_sizes_and_a_preset_the_algorithm(recipe: str, name: str):
    overrides = ["algorithm.shaping.overlong_buffer=4"]
    recipe_overrides = [f"+recipe={recipe}", *(["data.path=rows.jsonl"] if recipe.endswith("gsm8k") else [])]
    own = load_config(recipe_overrides).algorithm
    found = load_config([*recipe_overrides, f"algorithm={name}", *overrides]).algorithm
    assert [getattr(found, key) for key in SIZES] == [getattr(own, key) for key in SIZES]
    assert found.sampling.max_tokens == own.sampling.max_tokens
    limit = f"algorithm.sampling.max_tokens={own.sampling.max_tokens}"
    alone = preset(name, *overrides, limit)
    assert (found.objective, found.advantage, found.shaping) == (
        alone.objective,
        alone.advantage,
        alone.shaping,
    )
    assert found.dynamic_sampling == (alone.dynamic_sampling and recipe != "smollm2_gsm8k")


def test_settings_of_the_objective_can_be_overridden():
    band = "algorithm.objective.correction.token_band=[0.5,5.0]"
    found = preset("defaults", band, "algorithm.objective.correction.cap=null").objective.correction
    assert (found.token_band, found.cap) == ((0.5, 5.0), None)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm.shaping.overlong_buffer=300"], "algorithm.sampling.max_tokens=256"),
        (["algorithm.shaping.overlong_buffer=-1"], "algorithm.shaping.overlong_buffer=-1"),
        (["algorithm.shaping.truncated=drop"], "algorithm.shaping.truncated='drop'"),
        (["algorithm.shaping.truncated_reward=.inf"], "truncated_reward"),
        (["algorithm.advantage.estimator=gae"], "algorithm.objective.critic need each other"),
        (["algorithm.advantage.estimator=rloo"], "algorithm.advantage.estimator='rloo'"),
        (["algorithm.advantage.lam=1.5"], "algorithm.advantage.lam=1.5"),
        (["algorithm.objective.loss_aggregation=dr_grpo"], "max_response_tokens"),
        (["algorithm.objective.kl.estimator=k9"], "estimator='k9'"),
        (["algorithm.routing_replay=r4"], "algorithm.routing_replay='r4'"),
        (["algorithm.pipeline=one_step_off", "algorithm.max_staleness=0"], "algorithm.max_staleness=0"),
        (["algorithm.max_staleness=-1"], "algorithm.max_staleness=-1"),
        (["algorithm.prompts_per_round=0"], "algorithm.prompts_per_round=0"),
        (["algorithm.group_size=1", "algorithm.dynamic_sampling=false"], "algorithm.group_size=1"),
    ],
)
def test_wrong_settings_are_refused_by_name(overrides: list[str], named: str):
    with pytest.raises(ConfigError) as refusal:
        preset("defaults", *overrides)
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_penalty_that_is_off_is_not_checked():
    assert preset("defaults", "algorithm.sampling.max_tokens=1").shaping.overlong_buffer == 0


def test_one_response_a_prompt_is_enough_for_a_critic():
    assert preset("ppo", "algorithm.group_size=1").group_size == 1
    with pytest.raises(ConfigError, match="group_size=1"):
        preset("ppo", "algorithm.dynamic_sampling=true")
