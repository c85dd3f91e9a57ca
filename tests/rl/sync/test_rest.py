"""Sleeping and waking in every order: what is allowed is what a model of the order allows, and nothing else happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.sync.protocol import ProtocolError, State
from rl.sync.receiver import Receiver
from rl.sync.rest import Rest, Stage
from rl.sync.sender import Sender
from tests.rl.sync.worlds import MAP, Learner, Model, copied, equal, sync, wanted


class Engine:
    """Notes what it is asked for, and loses its weights as an engine does."""

    def __init__(self, model: Model) -> None:
        self.model, self.calls = model, []

    def sleep(self, keep: bool) -> None:
        self.calls.append("sleep")
        if not keep:
            for tensor in self.model.tensors().values():
                tensor.zero_()

    def wake_weights(self) -> None:
        self.calls.append("wake_weights")

    def wake_cache(self) -> None:
        self.calls.append("wake_cache")


def world(keep: bool) -> tuple[Learner, Sender, Receiver, Rest]:
    learner, model = Learner(), Model()
    sender, receiver = Sender(learner, MAP, keep=True), Receiver(model)
    sync(sender, receiver, 1)
    return learner, sender, receiver, Rest(Engine(model), receiver, keep)


NEXT = {
    ("awake", "sleep"): "asleep",
    ("asleep", "wake_weights"): "weights",
    ("weights", "wake_cache"): "awake",
}


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.lists(st.sampled_from(["sleep", "wake_weights", "wake_cache", "sync"]), max_size=12))
def test_only_the_one_order_is_allowed(keep: bool, calls: list[str]) -> None:
    learner, sender, receiver, rest = world(keep)
    stage, version, lost, done = "awake", 1, False, []
    for call in calls:
        before = rest.stage, receiver.state, receiver.holder.closed
        allowed = stage != "asleep" if call == "sync" else (stage, call) in NEXT
        if not allowed:
            with pytest.raises(ProtocolError, match=r"asleep|it belongs to"):
                if call == "sync":
                    sync(sender, receiver, version + 1, "packed")
                else:
                    getattr(rest, call)()
            sender.abort()
            assert (rest.stage, receiver.state, receiver.holder.closed) == before
            continue
        if call == "sync":
            version, lost = version + 1, False
            learner.step()
            sync(sender, receiver, version, "packed")
            assert equal(receiver.holder.everything(), wanted(learner))  # type: ignore[attr-defined]
        else:
            stage = NEXT[stage, call]
            getattr(rest, call)()
            done.append(call)
            lost = lost or (call == "sleep" and not keep)
        serves = receiver.holder.closed is None
        assert serves == (stage != "asleep" and not lost)
        assert receiver.holder.version == version
    assert rest.stage is Stage(stage)
    assert rest._engine.calls == done  # type: ignore[attr-defined]


def test_no_sleep_and_no_waking_while_a_sync_is_open() -> None:
    _, sender, receiver, rest = world(keep=True)
    said = sender.open("s", 2, "packed", 1000)
    receiver.begin(said)
    receiver.receive(copied(sender.chunk()))
    with pytest.raises(ProtocolError, match=r"sleep came while the sync of version 2 is open \(open\)"):
        rest.sleep()
    assert rest.stage is Stage.AWAKE
    receiver.abort()
    sender.abort()
    rest.sleep()
    rest.wake_weights()
    receiver.begin(sender.open("s", 2, "packed", 1000))
    with pytest.raises(ProtocolError, match="wake_cache came while the sync of version 2 is open"):
        rest.wake_cache()
    assert rest.stage is Stage.WEIGHTS


def test_kept_weights_take_changes_and_discarded_ones_only_whole_tensors() -> None:
    for keep in (True, False):
        learner, sender, receiver, rest = world(keep)
        rest.sleep()
        rest.wake_weights()
        assert receiver.state is (State.IDLE if keep else State.TORN)
        assert (receiver.held().root == sender.kept_root) is keep
        learner.step()
        sent = sync(sender, receiver, 2, "delta")
        assert (sent.changed < sent.total) is keep
        assert equal(receiver.holder.everything(), wanted(learner))  # type: ignore[attr-defined]
        rest.wake_cache()
        assert receiver.holder.closed is None
