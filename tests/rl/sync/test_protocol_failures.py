"""Sides that die, installations that fail, content that is not as sent: nothing half-new is ever served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rl.sync.protocol import (
    AttestationError,
    ProtocolError,
    RefusedError,
    State,
    attest,
)
from rl.sync.receiver import Receiver
from rl.sync.sender import Sender
from tests.rl.sync.faults import LIMIT, World
from tests.rl.sync.worlds import MAP, Model, copied, equal


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
