"""The machines, and how weights get from one engine to the others."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from rl.config.rules import require
from rl.devices import DEVICES


@dataclass(frozen=True)
class SyncConfig:
    """How weights get from the learner to the samplers; see `rl.sync`."""

    codec: Literal["packed", "delta", "bf16"] = "packed"  # see `rl.sync.codecs`
    transport: Literal["ray", "process_group", "cuda_ipc"] = "ray"
    bucket_mib: int = 64  # of tensors in a chunk; a larger tensor is a chunk of its own
    # For the members of the process group to meet, and for a chunk to arrive: ends the wait for a process that hangs;
    # one that dies is noticed at once.
    timeout_s: float = 120.0
    restarts: int = 3  # of samplers that die, in a launch. With 0 the learner keeps no copy of what it sent

    def __post_init__(self) -> None:
        require(self.bucket_mib >= 1, "sync.bucket_mib", self.bucket_mib, "at least 1")
        require(self.timeout_s > 0, "sync.timeout_s", self.timeout_s, "more than 0 seconds")
        require(self.restarts >= 0, "sync.restarts", self.restarts, "0 or more")

    @property
    def keep(self) -> bool:
        """Whether the learner keeps a copy of what it sent last."""
        return self.codec == "delta" or self.restarts > 0


@dataclass(frozen=True)
class ClusterConfig:
    """The machines that a run is meant for. `gpu` and `memory_gib` are for the preflight (`plan=true`) alone."""

    nodes: int = 1
    gpus_per_node: int = 0  # 0: nodes of CPUs
    gpu: str | None = None  # of `rl.devices`
    memory_gib: float | None = (
        None  # of each GPU, or without GPUs of the machine; None: as `rl.devices` has it
    )
    placement: Literal["colocated", "separate"] = "colocated"  # samplers on the learner's GPUs, or on others
    ray_address: str = (
        "local"  # local: a Ray of the run's own on 127.0.0.1; else that of one that is there, or auto
    )
    interface: str | None = (
        None  # network between several nodes; None: that of the address by which Ray knows a node
    )
    patience_s: float = 60.0  # for a Ray that is there to have so many nodes, with GPUs that nobody uses

    def __post_init__(self) -> None:
        require(self.nodes >= 1, "cluster.nodes", self.nodes, "at least 1")
        require(self.gpus_per_node >= 0, "cluster.gpus_per_node", self.gpus_per_node, "0 or more")
        require(bool(self.ray_address), "cluster.ray_address", self.ray_address, "local, auto or HOST:PORT")
        known = ", ".join(DEVICES)
        require(self.gpu is None or self.gpu in DEVICES, "cluster.gpu", self.gpu, f"one of {known}")
        require(
            self.gpus_per_node > 0 or self.gpu is None,
            "cluster.gpus_per_node",
            self.gpus_per_node,
            "at least 1 with cluster.gpu",
        )
        require(0 < self.patience_s < inf, "cluster.patience_s", self.patience_s, "more than 0 seconds")
        require(
            self.memory_gib is None or 0 < self.memory_gib < inf,
            "cluster.memory_gib",
            self.memory_gib,
            "more than 0",
        )

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def memory(self) -> int | None:
        """Bytes that there are of GPU memory, or of the machine's; None: not known."""
        if self.memory_gib is not None:
            return int(self.memory_gib * 2**30)
        return None if self.gpu is None else DEVICES[self.gpu].memory
