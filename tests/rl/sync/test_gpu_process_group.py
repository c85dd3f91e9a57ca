"""The process group's ends over NCCL: two processes, each with a GPU."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from rl.sync.process_group import GroupInlet, GroupOutlet
from rl.sync.protocol import Piece, make_chunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
TIMEOUT_S = 60
SIZES = (1000, 70_000_000, 0, 48)


def receive(port: int, parcels: Any, contents: Any) -> None:
    inlet = GroupInlet("127.0.0.1", port, 1, 2, TIMEOUT_S, torch.device("cuda", 1))
    for _ in SIZES:
        contents.put(inlet.fetch(parcels.get(timeout=TIMEOUT_S)).payload.cpu().numpy())
    inlet.close()


def test_what_is_sent_arrives_on_another_gpu() -> None:
    """A parcel is handed over only when its payload is under way, as `rl.sync.weight_sync` does it."""
    spawn = multiprocessing.get_context("spawn")
    parcels, contents = spawn.Queue(), spawn.Queue()
    outlet = GroupOutlet([0], "127.0.0.1", TIMEOUT_S, torch.device("cuda", 0))
    receiver = spawn.Process(target=receive, args=(outlet.port, parcels, contents))
    receiver.start()
    try:
        outlet.join()
        outlet.address([0])
        for number, size in enumerate(SIZES):
            content = torch.randint(256, (size,), dtype=torch.uint8, device="cuda:0")
            chunk = make_chunk("s", number, [(Piece("t", "whole", size), content)] if size else [])
            parcels.put(outlet.ship(chunk))
            found = torch.from_numpy(contents.get(timeout=TIMEOUT_S))
            assert torch.equal(found, chunk.payload.cpu())
        outlet.flush()
        receiver.join(TIMEOUT_S)
        assert receiver.exitcode == 0
    finally:
        receiver.kill()
        outlet.close()
