"""One learner and several samplers, without processes: what is sent to whom, and what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.experts import StoredLayout
from rl.actors import LearnerActor, SamplerActor
from rl.config.cluster import SyncConfig
from rl.deaths import ActorDied
from rl.fleet import Fleet
from rl.metrics import METRICS
from rl.sync import weight_sync
from rl.sync.protocol import AttestationError, RefusedError, State
from rl.sync.receiver import Receiver
from rl.sync.rest import Rest, Stage
from rl.sync.sender import Sender
from rl.sync.transport import RayInlet, RayOutlet
from rl.sync.weight_sync import NoSamplerLeft, WeightSync
from tests.rl.sync.worlds import MAP, Learner, Model, equal, wanted


class Local:
    """`rl.cluster.Remote` without a process. `later` answers at once with the result, or with what was raised.

    dies_in: a method in which the process ends. fails_in: one that raises.
    """

    def __init__(self, actor: Any, dies_in: str = "", fails_in: str = "") -> None:
        self.actor, self.dies_in, self.fails_in, self.dead = actor, dies_in, fails_in, False
        self.calls: list[str] = []
        self.later = SimpleNamespace()
        for method in dir(actor):
            if not method.startswith("_") and callable(getattr(actor, method)):
                setattr(self.later, method, self._caught(method))
                setattr(self, method, self._waiting(method))

    def _caught(self, method: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(method)
            self.dead = self.dead or method == self.dies_in
            if self.dead:
                return ActorDied("an actor", "died", 4711, "its.log")
            failed = [argument for argument in args if isinstance(argument, Exception)]
            if failed:
                return failed[0]  # as Ray has it: a call fails with the call that was to give its argument
            if method == self.fails_in:
                return ValueError(f"failed in {method}")
            try:
                return getattr(self.actor, method)(*args)
            except Exception as error:
                return error

        return call

    def _waiting(self, method: str) -> Callable[..., Any]:
        return lambda *args: wait(getattr(self.later, method)(*args))


def wait(result: Any) -> Any:
    if isinstance(result, list):
        return [wait(one) for one in result]
    if isinstance(result, Exception):
        raise result
    return result


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "wait", wait)
    monkeypatch.setattr(weight_sync, "as_done", lambda calls: iter(calls.items()))
    monkeypatch.setattr("rl.fleet.wait", wait)


def learner_actor(learner: Learner) -> LearnerActor:
    """The actor's own methods, around other weights than Megatron's."""
    actor = LearnerActor.__new__(LearnerActor)
    actor.policy = learner  # type: ignore[assignment]
    return actor


def sampler_actor(seed: int, layout: StoredLayout = StoredLayout.ROWS) -> SamplerActor:
    actor = SamplerActor.__new__(SamplerActor)
    actor.receiver, actor.inlet = Receiver(Model(seed, layout)), RayInlet()
    actor.device = torch.device("cpu")
    actor.ready = lambda: True  # type: ignore[method-assign]
    actor.memory_mib = lambda: seed  # type: ignore[method-assign]
    actor.state = lambda: (seed, actor.receiver.held().version)  # type: ignore[attr-defined]
    actor.generate = lambda *share: (seed, *share)  # type: ignore[method-assign,assignment]
    actor.rest = Rest(SimpleNamespace(sleep=bool, wake_weights=int, wake_cache=int), actor.receiver, False)
    return actor


class World:
    def __init__(
        self,
        samplers: int = 2,
        faults: dict[int, dict[str, str]] | None = None,
        layout: StoredLayout = StoredLayout.ROWS,
        **config: Any,
    ) -> None:
        self.learner, self.layout = Learner(layout=layout), layout
        faults = faults or {}
        self.samplers = [Local(sampler_actor(50 + i, layout), **faults.get(i, {})) for i in range(samplers)]
        self.remote = Local(learner_actor(self.learner))
        config = {"codec": "delta", **config}
        self.sync = WeightSync(self.remote, self.samplers, MAP, SyncConfig(**config))

    def model(self, index: int) -> Model:
        return self.samplers[index].actor.receiver.holder

    def all_hold(self, version: int, *indices: int) -> bool:
        want = wanted(self.learner, self.layout)
        models = [self.model(index) for index in indices or range(len(self.samplers))]
        return all((m.version, m.closed) == (version, None) and equal(m.everything(), want) for m in models)


@pytest.mark.parametrize("layout", list(StoredLayout))
@pytest.mark.parametrize("codec", ["packed", "delta", "bf16"])
def test_every_sampler_gets_every_version_and_the_metrics_are_in_the_table(
    codec: str, layout: StoredLayout
) -> None:
    world = World(3, layout=layout, codec=codec)
    for version in (1, 2, 3):
        world.learner.step()
        metrics = world.sync.sync(version)
        assert world.all_hold(version)
        assert metrics.keys() <= METRICS.keys()
        assert metrics["sync/tensors"] == len(world.learner.export_layout(MAP, layout))
        assert min(metrics.values()) >= 0
    entries = world.learner.export_layout(MAP, layout).values()
    held = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in entries)
    if codec == "packed":
        assert metrics["sync/bytes"] == held
    if codec == "delta":
        assert 0 < metrics["sync/bytes"] < held / 2
        assert 0 < metrics["sync/changed_share"] < 0.3
    else:
        assert "sync/changed_share" not in metrics


def test_samplers_of_different_layouts_are_refused() -> None:
    world = World(1)
    others = [*world.samplers, Local(sampler_actor(60, StoredLayout.TILES))]
    with pytest.raises(ValueError, match="in one layout, got sampler 0: rows, sampler 1: tiles"):
        WeightSync(world.remote, others, MAP, SyncConfig())


def test_unchanged_weights_cost_a_delta_nothing() -> None:
    world = World()
    world.sync.sync(1)
    metrics = world.sync.sync(2)
    assert (metrics["sync/bytes"], metrics["sync/changed_share"]) == (0, 0)
    assert world.all_hold(2)


@pytest.mark.parametrize("stage", ["held", "begin", "receive"])
def test_a_refusal_before_the_end_leaves_every_sampler_as_it_was(stage: str) -> None:
    world = World(faults={1: {"fails_in": ""}})
    world.sync.sync(1)
    before = [world.model(index).everything() for index in (0, 1)]
    world.learner.step()
    world.samplers[1].fails_in = stage
    with pytest.raises(ValueError, match=f"failed in {stage}"):
        world.sync.sync(2)
    for index in (0, 1):
        model = world.model(index)
        assert (model.version, model.closed) == (1, None)
        assert equal(model.everything(), before[index])
        assert world.samplers[index].calls.count("end") == 1  # of version 1
    world.samplers[1].fails_in = ""
    world.sync.sync(3)  # whole: the sender does not know any more what they hold
    assert world.all_hold(3)


def test_a_sampler_that_holds_anything_else_stops_the_run_and_nobody_serves() -> None:
    world = World()
    world.sync.sync(1)
    world.learner.step()
    model = world.model(1)
    stale = dict(model.derived)
    model.refresh = lambda: stale  # type: ignore[method-assign]
    with pytest.raises(
        AttestationError, match=r"version 2: sampler 1 holds other bytes .*derived.w13.elements"
    ):
        world.sync.sync(2)
    for index in (0, 1):
        assert world.samplers[index].actor.receiver.state is State.TORN
        assert world.model(index).closed is not None


def test_another_specification_is_refused() -> None:
    world = World()
    world.model(0).precision_map = type(MAP).resolve(2, MAP.layers[0])
    with pytest.raises(
        RefusedError, match=f"made under precision map {MAP.fingerprint}, this sampler runs under"
    ):
        world.sync.sync(1)


@pytest.mark.parametrize("stage", ["held", "begin", "receive", "end", "commit"])
@pytest.mark.parametrize("codec", ["packed", "delta"])
def test_a_sampler_that_dies_in_a_sync_does_not_keep_the_others_from_it(stage: str, codec: str) -> None:
    world = World(3, codec=codec)
    world.sync.sync(1)
    world.learner.step()
    world.samplers[1].dies_in = stage
    world.sync.sync(2)
    assert world.all_hold(2, 0, 2)
    assert list(world.sync.lost()) == [1]

    # Its successor comes when the learner has moved on: it must get what the others hold.
    want = wanted(world.learner)
    world.learner.step()
    world.samplers[1] = Local(sampler_actor(77))
    world.sync.rejoin(1, world.samplers[1])
    assert not world.sync.lost()
    assert (world.model(1).version, world.model(1).closed) == (2, None)
    assert equal(world.model(1).everything(), want)
    world.sync.sync(3)
    assert world.all_hold(3)


def test_a_sampler_that_missed_a_version_gets_whole_tensors_and_the_others_changes() -> None:
    world = World()
    world.sync.sync(1)
    world.samplers[1] = Local(sampler_actor(88))  # replaced without anybody being told
    world.sync._samplers[1] = [world.samplers[1]]
    world.learner.step()
    metrics = world.sync.sync(2)
    assert "sync/changed_share" in metrics
    assert world.all_hold(2)


@pytest.mark.parametrize("stage", ["begin", "receive", "end"])
def test_a_sampler_that_dies_while_it_catches_up_is_left_out(stage: str) -> None:
    """The others hold the version by then: it is not sent to them again, which they would refuse."""
    world = World(3)
    world.sync.sync(1)
    world.samplers[1] = Local(sampler_actor(88), dies_in=stage)
    world.sync._samplers[1] = [world.samplers[1]]
    world.learner.step()
    world.sync.sync(2)
    assert world.all_hold(2, 0, 2)
    assert list(world.sync.lost()) == [1]
    world.learner.step()
    world.sync.sync(3)
    assert world.all_hold(3, 0, 2)


def test_a_learner_that_dies_in_a_sync_is_not_taken_for_a_sampler() -> None:
    world = World()
    world.sync.sync(1)
    before = [world.model(index).everything() for index in (0, 1)]
    world.learner.step()
    world.remote.dies_in = "ship"
    with pytest.raises(ActorDied, match="an actor"):
        world.sync.sync(2)
    assert not world.sync.lost()
    for index in (0, 1):
        assert (world.model(index).version, world.model(index).closed) == (1, None)
        assert equal(world.model(index).everything(), before[index])


def test_when_nobody_is_left_the_sync_says_so_and_a_fresh_sampler_is_sent_the_version() -> None:
    world = World(2, faults={0: {"dies_in": "begin"}, 1: {"dies_in": "receive"}})
    for _ in range(2):
        with pytest.raises(NoSamplerLeft, match="no sampler is left for version 1"):
            world.sync.sync(1)
        assert [str(died) for died in world.sync.lost().values()] == [
            f"sampler {index} (process 4711) died in the weight sync of version 1; its log: its.log"
            for index in (0, 1)
        ]
    world.samplers[1] = Local(sampler_actor(77))
    world.sync.take(1, world.samplers[1])
    world.sync.sync(1)
    assert world.all_hold(1, 1)
    assert list(world.sync.lost()) == [0]


def test_without_a_copy_a_sampler_cannot_be_brought_back() -> None:
    world = World(codec="packed", restarts=0)
    world.sync.sync(1)
    with pytest.raises(RuntimeError, match="no copy of what was sent last is kept"):
        world.sync.rejoin(1, Local(sampler_actor(88)))


def fleet_of(world: World, **settings: Any) -> Fleet:
    """Of the world's samplers. Those that it starts have numbers from 100 on for seeds."""
    started = iter(range(100, 110))

    def start(index: int) -> Local:
        world.samplers[index] = Local(sampler_actor(next(started)))
        return world.samplers[index]

    return Fleet(world.samplers, Local(world.sync), start, **{"restarts": 2, **settings})  # type: ignore[arg-type]


@pytest.fixture
def fleet() -> tuple[World, Fleet]:
    world = World()
    return world, fleet_of(world)


def test_a_sampler_that_dies_at_work_is_replaced_and_its_share_done_again(fleet: tuple[World, Fleet]) -> None:
    world, samplers = fleet
    samplers.sync(1)
    assert samplers.generate([("a",), ("b",)]) == [(50, "a"), (51, "b")]
    assert samplers.generate([("a",), ("",)]) == [(50, "a"), []]  # fewer prompts than samplers
    assert samplers.ask(1, "c") == (51, "c")
    want = wanted(world.learner)
    world.learner.step()  # an update under way while the next batch is drawn
    world.samplers[1].dead = True
    assert samplers.generate([("a",), ("b",)]) == [(50, "a"), (100, "b")]
    assert world.model(1).version == 1
    assert equal(world.model(1).everything(), want)


def test_a_sampler_that_dies_in_a_sync_is_replaced_at_once(fleet: tuple[World, Fleet]) -> None:
    world, samplers = fleet
    samplers.sync(1)
    world.learner.step()
    world.samplers[0].dies_in = "receive"
    samplers.sync(2)
    assert world.all_hold(2)
    assert samplers.generate([("a",), ("b",)]) == [(100, "a"), (51, "b")]


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("stage", ["", "held", "begin", "receive", "end", "commit"])
@pytest.mark.parametrize("codec, samplers", [("packed", 1), ("delta", 1), ("delta", 2)])
def test_when_all_samplers_die_in_a_sync_their_successors_get_the_version(
    codec: str, samplers: int, stage: str, sleeps: bool
) -> None:
    """stage: "" for before the sync."""
    world = World(samplers, codec=codec)
    learner = Local(SimpleNamespace(offload=int, onload=bool))
    own = fleet_of(world, sleeps=sleeps, leaving=[learner])
    own.sync(1)
    own.rest()
    world.learner.step()
    for sampler in world.samplers:
        sampler.dies_in, sampler.dead = stage, not stage
    metrics = own.sync(2)
    assert own.restarts == samplers
    assert world.all_hold(2)
    assert "sync/changed_share" not in metrics or stage == "commit"  # whole, as nobody had the version before
    assert all(sampler.actor.rest.stage is Stage.AWAKE for sampler in world.samplers)
    own.rest()
    assert [call for call in learner.calls if call == "onload"] == learner.calls[1::2]  # in turns
    world.learner.step()
    assert ("sync/changed_share" in own.sync(3)) == (
        codec == "delta" and not sleeps
    )  # in sleep weights are lost
    assert world.all_hold(3)
    assert own.restarts == samplers


def test_a_sampler_that_dies_before_the_first_sync_is_replaced_when_it_is_asked_for_anything() -> None:
    world = World()
    own = fleet_of(world)
    world.samplers[0].dead = True
    assert own.from_each("state") == [(100, 0), (51, 0)]
    own.sync(1)
    assert world.all_hold(1)
    assert own.from_each("state") == [(100, 1), (51, 1)]


def test_a_sampler_that_dies_later_is_replaced_and_brought_to_the_version_when_it_is_asked_for_anything() -> (
    None
):
    world = World()
    own = fleet_of(world)
    own.sync(1)
    want = wanted(world.learner)
    world.learner.step()
    world.samplers[1].dead = True
    assert own.from_each("state") == [(50, 1), (100, 1)]
    assert equal(world.model(1).everything(), want)


def test_what_no_work_depends_on_is_asked_of_those_alive(fleet: tuple[World, Fleet]) -> None:
    world, own = fleet
    own.sync(1)
    assert own.largest("memory_mib") == 51
    world.samplers[1].dead = True
    assert own.largest("memory_mib") == 50
    assert own.from_those_at_work("state") == [(50, 1)]
    assert own.restarts == 0
    own.from_each("state")
    assert own.restarts == 1
    assert own.from_those_at_work("state") == [(50, 1)]  # the successor has had nothing to do
    own.generate([("a",), ("b",)])
    assert own.from_those_at_work("state") == [(50, 1), (100, 1)]
    for sampler in world.samplers:
        sampler.dead = True
    assert (own.largest("memory_mib"), own.from_those_at_work("state")) == (None, [])


def test_a_first_sync_that_nobody_survives_is_made_again() -> None:
    world = World(1, faults={0: {"dies_in": "end"}})
    own = fleet_of(world)
    own.sync(1)
    assert world.all_hold(1)
    assert own.restarts == 1


def test_samplers_rest_from_the_last_question_to_the_next_sync(fleet: tuple[World, Fleet]) -> None:
    world, samplers = fleet
    samplers.rest()  # of a fleet that does not sleep: nothing happens
    samplers = fleet_of(world, sleeps=True)
    samplers.sync(1)
    for version in (2, 3):
        samplers.rest()
        assert {world.model(index).closed for index in (0, 1)} == {"the sampler is asleep"}
        world.learner.step()
        if version == 3:
            world.samplers[1].dead = True  # in its sleep
        samplers.sync(version)
        assert world.all_hold(version)
        assert all(sampler.actor.rest.stage is Stage.AWAKE for sampler in world.samplers)
    calls = [
        call
        for call in world.samplers[0].calls
        if call in ("sleep", "wake_weights", "begin", "commit", "wake_cache")
    ]
    assert calls == ["begin", "commit", *(["sleep", "wake_weights", "begin", "commit", "wake_cache"] * 2)]


def test_deaths_are_bounded(fleet: tuple[World, Fleet]) -> None:
    world, samplers = fleet
    samplers.sync(1)
    for _ in range(2):
        world.samplers[1].dead = True
        samplers.generate([("a",), ("b",)])
    world.samplers[1].dead = True
    with pytest.raises(ActorDied) as found:
        samplers.generate([("a",), ("b",)])
    assert str(found.value) == (
        "sampler 1 (process 4711) died while it wrote responses; its log: its.log;"
        " sync.restarts=2: no more restarts"
    )
    alone = World(1)
    samplers = fleet_of(alone, restarts=0)
    samplers.sync(1)
    alone.samplers[0].dies_in = "receive"
    with pytest.raises(ActorDied, match=r"0 .* died in the weight sync of version 2; .* sync\.restarts=0"):
        samplers.sync(2)


def test_twenty_versions_by_changes_are_byte_for_byte_a_whole_sync() -> None:
    """And the bytes of the three codecs, printed."""
    learner = Learner()
    model, spent = Receiver(Model()), {}
    from tests.rl.sync.worlds import sync

    senders = {codec: Sender(learner, MAP, keep=True) for codec in ("packed", "delta", "bf16")}
    receivers = {"delta": model, "packed": Receiver(Model(1)), "bf16": Receiver(Model(2))}
    for version in range(1, 22):
        for codec, sender in senders.items():
            spent[codec] = sync(sender, receivers[codec], version, codec).nbytes
        learner.step(1e-4)
    fresh = Receiver(Model(3))
    sync(Sender(learner, MAP, keep=False), fresh, 1)
    learner_now = wanted(learner)
    sync(senders["delta"], model, 22, "delta")
    assert equal(model.holder.everything(), fresh.holder.everything())  # type: ignore[attr-defined]
    assert equal(fresh.holder.everything(), learner_now)  # type: ignore[attr-defined]
    assert spent["delta"] < spent["packed"] < spent["bf16"]
    print(f"bytes of a sync: {spent}")


def test_the_ray_ends_give_back_what_was_shipped() -> None:
    learner = Learner()
    sender, outlet, inlet = Sender(learner, MAP, keep=False), RayOutlet(), RayInlet()
    said = sender.open("s", 1, "packed", 1000)
    chunk = sender.chunk()
    parcel = outlet.ship(chunk)
    got = inlet.fetch(parcel)
    assert said.chunks > 1
    assert got.header == chunk.header
    assert torch.equal(got.payload, chunk.payload)
    assert got.payload.data_ptr() != chunk.payload.data_ptr()
