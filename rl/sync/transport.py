"""How chunks get from the sender's process to the receivers': one interface, and the Ray object store.

Control messages always go through Ray; what differs is the way of the payload. `Outlet.ship` gives a parcel that is
handed to every receiver, whose `Inlet.fetch` makes the chunk of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rl.sync.protocol import Chunk, ChunkHeader

Receiving = tuple[int, int]  # a sampler, and one of its processes: the numbers of both


@dataclass(frozen=True, eq=False)
class Parcel:
    """What is handed over through Ray. content: the transport's own."""

    header: ChunkHeader
    content: Any


class Outlet(Protocol):
    """The sender's end."""

    def address(self, receivers: Sequence[Receiving]) -> None:
        """To whom the next parcels go."""
        ...

    def ship(self, chunk: Chunk) -> Parcel:
        """Begin to send. The payload must stay as it is until `flush`."""
        ...

    def flush(self) -> None:
        """Wait until the memory of everything shipped may change. Raises what went wrong on the way."""
        ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """A receiver's end."""

    def fetch(self, parcel: Parcel) -> Chunk:
        """The chunk, whose payload does not change until the sync is over."""
        ...

    def close(self) -> None: ...


class RayOutlet:
    """Through the object store, by way of the CPU: works between any two processes."""

    def address(self, receivers: Sequence[Receiving]) -> None:
        pass

    def ship(self, chunk: Chunk) -> Parcel:
        return Parcel(chunk.header, chunk.payload.cpu().numpy())  # Ray copies it once, and pickles nothing

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class RayInlet:
    """device: where the chunks are wanted."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def fetch(self, parcel: Parcel) -> Chunk:
        # A copy: what lies in the object store would fill it up until the sync is over.
        return Chunk(parcel.header, torch.from_numpy(parcel.content.copy()).to(self._device))

    def close(self) -> None:
        pass
