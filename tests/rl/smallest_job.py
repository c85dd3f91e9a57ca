"""The main job at its smallest, with the real engines on this machine's CPU: started, killed, compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil
from safetensors.torch import load_file

from rl.records.history import comparable, read_history

ITERATIONS = 4
SETTINGS = [
    "+recipe=tiny",
    "data.bound=4",
    "data.held_out=3",
    "model.hf_config.num_hidden_layers=2",
    "model.hf_config.hidden_size=64",
    "model.warm_start.batch_size=32",
    "algorithm.prompts_per_iteration=8",
    "algorithm.min_groups=2",
    f"run.iterations={ITERATIONS}",
    "run.checkpoint_every=1",
    "run.keep_checkpoints=2",
    "evaluation.every=2",
    "logging.wandb=off",
    "sampler.kv_cache_gib=0.25",
]


def arguments(place: Path, *overrides: str) -> list[str]:
    """Of `rl.train`. Runs in one `place` share its cache of initial policies."""
    return [*SETTINGS, f"run.output_dir={place}", f"run.cache_dir={place / 'cache'}", *overrides]


def start(place: Path, *overrides: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rl.train", *arguments(place, *overrides)]
    with (place / "output").open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[bytes], place: Path) -> str:
    """What it printed. It must end well."""
    process.wait(timeout=300)
    output = (place / "output").read_text()
    assert process.returncode == 0, output
    return output


def run_folder(place: Path, name: str) -> Path:
    return (place / name / "latest").resolve()


def kill_when(place: Path, process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """SIGKILL the driver as soon as `condition` holds, and wait until its actors are gone.

    Two small agents of Ray look for the dead head for a minute before they end; they hold no model.
    """
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, f"the run ended by itself:\n{finish(process, place)}"
        assert time.monotonic() < deadline, "the moment to kill never came"
        time.sleep(0.005)
    family = psutil.Process(process.pid).children(recursive=True)
    engines = [member for member in family if "Agent" not in member.cmdline()[0]]
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    _, alive = psutil.wait_procs(engines, timeout=60)
    assert not alive, f"left running: {alive}"


def kill_sampler_in_sync(process: subprocess.Popen[bytes], place: Path) -> None:
    """SIGKILL the only sampler in a sync: it is halted while the learner updates, and killed when the sync waits.

    Ray names an actor's process after what it is at.
    """

    def wait_for(title: str) -> psutil.Process:
        deadline = time.monotonic() + 240
        while True:
            for member in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if member.cmdline()[:1] == [f"ray::{title}"]:
                        return member
            assert process.poll() is None, (place / "output").read_text()
            assert time.monotonic() < deadline, f"{title} never came"
            time.sleep(0.005)

    wait_for("LearnerActor.update")
    sampler = wait_for("SamplerActor")
    sampler.suspend()
    wait_for("WeightSyncActor.sync")
    sampler.kill()


def recorded(place: Path, name: str) -> int:
    """The last step in metrics.jsonl; -1: none."""
    metrics = place / name / "latest" / "metrics.jsonl"
    return max(read_history(metrics), default=-1) if metrics.exists() else -1


def assert_equal_runs(folder: Path, other: Path, engines: Sequence[str] = ("learner",)) -> None:
    """All metrics but the volatile ones, and what the engines hold at the end, bit for bit."""
    assert comparable(read_history(folder / "metrics.jsonl")) == comparable(
        read_history(other / "metrics.jsonl")
    )
    for engine, file in product(engines, ("weights.safetensors", "optimizer.safetensors")):
        ours, theirs = (
            load_file(path / "checkpoints" / f"step_{ITERATIONS:06d}" / engine / file)
            for path in (folder, other)
        )
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in theirs)
