"""All of the preflight's arithmetic on one configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.precision_map import PrecisionMap
from learner.families.architecture import Architecture
from learner.layout import Layout
from rl.config import Config
from rl.devices import DEVICES
from rl.errors import ConfigError
from rl.preflight.batch import Batch
from rl.preflight.checks import checks, memory_problems, sync_problems
from rl.preflight.memory import Memory, learner_memory, sampler_memory
from rl.preflight.model import planned_architecture
from rl.preflight.parameters import Parameters, count
from rl.preflight.traffic import Limits, SyncBytes, limits, sync_bytes
from rl.validate import model_problems, resolve_maps, resolve_specs, start_problems, transport_problems


@dataclass(frozen=True)
class Preflight:
    """What a configuration comes to. `others`: what stands beside the learner on its ranks (reference, critic)."""

    config: Config
    model: Architecture
    model_source: str
    learner_map: PrecisionMap
    sampler_map: PrecisionMap
    layout: Layout
    batch: Batch
    backend: str
    learner: Memory
    others: dict[str, Memory]
    sampler: Memory
    sync: SyncBytes
    limits: Limits

    @property
    def parameters(self) -> Parameters:
        return count(self.model)


def preflight(config: Config) -> Preflight:
    """Raises ConfigError with everything that cannot work, and DataError when nothing says what the model is."""
    model, source = planned_architecture(config)
    problems = [*model_problems(config, model), *start_problems(config, model), *transport_problems(config)]
    learner_map, sampler_map = resolve_maps(config.spec, model.layers)
    layout, batch = Layout.of(config.learner), Batch.of(config)
    problems += checks(config, model, layout, batch)
    if problems:
        raise ConfigError("; ".join(problems))
    backend = _backend(config)
    learning = replace(config.learner, micro_batch_tokens=batch.largest_micro_batch)
    learner = learner_memory(
        model, learner_map, learning, layout, backend=backend, keeps_copy=config.sync.keep
    )
    others = _others(config, model, learner_map, layout, backend)
    sampler = sampler_memory(
        model,
        sampler_map,
        config.sampler,
        backend=backend,
        gpu=config.cluster.gpus > 0,
        operands=config.sync.codec == "bf16",
    )
    synced = sync_bytes(model, sampler_map, config.learner.dtype, config.sync.codec)
    problems = [*memory_problems(config, learner, others, sampler), *sync_problems(config, synced.total)]
    if problems:
        raise ConfigError("; ".join(problems))
    bounds = limits(
        model,
        sampler_map,
        config.sampler,
        batch,
        samplers=config.run.samplers,
        ranks=layout.ranks,
        device=DEVICES[config.cluster.gpu] if config.cluster.gpu else None,
        synced=synced,
    )
    return Preflight(
        config,
        model,
        source,
        learner_map,
        sampler_map,
        layout,
        batch,
        backend,
        learner,
        others,
        sampler,
        synced,
        bounds,
    )


def _backend(config: Config) -> str:
    """What computes NVFP4 experts on the machine that is planned for."""
    if not config.cluster.gpus or any(spec.strict for spec in resolve_specs(config.spec)):
        return "reference"
    return DEVICES[config.cluster.gpu].expert_backend if config.cluster.gpu else "triton_emulated"


def _others(
    config: Config, model: Architecture, specs: PrecisionMap, layout: Layout, backend: str
) -> dict[str, Memory]:
    """A reference policy only scores: it holds weights. A critic is a second learner, without an output layer."""
    others = {}
    if config.algorithm.needs_reference:
        whole = learner_memory(model, specs, config.learner, layout, backend=backend)
        kept = ("weights", "quantised experts", "experts decoded or laid out", "GPU context")
        standing = {name: size for name, size in whole.standing.items() if name in kept}
        others["a reference policy"] = Memory(standing, {})
    if config.algorithm.objective.critic is not None:
        whole = learner_memory(model, specs, config.learner, layout, backend=backend)
        working = {name: size for name, size in whole.working.items() if name != "logits"}
        others["a critic"] = Memory(whole.standing, working)
    return others
