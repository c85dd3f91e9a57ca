"""The sending side of the protocol, over anything that exports tensors: chunks are made as they are asked for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kernels.digest import fast_digest
from kernels.experts import StoredLayout, split_wire_name
from kernels.precision_map import PrecisionMap
from kernels.shard import NO_SHARDS, Shards
from rl.sync.codecs import CODECS
from rl.sync.codecs.base import WHOLE, Codec
from rl.sync.codecs.delta import changed_bytes
from rl.sync.protocol import (
    Announcement,
    Chunk,
    Manifest,
    ProtocolError,
    TensorSpec,
    buckets,
    make_chunk,
    root_digest,
)

Named = Iterator[tuple[str, torch.Tensor]]
_Hashed = tuple[str, int | None]  # a tensor, and the process whose part of it; None: the whole


class Source(Protocol):
    """Whose weights are sent: `learner.policy.Policy`. All under a precision map and in a layout of 4-bit weights,
    those of the receivers.
    """

    def export_layout(
        self, precision_map: PrecisionMap, layout: StoredLayout
    ) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]: ...
    def export(self, precision_map: PrecisionMap, layout: StoredLayout) -> Named: ...
    def export_operands(self, precision_map: PrecisionMap) -> Named: ...
    def export_derived(self, precision_map: PrecisionMap, layout: StoredLayout) -> Named: ...


def exported(source: Source, precision_map: PrecisionMap, layout: StoredLayout, codec: Codec) -> Named:
    """What travels by `codec`."""
    if codec.operands:
        return source.export_operands(precision_map)
    return source.export(precision_map, layout)


@dataclass(frozen=True)
class Sent:
    """What the sender says when it is done.

    digests: of the whole content. parts: for each process of a sampler, of its part of those tensors that it does not
    hold whole. nbytes: of payloads. changed: bytes that differ from the content before, of `total` (a delta alone knows
    that). seconds: of the phases `gather`, `quantise` and `attest`.
    """

    version: int
    digests: dict[str, int]
    parts: Sequence[Mapping[str, int]]
    nbytes: int
    changed: int
    total: int
    seconds: dict[str, float]

    def held_by(self, rank: int) -> dict[str, int]:
        """Digests of what process `rank` of a sampler must hold."""
        return {**self.digests, **self.parts[rank]}

    @property
    def content(self) -> str:
        """As in `Held.root`."""
        return root_digest(self.digests)


@dataclass
class _Kept:
    """A copy of what was sent last, to find changes in, and to bring a sampler to this version."""

    version: int
    tensors: dict[str, torch.Tensor]
    digests: dict[str, int]
    parts: Sequence[Mapping[str, int]]

    @property
    def root(self) -> str:
        return root_digest(self.digests)


@dataclass
class _Export:
    said: Announcement
    codec: Codec
    cut: list[list[str]]
    stream: Named
    base: Mapping[str, torch.Tensor]
    from_kept: bool
    next_chunk: int = 0
    scalars: dict[_Hashed, torch.Tensor] = field(default_factory=dict)  # digests that are not read yet
    digests: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    changed: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Sender:
    """One sync at a time: `open`, `chunk` as often as announced, `close` or `abort`.

    layout: of 4-bit weights, as the receivers hold them. parts: for each process of a sampler, what it holds in part;
    samplers share out alike. keep: whether to hold a copy of what was sent last, as large
    as what a sampler holds. A delta, and a sampler that is to be brought to a version that the source has left since,
    need it.
    """

    def __init__(
        self,
        source: Source,
        precision_map: PrecisionMap,
        keep: bool,
        layout: StoredLayout = StoredLayout.ROWS,
        parts: Sequence[Shards] = (NO_SHARDS,),
    ) -> None:
        self._source, self._map, self._keep, self._layout = source, precision_map, keep, layout
        self._parts = parts
        self._kept: _Kept | None = None
        self._keeping: dict[str, torch.Tensor] = {}  # valid while `_kept` is not, and the other way round
        self._export: _Export | None = None

    @property
    def kept_root(self) -> str | None:
        """`root_digest` of the copy; None without one."""
        return None if self._kept is None else self._kept.root

    @property
    def kept_version(self) -> int | None:
        return None if self._kept is None else self._kept.version

    def open(
        self, session: str, version: int, codec: str, bucket_bytes: int, base: str | None = None
    ) -> Announcement:
        """Begin to send the source's present weights as `version`, as changes of content `base` if that is the copy.

        Raises ProtocolError while a sync is open and for a base that is not the copy, ValueError for an unknown codec.
        """
        self._require_closed(version)
        if base is not None and base != self.kept_root:
            raise ProtocolError(
                f"weights version {version}: content {base} is not what was kept, {self.kept_root}"
            )
        chosen = chosen_codec(codec)
        stream = exported(self._source, self._map, self._layout, chosen)
        kept = self._kept.tensors if self._kept is not None else {}
        self._begin(session, version, chosen, bucket_bytes, stream, base, kept, from_kept=False)
        if self._kept is not None:
            self._kept, self._keeping = None, kept  # written over as the sync goes on
        assert self._export is not None
        return self._export.said

    def open_kept(self, session: str, bucket_bytes: int) -> Announcement:
        """Begin to send the copy, whole, as the version that it is. Raises ProtocolError without a copy."""
        if self._kept is None:
            raise ProtocolError(
                "no copy of what was sent last is kept: a sampler cannot be brought to that version"
            )
        self._require_closed(self._kept.version)
        stream = iter(self._kept.tensors.items())
        self._begin(
            session,
            self._kept.version,
            chosen_codec("packed"),
            bucket_bytes,
            stream,
            None,
            {},
            from_kept=True,
        )
        assert self._export is not None
        return self._export.said

    def chunk(self) -> Chunk:
        """The next chunk. Raises ProtocolError when no sync is open or all chunks were made."""
        export = self._require_open()
        if export.next_chunk == export.said.chunks:
            raise ProtocolError(f"all {export.said.chunks} chunks were made")
        pieces = []
        for expected in export.cut[export.next_chunk]:
            with _timed(export.seconds, "quantise" if split_wire_name(expected) else "gather"):
                name, tensor = next(export.stream)
                _settle(tensor)
            assert name == expected, f"the source exports {name} where its layout has {expected}"
            piece, content = export.codec.encode(name, tensor, export.base.get(name))
            if not export.from_kept and not export.codec.operands:
                self._hash(export, name, tensor, whole=piece.encoding != WHOLE)  # which else the chunk has
                self._remember(name, tensor)
                export.changed += changed_bytes(piece, tensor)
            export.nbytes += piece.nbytes
            pieces.append((piece, content))
        chunk = make_chunk(export.said.session, export.next_chunk, pieces)
        export.next_chunk += 1
        if not export.codec.operands:
            export.digests |= {p.name: p.digest for p in chunk.header.pieces if p.encoding == WHOLE}
        return chunk

    def close(self) -> Sent:
        """All chunks were made: the digests, and the copy is what was sent. Raises ProtocolError before that."""
        export = self._require_open()
        said = export.said
        if export.next_chunk != said.chunks:
            raise ProtocolError(f"{export.next_chunk} of {said.chunks} chunks were made: not done yet")
        if export.codec.operands:
            for name, tensor in self._source.export(self._map, self._layout):
                with _timed(export.seconds, "attest"):
                    self._hash(export, name, tensor)
                self._remember(name, tensor)
        with _timed(export.seconds, "attest"):
            digests, parts = self._digests(export)
        if not export.from_kept and self._keep:
            self._kept, self._keeping = _Kept(said.version, self._keeping, digests, parts), {}
        total = sum(spec.nbytes for spec in said.manifest.values())
        self._export = None
        return Sent(said.version, digests, parts, export.nbytes, export.changed, total, dict(export.seconds))

    def abort(self) -> None:
        """Forget the sync. If the source was being sent, what its receivers hold is not known any more."""
        if self._export is not None and not self._export.from_kept:
            self._keeping = {}
        self._export = None

    def _begin(
        self,
        session: str,
        version: int,
        codec: Codec,
        bucket_bytes: int,
        stream: Named,
        base: str | None,
        kept: Mapping[str, torch.Tensor],
        from_kept: bool,
    ) -> None:
        manifest, cut = manifest_and_cut(self._source, self._map, self._layout, codec, bucket_bytes)
        fingerprint = self._map.fingerprint
        said = Announcement(
            session, version, fingerprint, codec.name, manifest, base, len(cut), bucket_bytes, self._layout
        )
        self._export = _Export(said, codec, cut, stream, kept if base is not None else {}, from_kept)

    def _hash(self, export: _Export, name: str, tensor: torch.Tensor, whole: bool = True) -> None:
        if whole:
            export.scalars[name, None] = fast_digest(tensor)
        for rank, shards in enumerate(self._parts):
            if name in shards:
                export.scalars[name, rank] = fast_digest(shards[name].of(tensor))

    def _digests(self, export: _Export) -> tuple[dict[str, int], list[dict[str, int]]]:
        """Of the whole content, and of the parts of each process of a sampler."""
        if export.from_kept:
            assert self._kept is not None
            return self._kept.digests, [dict(own) for own in self._kept.parts]
        for name, tensor in self._source.export_derived(self._map, self._layout):
            self._hash(export, name, tensor)
        digests, parts = dict(export.digests), [dict[str, int]() for _ in self._parts]
        numbers = torch.stack(list(export.scalars.values())).tolist() if export.scalars else []
        for (name, rank), number in zip(export.scalars, numbers, strict=True):
            (digests if rank is None else parts[rank])[name] = number % 2**64
        return digests, parts

    def _remember(self, name: str, tensor: torch.Tensor) -> None:
        if not self._keep:
            return
        if name in self._keeping:
            self._keeping[name].copy_(tensor)
        else:
            self._keeping[name] = tensor.detach().clone(memory_format=torch.contiguous_format)

    def _require_open(self) -> _Export:
        if self._export is None:
            raise ProtocolError("no sync is open at the sender")
        return self._export

    def _require_closed(self, version: int) -> None:
        if self._export is not None:
            open_one = self._export.said.version
            raise ProtocolError(
                f"weights version {version}: the sync of version {open_one} is still open at the sender"
            )


def manifest_and_cut(
    source: Source, precision_map: PrecisionMap, layout: StoredLayout, codec: Codec, bucket_bytes: int
) -> tuple[Manifest, list[list[str]]]:
    """What receivers shall hold, and the names of what travels in each chunk."""
    entries = source.export_layout(precision_map, layout).items()
    manifest: Manifest = {
        name: TensorSpec(str(dtype).removeprefix("torch."), shape) for name, (shape, dtype) in entries
    }
    return manifest, buckets(codec.travels(manifest, precision_map.layers), bucket_bytes)


def chosen_codec(name: str) -> Codec:
    if name not in CODECS:
        raise ValueError(f"the codec {name!r} is unknown; there are {', '.join(CODECS)}")
    return CODECS[name]


@contextmanager
def _timed(seconds: defaultdict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] += time.perf_counter() - started


def _settle(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
