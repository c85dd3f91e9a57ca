"""Payloads that two processes share on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.digest import byte_view
from rl.sync.cuda_ipc import IpcInlet, IpcOutlet
from rl.sync.protocol import Piece, make_chunk, open_chunk

CONTENT = torch.arange(100_000, dtype=torch.int32)


def receive(parcels: Any, answers: Any) -> None:
    """Another process: says whether the pieces are as sent; the last parcel is None."""
    inlet = IpcInlet("cuda")
    while (parcel := parcels.get()) is not None:
        pieces = open_chunk(inlet.fetch(parcel))
        answers.put([torch.equal(content.cpu(), byte_view(CONTENT)) for _, content in pieces])
        del pieces


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_another_process_reads_what_was_lent() -> None:
    context = torch.multiprocessing.get_context("spawn")
    parcels, answers = context.Queue(), context.Queue()
    process = context.Process(target=receive, args=(parcels, answers))
    process.start()
    outlet, size = IpcOutlet(), 4 * len(CONTENT)
    for number, tensors in enumerate(([CONTENT.cuda()], [CONTENT.cuda(), CONTENT.cuda()], [])):
        parcels.put(outlet.ship(make_chunk("s", number, [(Piece("t", "whole", size), t) for t in tensors])))
        assert answers.get(timeout=120) == [True] * len(tensors)
    outlet.flush()
    parcels.put(None)
    process.join(timeout=60)
    assert process.exitcode == 0


def test_weights_on_a_cpu_are_refused() -> None:
    chunk = make_chunk("s", 0, [(Piece("t", "whole", 400_000), CONTENT)])
    with pytest.raises(ValueError, match="the weights lie on cpu, not on a GPU"):
        IpcOutlet().ship(chunk)
