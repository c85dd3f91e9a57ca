"""Rules that cross the sections of a configuration, checked before any engine starts (design: configuration fails
early). Each failure is a ConfigError naming the key, its value and the rule.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from kernels.spec import ExecutionSpec
from learner.families.architecture import Architecture
from learner.layout import Layout
from rl.config import Config
from rl.config.model import SpecConfig
from rl.errors import ConfigError
from rl.placement import gpus_needed, spread_problems
from sampler.model_check import rank_problems, spec_problems


def resolve_specs(config: SpecConfig) -> tuple[ExecutionSpec, ExecutionSpec]:
    """The execution specifications of the learner and of the sampler. Raises ConfigError."""
    specs = []
    for side in ("learner", "sampler"):
        try:
            specs.append(named_spec(config.name, getattr(config, side)))
        except ValueError as error:
            raise ConfigError(f"spec ({side}): {error}") from error
    return specs[0], specs[1]


def resolve_maps(config: SpecConfig, layers: int) -> tuple[PrecisionMap, PrecisionMap]:
    """The precision maps of the learner and of the sampler for a model of `layers` layers. Raises ConfigError."""
    try:
        learner, sampler = (
            PrecisionMap.resolve(layers, spec, config.first_layers_bf16, config.last_layers_bf16)
            for spec in resolve_specs(config)
        )
    except ValueError as error:
        raise ConfigError(f"spec: {error}") from error
    return learner, sampler


def check_against_model(config: Config, model: Architecture) -> None:
    """Raise ConfigError unless the model fits the specification, the layout and the engines' limits."""
    problems = [*model_problems(config, model), *start_problems(config, model)]
    if config.sync.transport == "cuda_ipc" and not torch.cuda.is_available():
        problems.append(
            "sync.transport=cuda_ipc: needs a GPU that learner and samplers share, and there is none"
        )
    if problems:
        raise ConfigError("; ".join(problems))


def check_placement(config: Config) -> None:
    """Raise ConfigError unless engines can be placed as asked: on the GPUs that this process sees, or, of a Ray that is
    there (`cluster.ray_address`), on those that the run is to hold, which `rl.nodes` asks for.
    """
    problems = list(transport_problems(config))
    nodes = config.cluster.nodes
    if nodes > 1 and config.cluster.ray_address == "local":
        problems.append(
            f"cluster.nodes={nodes}: a Ray of the run's own (cluster.ray_address=local) has one node; auto or HOST:PORT"
            " joins one that is there"
        )
    own = config.cluster.ray_address == "local"
    needed, there = gpus_needed(config), torch.cuda.device_count() if own else config.cluster.gpus
    if needed > there:
        where = "can be seen" if own else f"are in cluster.nodes={nodes} x cluster.gpus_per_node"
        problems.append(
            f"cluster.placement={config.cluster.placement}: {config.learner.processes} ranks of the learner and"
            f" run.samplers={config.run.samplers} x sampler.tensor_parallel={config.sampler.tensor_parallel} need"
            f" {needed} GPUs, and {there} {where}"
        )
    for key, device in (("learner", config.learner.device), ("sampler", config.sampler.device)):
        if own and device.startswith("cuda") and not needed and not torch.cuda.is_available():
            problems.append(f"{key}.device={device}: no GPU can be seen")
    if problems:
        raise ConfigError("; ".join(problems))


def transport_problems(config: Config) -> Iterator[str]:
    """Ways of the weight sync that the placement of the engines rules out."""
    cluster, transport = config.cluster, config.sync.transport
    separate = cluster.placement == "separate"
    if transport == "cuda_ipc" and (
        cluster.nodes > 1 or cluster.gpus > 1 or separate or config.learner.processes > 1
    ):
        gpus = max(cluster.gpus, gpus_needed(config), config.learner.processes)
        nodes = f", on cluster.nodes={cluster.nodes}" if cluster.nodes > 1 else ""
        yield (
            "sync.transport=cuda_ipc: rank 0 of the learner, which sends, and every sampler must be on the same GPU,"
            f" one in all; here are {gpus}, {cluster.placement}{nodes}"
            " (sync.transport=ray works between any two processes)"
        )
    on_gpus = cluster.gpus > 0 or config.learner.device.startswith("cuda")
    if transport == "process_group" and on_gpus and not separate:
        yield (
            "sync.transport=process_group: NCCL refuses two members on one GPU, which rank 0 of the learner and a"
            " sampler share with cluster.placement=colocated (sync.transport=ray works between any two processes)"
        )


def start_problems(config: Config, model: Architecture) -> Iterator[str]:
    """What cannot be started yet, on any machine."""
    yield from spread_problems(config)
    for problem in Layout.of(config.learner).problems(model):
        yield f"learner.{problem}"
    algorithm = config.algorithm
    fewest = (algorithm.min_groups or algorithm.prompts_per_iteration) * algorithm.group_size
    if fewest // algorithm.updates_per_iteration < config.learner.data_parallel:
        yield (
            f"learner.data_parallel={config.learner.data_parallel}: an iteration may learn from as few as {fewest}"
            f" responses in algorithm.updates_per_iteration={algorithm.updates_per_iteration} updates, each of which"
            " needs one for every replica"
        )
    least = "min_groups" if algorithm.min_groups else "prompts_per_iteration"
    if algorithm.round_size * algorithm.max_rounds < getattr(algorithm, least):
        yield (
            f"algorithm.max_rounds={algorithm.max_rounds} rounds of algorithm.prompts_per_round={algorithm.round_size}"
            f" prompts cannot fill algorithm.{least}={getattr(algorithm, least)}"
        )
    strict = not config.sampler.stock and resolve_specs(config.spec)[1].strict
    for problem in spec_problems(strict, config.sampler):
        yield f"sampler.{problem}"
    yield from _sampler_rank_problems(config)


def _sampler_rank_problems(config: Config) -> Iterator[str]:
    """Where a sampler is to have several processes."""
    ranks = config.sampler.tensor_parallel
    if ranks == 1:
        return
    if config.sync.transport == "cuda_ipc":
        yield (
            f"sync.transport=cuda_ipc: sampler.tensor_parallel={ranks} processes are on as many GPUs, and it needs all"
            " engines on one"
        )
    for problem in rank_problems([resolve_specs(config.spec)[1]], config.sampler):
        yield f"sampler.tensor_parallel={ranks}: {problem}"


def model_problems(config: Config, model: Architecture) -> Iterator[str]:
    """Where the configuration and `model` do not fit each other on any machine."""
    multiple = max(spec.width_multiple for spec in resolve_specs(config.spec))
    for width, value in (("hidden size", model.hidden), ("expert FFN width", model.expert_ffn)):
        if value % multiple:
            yield f"spec.name={config.spec.name}: the model's {width} {value} is not a multiple of {multiple}"
    critic = config.algorithm.objective.critic
    if critic is not None and critic.warmup_iterations >= config.run.iterations:
        yield (
            f"algorithm.objective.critic.warmup_iterations={critic.warmup_iterations} leaves none of"
            f" run.iterations={config.run.iterations} to the policy"
        )
    if config.sampler.max_model_len > model.max_positions:
        yield (
            f"sampler.max_model_len={config.sampler.max_model_len} is more than the model's"
            f" {model.max_positions} positions"
        )
    room = config.sampler.max_model_len - config.algorithm.sampling.max_tokens
    if room < 1:
        yield (
            f"algorithm.sampling.max_tokens={config.algorithm.sampling.max_tokens} leaves no room for a prompt in"
            f" sampler.max_model_len={config.sampler.max_model_len}"
        )
    if config.learner.micro_batch_tokens < config.sampler.max_model_len:
        yield (
            f"learner.micro_batch_tokens={config.learner.micro_batch_tokens} is less than"
            f" sampler.max_model_len={config.sampler.max_model_len}: the longest sequence must fit"
        )
    if config.sampler.stock:
        yield from _stock_problems(config)
    if config.sampler.sleep != "off" and config.algorithm.pipeline != "serial":
        yield (
            f"sampler.sleep={config.sampler.sleep}: the samplers are at work while the learner is, with"
            f" algorithm.pipeline={config.algorithm.pipeline}"
        )
    if config.learner.offload and config.algorithm.pipeline != "serial":
        yield (
            f"learner.offload=true: the learner is at work while the samplers are, with"
            f" algorithm.pipeline={config.algorithm.pipeline}"
        )
    yield from _strict_problems(config)
    if config.learner.dtype != config.sampler.dtype and not config.spec.allow_difference:
        yield (
            f"learner.dtype={config.learner.dtype} and sampler.dtype={config.sampler.dtype} differ;"
            " spec.allow_difference=true asks for that"
        )


def _stock_problems(config: Config) -> Iterator[str]:
    if not config.spec.allow_difference:
        yield (
            "sampler.stock=true: the engine computes experts in its own way, which is not the learner's;"
            " spec.allow_difference=true asks for that"
        )
    if config.spec.sampler:
        yield f"spec.sampler={config.spec.sampler}: a stock engine takes no specification"
    if config.algorithm.rollout_sampling.return_routes:
        yield "sampler.stock=true: a stock engine does not say which experts it chose (return_routes, r3)"


def _strict_problems(config: Config) -> Iterator[str]:
    """What a strict specification does not cover yet, where one is asked for."""
    if not any(spec.strict for spec in resolve_specs(config.spec)):
        return
    learner, algorithm = config.learner, config.algorithm
    rules = {
        "learner.tensor_parallel": (learner.tensor_parallel, learner.tensor_parallel == 1, "1"),
        "algorithm.sampling.top_p": (algorithm.sampling.top_p, algorithm.sampling.top_p == 1, "1"),
        "algorithm.routing_replay": (algorithm.routing_replay, algorithm.routing_replay == "off", "off"),
    }
    for key, (value, fits, expected) in rules.items():
        if not fits:
            yield f"{key}={value}: must be {expected} under the strict specification spec.name={config.spec.name}"


def prompt_limit(config: Config) -> int:
    """Most tokens that a prompt may have."""
    return config.sampler.max_model_len - config.algorithm.sampling.max_tokens
