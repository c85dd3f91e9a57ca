"""Learner, weight sync and samplers as processes: both transports that a CPU has, and a sampler that is killed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl.actors import WeightSyncActor
from rl.cluster import Remote, local_cluster, start_actor, stop_actor, wait
from rl.config.cluster import SyncConfig
from rl.deaths import ActorDied
from rl.fleet import Fleet
from tests.rl.sync.processes import SmallLearner, SmallSampler
from tests.rl.sync.worlds import MAP, equal

pytestmark = pytest.mark.slow

TIMEOUT_S = 600  # of the process group: nobody waits for it


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_cluster(80):
        yield


class Run:
    def __init__(self, folder: Path, transport: str, codec: str, samplers: int = 2) -> None:
        self.folder, self.started = folder, 0
        name = f"{transport}_{samplers}"
        self.learner = start_actor(SmallLearner, f"learner_{name}", 1, folder / "log")
        config = SyncConfig(codec=codec, transport=transport, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
        started = [self.start(index) for index in range(samplers)]
        sync = start_actor(
            WeightSyncActor, f"sync_{name}", 1, folder / "log", self.learner, started, MAP, config
        )
        self.fleet = Fleet(started, sync, self.start, restarts=3)

    def start(self, index: int) -> Remote:
        self.started += 1
        name = f"{self.folder.name}_{index}"  # of its predecessor, too
        return start_actor(SmallSampler, name, 1, self.folder / "log", 40 + self.started)

    def assert_all_hold(self, version: int) -> None:
        want = self.learner.content()
        for sampler in self.fleet.samplers:
            assert equal(sampler.content(), want)
        states = wait([sampler.later.state() for sampler in self.fleet.samplers])
        assert {(held, closed) for held, _, closed in states} == {(version, None)}
        assert len({root for _, root, _ in states}) == 1


@pytest.mark.parametrize("transport", ["ray", "process_group"])
def test_a_sampler_killed_when_a_chunk_arrives_rejoins(transport: str, tmp_path: Path) -> None:
    run = Run(tmp_path, transport, "delta")
    first = run.fleet.sync(1)
    run.assert_all_hold(1)
    run.learner.step()
    second = run.fleet.sync(2)
    run.assert_all_hold(2)
    assert second["sync/bytes"] < first["sync/bytes"] / 2

    run.learner.step()
    run.fleet.samplers[1].doom(0)
    run.fleet.sync(3)
    run.assert_all_hold(3)
    assert run.started == 3

    run.learner.step()
    fourth = run.fleet.sync(4)  # changes again, to both
    run.assert_all_hold(4)
    assert 0 < fourth["sync/changed_share"] < 0.3

    run.learner.step()
    for chunk, sampler in enumerate(run.fleet.samplers):  # in the same sync, so that nobody is left
        sampler.doom(chunk)
    fifth = run.fleet.sync(5)
    run.assert_all_hold(5)
    assert (
        fifth["sync/bytes"] == first["sync/bytes"]
    )  # whole, as successors hold nothing that could be changed
    assert (run.started, run.fleet.restarts) == (5, 3)

    run.learner.step()
    sampler = run.fleet.samplers[0]
    stop_actor(sampler)  # between two syncs, and once too often
    with pytest.raises(ActorDied) as found:
        run.fleet.sync(6)
    log = re.escape(str(tmp_path / "log"))
    assert re.fullmatch(
        rf"sampler 0 \(process \d+\) died in the weight sync of version 6; its log: {log};"
        r" sync\.restarts=3: no more restarts",
        str(found.value),
    )
    assert "The actor died unexpectedly" in (tmp_path / "log").read_text()  # Ray's account


def test_a_process_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    actor = start_actor(SmallSampler, "sampler_1", 1, tmp_path / "log", "no number")
    for ask in (lambda: actor.ready(), lambda: wait(actor.later.ready())):
        with pytest.raises(ActorDied) as found:
            ask()
        said = str(found.value)
        assert re.match(r"sampler_1 \(process \d+\) did not start: \w+Error: .*; its log: /", said)
        assert "\n" not in said and len(said) < 500
    account = "The actor died because of an error"  # Ray's, once
    assert (tmp_path / "log").read_text().count(account) == 1


def test_a_death_releases_those_who_wait_for_what_it_was_to_pass_on(tmp_path: Path) -> None:
    """In a group of four, gloo's broadcast reaches some members by way of others: nobody waits for the timeout."""
    run = Run(tmp_path, "process_group", "packed", samplers=3)
    run.fleet.sync(1)
    with ThreadPoolExecutor(1) as thread:
        run.learner.step()
        run.fleet.samplers[1].doom(0)
        thread.submit(run.fleet.sync, 2).result(timeout=TIMEOUT_S / 6)
        run.assert_all_hold(2)
    assert run.started == 4
