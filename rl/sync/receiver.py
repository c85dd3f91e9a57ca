"""The receiving side of the protocol, over anything that holds tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kernels.digest import fast_digests
from kernels.experts import StoredLayout
from kernels.precision_map import PrecisionMap
from kernels.shard import Shards
from rl.sync.codecs import CODECS
from rl.sync.codecs.base import Codec, own_part
from rl.sync.protocol import (
    Announcement,
    Chunk,
    Held,
    Manifest,
    Piece,
    ProtocolError,
    RefusedError,
    State,
    listed,
    manifest_of,
    manifest_problems,
    open_chunk,
    root_digest,
)


class Holder(Protocol):
    """What a receiver keeps up to date: a model in an engine (`sampler.weights.LiveWeights`)."""

    precision_map: PrecisionMap
    layout: StoredLayout  # of its experts' 4-bit weights: how they must come
    shards: Shards  # of the tensors on the wire, and of derived ones, that it holds in part
    version: int
    closed: str | None  # why nothing may be generated; None: it may

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The live tensors, or parts of them, by their names on the wire, contiguous; the same memory at every call."""
        ...

    def refresh(self) -> Mapping[str, torch.Tensor]:
        """Derive anew whatever is made from the live tensors; returns it, by `kernels.experts.derived_name`."""
        ...


@dataclass(frozen=True)
class Installed:
    """What a receiver says after `end`. seconds: of the phases `install` and `attest`."""

    digests: dict[str, int]
    seconds: dict[str, float]


@dataclass
class _Update:
    said: Announcement
    codec: Codec
    travels: Manifest
    before: State  # where an abort leads back to
    why_closed: str | None
    staged: dict[str, tuple[Piece, torch.Tensor]] = field(default_factory=dict)
    next_chunk: int = 0
    digests: dict[str, int] = field(default_factory=dict)


class Receiver:
    """See `rl.sync.protocol` for the states. Every method raises ProtocolError when it does not fit the state, and
    RefusedError, naming the cause, for content that is wrong; nothing has changed then.
    """

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.state = State.IDLE
        self._root: str | None = None
        self._update: _Update | None = None
        self._awakes_to: tuple[State, str | None] = (State.IDLE, None)
        self._manifest = manifest_of(holder.tensors(), holder.shards)

    def held(self) -> Held:
        return Held(self.holder.version, self._root if self.state is State.IDLE else None)

    def sleep(self, keep: bool) -> None:
        """The live tensors are about to leave the device; they come back, or are lost unless `keep`."""
        self.require_no_sync("sleep")
        if self.state is State.ASLEEP:
            raise ProtocolError("sleep came a second time")
        self._awakes_to = (self.state, self.holder.closed)
        if not keep:
            self._tear(f"weights version {self.holder.version} were discarded in sleep")
            self._awakes_to = (self.state, self.holder.closed)
        self.state, self.holder.closed = State.ASLEEP, "the sampler is asleep"

    def wake(self) -> None:
        """The live tensors are back on the device, in the same memory."""
        if self.state is not State.ASLEEP:
            raise ProtocolError(f"wake came to a receiver that is {self.state}")
        self.state, self.holder.closed = self._awakes_to

    def require_no_sync(self, message: str) -> None:
        if self._update is not None:
            version = self._update.said.version
            raise ProtocolError(f"{message} came while the sync of version {version} is open ({self.state})")

    def begin(self, said: Announcement) -> None:
        what = f"weights version {said.version}"
        if self._update is not None:
            version = self._update.said.version
            raise ProtocolError(f"{what}: the sync of version {version} is still open ({self.state})")
        if self.state is State.ASLEEP:
            raise ProtocolError(f"{what}: the sampler is asleep, its weights must be woken first")
        if said.version <= self.holder.version:
            raise RefusedError(f"{what} is not newer than {self.holder.version}, which is held")
        own = self.holder.precision_map.fingerprint
        if said.fingerprint != own:
            raise RefusedError(
                f"{what} was made under precision map {said.fingerprint}, this sampler runs under {own}"
            )
        if said.layout is not self.holder.layout:
            raise RefusedError(
                f"{what} was laid out in {said.layout}, this sampler holds its experts in {self.holder.layout}"
            )
        codec = CODECS.get(said.codec)
        if codec is None:
            raise RefusedError(
                f"{what} comes by the unknown codec {said.codec!r}; there are {', '.join(CODECS)}"
            )
        problems = manifest_problems(said.manifest, self._manifest)
        if problems:
            raise RefusedError(f"{what} do not fit this model: {listed(problems)}")
        if said.base is not None and said.base != self.held().root:
            raise RefusedError(
                f"{what} changes content {said.base}, held is {self.held().root} ({self.state})"
            )
        if said.chunks < 0 or said.bucket_bytes < 1:
            raise RefusedError(
                f"{what}: {said.chunks} chunks of up to {said.bucket_bytes} bytes make no sense"
            )
        travels = codec.travels(self._manifest, self.holder.precision_map.layers)
        self._update = _Update(said, codec, travels, self.state, self.holder.closed)
        self.state = State.OPEN
        self.holder.closed = f"the sync of {what} is open"

    def receive(self, chunk: Chunk) -> None:
        """Stage the pieces of a chunk, whose payload must stay as it is until the sync is over."""
        header = chunk.header
        update = self._require(State.OPEN, header.session, f"chunk {header.number}")
        if header.number >= update.said.chunks:
            raise RefusedError(
                f"chunk {header.number} came, {update.said.chunks} were announced, counted from 0"
            )
        if header.number != update.next_chunk:
            again = " a second time" if header.number < update.next_chunk else ""
            raise RefusedError(f"chunk {header.number} came{again} where chunk {update.next_chunk} was due")
        pieces = open_chunk(chunk)
        names = [piece.name for piece, _ in pieces]
        problems = [f"{name} is unknown" for name in names if name not in update.travels]
        problems += [
            f"{name} came twice" for i, name in enumerate(names) if name in update.staged or name in names[:i]
        ]
        if problems:
            raise RefusedError(f"chunk {header.number}: {listed(problems)}")
        size = sum(update.travels[name].nbytes for name in names)
        if len(names) > 1 and size > update.said.bucket_bytes:
            limit = update.said.bucket_bytes
            raise RefusedError(
                f"chunk {header.number} holds tensors of {size} bytes, more than the {limit} announced"
            )
        for piece, content in pieces:
            update.codec.check(piece, content, update.travels[piece.name])
            if piece.encoding != "whole" and update.said.base is None:
                raise RefusedError(f"{piece.name} comes as {piece.encoding} to a sync without a base")
        shards = self.holder.shards
        update.staged |= {
            piece.name: (piece, own_part(piece, content, update.travels[piece.name], shards.get(piece.name)))
            for piece, content in pieces
        }
        update.next_chunk += 1

    def end(self, session: str) -> Installed:
        """Replace the live tensors; the digests of everything then held. Any failure on the way leaves it TORN."""
        update = self._require(State.OPEN, session, "the end")
        missing = [f"{name} did not come" for name in update.travels if name not in update.staged]
        if update.next_chunk != update.said.chunks or missing:
            counted = f"{update.next_chunk} of {update.said.chunks} chunks came"
            raise RefusedError(
                f"weights version {update.said.version} incomplete: {counted}; {listed(missing)}"
            )
        try:
            return self._install(update)
        except BaseException as error:
            self._tear(f"installing weights version {update.said.version} failed: {error}")
            raise

    def commit(self, session: str, content: str | None = None) -> None:
        """The sender has found the digests right: serve. content: what `Held.root` then is, where a part is held."""
        update = self._require(State.INSTALLED, session, "commit")
        self._root = content or root_digest(update.digests)
        self.holder.version = update.said.version
        self._update, self.state, self.holder.closed = None, State.IDLE, None

    def abort(self, session: str | None = None) -> None:
        """Forget what was staged; with nothing open, nothing happens. After `end` what is held cannot be used.

        session: None ends whatever is open, for use when its sender is gone. Raises ProtocolError for another's sync.
        """
        if self._update is None:
            return
        if session is not None and session != self._update.said.session:
            raise ProtocolError(f"the sync that is open is {self._update.said.session}, not {session}")
        if self.state is State.INSTALLED:
            self._tear(f"weights version {self._update.said.version} were rejected after their installation")
        else:
            self.state, self.holder.closed = self._update.before, self._update.why_closed
            self._update = None

    def _install(self, update: _Update) -> Installed:
        live = self.holder.tensors()
        device = next(iter(live.values())).device if live else torch.device("cpu")
        started = time.perf_counter()
        update.codec.install(update.staged, live, self.holder.precision_map.layers, self.holder.shards)
        derived = self.holder.refresh()
        _settle(device)
        installed = time.perf_counter()
        update.digests = fast_digests({**live, **derived})
        update.staged = {}
        self.state = State.INSTALLED
        seconds = {"install": installed - started, "attest": time.perf_counter() - installed}
        return Installed(update.digests, seconds)

    def _require(self, state: State, session: str, message: str) -> _Update:
        if self._update is None:
            raise ProtocolError(f"{message} came, and no sync is open ({self.state})")
        if session != self._update.said.session:
            raise ProtocolError(f"{message} belongs to sync {session}, open is {self._update.said.session}")
        if self.state is not state:
            raise ProtocolError(f"{message} came in state {self.state}, it belongs to {state}")
        return self._update

    def _tear(self, why: str) -> None:
        self._root, self._update, self.state = None, None, State.TORN
        self.holder.closed = f"{why}; a sync of whole tensors is needed"


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
