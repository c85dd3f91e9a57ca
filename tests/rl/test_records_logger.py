from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.metrics import UnknownMetric
from rl.records.history import read_history
from rl.records.logger import RunLogger
from rl.records.wandb_mirror import record_config
from rl.run_folder import RunFolder, RunFolderError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "tiny", "run: {iterations: 3}\n")


def test_metrics_are_on_disk_when_log_returns(folder: RunFolder) -> None:
    with RunLogger(folder) as logger:
        logger.log(0, {"held_out/reward": np.float64(0.25)})
        assert folder.metrics.read_text() == '{"step": 0, "held_out/reward": 0.25}\n'
        logger.log(1, {"tokens/trained": torch.tensor(7), "policy/loss": np.float32(0.5)})
        logger.log(1, {"held_out/reward": 0.5})
    assert read_history(folder.metrics) == {
        0: {"held_out/reward": 0.25},
        1: {"tokens/trained": 7, "policy/loss": 0.5, "held_out/reward": 0.5},
    }


def test_what_cannot_be_recorded_leaves_no_trace(folder: RunFolder) -> None:
    with RunLogger(folder) as logger:
        logger.log(2, {"policy/loss": 0.5})
        before = folder.metrics.read_text()
        for step, metrics, error in (
            (1, {"policy/entropy": 1.0}, "step 1 comes after step 2"),
            (2, {"policy/loss": 0.5}, "step 2 already has policy/loss"),
            (3, {"policy/entropy": 1.0, "policy/loss": float("nan")}, "finite"),
        ):
            with pytest.raises(ValueError, match=error):
                logger.log(step, metrics)
        with pytest.raises(UnknownMetric):
            logger.log(3, {"policy/lss": 0.5})
        assert folder.metrics.read_text() == before


def _iteration(logger: RunLogger, step: int) -> None:
    logger.log(step, {"policy/loss": 1 / step})
    if step % 2 == 0:
        logger.log(step, {"held_out/reward": step / 10})


@pytest.mark.parametrize("killed_at", range(5, 9))
def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path: Path, killed_at: int) -> None:
    whole, resumed = (RunFolder.create(tmp_path, name, "") for name in ("whole", "resumed"))
    with RunLogger(whole) as logger:
        for step in range(1, 11):
            _iteration(logger, step)
    with RunLogger(resumed) as logger:
        for step in range(1, killed_at):
            _iteration(logger, step)
    with resumed.metrics.open("a") as file:
        file.write('{"step": 99, "polic')
    with RunLogger(resumed, resumed_at=4) as logger:
        for step in range(5, 11):
            _iteration(logger, step)
    assert resumed.metrics.read_bytes() == whole.metrics.read_bytes()


def test_a_run_is_not_recorded_twice(folder: RunFolder) -> None:
    with RunLogger(folder) as logger:
        with pytest.raises(RunFolderError, match="another process"):
            RunLogger(folder, resumed_at=0)
        logger.log(1, {"policy/loss": 0.5})
    with pytest.raises(RunFolderError, match="holds metrics already"):
        RunLogger(folder)
    RunLogger(folder, resumed_at=1).close()


def test_lost_metrics_are_reported(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    RunLogger(folder, resumed_at=7).close()
    assert "ends at step 0, before the checkpoint of step 7" in caplog.text


def test_damaged_metrics_are_refused(folder: RunFolder) -> None:
    folder.metrics.write_text('oops\n{"step": 1}\n')
    with pytest.raises(RunFolderError, match=r"damaged.*line 1"):
        RunLogger(folder, resumed_at=1)


def test_wandb_off_writes_nothing(folder: RunFolder) -> None:
    with RunLogger(folder, wandb="off") as logger:
        logger.log(1, {"policy/loss": 0.5})
    assert not folder.wandb.exists()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch):
    """A server that W&B and any proxy are pointed at; it answers nobody and can tell whether one came."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, address)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield server


def _visited(server: socket.socket) -> bool:
    server.settimeout(0.2)
    try:
        server.accept()
    except TimeoutError:
        return False
    return True


def _offline_runs(folder: RunFolder) -> list[bytes]:
    """The contents of the offline runs, oldest first."""
    return [path.read_bytes() for path in sorted(folder.wandb.glob("offline-run-*/run-*.wandb"))]


def test_wandb_offline_writes_everything_and_sends_nothing(
    folder: RunFolder, network: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_ERROR_REPORTING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder.path / "no_account"))
    with RunLogger(folder, wandb="offline") as logger:
        logger.log(1, {"policy/loss": 0.123456789})
        logger.log(2, {"policy/loss": 0.234567891})
    (first,) = _offline_runs(folder)
    assert b"policy/loss" in first and b"0.123456789" in first and b"0.234567891" in first
    assert b"iterations" in first  # the configuration
    assert str(ROOT).encode() not in first  # neither code nor command

    time.sleep(1.1)  # W&B names its folders by the second
    with RunLogger(folder, wandb="offline", resumed_at=1) as logger:
        logger.log(2, {"policy/loss": 0.345678912})
    _, second = _offline_runs(folder)
    assert b"0.123456789" in second and b"0.345678912" in second and b"0.234567891" not in second
    names = {path.name for path in folder.wandb.glob("offline-run-*/run-*.wandb")}
    assert names == {f"run-{(folder.wandb / 'id').read_text()}.wandb"}
    assert not _visited(network)
    assert not (folder.path / "no_account").exists()  # nothing in the user's home


def test_wandb_takes_the_changed_configuration_of_a_resumed_run(
    folder: RunFolder, network: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("HOME", str(folder.path / "no_account"))
    with wandb.init(mode="offline", dir=str(folder.path)) as run:
        for iterations in (10, 20):
            folder.replace_config(f"run:\n  iterations: {iterations}\n")
            record_config(run, folder)
            assert run.config["run"]["iterations"] == iterations
    assert not _visited(network)


# A run that is killed, while a process that it forked lives on and holds its pipes open.
_KILLED = """
import os, sys, time
from pathlib import Path
from rl.records.logger import RunLogger
from rl.run_folder import RunFolder

folder = RunFolder.open(Path(sys.argv[1]))
logger = RunLogger(folder, wandb="offline")
logger.log(1, {"policy/loss": 0.123456789})
survivor = os.fork()
if survivor == 0:
    time.sleep(300)
    os._exit(0)
(folder.path / "survivor").write_text(str(survivor))
os.kill(os.getpid(), 9)
"""


def test_wandb_is_finished_when_the_run_is_killed(folder: RunFolder, network: socket.socket) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", _KILLED, folder.path], env=environment)
    assert killed.returncode == -signal.SIGKILL
    try:
        deadline = time.monotonic() + 60
        while not any(b"0.123456789" in content for content in _offline_runs(folder)):
            assert time.monotonic() < deadline, (folder.wandb / "mirror.log").read_text()
            time.sleep(0.1)
    finally:
        os.kill(int((folder.path / "survivor").read_text()), signal.SIGKILL)


def test_a_wandb_outage_is_reported_once_and_delays_nothing(
    folder: RunFolder,
    network: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    logger = RunLogger(folder, wandb="online", wandb_patience_s=0.5)
    step, slowest = 0, 0.0
    while not _visited(network):  # W&B waits for an answer of its server
        started = time.monotonic()
        logger.log(step := step + 1, {"policy/loss": 0.5})
        slowest = max(slowest, time.monotonic() - started)
    started = time.monotonic()
    logger.close()
    logger.close()
    assert max(slowest, time.monotonic() - started) < 10
    assert len(caplog.records) == 1
    assert "W&B did not finish within 0.5 s and was stopped" in caplog.text
    assert len(read_history(folder.metrics)) == step


def test_a_run_goes_on_when_wandb_cannot_be_started(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/missing/python")
    with RunLogger(folder, wandb="offline") as logger:
        logger.log(1, {"policy/loss": 0.5})
    assert len(caplog.records) == 1 and "W&B cannot be started" in caplog.text
    assert read_history(folder.metrics) == {1: {"policy/loss": 0.5}}


def test_a_wandb_failure_is_reported_once_with_its_reason(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(folder.path / "no_account"))
    with RunLogger(folder, wandb="online") as logger:
        step, deadline = 0, time.monotonic() + 60
        while not caplog.records:
            assert time.monotonic() < deadline
            logger.log(step := step + 1, {"policy/loss": 0.5})
            time.sleep(0.1)
        logger.log(step + 1, {"policy/loss": 0.5})
    assert len(caplog.records) == 1
    assert "W&B ended with status 1" in caplog.text and "No API key" in caplog.text
