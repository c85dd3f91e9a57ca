"""The actors of a run, each a thin wrapper: the work is done by plain classes that know nothing of Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.digest import tensor_digest
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from rl.cluster import LOG_VARIABLE

if TYPE_CHECKING:
    import torch

    from learner.batch import TrainBatch
    from learner.config import CriticConfig, LearnerConfig, ObjectiveConfig
    from learner.policy import Scores
    from rl.cluster import Remote
    from rl.rollout import Sequences
    from sampler.config import SamplerConfig, SamplingConfig
    from sampler.engine import Completion


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

    def ready(self) -> bool:
        return True

    def memory_mib(self) -> float:
        return peak_memory_mib()


class LearnerActor(Actor):
    """`learner.policy.Policy` behind Ray."""

    def __init__(self, model_dir: Path, precision_map: PrecisionMap, config: LearnerConfig, seed: int):
        super().__init__()
        from learner.policy import Policy

        self.policy = Policy(model_dir, precision_map, config, seed)
        self._exported: dict[str, torch.Tensor] = {}

    def report(self) -> EngineReport:
        return self.policy.report()

    def score(
        self, sequences: Sequences, temperature: float, top_p: float, replay: str | None = None
    ) -> Scores:
        """replay: `algorithm.routing_replay`; with it come the routers' own choices, where anything is made of them."""
        parts = (sequences.tokens, sequences.lengths, sequences.loss_mask)
        return self.policy.score(
            *parts,
            temperature,
            top_p,
            routes=sequences.routes if replay == "r3" else None,
            return_routes=replay == "r2" or (replay is not None and sequences.routes is not None),
        )

    def update(
        self, batch: TrainBatch, objective: ObjectiveConfig, temperature: float, top_p: float
    ) -> dict[str, float]:
        return self.policy.update(batch, objective, temperature, top_p)

    def supervised_step(
        self, tokens: torch.Tensor, lengths: torch.Tensor, loss_mask: torch.Tensor, lr: float
    ) -> float:
        return self.policy.supervised_step(tokens, lengths, loss_mask, lr=lr)

    def open_export(self, precision_map: PrecisionMap) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Manifest of the current weights, experts quantised under `precision_map`: name -> (dtype, shape)."""
        self._exported = dict(self.policy.export(precision_map))
        return {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self._exported.items()
        }

    def export_chunk(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._exported[name] for name in names}

    def close_export(self) -> dict[str, str]:
        """Digests of everything that was exported."""
        digests = {name: tensor_digest(tensor) for name, tensor in self._exported.items()}
        self._exported = {}
        return digests

    def checkpoint(self, folder: Path) -> None:
        self.policy.checkpoint(folder)

    def restore(self, folder: Path) -> None:
        self.policy.restore(folder)

    def save_hf(self, folder: Path) -> None:
        self.policy.save_hf(folder)


class CriticActor(Actor):
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
        from learner.critic import Critic

        self.critic = Critic(model_dir, precision_map, config, critic, seed)

    def values(self, sequences: Sequences) -> torch.Tensor:
        return self.critic.values(sequences.tokens, sequences.lengths, sequences.loss_mask)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        return self.critic.update(batch)

    def checkpoint(self, folder: Path) -> None:
        self.critic.checkpoint(folder)

    def restore(self, folder: Path) -> None:
        self.critic.restore(folder)


class SamplerActor(Actor):
    """`sampler.engine.Sampler` behind Ray."""

    def __init__(self, model_dir: Path, precision_map: PrecisionMap, config: SamplerConfig):
        super().__init__()
        from sampler.engine import Sampler

        self.sampler = Sampler(model_dir, precision_map, config)

    def report(self) -> EngineReport:
        return self.sampler.report()

    def generate(
        self, prompts: list[list[int]], seeds: list[list[int]], sampling: SamplingConfig
    ) -> list[list[Completion]]:
        return self.sampler.generate(prompts, seeds, sampling)

    def begin_update(
        self, version: int, map_fingerprint: str, manifest: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> None:
        from sampler.weights import TensorSpec

        specs = {name: TensorSpec(dtype, shape) for name, (dtype, shape) in manifest.items()}
        self.sampler.begin_update(version, map_fingerprint, specs)

    def receive(self, chunk: dict[str, torch.Tensor]) -> None:
        self.sampler.receive(chunk)

    def finish_update(self) -> dict[str, str]:
        return self.sampler.finish_update()

    def abort_update(self) -> None:
        self.sampler.abort_update()


class WeightSyncActor(Actor):
    """`rl.weight_sync.WeightSync` behind Ray."""

    def __init__(self, learner: Remote, samplers: Sequence[Remote], precision_map: PrecisionMap):
        super().__init__()
        from rl.weight_sync import WeightSync

        self.weight_sync = WeightSync(learner, samplers, precision_map)

    def report(self) -> EngineReport:
        return self.weight_sync.report()

    def sync(self, version: int) -> dict[str, Any]:
        return self.weight_sync.sync(version)


def peak_memory_mib() -> float:
    """Largest resident set of this process so far, in MiB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
