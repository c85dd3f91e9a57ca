"""Every recipe is planned; every row of rl/preflight/README.md is refused with its reason; nothing is started."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl.compose import load_config, recipes
from rl.devices import DEVICES, device_of
from rl.errors import ConfigError, UserError
from rl.preflight import __main__ as all_recipes
from rl.preflight.report import report
from rl.preflight.run import preflight
from rl.train import main

README = Path(all_recipes.__file__).with_name("README.md")
REFUSED = re.findall(r"^\| `(\+recipe=[^`]+)` \| (.+) \|$", README.read_text(), re.MULTILINE)


def test_there_are_more_than_a_dozen_rows():
    assert len(REFUSED) > 12


@pytest.mark.parametrize("line, reason", REFUSED, ids=[line for line, _ in REFUSED])
def test_what_the_readme_says_is_refused_is_refused(line: str, reason: str):
    with pytest.raises(UserError) as refusal:
        preflight(load_config(line.split()))
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_all_recipes_can_work(capsys: pytest.CaptureFixture[str]):
    assert all_recipes.main([]) == 0
    assert all(f"`{recipe}`" in capsys.readouterr().out for recipe in recipes()[:1])
    assert all_recipes.main(["spec.first_layers_bf16=99"]) == 2
    assert capsys.readouterr().out.count("refused: ") == len(recipes())


def test_a_recipe_of_the_paper_updates_on_524288_tokens():
    for recipe in ("bf16", "te_nvfp4", "minite", "minite_expert"):
        found = preflight(load_config([f"+recipe={recipe}"]))
        assert found.batch.tokens == 524_288
        assert found.batch.sequences == 512


def test_recipes_of_the_paper_differ_in_name_and_specification_alone():
    from rl.compose import differing_keys

    names = ("minite", "bf16", "te_nvfp4", "minite_expert", "minite_strict")
    configs = [load_config([f"+recipe={name}"]) for name in names]
    for other in configs[1:]:
        assert differing_keys(configs[0], other).keys() == {"run.name", "spec.name"}


def test_a_report_says_what_it_was_made_from():
    text = report(preflight(load_config(["+recipe=minite"])))
    for part in (
        "30,532,122,624 parameters",
        "524,288 tokens an update",
        "19,477,721,088 bytes",
        "b300",
        "GiB",
    ):
        assert part in text


def test_precision_of_the_first_layers_counts():
    some = preflight(load_config(["+recipe=minite", "spec.first_layers_bf16=2", "spec.last_layers_bf16=4"]))
    none, all_of_it = (preflight(load_config([f"+recipe={name}"])) for name in ("minite", "bf16"))
    share = 6 / 48
    assert some.sync.experts == pytest.approx(
        (1 - share) * none.sync.experts + share * all_of_it.sync.experts
    )


def test_nothing_is_started_or_written(tmp_path: Path):
    code = (
        "import sys; from rl.train import main; status = main(['+recipe=minite', 'plan=true']);"
        "loaded = {'ray', 'vllm', 'megatron', 'wandb'} & set(sys.modules); sys.exit(status or bool(loaded))"
    )
    root = README.parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_wish_that_is_neither_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["+recipe=tiny", "plan=maybe"]) == 2
    assert capsys.readouterr().err == "error: plan=maybe: true or false\n"
    assert main(["+recipe=minite", "plan=true", "run.samplers=9"]) == 2
    assert "run.samplers=9" in capsys.readouterr().err


def test_a_model_that_nothing_describes_is_refused():
    with pytest.raises(UserError, match=r"model\.path='nowhere'"):
        preflight(load_config(["+recipe=tiny", "model=folder", "model.path=nowhere"]))
    with pytest.raises(ConfigError, match="vocabulary"):
        preflight(load_config(["+recipe=tiny", "data=sums", "reward=math"]))


@pytest.mark.parametrize(
    "reported, name",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
    ],
)
def test_devices_by_the_name_that_drivers_report(reported: str, name: str):
    assert device_of(reported) == DEVICES[name]


@pytest.mark.parametrize(
    "reported", ["NVIDIA H200 NVL", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 5090", "NVIDIA GB10", ""]
)
def test_other_devices_have_no_rates(reported: str):
    assert device_of(reported) is None
