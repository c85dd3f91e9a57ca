from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from rl.records.provenance import (
    git_state,
    machine,
    package_versions,
    read_run_json,
    record_engines,
    record_launch,
)
from rl.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "tiny", "")


def test_each_start_is_a_launch(folder: RunFolder) -> None:
    assert read_run_json(folder) == {}
    record_launch(folder)
    record_launch(folder, resumed_at=10)
    first, second = json.loads(folder.run_json.read_text())["launches"]
    assert (first["resumed_at"], second["resumed_at"]) == (None, 10)
    assert first["versions"]["python"] == platform.python_version()


def test_the_command_is_what_was_typed(folder: RunFolder) -> None:
    script = folder.path / "train.py"
    script.write_text(
        "from pathlib import Path; from rl.run_folder import RunFolder;"
        "from rl.records.provenance import record_launch;"
        f"record_launch(RunFolder.open(Path({str(folder.path)!r})))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, script, "+recipe=tiny", "data.template={problem} ?"], env=environment, check=True
    )
    command = read_run_json(folder)["launches"][0]["command"]
    assert command.endswith(f"{script} +recipe=tiny 'data.template={{problem}} ?'")


def test_engines_and_their_specs(folder: RunFolder) -> None:
    record_launch(folder)
    aligned = PrecisionMap.resolve(4, named_spec("minite"), first_layers_bf16=1, last_layers_bf16=1)
    other = PrecisionMap.resolve(4, named_spec("minite_expert"), first_layers_bf16=1, last_layers_bf16=1)
    reports = [
        EngineReport("learner", aligned, "reference", 4, 20),
        EngineReport("sampler", other, "reference", 4, 9),
    ]
    record_engines(folder, reports)
    described = read_run_json(folder)
    assert len(described["launches"]) == 1
    assert described["engines"][1] == {
        "engine": "sampler",
        "fingerprint": other.fingerprint,
        "backend": "reference",
        "expert_layers": 4,
        "expert_calls": 9,
    }
    assert [(spec["name"], spec["layers"], spec["engines"]) for spec in described["specs"]] == [
        ("bf16", "0", ["learner", "sampler"]),
        ("minite", "1 to 2", ["learner"]),
        ("bf16", "3", ["learner", "sampler"]),
        ("minite_expert", "1 to 2", ["sampler"]),
    ]
    assert described["specs"][1]["canonical"] == named_spec("minite").canonical()


def test_versions_and_machine() -> None:
    found = package_versions()
    assert found["torch"] == version("torch") and found["ray"] == version("ray")
    described = machine()
    without_omp = {
        key: value for key, value in os.environ.items() if not key.startswith("OMP_")
    }  # nproc reads it
    assert described["cores"] == int(subprocess.check_output(["nproc"], env=without_omp))
    assert described["memory_gib"] == pytest.approx(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, rel=0.05
    )
    assert platform.node() not in json.dumps(described)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_tracked_source(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    source = tmp_path / "source.py"
    source.write_text("")
    assert git_state(source) is None
    git("init")
    assert git_state(source) is None  # in a repository that does not track it
    git("add", "source.py")
    git("commit", "-m", "first")
    assert git_state(source) == {"commit": git("rev-parse", "HEAD"), "modified": False}
    source.write_text("changed")
    assert git_state(source) == {"commit": git("rev-parse", "HEAD"), "modified": True}
