"""Random sequences of right and wrong messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernels.experts import StoredLayout
from rl.sync.protocol import (
    ProtocolError,
    RefusedError,
    State,
    attest,
)
from tests.rl.sync.faults import CHUNKS, CODECS, LAYOUTS, World, sealed
from tests.rl.sync.worlds import equal


class AnySequence(RuleBasedStateMachine):
    """Messages of two senders, right and wrong, in any order: what is served is always one of the senders' contents,
    whole, and the very one that the version says.
    """

    @initialize(codec=st.sampled_from(CODECS), layout=st.sampled_from(LAYOUTS))
    def start(self, codec: str, layout: StoredLayout) -> None:
        self.worlds = {"a": World(codec, layout=layout), "b": World(codec, step=0.1, layout=layout)}
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
