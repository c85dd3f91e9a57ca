"""The part of ranks other than 0 in a weight sync: they hand over to rank 0 what they own, chunk by chunk, as it asks.

Where processes share a model, rank 0 has the sender. Every rank iterates over the export at the same time
(`learner.policy.Policy.export`), so that each expert is quantised by the rank that owns it and travels packed.
"""

from __future__ import annotations

from kernels.experts import StoredLayout
from kernels.precision_map import PrecisionMap
from rl.sync.sender import Named, Source, chosen_codec, exported, manifest_and_cut


class Follower:
    """The calls of `rl.sync.sender.Sender`, in the same order. They give nothing."""

    def __init__(
        self, source: Source, precision_map: PrecisionMap, layout: StoredLayout = StoredLayout.ROWS
    ) -> None:
        self._source, self._map, self._layout = source, precision_map, layout
        self._stream: Named = iter(())
        self._cut: list[list[str]] | None = None  # None: what is sent comes from the sender's copy
        self._operands = False
        self._next_chunk = 0

    def open(self, codec: str, bucket_bytes: int) -> None:
        chosen = chosen_codec(codec)
        self._stream = exported(self._source, self._map, self._layout, chosen)
        self._operands, self._next_chunk = chosen.operands, 0
        _, self._cut = manifest_and_cut(self._source, self._map, self._layout, chosen, bucket_bytes)

    def open_kept(self) -> None:
        self._cut = None

    def chunk(self) -> None:
        if self._cut is None:
            return
        for expected in self._cut[self._next_chunk]:
            name, _ = next(self._stream)
            assert name == expected, f"this rank exports {name} where rank 0 asks for {expected}"
        self._next_chunk += 1

    def close(self) -> None:
        if self._cut is None:
            return
        if self._operands:
            _drain(self._source.export(self._map, self._layout))
        _drain(self._source.export_derived(self._map, self._layout))

    def abort(self) -> None:
        self._stream, self._cut = iter(()), None


def _drain(stream: Named) -> None:
    for _ in stream:
        pass
