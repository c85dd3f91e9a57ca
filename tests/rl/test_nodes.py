"""Runs over two nodes of a Ray cluster, each with a raylet of its own, on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from rl.checkpoint import CheckpointStore
from rl.command import TRY_AGAIN
from rl.records.history import comparable, read_history
from rl.train import main
from tests.rl.raylets import Raylets, raylets
from tests.rl.smallest_job import arguments, run_folder

pytestmark = pytest.mark.slow

SECOND, THIRD = "127.0.0.3", "127.0.0.4"
SETTINGS = (
    "learner.data_parallel=2",
    "model.warm_start.steps=0",
    "reward.function=tests.rl.custom_rewards:even_length",
    "run.iterations=3",
    "evaluation.every=3",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    with raylets(tmp_path_factory.mktemp("raylets")) as found:
        yield found


def driven(cluster: Raylets, *arguments: str) -> Any:
    done = cluster.run("-m", "tests.rl.node_driver", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def on_nodes(cluster: Raylets, place: Path) -> subprocess.Popen[str]:
    own = [
        f"cluster.ray_address={cluster.address}",
        "cluster.nodes=2",
        "sync.transport=process_group",
        "run.resume=latest",
    ]
    command = [sys.executable, "-m", "rl.train", *arguments(place, *SETTINGS, "run.name=nodes", *own)]
    return subprocess.Popen(
        command, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def kill_when(
    process: subprocess.Popen[str], condition: Callable[[], bool], kill: Callable[[], None]
) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the moment to kill never came"
        time.sleep(0.01)
    kill()


def test_a_run_over_two_nodes_that_loses_one_and_goes_on_is_the_run_on_one_node(
    cluster: Raylets, tmp_path: Path
):
    checkpoints = CheckpointStore(tmp_path / "nodes/latest/checkpoints", 2)
    with on_nodes(cluster, tmp_path) as process:
        kill_when(process, checkpoints.steps, lambda: cluster.kill(SECOND))
        output, _ = process.communicate(timeout=120)
    assert process.returncode == TRY_AGAIN, output
    assert "learner's ranks 0 on node 127.0.0.2, 1 on node 127.0.0.3; samplers 0 on node 127.0.0.3" in output
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"node {SECOND} is gone" in line and "run.resume" in line
    assert "Traceback" not in output

    cluster.start(SECOND)
    with on_nodes(cluster, tmp_path) as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output

    with redirect_stdout(StringIO()):
        assert main(arguments(tmp_path, *SETTINGS, "run.name=one")) == 0
    found, expected = (
        comparable(read_history(run_folder(tmp_path, name) / "metrics.jsonl")) for name in ("nodes", "one")
    )
    assert found == expected and max(found) == 3
    assert all(found[step]["policy/grad_norm"] > 0 for step in (1, 2, 3))


def test_weights_reach_a_sampler_on_another_node_by_both_transports(cluster: Raylets):
    found = driven(cluster, "synced", cluster.address)
    assert found == {"gap": pytest.approx(0, abs=1e-5), "ray": True, "process_group": True}


def test_a_node_that_differs_is_named_before_any_work(cluster: Raylets, tmp_path: Path):
    """The third node has another torch, no GPU behind those that it promises, and does not see what the driver sees."""
    for name in ("run", "model", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    other = tmp_path / "other" / "torch-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    path = f"{tmp_path / 'other'}:{cluster.environment.get('PYTHONPATH', '')}"
    cluster.start(THIRD, "--num-gpus=2", hide=tmp_path / "run", PYTHONPATH=path)
    cases = (
        "cluster.nodes=4",
        "cluster.nodes=3",
        "cluster.nodes=3,cluster.interface=ib7",
        "cluster.gpus_per_node=2",
    )
    found = driven(cluster, "refused", cluster.address, str(tmp_path), *cases)
    cluster.kill(THIRD)
    four, three, interface, gpus = (found[case] for case in cases)
    assert "cluster.nodes=4: Ray has not so many nodes with a CPU free on each" in four
    assert "alive: 127.0.0.2 with 0 GPUs, 127.0.0.3 with 0 GPUs, 127.0.0.4 with 2 GPUs" in four
    assert f"node {THIRD} has other packages than node 127.0.0.2: torch 9.9.9 (there " in three
    assert f"node {THIRD}: {tmp_path / 'run'} is not the folder that the driver sees: run.output_dir" in three
    assert "node 127.0.0.2:" not in three and f"node {SECOND}" not in three
    assert f"node {SECOND}: cluster.interface=ib7 must be one of lo 127.0.0.1" in interface
    assert f"node {THIRD}: Ray counts 2 GPUs there for the run, and CUDA sees 0" in gpus
    assert not any("\n" in line for line in found.values())
