"""The actors of a run, each a thin wrapper: the work is done by plain classes that know nothing of Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from rl.cluster import LOG_VARIABLE
from rl.process import device_name, loading, own_host, peak_gpu_mib, peak_memory_mib

if TYPE_CHECKING:
    import torch

    from kernels.experts import StoredLayout
    from kernels.shard import Shards
    from learner.batch import Scores, TrainBatch
    from learner.config import CriticConfig, LearnerConfig, ObjectiveConfig
    from rl.actor_group import ActorGroup
    from rl.cluster import Remote
    from rl.config.cluster import SyncConfig
    from rl.deaths import ActorDied
    from rl.rollout import Sequences
    from rl.sync.follower import Follower
    from rl.sync.protocol import Announcement, Held
    from rl.sync.receiver import Installed
    from rl.sync.sender import Sent
    from rl.sync.transport import Parcel, Receiving
    from sampler.config import SamplerConfig, SamplingConfig
    from sampler.engine import Completion


Method = TypeVar("Method", bound=Callable[..., Any])


def collective(method: Method) -> Method:
    """Marks what all processes that share a model must call together; see `rl.actor_group`."""
    method.collective = True  # type: ignore[attr-defined]
    return method


class Actor:
    """Base: sends what the process prints to its own log file."""

    def __init__(self) -> None:
        log = os.environ.get(LOG_VARIABLE)
        if log:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)

    @collective
    def ready(self) -> bool:
        return True

    def memory_mib(self) -> float:
        return peak_memory_mib()

    def gpu_mib(self) -> float:
        return peak_gpu_mib()


class RankActor(Actor):
    """One of the processes that share a model, which torchrun's environment variables tell of each other."""

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.rank = int(os.environ.get("RANK", "0"))

    def silently(self, method: str, *args: Any, **kwargs: Any) -> None:
        """The call of a rank whose result nobody asks for."""
        getattr(self, method)(*args, **kwargs)


class LearnerActor(RankActor):
    """`learner.policy.Policy` behind Ray."""

    follower: Follower | None = None  # on ranks other than 0, which send nothing to samplers

    def __init__(self, model_dir: Path, precision_map: PrecisionMap, config: LearnerConfig, seed: int):
        super().__init__()
        with loading():
            from learner.policy import Policy

        self.policy = Policy(model_dir, precision_map, config, seed)

    def report(self) -> EngineReport:
        return self.policy.report()

    @collective
    def score(
        self, sequences: Sequences, temperature: float, top_p: float, replay: str | None = None
    ) -> Scores:
        """replay: `algorithm.routing_replay`; with it come the routers' own choices, where anything is made of them."""
        parts = (sequences.tokens, sequences.lengths, sequences.loss_mask)
        self.policy.expert_load()  # what came before does not count
        return self.policy.score(
            *parts,
            temperature,
            top_p,
            routes=sequences.routes if replay == "r3" else None,
            return_routes=replay == "r2" or (replay is not None and sequences.routes is not None),
        )

    @collective
    def update(
        self, batch: TrainBatch, objective: ObjectiveConfig, temperature: float, top_p: float
    ) -> dict[str, float]:
        return self.policy.update(batch, objective, temperature, top_p)

    @collective
    def expert_load(self) -> torch.Tensor | None:
        """Of the last scoring pass, or of all passes since then; see `learner.policy.Policy.expert_load`."""
        return self.policy.expert_load()

    def device_name(self) -> str:
        return device_name(self.policy.device)

    @collective
    def supervised_step(
        self, tokens: torch.Tensor, lengths: torch.Tensor, loss_mask: torch.Tensor, lr: float
    ) -> float:
        return self.policy.supervised_step(tokens, lengths, loss_mask, lr=lr)

    @collective
    def open_sender(
        self,
        precision_map: PrecisionMap,
        layout: StoredLayout,
        keep: bool,
        transport: str,
        parts: Sequence[Shards],
    ) -> None:
        """Before any sync: what samplers hold, and how it travels; see `rl.sync.sender.Sender`."""
        from rl.sync.follower import Follower
        from rl.sync.links import open_outlet
        from rl.sync.sender import Sender

        self.follower = Follower(self.policy, precision_map, layout) if self.rank else None
        if self.rank:
            return
        self.sender = Sender(self.policy, precision_map, keep, layout, parts)
        self.outlet = open_outlet(transport)

    def open_link(self, members: Sequence[Receiving], timeout_s: float) -> tuple[str, int]:
        """A new process group, to be joined at the address and port that are returned."""
        from rl.sync.process_group import GroupOutlet

        self.outlet.close()
        host = own_host()
        outlet = GroupOutlet(members, host, timeout_s, self.policy.device)
        self.outlet = outlet
        return host, outlet.port

    def join_link(self) -> None:
        from rl.sync.process_group import GroupOutlet

        assert isinstance(self.outlet, GroupOutlet)
        self.outlet.join()

    def sever(self) -> None:
        """Close this end of the transport: whoever waits for something from it hears of that at once."""
        self.outlet.close()

    def kept_root(self) -> str | None:
        return self.sender.kept_root

    @collective
    def open_sync(
        self, session: str, version: int, codec: str, bucket_bytes: int, base: str | None
    ) -> Announcement | None:
        if self.follower is not None:
            self.follower.open(codec, bucket_bytes)
            return None
        return self.sender.open(session, version, codec, bucket_bytes, base)

    @collective
    def open_kept(self, session: str, bucket_bytes: int) -> Announcement | None:
        if self.follower is not None:
            self.follower.open_kept()
            return None
        return self.sender.open_kept(session, bucket_bytes)

    def address(self, receivers: Sequence[Receiving]) -> None:
        self.outlet.address(receivers)

    @collective
    def ship(self) -> Parcel | None:
        """Make the next chunk and begin to send it."""
        if self.follower is not None:
            self.follower.chunk()
            return None
        return self.outlet.ship(self.sender.chunk())

    @collective
    def close_sync(self) -> Sent | None:
        if self.follower is not None:
            self.follower.close()
            return None
        return self.sender.close()

    def release(self) -> None:
        """The receivers have no more use for what was shipped."""
        self.outlet.flush()

    @collective
    def abort_sync(self) -> None:
        if self.follower is not None:
            self.follower.abort()
        else:
            self.sender.abort()

    @collective
    def checkpoint(self, folder: Path) -> None:
        self.policy.checkpoint(folder)

    @collective
    def restore(self, folder: Path) -> None:
        self.policy.restore(folder)

    @collective
    def save_hf(self, folder: Path) -> None:
        self.policy.save_hf(folder)

    @collective
    def offload(self) -> int:
        from learner.offload import offload

        return offload(self.policy)

    @collective
    def onload(self) -> None:
        from learner.offload import onload

        onload(self.policy)


class CriticActor(RankActor):
    """`learner.critic.Critic` behind Ray."""

    def __init__(
        self,
        model_dir: Path,
        precision_map: PrecisionMap,
        config: LearnerConfig,
        critic: CriticConfig,
        seed: int,
    ):
        super().__init__()
        with loading():
            from learner.critic import Critic

        self.critic = Critic(model_dir, precision_map, config, critic, seed)

    @collective
    def values(self, sequences: Sequences) -> torch.Tensor:
        return self.critic.values(sequences.tokens, sequences.lengths, sequences.loss_mask)

    @collective
    def update(self, batch: TrainBatch) -> dict[str, float]:
        return self.critic.update(batch)

    @collective
    def checkpoint(self, folder: Path) -> None:
        self.critic.checkpoint(folder)

    @collective
    def restore(self, folder: Path) -> None:
        self.critic.restore(folder)

    @collective
    def offload(self) -> int:
        from learner.offload import offload

        return offload(self.critic)

    @collective
    def onload(self) -> None:
        from learner.offload import onload

        onload(self.critic)


class SamplerActor(RankActor):
    """`sampler.engine.Sampler` behind Ray. Each process of an engine is a receiver of weight syncs by itself."""

    def __init__(
        self, model_dir: Path, precision_map: PrecisionMap, config: SamplerConfig, transport: str = "ray"
    ):
        super().__init__()
        from rl.sync.links import open_inlet
        from rl.sync.receiver import Receiver
        from rl.sync.rest import Rest
        from sampler.engine import Sampler

        self.sampler = Sampler(model_dir, precision_map, config)
        self.receiver = Receiver(self.sampler.weights)
        self.rest = Rest(self.sampler, self.receiver, keep=config.sleep == "keep")
        self.device = next(iter(self.sampler.weights.tensors().values())).device
        self.inlet = open_inlet(transport, self.device)

    def report(self) -> EngineReport:
        return self.sampler.report()

    @collective
    def generate(
        self,
        prompts: list[list[int]],
        seeds: list[list[int]],
        sampling: SamplingConfig,
        limits: list[int] | None = None,
    ) -> list[list[Completion]]:
        return self.sampler.generate(prompts, seeds, sampling, limits)

    @collective
    def sleep(self) -> None:
        self.rest.sleep()

    @collective
    def wake_weights(self) -> None:
        self.rest.wake_weights()

    @collective
    def wake_cache(self) -> None:
        self.rest.wake_cache()

    def device_name(self) -> str:
        return device_name(self.device)

    def join_link(self, host: str, port: int, rank: int, size: int, timeout_s: float) -> None:
        from rl.sync.process_group import GroupInlet

        self.inlet.close()
        self.inlet = GroupInlet(host, port, rank, size, timeout_s, self.device, own_host())

    def expert_layout(self) -> StoredLayout:
        """How experts must come in a weight sync."""
        return self.receiver.holder.layout

    def shards(self) -> Shards:
        """Which part of a weight sync's tensors is held here."""
        return self.receiver.holder.shards

    def held(self) -> Held:
        return self.receiver.held()

    def begin(self, said: Announcement) -> None:
        self.receiver.begin(said)

    def receive(self, parcel: Parcel) -> None:
        self.receiver.receive(self.inlet.fetch(parcel))

    def end(self, session: str) -> Installed:
        return self.receiver.end(session)

    def commit(self, session: str, content: str) -> None:
        self.receiver.commit(session, content)

    def abort(self) -> None:
        self.receiver.abort()


class WeightSyncActor(Actor):
    """`rl.sync.weight_sync.WeightSync` behind Ray."""

    def __init__(
        self,
        learner: Remote | ActorGroup,
        samplers: Sequence[Remote | ActorGroup],
        precision_map: PrecisionMap,
        config: SyncConfig,
    ):
        super().__init__()
        from rl.sync.weight_sync import WeightSync

        self.weight_sync = WeightSync(learner, samplers, precision_map, config)

    def report(self) -> EngineReport:
        return self.weight_sync.report()

    def sync(self, version: int) -> dict[str, Any]:
        return self.weight_sync.sync(version)

    def lost(self) -> dict[int, ActorDied]:
        return self.weight_sync.lost()

    def take(self, index: int, sampler: Remote | ActorGroup) -> None:
        self.weight_sync.take(index, sampler)

    def rejoin(self, index: int, sampler: Remote | ActorGroup) -> None:
        self.weight_sync.rejoin(index, sampler)
