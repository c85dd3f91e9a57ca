"""Launch: going on with the newest run, and files beside the code that hold commands."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.compose import load_config, to_yaml
from rl.config import Config
from rl.errors import ConfigError
from rl.preflight.run import preflight
from rl.run_folder import RunFolder
from rl.train import _load
from rl.validate import check_against_model, check_placement

ROOT = Path(__file__).resolve().parents[2]


def created(config: Config, output: Path) -> RunFolder:
    config = replace(config, run=replace(config.run, output_dir=str(output)))
    return RunFolder.create(output, config.run.name, to_yaml(config))


def test_latest_is_a_new_run_where_there_is_none(tmp_path: Path):
    assert _load(["+recipe=tiny", f"run.output_dir={tmp_path}", "run.resume=latest"]).run.resume is None


def test_latest_goes_on_with_the_newest_run_of_that_name(tmp_path: Path):
    own = ["+recipe=tiny", f"run.output_dir={tmp_path}"]
    created(load_config(own), tmp_path)
    newest = created(load_config(own), tmp_path)
    assert _load([*own, "run.resume=latest"]).run.resume == str(newest.path)
    assert _load([*own, "run.resume=latest", "run.name=other"]).run.resume is None
    assert _load([*own, "run.resume=latest", "run.iterations=7"]).run.iterations == 7
    with pytest.raises(ConfigError, match=r"cannot change learner\.lr"):
        _load([*own, "run.resume=latest", "learner.lr=1e-3"])


def overrides(command: str) -> list[str]:
    return [word for word in command.split() if re.match(r"\+?[\w.]+=", word)]


def test_the_job_for_kubernetes_is_one_that_can_work():
    [job] = yaml.safe_load_all((ROOT / "scripts/cluster/kuberay.yaml").read_text())
    words = overrides(job["spec"]["entrypoint"])
    assert "run.resume=latest" in words
    config = load_config([word for word in words if not word.startswith("run.resume=")])
    found = preflight(config)
    check_against_model(config, found.model)
    check_placement(config)
    ray = job["spec"]["rayClusterSpec"]
    groups = [ray["headGroupSpec"], *ray.get("workerGroupSpecs", [])]
    gpus = [
        container["resources"]["limits"]["nvidia.com/gpu"]
        for group in groups
        for container in containers(group) * group.get("replicas", 1)
    ]
    assert gpus == [found.config.cluster.gpus_per_node] * found.config.cluster.nodes
    lock = (ROOT / "requirements-gpu.lock").read_text()
    assert f"ray=={ray['rayVersion']}\n" in lock


def test_the_job_for_slurm_is_one_that_can_work():
    """Its own examples, on as many nodes and GPUs as they ask for."""
    text = (ROOT / "scripts/cluster/minite.sbatch").read_text()
    assert "#SBATCH --nodes=1\n" in text
    examples = re.findall(r"^# +sbatch (.*)", text, re.MULTILINE)
    assert len(examples) == 2
    for example in examples:
        [nodes] = re.findall(r"--nodes=(\d+)", example) or ["1"]
        words = [word for word in overrides(example) if not word.startswith("group.key=")]
        config = load_config([*words, f"cluster.nodes={nodes}"])
        check_against_model(config, preflight(config).model)
        assert f"#SBATCH --gpus-per-node={config.cluster.gpus_per_node}\n" in text


def test_the_job_for_slurm_starts_a_ray_over_its_nodes_and_is_queued_again_when_one_is_lost(tmp_path: Path):
    """The script itself, with commands of Slurm and Ray that write down how they are called."""
    calls = tmp_path / "calls"
    commands = {
        "srun": 'case "$*" in *"node2 getent ahostsv4 node1"*) echo 10.0.0.1 STREAM node1;; esac',
        "scontrol": 'case "$1" in show) printf "node1\\nnode2\\n";; esac',
        "ray": "exit 0",
        "python": 'sleep 0.3; case "$*" in *plan=true*) exit 0;; *) exit 75;; esac',
    }
    (tmp_path / "bin").mkdir()
    for name, body in commands.items():
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\necho "{name} $*" >> {calls}\n{body}\n')
        command.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/launch_minite.sh", tmp_path / "scripts")
    slurm = {
        "SLURM_SUBMIT_DIR": tmp_path,
        "SLURM_JOB_NUM_NODES": 2,
        "SLURM_JOB_NODELIST": "n",
        "SLURM_JOB_ID": 7,
    }
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"} | {
        key: str(value) for key, value in slurm.items()
    }
    command = ["bash", ROOT / "scripts/cluster/minite.sbatch", "+recipe=minite"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75, done.stderr
    said = calls.read_text()
    assert "ray start --head --node-ip-address=10.0.0.1" in said
    assert "--nodes=1 --ntasks=1 --exclude=node1 ray start --address=10.0.0.1:6379 --block" in said
    run = "-m rl.train +recipe=minite cluster.nodes=2 cluster.ray_address=10.0.0.1:6379"
    assert f"python {run} plan=true\n" in said and f"python {run} run.resume=latest\n" in said
    assert "scontrol requeue 7\n" in said


def containers(group: dict[str, Any]) -> list[dict[str, Any]]:
    return group["template"]["spec"]["containers"]


def test_images_are_those_that_the_compose_file_builds():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    for service in services.values():
        assert (ROOT / service["build"]["dockerfile"]).is_file()
    [job] = yaml.safe_load_all((ROOT / "scripts/cluster/kuberay.yaml").read_text())
    image = containers(job["spec"]["rayClusterSpec"]["headGroupSpec"])[0]["image"]
    assert image == services["gpu"]["image"]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_base_images_are_pinned_by_digest(name: str):
    bases = re.findall(r"^FROM (\S+)", (ROOT / "docker" / name).read_text(), re.MULTILINE)
    assert bases and all(re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", base) for base in bases)


def test_the_gpu_lock_holds_what_the_image_promises():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements-gpu.lock").read_text(), re.MULTILINE))
    at_least = {"torch": (2, 13), "vllm": (0, 32), "megatron-core": (0, 16, 1), "transformer-engine": (2, 20)}
    for package, version in at_least.items():
        assert tuple(int(part) for part in pins[package].split(".")[:3]) >= version
    assert any(package.startswith("nvidia-") and package.endswith("-cu13") for package in pins)
