"""What a configuration resolves to, with everything checked that can be checked before an engine starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernels.precision_map import PrecisionMap
from learner.layout import Layout
from rl.checkpoint import Checkpoint
from rl.config import Config
from rl.errors import ConfigError, DataError
from rl.evaluation.during_training import benchmark_texts, training_exams
from rl.evaluation.exams import Exam
from rl.models import initial_model, model_architecture
from rl.preflight.batch import Batch
from rl.preflight.checks import checks
from rl.rewards.registry import Reward, load_reward
from rl.run_folder import RunFolder
from rl.task import Task, own_tokenizer, problem_source
from rl.validate import check_against_model, check_placement, resolve_maps
from sampler.model_check import check_model
from sampler.stock import own_map

DATA = "data"  # what the driver's state in a checkpoint says of the data


@dataclass(frozen=True)
class Plan:
    """What a configuration resolves to; making one starts nothing and refuses whatever cannot work."""

    config: Config
    task: Task
    model: Path  # the initial policy, before a warm start
    learner_map: PrecisionMap
    sampler_map: PrecisionMap
    reward: Reward
    resumed: tuple[RunFolder, Checkpoint | None] | None
    exams: tuple[Exam, ...]


def make_plan(config: Config) -> Plan:
    """Check everything that can be checked before an engine starts. Raises UserError."""
    resumed = _resumed_run(config)
    source = problem_source(config.data, config.run.seed, benchmark_texts(config.evaluation))
    reward = load_reward(config.reward.function, config.reward.parser, config.reward.wrong)
    cache = Path(config.run.cache_dir)
    model = initial_model(config.model, own_tokenizer(source, cache), config.run.seed, cache)
    architecture = model_architecture(model)
    check_against_model(config, architecture)
    check_placement(config)
    if problems := list(checks(config, architecture, Layout.of(config.learner), Batch.of(config))):
        raise ConfigError("; ".join(problems))  # as plan=true refuses it
    learner_map, sampler_map = resolve_maps(config.spec, architecture.layers)
    if config.sampler.stock:
        sampler_map = own_map(architecture.layers, config.sampler.dtype)
    try:
        check_model(model, sampler_map, config.sampler)
    except ValueError as error:
        raise DataError(f"model: {error}") from error
    task = Task(config, source, model)
    if resumed and resumed[1]:
        task.prompts.check_bookmark(resumed[1].state.get(DATA, {}))
    exams = training_exams(config, task.tokenizer)
    return Plan(config, task, model, learner_map, sampler_map, reward, resumed, exams)


def _resumed_run(config: Config) -> tuple[RunFolder, Checkpoint | None] | None:
    if not config.run.resume:
        return None
    folder = RunFolder.open(Path(config.run.resume))
    checkpoint = folder.checkpoint_to_resume(config.run.keep_checkpoints)
    if checkpoint and checkpoint.step >= config.run.iterations:
        raise ConfigError(
            f"run.iterations={config.run.iterations}: {folder.path} has finished {checkpoint.step} iterations already"
        )
    return folder, checkpoint
