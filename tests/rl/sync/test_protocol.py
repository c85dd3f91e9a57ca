"""The contract of the protocol: every fault at every state is refused by name and leaves nothing half-new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.digest import fast_digest
from kernels.experts import StoredLayout
from rl.sync.protocol import (
    Announcement,
    AttestationError,
    Chunk,
    ChunkHeader,
    Piece,
    ProtocolError,
    RefusedError,
    State,
    TensorSpec,
    attest,
    buckets,
    make_chunk,
    open_chunk,
)
from tests.rl.sync.faults import CHUNKS, CODECS, LAYOUTS, LIMIT, World, encoded_as, huge, sealed
from tests.rl.sync.worlds import MAP, equal


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_sync_brings_exactly_the_senders_content(codec: str, layout: StoredLayout) -> None:
    world = World(codec, layout=layout)
    assert world.said.chunks > 5
    world.begin()
    world.deliver()
    assert equal(world.model.everything(), world.old)
    memory = {name: tensor.data_ptr() for name, tensor in world.model.tensors().items()}
    world.finish()
    assert equal(world.model.everything(), world.new)
    assert memory == {name: tensor.data_ptr() for name, tensor in world.model.tensors().items()}
    assert any(name.endswith(".words") for name in memory) == (layout is StoredLayout.TILES)


def without(name: str) -> Callable[[Announcement], dict[str, Any]]:
    return lambda said: {"manifest": {key: spec for key, spec in said.manifest.items() if key != name}}


ANNOUNCEMENTS: list[tuple[Callable[[Announcement], dict[str, Any]], str]] = [
    (lambda said: {"version": 1}, "version 1 is not newer than 1, which is held"),
    (lambda said: {"version": 0}, "version 0 is not newer than 1, which is held"),
    (
        lambda said: {"fingerprint": "0" * 16},
        f"precision map {'0' * 16}, this sampler runs under {MAP.fingerprint}",
    ),
    (
        lambda said: {"layout": StoredLayout.TILES},
        "version 2 was laid out in tiles, this sampler holds its experts in rows",
    ),
    (lambda said: {"codec": "zip"}, "unknown codec 'zip'; there are packed, delta, bf16"),
    (without("odd"), "do not fit this model: odd is missing"),
    (lambda said: {"manifest": {**said.manifest, "extra": TensorSpec("uint8", (1,))}}, "extra is unknown"),
    (
        lambda said: {"manifest": {**said.manifest, "odd": TensorSpec("bfloat16", (3,))}},
        r"odd is bfloat16 \[3\], expected float32 \[3\]",
    ),
    (
        lambda said: {"manifest": {**said.manifest, "odd": TensorSpec("float32", (1, 3))}},
        r"odd is float32 \[1, 3\], expected float32 \[3\]",
    ),
    (lambda said: {"base": "f" * 16}, f"changes content {'f' * 16}, held is [0-9a-f]{{16}}"),
    (lambda said: {"chunks": -1}, "-1 chunks .* make no sense"),
]


@pytest.mark.parametrize(("change", "message"), ANNOUNCEMENTS)
def test_announcements_that_do_not_fit_are_refused(
    change: Callable[..., dict[str, Any]], message: str
) -> None:
    world = World()
    with pytest.raises(RefusedError, match=message):
        world.begin(**change(world.said))
    assert world.model.closed is None
    world.assert_untouched()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", CHUNKS)
def test_chunks_that_are_wrong_are_refused_and_stage_nothing(fault: str, layout: StoredLayout) -> None:
    world = World(layout=layout)
    make, error, message = CHUNKS[fault]
    world.begin()
    world.deliver(0)
    with pytest.raises(error, match=message):
        world.receiver.receive(make(world))
    assert world.receiver.state is State.OPEN
    with pytest.raises(RefusedError, match=r"1 of \d+ chunks came; .* did not come"):
        world.receiver.end("two")
    world.deliver(*range(1, len(world.chunks)))  # the right ones are taken all the same
    world.assert_untouched()


def test_an_oversize_chunk_is_refused_and_an_oversize_tensor_is_not() -> None:
    world = World()
    sizes = {name: spec.nbytes for name, spec in world.said.manifest.items()}
    alone = [chunk.header.pieces for chunk in world.chunks if sizes[chunk.header.pieces[0].name] > LIMIT]
    assert alone and all(len(pieces) == 1 for pieces in alone)
    world.begin()
    with pytest.raises(
        RefusedError, match=r"chunk 0 holds tensors of \d+ bytes, more than the 1000 announced"
    ):
        world.receiver.receive(huge(world))
    world.assert_untouched()


def test_an_empty_chunk_is_taken_and_stands_for_nothing() -> None:
    world = World()
    world.begin(chunks=len(world.chunks) + 1)
    world.receiver.receive(make_chunk("two", 0, []))
    for chunk in world.chunks:
        pieces = [(piece, content) for piece, content in open_chunk(chunk)]
        world.receiver.receive(make_chunk("two", chunk.header.number + 1, pieces))
    world.finish()
    assert equal(world.model.everything(), world.new)


def test_empty_chunks_instead_of_tensors_are_noticed_at_the_end() -> None:
    world = World()
    world.begin()
    for number in range(len(world.chunks)):
        world.receiver.receive(make_chunk("two", number, []))
    with pytest.raises(RefusedError, match=r"incomplete: .*model.embed_tokens.weight did not come"):
        world.receiver.end("two")
    world.assert_untouched()


DELTAS: list[tuple[str, int, str]] = [
    ("gaps8:999999", 0, "cannot hold 999999 changes"),
    ("gaps16:0", 0, "cannot hold 0 changes"),
    ("same", 0, r"is said to be the same and came with \d+ bytes"),
    ("gaps9:1", 0, "unknown encoding 'gaps9:1'"),
]


@pytest.mark.parametrize(("encoding", "number", "message"), DELTAS)
def test_changes_that_cannot_be_are_refused(encoding: str, number: int, message: str) -> None:
    world = World("delta")
    assert world.chunks[number].header.pieces[0].encoding.startswith("gaps")
    world.begin()
    with pytest.raises(RefusedError, match=message):
        world.receiver.receive(encoded_as(world.chunks[number], encoding))
    world.assert_untouched()


def test_changes_are_refused_where_whole_tensors_were_announced() -> None:
    world = World("delta")
    world.begin(base=None)
    with pytest.raises(RefusedError, match=r"comes as gaps.* to a sync without a base"):
        world.deliver(0)
    world.assert_untouched()


def test_messages_out_of_place_are_refused_and_change_nothing() -> None:
    world = World()
    receiver = world.receiver
    calls: dict[str, Callable[[], object]] = {
        "chunk 0": lambda: world.deliver(0),
        "the end": lambda: receiver.end("two"),
        "commit": lambda: receiver.commit("two"),
    }
    for message, call in calls.items():
        with pytest.raises(ProtocolError, match=rf"{message} came, and no sync is open \(idle\)"):
            call()
    world.begin()
    with pytest.raises(ProtocolError, match="commit came in state open, it belongs to installed"):
        receiver.commit("two")
    for call in (lambda: receiver.end("three"), lambda: receiver.commit("three")):
        with pytest.raises(ProtocolError, match="belongs to sync three, open is two"):
            call()
    with pytest.raises(ProtocolError, match="the sync that is open is two, not three"):
        receiver.abort("three")
    assert receiver.state is State.OPEN
    world.deliver()
    receiver.end("two")
    for message in ("chunk 0", "the end"):
        with pytest.raises(ProtocolError, match=f"{message} came in state installed, it belongs to open"):
            calls[message]()
    receiver.commit("two")
    assert equal(world.model.everything(), world.new)


def test_two_syncs_at_once_do_not_mix() -> None:
    world = World()
    world.begin()
    world.deliver(0)
    with pytest.raises(ProtocolError, match=r"version 3: the sync of version 2 is still open \(open\)"):
        world.begin(session="three", version=3)
    with pytest.raises(ProtocolError, match="belongs to sync three"):
        world.receiver.receive(sealed(world.chunks[1], session="three"))
    world.deliver(*range(1, len(world.chunks)))
    world.finish()
    assert equal(world.model.everything(), world.new)

    world.sender.open("four", 4, "packed", LIMIT)
    for call in (
        lambda: world.sender.open("five", 5, "packed", LIMIT),
        lambda: world.sender.open_kept("five", LIMIT),
    ):
        with pytest.raises(ProtocolError, match=r"version 4 is still open at the sender|no copy"):
            call()


def test_many_differences_are_named_in_part() -> None:
    sent = {f"t{i}": i for i in range(9)}
    with pytest.raises(AttestationError, match=r"sampler 0 holds .*: t0, t1, t2, t3, t4 and 4 more"):
        attest(sent, dict.fromkeys(sent, 77), "sampler 0", 1)


def test_buckets_keep_the_order_and_the_limit() -> None:
    sizes = [5, 60, 5, 5, 50, 100, 0, 3]
    manifest = {f"t{i}": TensorSpec("uint8", (size,)) for i, size in enumerate(sizes)}
    assert buckets(manifest, 60) == [["t0"], ["t1"], ["t2", "t3", "t4"], ["t5"], ["t6", "t7"]]
    assert buckets({}, 60) == []


def test_a_chunk_header_says_everything_that_its_payload_does_not() -> None:
    chunk = make_chunk("s", 3, [(Piece("t", "whole", 3), torch.tensor([1, 2, 3], dtype=torch.uint8))])
    [piece] = chunk.header.pieces
    assert piece == Piece(
        "t", "whole", 3, int(fast_digest(torch.tensor([1, 2, 3], dtype=torch.uint8))) % 2**64
    )
    assert chunk.header == ChunkHeader("s", 3, (piece,), chunk.header.checksum)
    assert chunk.payload.tolist() == [1, 2, 3, *[0] * 13]
    for change in ({"session": "u"}, {"number": 4}, {"pieces": (replace(piece, name="u"),)}):
        with pytest.raises(RefusedError, match="corrupt"):
            open_chunk(Chunk(replace(chunk.header, **change), chunk.payload))
