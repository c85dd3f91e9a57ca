"""The contract of the protocol: every fault at every state is refused by name and leaves nothing half-new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernels.digest import fast_digest
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
from rl.sync.receiver import Receiver
from rl.sync.sender import Sender
from tests.rl.sync.worlds import MAP, Learner, Model, copied, equal, sync, wanted

CODECS = ("packed", "delta", "bf16")
LIMIT = 1000


class World:
    """A receiver that was synced to version 1, and a sync of version 2 begun with all its chunks made."""

    def __init__(self, codec: str = "packed", step: float = 1e-2) -> None:
        self.learner, self.model = Learner(), Model()
        self.sender, self.receiver = Sender(self.learner, MAP, keep=True), Receiver(self.model)
        sync(self.sender, self.receiver, 1)
        self.old = self.model.everything()
        self.learner.step(step)
        self.new = wanted(self.learner)
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


@pytest.mark.parametrize("codec", CODECS)
def test_a_sync_brings_exactly_the_senders_content(codec: str) -> None:
    world = World(codec)
    assert world.said.chunks > 5
    world.begin()
    world.deliver()
    assert equal(world.model.everything(), world.old)
    memory = {name: tensor.data_ptr() for name, tensor in world.model.tensors().items()}
    world.finish()
    assert equal(world.model.everything(), world.new)
    assert memory == {name: tensor.data_ptr() for name, tensor in world.model.tensors().items()}


def without(name: str) -> Callable[[Announcement], dict[str, Any]]:
    return lambda said: {"manifest": {key: spec for key, spec in said.manifest.items() if key != name}}


ANNOUNCEMENTS: list[tuple[Callable[[Announcement], dict[str, Any]], str]] = [
    (lambda said: {"version": 1}, "version 1 is not newer than 1, which is held"),
    (lambda said: {"version": 0}, "version 0 is not newer than 1, which is held"),
    (
        lambda said: {"fingerprint": "0" * 16},
        f"precision map {'0' * 16}, this sampler runs under {MAP.fingerprint}",
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


@pytest.mark.parametrize("fault", CHUNKS)
def test_chunks_that_are_wrong_are_refused_and_stage_nothing(fault: str) -> None:
    world = World()
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


@pytest.mark.parametrize("delivered", [0, 3])
def test_a_sender_that_dies_leaves_a_receiver_that_serves_nothing_until_it_is_released(
    delivered: int,
) -> None:
    world = World()
    world.begin()
    world.deliver(*range(delivered)) if delivered else None
    other = Sender(world.learner, MAP, keep=True)  # its successor knows nothing of the sync
    said = other.open("other", 2, "packed", LIMIT)
    with pytest.raises(ProtocolError, match="the sync of version 2 is still open"):
        world.receiver.begin(said)
    assert world.model.closed == "the sync of weights version 2 is open"
    world.assert_untouched()


def test_a_sender_that_dies_after_the_end_leaves_nothing_served() -> None:
    world = World()
    world.begin()
    world.deliver()
    world.receiver.end("two")
    assert world.model.closed is not None
    world.receiver.abort()
    assert world.receiver.state is State.TORN
    assert "rejected after their installation; a sync of whole tensors is needed" in str(world.model.closed)


def test_a_receiver_that_dies_is_known_by_its_content_and_gets_whole_tensors() -> None:
    world = World("delta")
    world.begin()
    world.deliver(0)
    successor = Receiver(Model())  # as the engine starts: version 0, attested by nobody
    assert successor.held().root is None
    with pytest.raises(RefusedError, match=r"changes content [0-9a-f]{16}, held is None"):
        successor.begin(world.said)
    said = world.sender.open_kept("whole", LIMIT)
    successor.begin(said)
    for _ in range(said.chunks):
        successor.receive(copied(world.sender.chunk()))
    installed = successor.end("whole")
    attest(world.sender.close().digests, installed.digests, "it", 2)
    successor.commit("whole")
    assert (successor.held().version, successor.held().root) == (2, world.sender.kept_root)
    assert equal(successor.holder.everything(), world.new)  # type: ignore[attr-defined]


def test_an_installation_that_fails_serves_nothing_until_whole_tensors_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.begin()
    world.deliver()

    def fail() -> dict[str, torch.Tensor]:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(world.model, "refresh", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            world.receiver.end("two")
    assert world.receiver.state is State.TORN
    assert str(world.model.closed).startswith("installing weights version 2 failed: out of memory")
    assert world.receiver.held().root is None

    changes = World("delta").said
    with pytest.raises(RefusedError, match=r"held is None \(torn\)"):
        world.receiver.begin(replace(changes, base=changes.base))
    world.begin()
    world.receiver.abort()
    assert world.receiver.state is State.TORN  # and an abort does not make it whole
    assert world.model.closed is not None
    world.begin()
    world.deliver()
    world.finish()
    assert world.model.closed is None
    assert equal(world.model.everything(), world.new)


def stale_cache(model: Model) -> None:
    """An engine that keeps what it had derived from the weights before."""
    before = dict(model.derived)
    model.refresh = lambda: before  # type: ignore[method-assign]


FAULTS: list[tuple[Callable[[Model], None], str]] = [
    (
        stale_cache,
        r"model.layers.0.experts.derived.w13.elements",
    ),
    (lambda m: setattr(m, "refresh", lambda: {}), r"model.layers.0.experts.derived.w13.elements"),
]


@pytest.mark.parametrize(("fault", "named"), FAULTS)
def test_attestation_names_what_is_not_as_sent(fault: Callable[[Model], None], named: str) -> None:
    world = World()
    fault(world.model)
    world.begin()
    world.deliver()
    with pytest.raises(AttestationError, match=rf"version 2: it holds other bytes than were sent: {named}"):
        world.finish()
    assert world.model.closed is not None
    world.receiver.abort("two")
    assert world.receiver.state is State.TORN


def test_bytes_that_change_behind_the_checks_are_found() -> None:
    """A payload that its memory's owner writes over between the arrival of the chunk and the end."""
    world = World()
    world.begin()
    world.deliver()
    world.chunks[1].payload[0] ^= 1
    with pytest.raises(AttestationError, match=world.chunks[1].header.pieces[0].name):
        world.finish()


def test_many_differences_are_named_in_part() -> None:
    sent = {f"t{i}": i for i in range(9)}
    with pytest.raises(AttestationError, match=r"sampler 0 holds .*: t0, t1, t2, t3, t4 and 4 more"):
        attest(sent, dict.fromkeys(sent, 77), "sampler 0", 1)


def test_buckets_keep_the_order_and_the_limit() -> None:
    sizes = [5, 60, 5, 5, 50, 100, 0, 3]
    manifest = {f"t{i}": TensorSpec("uint8", (size,)) for i, size in enumerate(sizes)}
    assert buckets(manifest, 60) == [["t0"], ["t1"], ["t2", "t3", "t4"], ["t5"], ["t6", "t7"]]
    assert buckets({}, 60) == []


class AnySequence(RuleBasedStateMachine):
    """Messages of two senders, right and wrong, in any order: what is served is always one of the senders' contents,
    whole, and the very one that the version says.
    """

    @initialize(codec=st.sampled_from(CODECS))
    def start(self, codec: str) -> None:
        self.worlds = {"a": World(codec), "b": World(codec, step=0.1)}
        self.worlds["b"].said = replace(self.worlds["b"].said, session="b", version=3)
        self.model, self.receiver = self.worlds["a"].model, self.worlds["a"].receiver
        self.worlds["a"].said = replace(self.worlds["a"].said, session="a")
        self.content = {1: self.worlds["a"].old}
        for name, version in (("a", 2), ("b", 3)):
            own = self.worlds[name]
            own.chunks = [sealed(chunk, session=name) for chunk in own.chunks]
            self.content[version] = own.new
        assert not equal(self.content[2], self.content[3])
        self.version = 1

    names = st.sampled_from(["a", "b"])

    def tell(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except (ProtocolError, RefusedError) as error:
            assert str(error)
            return False
        return True

    @rule(name=names)
    def begin(self, name: str) -> None:
        if self.tell(lambda: self.receiver.begin(self.worlds[name].said)):
            self.delivered = 0

    @rule(name=names)
    def all_chunks(self, name: str) -> None:
        for chunk in self.worlds[name].chunks:
            self.tell(lambda chunk=chunk: self.receiver.receive(chunk))

    @rule(name=names, number=st.integers(0, 30), fault=st.sampled_from([None, *CHUNKS]))
    def one_chunk(self, name: str, number: int, fault: str | None) -> None:
        world = self.worlds[name]
        chunk = world.chunks[number % len(world.chunks)] if fault is None else CHUNKS[fault][0](world)
        self.tell(lambda: self.receiver.receive(chunk))

    @rule(name=names)
    def abort(self, name: str) -> None:
        self.tell(lambda: self.receiver.abort(name))

    @rule()
    def release(self) -> None:
        self.receiver.abort()

    @rule(name=names)
    def end(self, name: str) -> None:
        world = self.worlds[name]
        installed: list[Any] = []
        if self.tell(lambda: installed.append(self.receiver.end(name))):
            attest(world.sent.digests, installed[0].digests, name, world.said.version)
            assert self.model.closed is not None

    @precondition(lambda self: self.receiver.state is State.INSTALLED)
    @rule(name=names)
    def commit(self, name: str) -> None:
        if self.tell(lambda: self.receiver.commit(name)):
            self.version = self.worlds[name].said.version

    @invariant()
    def what_is_served_is_whole(self) -> None:
        assert self.model.version == self.version
        assert (self.model.closed is None) == (self.receiver.state is State.IDLE)
        if self.receiver.state is State.IDLE:
            assert equal(self.model.everything(), self.content[self.version])


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


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
