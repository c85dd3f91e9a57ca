"""Payloads by CUDA IPC: sender and receivers on one GPU read the same memory, nothing is copied on the way.

A parcel holds the handle of a payload's memory. The sender keeps the payload until `flush`, which is called when every
receiver has installed; a receiver lets its mapping go when the sync is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl.sync.protocol import Chunk
from rl.sync.transport import Parcel, Receiving


class IpcOutlet:
    def __init__(self) -> None:
        self._lent: list[torch.Tensor] = []

    def address(self, receivers: Sequence[Receiving]) -> None:
        pass

    def ship(self, chunk: Chunk) -> Parcel:
        from torch.multiprocessing.reductions import reduce_tensor

        payload = chunk.payload
        if not payload.numel():
            return Parcel(chunk.header, None)
        if not payload.is_cuda:
            raise ValueError(f"sync.transport=cuda_ipc: the weights lie on {payload.device}, not on a GPU")
        torch.cuda.current_stream(payload.device).synchronize()  # the bytes are there before the handle is
        self._lent.append(payload)
        return Parcel(chunk.header, reduce_tensor(payload))

    def flush(self) -> None:
        self._lent = []

    def close(self) -> None:
        self.flush()


class IpcInlet:
    """device: the receiver's, the same GPU."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def fetch(self, parcel: Parcel) -> Chunk:
        if parcel.content is None:
            return Chunk(parcel.header, torch.empty(0, dtype=torch.uint8, device=self._device))
        rebuild: Any
        rebuild, arguments = parcel.content
        return Chunk(parcel.header, rebuild(*arguments))

    def close(self) -> None:
        pass
