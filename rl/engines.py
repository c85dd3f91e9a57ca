"""The engines of a run: actors that hold a model, started together, checkpointed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from rl.actor_group import ActorGroup, largest, start_group, wait_until_ready
from rl.actors import CriticActor, LearnerActor, SamplerActor, WeightSyncActor
from rl.cluster import Remote, start_actor, stop_actor
from rl.devices import device_of
from rl.expert_load import expert_load_by_layer
from rl.fleet import Fleet
from rl.models import cached_folder, folder_digest, model_architecture
from rl.nodes import check_alive
from rl.placement import Node, Place, learner_places, sampler_places
from rl.plan import Plan
from rl.process import peak_memory_mib
from rl.records.view import RunView
from rl.rollout import Sequences
from rl.run_folder import RunFolder
from rl.usage import Hardware, expert_load
from rl.warm_start import warm_start

_LEARNER, _CRITIC = "learner", "critic"  # their folders in a checkpoint


@dataclass(frozen=True)
class Engines:
    """Where the objective asks for them, `reference` is the policy that the run started from, and `critic` its value
    function.
    """

    learner: Remote | ActorGroup
    weight_sync: Fleet
    hardware: Hardware
    reference: Remote | ActorGroup | None = None
    critic: Remote | ActorGroup | None = None

    @property
    def samplers(self) -> Sequence[Remote | ActorGroup]:
        return self.weight_sync.samplers

    def reports(self) -> list[EngineReport]:
        """Of all that must compute under one specification."""
        return [self.learner.report(), *self.weight_sync.from_each("report"), self.weight_sync.report()]

    def reports_at_end(self) -> list[EngineReport]:
        """The same when no sampler is needed any more: those that have died, or done nothing, are left out."""
        samplers = self.weight_sync.from_those_at_work("report")
        return [self.learner.report(), *samplers, self.weight_sync.report()]

    def memory(self) -> dict[str, float]:
        """Peak memory in MiB, the driver's too, by the names of `rl.metrics`, of an engine's processes the largest;
        and how many samplers had to be started again.
        """
        named = {"learner": self.learner, "reference": self.reference, "critic": self.critic}
        memory = {
            f"memory/{name}": largest([engine], "memory_mib")
            for name, engine in named.items()
            if engine is not None
        }
        memory |= {
            "memory/driver": peak_memory_mib(),
            "memory/weight_sync": self.weight_sync.memory_mib(),
        }
        unless_none = {
            "memory/sampler": self.weight_sync.largest("memory_mib"),
            "memory/learner_gpu": largest([self.learner], "gpu_mib"),
            "memory/sampler_gpu": self.weight_sync.largest("gpu_mib"),
        }
        memory |= {name: peak for name, peak in unless_none.items() if peak}
        return memory | {"usage/restarts": self.weight_sync.restarts}

    def work(self, sequences: Sequences) -> dict[str, float]:
        """What the scoring pass over `sequences`, which was the last, had to do, and how it spread over the experts."""
        counts = self.learner.expert_load()
        load = {} if counts is None else expert_load(counts) | expert_load_by_layer(counts)
        return self.hardware.work(sequences.lengths, int(sequences.loss_mask.sum())) | load

    def checkpoint(self, folder: Path) -> None:
        """Write what is trained into `folder`."""
        self.learner.checkpoint(folder / _LEARNER)
        if self.critic is not None:
            self.critic.checkpoint(folder / _CRITIC)

    def restore(self, folder: Path) -> None:
        """The inverse of `checkpoint`."""
        self.learner.restore(folder / _LEARNER)
        if self.critic is not None:
            self.critic.restore(folder / _CRITIC)


def start_engines(plan: Plan, folder: RunFolder, view: RunView, nodes: Sequence[Node]) -> Engines:
    """All engines that the configuration asks for, on `nodes`, after a warm start where it asks for one."""
    config = plan.config
    model = _warm_model(plan, folder, view, nodes)
    view.message("starting vLLM (sampler) and Megatron-core (learner)")
    learner = _start_learner(plan, model, plan.learner_map, folder, nodes)
    samplers = [_start_sampler(plan, model, folder, nodes, index) for index in range(config.run.samplers)]
    wait_until_ready([learner, *samplers])
    sync_log = folder.path / "weight_sync.log"
    beside = Place(learner_places(config, nodes)[0].node)
    arguments = (learner, samplers, plan.sampler_map, config.sync)
    weight_sync = start_actor(WeightSyncActor, "weight_sync", 1, sync_log, *arguments, place=beside)
    start = partial(_start_sampler, plan, model, folder, nodes)
    sleeps = config.sampler.sleep != "off"
    reference = critic = None
    if config.algorithm.needs_reference:
        reference = _start_learner(plan, model, plan.learner_map, folder, nodes, "reference")
    if config.algorithm.objective.critic is not None:
        critic = _start_critic(plan, model, folder, nodes)
    wait_until_ready([engine for engine in (weight_sync, reference, critic) if engine is not None])
    trained = [engine for engine in (learner, reference, critic) if engine is not None]
    leaving = trained if config.learner.offload else []
    fleet = Fleet(samplers, weight_sync, start, config.sync.restarts, sleeps, leaving)
    return Engines(learner, fleet, _hardware(plan, learner, fleet), reference, critic)


def _hardware(plan: Plan, learner: Remote | ActorGroup, fleet: Fleet) -> Hardware:
    config = plan.config
    return Hardware(
        model_architecture(plan.model),
        plan.sampler_map,
        config.sampler,
        samplers=config.run.samplers,
        ranks=config.learner.processes,
        learner=device_of(learner.device_name()),
        sampler=device_of(fleet.from_each("device_name")[0]),
    )


def _start_learner(
    plan: Plan,
    model: Path,
    precision_map: PrecisionMap,
    folder: RunFolder,
    nodes: Sequence[Node],
    name: str = "learner",
) -> Remote | ActorGroup:
    config = plan.config
    arguments = (model, precision_map, config.learner, config.run.seed)
    places = learner_places(config, nodes)
    return start_group(LearnerActor, name, config.learner, folder.path, *arguments, places=places)


def _start_sampler(
    plan: Plan, model: Path, folder: RunFolder, nodes: Sequence[Node], index: int
) -> Remote | ActorGroup:
    config = plan.config
    name = f"sampler_{index}" if index else "sampler"
    arguments = (model, plan.sampler_map, config.sampler, config.sync.transport)
    places = sampler_places(config, nodes, index)
    check_alive([places[0].node])  # what is started for one that died would wait for the node's return
    return start_group(SamplerActor, name, config.sampler, folder.path, *arguments, places=places)


def _start_critic(plan: Plan, model: Path, folder: RunFolder, nodes: Sequence[Node]) -> Remote | ActorGroup:
    config = plan.config
    arguments = (
        model,
        plan.learner_map,
        config.learner,
        config.algorithm.objective.critic,
        config.run.seed,
    )
    places = learner_places(config, nodes)
    return start_group(CriticActor, "critic", config.learner, folder.path, *arguments, places=places)


def _warm_model(plan: Plan, folder: RunFolder, view: RunView, nodes: Sequence[Node]) -> Path:
    """The folder to start from: the initial policy, or what a supervised start made of it (cached by content).

    The supervised start runs under `bf16`, as models are pretrained before they are trained in 4 bits.
    """
    config, settings = plan.config, plan.config.model.warm_start
    if not settings.steps:
        return plan.model.absolute()  # actors on other nodes may work in another folder

    def progress(step: int, loss: float) -> None:
        view.stage(f"warm start {step}/{settings.steps}")
        if step % 100 == 0 or step == settings.steps:
            view.message(f"warm start: step {step}/{settings.steps}, loss {loss:.3f}")

    precision_map = PrecisionMap.resolve(len(plan.learner_map.layers), named_spec("bf16"))

    def make(out: Path) -> None:
        learner = _start_learner(plan, plan.model.absolute(), precision_map, folder, nodes)
        warm_start(learner, plan.task.demonstrations, settings, progress)
        learner.save_hf(out)
        stop_actor(learner)

    learner = config.learner
    key = {
        "base": folder_digest(plan.model),
        "data": plan.task.source.describe(),
        "settings": vars(settings),
        "seed": config.run.seed,
        "precision_map": precision_map.fingerprint,
        "learner": [learner.dtype, learner.betas, learner.eps, learner.weight_decay, learner.grad_clip],
    }
    return cached_folder(Path(config.run.cache_dir).absolute(), "warm", key, make)
