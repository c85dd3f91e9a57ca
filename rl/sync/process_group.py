"""Payloads through a torch.distributed process group of sender (rank 0) and receivers: gloo on CPUs, NCCL on GPUs.

The group is made by itself, beside the default groups that Megatron and vLLM have in these processes. All receivers are
served by a broadcast, some of them point to point. It lives until a transfer fails or one of its members dies: then a
new one is made.

Who dies in the midst of a message goes unnoticed by the others until their timeout. So the sender, told of a death,
closes its end and says so in the store by which the members met; a receiver that waits looks there twice a second. It
gives up as well when the store is gone with its sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from rl.sync.protocol import Chunk
from rl.sync.transport import Parcel, Receiving

_CLOSED = "closed"  # a key of the store: the sender will send nothing more
_ASK_S = 0.5
# Groups with transfers that may never end: to destroy one would be to wait for its timeout.
_abandoned: list[Any] = []


def host_store(host: str, size: int, timeout_s: float) -> tuple[Any, int]:
    """A rendezvous for `size` members, served by this process on interface `host`; its port, any that is free."""
    store = dist.TCPStore(
        host, 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return store, store.port


def join(store: Any, host: str, rank: int, size: int, timeout_s: float, device: torch.device) -> Any:
    """The group, once all members have joined. Raises RuntimeError when they do not come in time."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        group = nccl(store, rank, size, options)
        _connect(group, rank, size, device)
        return group
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]  # listens there and nowhere else
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _connect(group: Any, rank: int, size: int, device: torch.device) -> None:
    """NCCL connects at the first transfer, for which the sender then waits until the other side comes: too late, as a
    receiver learns of a chunk only when the sender has begun with it. So each kind of transfer is made once here.
    """
    empty = torch.zeros(1, dtype=torch.uint8, device=device)
    works = [group.broadcast([empty], _from_sender())]
    works += [group.recv([empty], 0, 0)] if rank else [group.send([empty], to, 0) for to in range(1, size)]
    for work in works:
        work.wait()
    torch.cuda.synchronize(device)


def _leave(group: Any, transfers: Any, device: torch.device) -> None:
    """transfers: those that may never end, if there are any. NCCL's are broken off: they would keep the GPU busy, and
    at their timeout NCCL ends the process. Nor does it then wait for the other members to leave.
    """
    if device.type == "cuda":
        group.abort()
    if transfers:
        _abandoned.append((group, transfers))


class GroupOutlet:
    """members: the receivers in the group, in the order of their ranks 1, 2, ..."""

    def __init__(
        self, members: Sequence[Receiving], host: str, timeout_s: float, device: torch.device
    ) -> None:
        self._members = list(members)
        self._host, self._timeout_s, self._device = host, timeout_s, device
        self._store, self.port = host_store(host, len(self._members) + 1, timeout_s)
        self._group: Any = None
        self._targets: list[int] = []
        self._under_way: list[tuple[Any, torch.Tensor]] = []

    def join(self) -> None:
        size = len(self._members) + 1
        self._group = join(self._store, self._host, 0, size, self._timeout_s, self._device)

    def address(self, receivers: Sequence[Receiving]) -> None:
        self._targets = [1 + self._members.index(receiver) for receiver in receivers]

    def ship(self, chunk: Chunk) -> Parcel:
        if self._group is None:
            raise ConnectionError("the process group of the weight sync is closed")
        self._under_way = [(work, sent) for work, sent in self._under_way if not work.is_completed()]
        payload = chunk.payload.to(self._device)
        broadcast = len(self._targets) == len(self._members)
        if payload.numel():
            if broadcast:
                works = [self._group.broadcast([payload], _from_sender())]
            else:
                works = [self._group.send([payload], rank, 0) for rank in self._targets]
            self._under_way += [(work, payload) for work in works]
        return Parcel(chunk.header, (payload.numel(), broadcast))

    def flush(self) -> None:
        works, self._under_way = self._under_way, []
        for work, payload in works:
            work.wait()
            if payload.is_cuda:
                torch.cuda.current_stream(payload.device).synchronize()

    def close(self) -> None:
        if self._group is not None:
            self._store.set(_CLOSED, "")
            going_on = [transfer for transfer in self._under_way if not transfer[0].is_completed()]
            _leave(self._group, going_on, self._device)
        self._under_way, self._group = [], None


class GroupInlet:
    """host, port: of the sender, where the members meet. own_host: where this one listens, if elsewhere."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        timeout_s: float,
        device: torch.device,
        own_host: str | None = None,
    ) -> None:
        self._store = dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))
        self._group: Any = join(self._store, own_host or host, rank, size, timeout_s, device)
        self._device = device

    def fetch(self, parcel: Parcel) -> Chunk:
        """Raises ConnectionError when the payload does not come; the group is of no use then, and is closed."""
        nbytes, broadcast = parcel.content
        payload = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if nbytes:
            try:
                self._take(payload, broadcast)
            except RuntimeError as error:
                self.close()
                raise ConnectionError(f"chunk {parcel.header.number} did not come: {error}") from error
        return Chunk(parcel.header, payload)

    def close(self) -> None:
        if self._group is not None:
            _leave(self._group, None, self._device)
        self._group = None

    def _take(self, payload: torch.Tensor, broadcast: bool) -> None:
        if self._group is None:
            raise RuntimeError("the process group of the weight sync is closed")
        options = _from_sender()
        work = self._group.broadcast([payload], options) if broadcast else self._group.recv([payload], 0, 0)
        over: Future[None] = Future()
        # Only a thread of its own can be left behind: nothing else ends a wait before its timeout.
        Thread(target=_wait, args=(work, payload, over), daemon=True).start()
        while True:
            try:
                return over.result(_ASK_S)
            except TimeoutError:
                if not self._sender_is_there():
                    _leave(self._group, work, self._device)
                    self._group = None
                    raise RuntimeError("the sender has closed its end") from None

    def _sender_is_there(self) -> bool:
        try:
            return not self._store.check([_CLOSED])
        except RuntimeError:  # there is nobody to ask
            return False


def _wait(work: Any, payload: torch.Tensor, over: Future[None]) -> None:
    try:
        work.wait()
        if payload.is_cuda:
            torch.cuda.current_stream(payload.device).synchronize()
        over.set_result(None)
    except Exception as error:
        over.set_exception(error)


def _from_sender() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options
