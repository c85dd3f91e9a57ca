"""The data and reward presets: each composes, and its reward can be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.compose import CONFIG_DIR, load_config
from rl.rewards.extraction import PARSERS
from rl.rewards.registry import BUILT_IN


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


@pytest.mark.parametrize("name", names("data"))
def test_every_data_preset_composes(name):
    needs_path = name in ("file", "gsm8k", "dapo_math_rows", "math")
    config = load_config(
        ["+recipe=smollm2", f"data={name}", *(["data.path=rows.jsonl"] if needs_path else [])]
    )
    assert Path(getattr(config.data, "path", "rows.jsonl")).suffix == ".jsonl" or not needs_path


@pytest.mark.parametrize("name", names("reward"))
def test_every_reward_preset_names_what_there_is(name):
    reward = load_config(["+recipe=smollm2", f"reward={name}"]).reward
    assert (reward.parser in PARSERS) == BUILT_IN[reward.function].parses


def test_the_dapo_reward_is_that_of_its_recipe():
    reward = load_config(["+recipe=smollm2", "reward=dapo_math"]).reward
    assert (reward.function, reward.parser, reward.wrong) == ("math", "answer_line", -1.0)


def test_bare_rows_get_the_published_prompt():
    published, bare = (
        load_config(["+recipe=smollm2", f"data={name}", "data.path=rows.jsonl"]).data
        for name in ("dapo_math", "dapo_math_rows")
    )
    assert published.template == bare.template == published.unwrap
    assert bare.unwrap is None
