"""Nodes of a Ray cluster on this machine: each has a raylet and an address of the loopback network of its own."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

_RAY = str(Path(sys.executable).with_name("ray"))


class Raylets:
    """environment: of the drivers that join. `address` is theirs to join at."""

    def __init__(self, folder: Path, temporary: str) -> None:
        self._folder, self._temporary = folder, temporary
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        with socket.socket() as free:
            free.bind(("127.0.0.2", 0))
            self.address = f"127.0.0.2:{free.getsockname()[1]}"
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # a Ray of one machine, in this process, has set it to 0
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_worker_prestart": "0",
            # A death is noticed in a second or two, instead of fifteen.
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "3",
        }

    def start(self, address: str, *options: str, hide: Path | None = None, **environment: str) -> None:
        """hide: a folder that the node sees empty."""
        if self._nodes:
            place = [f"--address={self.address}"]
        else:
            port = self.address.partition(":")[2]
            place = ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
            place += [f"--temp-dir={self._temporary}"]
        command = [_RAY, "start", *place, f"--node-ip-address={address}", "--num-cpus=1", "--block"]
        command += ["--object-store-memory=100000000", "--include-log-monitor=false", *options]
        if hide is not None:
            mount = f"mount -t tmpfs tmpfs {shlex.quote(str(hide))} && exec {shlex.join(command)}"
            command = ["unshare", "--mount", "sh", "-c", mount]
        log = self._folder / f"ray-{address}.log"
        with log.open("wb") as output:
            self._nodes[address] = subprocess.Popen(
                command,
                env=self.environment | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 90
        while b"Ray runtime started" not in log.read_bytes():
            assert self._nodes[address].poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def kill(self, address: str) -> None:
        """The raylet, and whatever is left of its node."""
        process = self._nodes.pop(address)
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
            for member in sorted(family, key=lambda member: "raylet" not in member.name()):
                with suppress(psutil.NoSuchProcess):
                    member.kill()
        process.kill()
        process.wait(timeout=60)

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """A driver, in a process of its own."""
        return subprocess.run(
            [sys.executable, *command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            **options,
        )

    def stop(self) -> None:
        for address in reversed(list(self._nodes)):
            self.kill(address)


@contextmanager
def raylets(folder: Path) -> Iterator[Raylets]:
    """Two nodes, 127.0.0.2 and 127.0.0.3. folder: for their logs."""
    with tempfile.TemporaryDirectory(
        prefix="ray-", ignore_cleanup_errors=True
    ) as temporary:  # sockets' paths are short
        found = Raylets(folder, temporary)
        try:
            found.start("127.0.0.2")
            found.start("127.0.0.3")
            yield found
        finally:
            found.stop()
