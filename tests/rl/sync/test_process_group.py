"""The process group's ends over gloo, their members as threads; as processes they are in test_processes.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl.sync.process_group import GroupInlet, GroupOutlet
from rl.sync.protocol import Piece, attest, make_chunk
from rl.sync.receiver import Receiver
from rl.sync.sender import Sender
from rl.sync.transport import Parcel
from tests.rl.sync.worlds import MAP, Learner, Model, equal, wanted

CPU = torch.device("cpu")
TIMEOUT_S = 60


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def link(
    members: list[int], threads: ThreadPoolExecutor, timeout_s: float = TIMEOUT_S
) -> tuple[GroupOutlet, dict[int, GroupInlet]]:
    outlet = GroupOutlet(members, "127.0.0.1", timeout_s, CPU)
    size = len(members) + 1
    joining = {
        member: threads.submit(GroupInlet, "127.0.0.1", outlet.port, rank, size, timeout_s, CPU)
        for rank, member in enumerate(members, start=1)
    }
    outlet.join()
    return outlet, {member: future.result() for member, future in joining.items()}


def test_broadcasts_and_messages_to_some_arrive_as_sent(threads: ThreadPoolExecutor) -> None:
    outlet, inlets = link([0, 2], threads)
    for number, (receivers, size) in enumerate(
        [([0, 2], 1000), ([2], 70_000), ([0], 16), ([0, 2], 0), ([0, 2], 48)]
    ):
        content = torch.randint(256, (size,), dtype=torch.uint8)
        chunk = make_chunk("s", number, [(Piece("t", "whole", size), content)] if size else [])
        outlet.address(receivers)
        parcel = outlet.ship(chunk)
        for found in threads.map(lambda index, parcel=parcel: inlets[index].fetch(parcel), receivers):
            assert found.header == chunk.header
            assert torch.equal(found.payload, chunk.payload)
    outlet.flush()
    for end in (outlet, *inlets.values()):
        end.close()


def test_a_sync_of_two_samplers_and_one_that_comes_in_place_of_another(threads: ThreadPoolExecutor) -> None:
    learner = Learner()
    sender = Sender(learner, MAP, keep=True)
    receivers = {0: Receiver(Model(1)), 1: Receiver(Model(2))}

    def run(version: int | None, codec: str, targets: list[int]) -> None:
        base = sender.kept_root if codec == "delta" else None
        said = (
            sender.open_kept("k", 1000) if version is None else sender.open("s", version, codec, 1000, base)
        )
        outlet.address(targets)
        for index in targets:
            receivers[index].begin(said)
        for _ in range(said.chunks):
            parcel = outlet.ship(sender.chunk())

            def take(index: int, parcel: object = parcel) -> None:
                receivers[index].receive(inlets[index].fetch(parcel))  # type: ignore[arg-type]

            list(threads.map(take, targets))
        ends = {index: receivers[index].end(said.session) for index in targets}
        sent = sender.close()
        outlet.flush()
        for index in targets:
            attest(sent.digests, ends[index].digests, str(index), said.version)
            receivers[index].commit(said.session)

    outlet, inlets = link([0, 1], threads)
    run(1, "packed", [0, 1])
    learner.step()
    run(2, "delta", [0, 1])
    outlet.close()
    inlets[1].close()  # its process is gone, and another comes
    receivers[1] = Receiver(Model(3))
    outlet, inlets = link([0, 1], threads)
    run(None, "packed", [1])
    learner.step()
    run(3, "delta", [0, 1])
    want = wanted(learner)
    for receiver in receivers.values():
        assert receiver.held().version == 3
        assert equal(receiver.holder.everything(), want)  # type: ignore[attr-defined]


def test_whoever_waits_hears_that_the_sender_has_closed_its_end(threads: ThreadPoolExecutor) -> None:
    """Long before the timeout of the group; and nothing goes through the group any more."""
    outlet, inlets = link([0, 1, 2], threads, timeout_s=20)
    outlet.address([0, 1, 2])
    content = torch.zeros(1000, dtype=torch.uint8)
    chunk = make_chunk("s", 0, [(Piece("t", "whole", 1000), content)])
    parcel = Parcel(chunk.header, (chunk.payload.numel(), True))
    waiting = [threads.submit(inlets[index].fetch, parcel) for index in (0, 1)]  # for what is never sent
    group = outlet._group  # lives on, as it does with a transfer that is under way
    outlet.close()
    for future in waiting:
        with pytest.raises(ConnectionError, match="chunk 0 did not come: the sender has closed its end"):
            future.result(timeout=10)
    with pytest.raises(ConnectionError, match="is closed"):
        inlets[0].fetch(parcel)
    with pytest.raises(ConnectionError, match="is closed"):
        outlet.ship(chunk)
    del group
