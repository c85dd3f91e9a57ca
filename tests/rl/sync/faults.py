"""A sync in the middle, and what can be wrong with a chunk of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels.experts import StoredLayout
from rl.sync.protocol import (
    Chunk,
    ProtocolError,
    RefusedError,
    State,
    attest,
    make_chunk,
    open_chunk,
)
from rl.sync.receiver import Receiver
from rl.sync.sender import Sender
from tests.rl.sync.worlds import MAP, Learner, Model, copied, equal, sync, wanted

CODECS = ("packed", "delta", "bf16")
LAYOUTS = tuple(StoredLayout)
LIMIT = 1000


class World:
    """A receiver that was synced to version 1, and a sync of version 2 begun with all its chunks made."""

    def __init__(
        self, codec: str = "packed", step: float = 1e-2, layout: StoredLayout = StoredLayout.ROWS
    ) -> None:
        self.learner, self.model = Learner(layout=layout), Model(layout=layout)
        self.sender = Sender(self.learner, MAP, keep=True, layout=layout)
        self.receiver = Receiver(self.model)
        sync(self.sender, self.receiver, 1)
        self.old = self.model.everything()
        self.learner.step(step)
        self.new = wanted(self.learner, layout)
        base = self.sender.kept_root if codec == "delta" else None
        self.said = self.sender.open("two", 2, codec, LIMIT, base)
        self.chunks = [copied(self.sender.chunk()) for _ in range(self.said.chunks)]
        self.sent = self.sender.close()

    def begin(self, **changes: Any) -> None:
        self.receiver.begin(replace(self.said, **changes))

    def deliver(self, *numbers: int) -> None:
        for number in numbers or range(len(self.chunks)):
            self.receiver.receive(self.chunks[number])

    def finish(self) -> None:
        installed = self.receiver.end("two")
        attest(self.sent.digests, installed.digests, "it", 2)
        self.receiver.commit("two")

    def assert_untouched(self) -> None:
        """Nothing live has changed; after an abort it serves as before, and the sync passes when it is done right."""
        assert equal(self.model.everything(), self.old)
        self.receiver.abort()
        assert (self.receiver.state, self.model.version, self.model.closed) == (State.IDLE, 1, None)
        self.begin()
        self.deliver()
        self.finish()
        assert equal(self.model.everything(), self.new)
        assert (self.receiver.state, self.model.version, self.model.closed) == (State.IDLE, 2, None)


def sealed(chunk: Chunk, **changes: Any) -> Chunk:
    """The chunk with another header or payload and a checksum that is right again."""
    payload = changes.pop("payload", chunk.payload)
    header = replace(chunk.header, **changes)
    pieces, start = [], 0
    for piece in header.pieces:
        pieces.append((piece, payload[start : start + piece.nbytes]))
        start += -(-piece.nbytes // 16) * 16
    return Chunk(make_chunk(header.session, header.number, pieces).header, payload)


def flipped(chunk: Chunk) -> Chunk:
    payload = chunk.payload.clone()
    payload[0] ^= 4
    return Chunk(chunk.header, payload)


def renamed(chunk: Chunk, name: str) -> Chunk:
    first, *rest = chunk.header.pieces
    return sealed(chunk, pieces=(replace(first, name=name), *rest))


def encoded_as(chunk: Chunk, encoding: str) -> Chunk:
    first, *rest = chunk.header.pieces
    return sealed(chunk, pieces=(replace(first, encoding=encoding), *rest))


def longer(chunk: Chunk) -> Chunk:
    """A tensor with sixteen bytes too many, everything else right."""
    *rest, last = chunk.header.pieces
    payload = torch.cat((chunk.payload, torch.zeros(16, dtype=torch.uint8)))
    return sealed(chunk, pieces=(*rest, replace(last, nbytes=last.nbytes + 16)), payload=payload)


def huge(world: World) -> Chunk:
    """Everything in one chunk."""
    pieces = [entry for chunk in world.chunks for entry in open_chunk(chunk)]
    return make_chunk("two", 0, pieces)


CHUNKS: dict[str, tuple[Callable[[World], Chunk], type[Exception], str]] = {
    "missing": (lambda w: w.chunks[2], RefusedError, "chunk 2 came where chunk 1 was due"),
    "duplicate": (lambda w: w.chunks[0], RefusedError, "chunk 0 came a second time where chunk 1 was due"),
    "extra": (
        lambda w: Chunk(replace(w.chunks[1].header, number=99), w.chunks[1].payload),
        RefusedError,
        r"chunk 99 came, \d+ were announced",
    ),
    "truncated": (
        lambda w: Chunk(w.chunks[1].header, w.chunks[1].payload[:-16]),
        RefusedError,
        r"chunk 1 has a payload of \d+ bytes, its pieces need \d+",
    ),
    "no payload": (
        lambda w: Chunk(w.chunks[1].header, w.chunks[1].payload[:0]),
        RefusedError,
        "payload of 0 bytes",
    ),
    "padded": (
        lambda w: Chunk(w.chunks[1].header, torch.cat((w.chunks[1].payload, w.chunks[1].payload[:1]))),
        RefusedError,
        "its pieces need",
    ),
    "corrupt payload": (lambda w: flipped(w.chunks[1]), RefusedError, "chunk 1 is corrupt"),
    "corrupt header": (
        lambda w: Chunk(replace(w.chunks[1].header, checksum=1), w.chunks[1].payload),
        RefusedError,
        "chunk 1 is corrupt",
    ),
    "payload of the chunk before": (
        lambda w: Chunk(w.chunks[1].header, w.chunks[0].payload),
        RefusedError,
        "chunk 1 (is corrupt|has a payload of)",
    ),
    "unknown tensor": (lambda w: renamed(w.chunks[1], "extra"), RefusedError, "chunk 1: extra is unknown"),
    "tensor of a former chunk": (
        lambda w: renamed(w.chunks[1], w.chunks[0].header.pieces[0].name),
        RefusedError,
        "chunk 1: .* came twice",
    ),
    "unknown encoding": (lambda w: encoded_as(w.chunks[1], "zip"), RefusedError, "unknown encoding 'zip'"),
    "too long a tensor": (lambda w: longer(w.chunks[1]), RefusedError, r"came with \d+ bytes, .* has \d+"),
    "another session": (
        lambda w: sealed(w.chunks[1], session="three"),
        ProtocolError,
        "chunk 1 belongs to sync three, open is two",
    ),
}
