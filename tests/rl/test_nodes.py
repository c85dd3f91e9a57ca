"""Runs over two nodes of a Ray cluster, each with a raylet of its own, on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rl.checkpoint import CheckpointStore
from rl.command import TRY_AGAIN
from rl.records.history import comparable, read_history
from rl.train import main
from tests.rl.raylets import Raylets, raylets
from tests.rl.smallest_job import arguments, run_folder

pytestmark = pytest.mark.slow

FIRST, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"
SETTINGS = (
    "learner.data_parallel=2",
    "model.warm_start.steps=0",
    "reward.function=tests.rl.custom_rewards:even_length",
    "run.iterations=2",
    "evaluation.every=2",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    with raylets(tmp_path_factory.mktemp("raylets")) as found:
        yield found


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
    cases = ("cluster.nodes=4", "cluster.nodes=3", "cluster.gpus_per_node=2")
    done = cluster.run("-m", "tests.rl.node_driver", cluster.address, str(tmp_path), *cases)
    cluster.kill(THIRD)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    four, three, gpus = (found[case] for case in cases)
    assert "cluster.nodes=4: Ray has not so many nodes with a CPU free on each" in four
    assert f"alive: {FIRST} with 0 GPUs, {SECOND} with 0 GPUs, {THIRD} with 2 GPUs" in four
    packages, folder = three.split("; ")
    assert packages.startswith(f"node {THIRD} has other packages than node {FIRST}: torch 9.9.9 (there ")
    assert folder.startswith(
        f"node {THIRD}: {tmp_path / 'run'} is not the folder that the driver sees: run.output"
    )
    assert f"node {THIRD}: Ray counts 2 GPUs there for the run, and CUDA sees 0" in gpus
    assert not any("\n" in line for line in found.values())


def on_nodes(cluster: Raylets, place: Path, runs: Mapping[str, str]) -> subprocess.Popen[str]:
    """A driver of `runs`, name -> transport, one after the other as long as they end well."""
    nodes = (f"cluster.ray_address={cluster.address}", "cluster.nodes=2", "run.resume=latest")
    settings = [
        arguments(place, *SETTINGS, f"run.name={name}", f"sync.transport={transport}", *nodes)
        for name, transport in runs.items()
    ]
    code = f"import sys; from rl.train import main; sys.exit(next(filter(None, map(main, {settings!r})), 0))"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def test_a_run_that_loses_a_node_goes_on_and_is_the_run_that_did_not(cluster: Raylets, tmp_path: Path):
    """One over two nodes to its end, weights through the object store; the other, by a process group, only until the
    second node dies, with a rank of the learner and the sampler, and then on one node.
    """
    checkpoints = CheckpointStore(tmp_path / "broken/latest/checkpoints", 2)
    with on_nodes(cluster, tmp_path, {"whole": "ray", "broken": "process_group"}) as process:
        wait_until(checkpoints.steps, process)
        cluster.kill(SECOND)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == TRY_AGAIN, output
    where = f"learner's ranks 0 on node {FIRST}, 1 on node {SECOND}; samplers 0 on node {SECOND}"
    assert output.count(where) == 2
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"node {SECOND} is gone" in line and "run.resume" in line
    assert "Traceback" not in output
    assert checkpoints.steps() == [1]

    again = ("run.name=broken", "run.resume=latest", "sync.transport=process_group")
    assert main(arguments(tmp_path, *SETTINGS, *again)) == 0
    whole, broken = (
        comparable(read_history(run_folder(tmp_path, name) / "metrics.jsonl")) for name in ("whole", "broken")
    )
    assert broken == whole and max(whole) == 2
    assert all(whole[step]["policy/grad_norm"] > 0 for step in (1, 2))
