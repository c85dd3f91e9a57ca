"""The weight-sync protocol: what is said, in which order, and what each side may conclude.

    sender                                            receiver: IDLE at version v
    begin(Announcement)  ------------------------->   OPEN: checks everything announced; nothing is generated any more
    chunk(0), chunk(1), ... chunk(n - 1)  -------->   OPEN: checks and stages; nothing live is touched
    end()  --------------------------------------->   INSTALLED: all chunks are here; live tensors replaced in place;
           <---- digests of what is now held ------   derived tensors made anew; everything held is hashed
    compares with its own: `attest`
    commit()  ------------------------------------>   IDLE at the new version: serves again
    or abort()  ---------------------------------->   OPEN: IDLE at v, untouched. INSTALLED: TORN

A receiver generates in IDLE only, so that nothing half-new, and nothing that was not attested, is ever served. TORN (an
installation that failed, or was rejected) serves nothing either; a sync of whole tensors brings it back, and only that.
ASLEEP (its memory is the learner's for a while, see `rl.sync.rest`) leads back to where it was, or to TORN without the
weights; no sync begins in it.

Every message names the sync's `session`; two syncs cannot mix. A chunk carries its number, the pieces in its payload
with a digest of each (`kernels.digest.fast_digest`: against accidents, not adversaries) and a checksum over all that.
Chunks come in order. A refused message changes nothing, and its error says what was wrong; the sender then aborts.

Digests cover, under their names on the wire, all tensors held, and the tensors that the receiver derives from them
(decoded weights, decode scales), which the sender derives from its own.

A sampler of several processes is as many receivers. Whole tensors are announced and travel; a receiver keeps its part
of them (`kernels.shard`), of which the sender, who knows the parts, has digests too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

import torch

from kernels.digest import byte_view, fast_digests
from kernels.experts import StoredLayout
from kernels.shard import NO_SHARDS, Shards

ALIGNMENT = 16  # bytes; every piece of a payload starts at a multiple of it


class ProtocolError(RuntimeError):
    """A message that does not fit the receiver's (or sender's) state."""


class RefusedError(ValueError):
    """A message whose content is wrong: nothing has changed."""


class AttestationError(RuntimeError):
    """A receiver holds other bytes than the sender has."""


class State(StrEnum):
    IDLE = "idle"
    OPEN = "open"
    INSTALLED = "installed"
    TORN = "torn"
    ASLEEP = "asleep"


@dataclass(frozen=True)
class TensorSpec:
    """dtype: a torch type's name, such as "float32"."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize * prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


Manifest = Mapping[str, TensorSpec]
Digests = Mapping[str, int]


@dataclass(frozen=True)
class Held:
    """What a receiver is known to hold: version, and `root_digest` of what it attested to.

    root: of the whole content, of which a receiver may hold a part. None where nothing was attested (weights that it
    loaded by itself) or the receiver is torn.
    """

    version: int
    root: str | None


@dataclass(frozen=True)
class Announcement:
    """What `begin` says.

    session: of this sync alone. fingerprint: of the precision map under which experts were quantised. layout: the order
    of their 4-bit weights. codec: a name in `rl.sync.codecs`. manifest: the tensors that the receiver shall hold
    afterwards. base: the content that the pieces change, by `Held.root`; None for whole tensors. chunks: how many
    follow. bucket_bytes: most bytes of tensors in a chunk of more than one.
    """

    session: str
    version: int
    fingerprint: str
    codec: str
    manifest: Manifest
    base: str | None
    chunks: int
    bucket_bytes: int
    layout: StoredLayout = StoredLayout.ROWS


@dataclass(frozen=True)
class Piece:
    """One tensor in a chunk: its name, how it is encoded (see `rl.sync.codecs`), the bytes of the encoding, and their
    digest, which `make_chunk` fills in.
    """

    name: str
    encoding: str
    nbytes: int
    digest: int = 0


@dataclass(frozen=True)
class ChunkHeader:
    """checksum: in [0, 2^64), of the rest of the header, and so of the digests in it."""

    session: str
    number: int
    pieces: tuple[Piece, ...]
    checksum: int = 0


@dataclass(frozen=True, eq=False)
class Chunk:
    """payload: uint8 [bytes], the pieces one after another, each padded to `ALIGNMENT`."""

    header: ChunkHeader
    payload: torch.Tensor


def make_chunk(session: str, number: int, pieces: Sequence[tuple[Piece, torch.Tensor]]) -> Chunk:
    """Pieces with their encodings (any tensors; their bytes count). A single aligned one is not copied."""
    parts: list[torch.Tensor] = []
    for _, tensor in pieces:
        content = byte_view(tensor)
        padding = _padded(content.numel()) - content.numel()
        parts += [content, content.new_zeros(padding)] if padding else [content]
    payload = (
        parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    )
    digests = _digests([content for _, content in pieces])
    said = tuple(replace(piece, digest=digest) for (piece, _), digest in zip(pieces, digests, strict=True))
    header = ChunkHeader(session, number, said)
    return Chunk(replace(header, checksum=_checksum(header)), payload)


def open_chunk(chunk: Chunk) -> list[tuple[Piece, torch.Tensor]]:
    """The pieces with their encodings, uint8 views of the payload. Raises RefusedError unless the chunk is intact."""
    header, payload = chunk.header, chunk.payload
    expected = sum(_padded(piece.nbytes) for piece in header.pieces)
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != expected:
        raise RefusedError(
            f"chunk {header.number} has a payload of {payload.numel() * payload.element_size()} bytes, its pieces need"
            f" {expected}"
        )
    if _checksum(header) != header.checksum:
        raise RefusedError(f"chunk {header.number} is corrupt: its header has another checksum")
    opened, start = [], 0
    for piece in header.pieces:
        opened.append((piece, payload[start : start + piece.nbytes]))
        start += _padded(piece.nbytes)
    digests = _digests([content for _, content in opened])
    wrong = [p.name for p, digest in zip(header.pieces, digests, strict=True) if p.digest != digest]
    if wrong:
        raise RefusedError(f"chunk {header.number} is corrupt: {listed(wrong, ', ')}")
    return opened


def buckets(manifest: Manifest, limit: int) -> list[list[str]]:
    """Names in order, cut so that a bucket holds at most `limit` bytes of tensors; a larger tensor has its own."""
    cut: list[list[str]] = []
    filled = 0
    for name, spec in manifest.items():
        if not cut or filled + spec.nbytes > limit:
            cut.append([])
            filled = 0
        cut[-1].append(name)
        filled += spec.nbytes
    return cut


def root_digest(digests: Digests) -> str:
    """16 hexadecimal digits that stand for all digests."""
    text = "\n".join(f"{name} {digests[name]:016x}" for name in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def attest(sent: Digests, held: Digests, receiver: str, version: int) -> None:
    """Raise AttestationError, naming the tensors, unless the receiver holds exactly what the sender has."""
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise AttestationError(
            f"weights version {version}: {receiver} holds other bytes than were sent: {listed(wrong, ', ', 5)}"
        )


def listed(items: Iterable[str], separator: str = "; ", shown: int = 10) -> str:
    """The first of `items`, and how many more there are."""
    items = list(items)
    rest = f" and {len(items) - shown} more" if len(items) > shown else ""
    return separator.join(items[:shown]) + rest


def manifest_of(tensors: Mapping[str, torch.Tensor], shards: Shards = NO_SHARDS) -> dict[str, TensorSpec]:
    """Of the whole tensors, of which `tensors` are the parts that `shards` say."""
    manifest = {}
    for name, tensor in tensors.items():
        own, shard = TensorSpec.of(tensor), shards.get(name)
        manifest[name] = own if shard is None else replace(own, shape=shard.whole(own.shape))
    return manifest


def manifest_problems(offered: Manifest, expected: Manifest) -> list[str]:
    """In words, every way in which `offered` is not `expected`."""
    problems = [f"{name} is missing" for name in expected if name not in offered]
    for name, spec in offered.items():
        if name not in expected:
            problems.append(f"{name} is unknown")
        elif spec != expected[name]:
            problems.append(f"{name} is {spec}, expected {expected[name]}")
    return problems


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _digests(contents: Sequence[torch.Tensor]) -> list[int]:
    """`fast_digest` of each, in one wait for the device."""
    return list(fast_digests({str(i): content for i, content in enumerate(contents)}).values())


def _checksum(header: ChunkHeader) -> int:
    text = repr((header.session, header.number, header.pieces))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
