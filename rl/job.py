"""A run's parts, put together from its configuration: task, actors, rewards, records."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from rl.actors import CriticActor, LearnerActor, SamplerActor, WeightSyncActor, peak_memory_mib
from rl.checkpoint import Checkpoint, CheckpointStore
from rl.cluster import Remote, local_cluster, start_actor, stop_actor, wait
from rl.compose import to_yaml
from rl.config import Config
from rl.data.prompts import Prompt
from rl.data.summary import summary
from rl.errors import ConfigError, DataError
from rl.evaluation.during_training import benchmark_metrics, training_exams
from rl.evaluation.exams import Exam
from rl.models import cached_folder, folder_digest, initial_model, model_architecture
from rl.pipeline import RolloutBatch
from rl.records.logger import RunLogger
from rl.records.provenance import record_engines, record_launch
from rl.records.report import write_report
from rl.records.view import RunView, open_view
from rl.rewards.pool import RewardPool
from rl.rewards.registry import Reward, load_reward
from rl.rollout import Group, Rollout, response_seed
from rl.rollout_store import load_rollouts, save_rollouts
from rl.run_folder import RunFolder
from rl.specs import check_experts_ran, check_specifications
from rl.task import Task, own_tokenizer, problem_source
from rl.validate import check_against_model, resolve_maps
from rl.warm_start import warm_start
from sampler.config import SamplingConfig
from sampler.engine import Completion
from sampler.model_check import check_model

log = logging.getLogger(__name__)

_LEARNER, _CRITIC, _ROLLOUTS = "learner", "critic", "rollouts"  # their folders in a checkpoint
_DATA = "data"  # what the driver's state in a checkpoint says of the data
_BEFORE_THE_FIRST_STEP = -1  # where a run goes on that was stopped before its first checkpoint


@dataclass(frozen=True)
class Job:
    """What the driver works with. `restored` is the driver's state in the checkpoint, empty for a new run. Where the
    objective asks for them, `reference` is the policy that the run started from, and `critic` its value function.
    `ahead` is a batch of rollouts that the checkpoint holds.
    """

    config: Config
    task: Task
    learner: Remote
    samplers: Sequence[Remote]
    weight_sync: Remote
    rewards: RewardPool
    folder: RunFolder
    logger: RunLogger
    view: RunView
    checkpoints: CheckpointStore
    restored: dict[str, Any]
    reference: Remote | None = None
    critic: Remote | None = None
    exams: Sequence[Exam] = ()
    ahead: RolloutBatch | None = None

    def generate(
        self, prompts: Sequence[Prompt], samples: int, purpose: str, sampling: SamplingConfig
    ) -> list[list[Completion]]:
        """`samples` responses to each prompt, in the order of `prompts`, which the samplers share out."""
        sampling = replace(sampling, stop_token_ids=self.task.stop_token_ids)
        seed = self.config.run.seed
        shares = [prompts[index :: len(self.samplers)] for index in range(len(self.samplers))]
        started = [
            sampler.later.generate(
                [list(prompt.token_ids) for prompt in share],
                [
                    [response_seed(seed, purpose, prompt.position, k) for k in range(samples)]
                    for prompt in share
                ],
                sampling,
            )
            for sampler, share in zip(self.samplers, shares, strict=True)
        ]
        results = [iter(responses) for responses in wait(started)]
        return [next(results[index % len(results)]) for index in range(len(prompts))]

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Completion]]) -> list[Group]:
        """Decode and score every response; each has exactly one score."""
        pairs = [
            (prompt, completion) for prompt, own in zip(prompts, responses, strict=True) for completion in own
        ]
        scores = iter(
            self.rewards.score([(self.task.text(c.token_ids), prompt.problem) for prompt, c in pairs])
        )
        return [
            Group(prompt, tuple(Rollout(completion, next(scores)) for completion in own))
            for prompt, own in zip(prompts, responses, strict=True)
        ]

    def answer_benchmarks(self) -> dict[str, float]:
        """The results of `evaluation.benchmarks` with the weights that the sampler holds."""
        reward = self.config.reward
        return benchmark_metrics(
            self.exams,
            self.samplers[0].generate,
            seed=self.config.run.seed,
            workers=reward.workers,
            timeout_s=reward.timeout_s,
        )

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step to metrics.jsonl, W&B and the terminal."""
        memory = {
            "memory/driver": peak_memory_mib(),
            "memory/learner": self.learner.memory_mib(),
            "memory/sampler": max(wait([sampler.later.memory_mib() for sampler in self.samplers])),
            "memory/weight_sync": self.weight_sync.memory_mib(),
        }
        if self.reference is not None:
            memory["memory/reference"] = self.reference.memory_mib()
        if self.critic is not None:
            memory["memory/critic"] = self.critic.memory_mib()
        self.logger.log(step, {**metrics, **memory})
        self.view.step(step, {**metrics, **memory})

    def save(self, step: int, state: dict[str, Any], ahead: RolloutBatch | None = None) -> None:
        """Write a checkpoint: learner, critic, the driver's state (data cursor: state["position"]), and rollouts."""
        started = time.perf_counter()
        self.view.stage("checkpoint")
        state = state | {_DATA: self.task.prompts.bookmark(state["position"])}

        def write(folder: Path) -> None:
            self.learner.checkpoint(folder / _LEARNER)
            if self.critic is not None:
                self.critic.checkpoint(folder / _CRITIC)
            if ahead is not None:
                save_rollouts(folder / _ROLLOUTS, ahead)

        self.checkpoints.save(step, write, state)
        self.logger.log(step, {"time/checkpoint": time.perf_counter() - started})

    def engine_reports(self) -> list[Any]:
        return [
            self.learner.report(),
            *(sampler.report() for sampler in self.samplers),
            self.weight_sync.report(),
        ]


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
    source = problem_source(config.data, config.run.seed)
    reward = load_reward(config.reward.function, config.reward.parser, config.reward.wrong)
    cache = Path(config.run.cache_dir)
    model = initial_model(config.model, own_tokenizer(source, cache), config.run.seed, cache)
    architecture = model_architecture(model)
    check_against_model(config, architecture)
    learner_map, sampler_map = resolve_maps(config.spec, architecture.layers)
    try:
        check_model(model, sampler_map, config.sampler)
    except ValueError as error:
        raise DataError(f"model: {error}") from error
    task = Task(config, source, model)
    if resumed and resumed[1]:
        task.prompts.check_bookmark(resumed[1].state.get(_DATA, {}))
    exams = training_exams(config, task.tokenizer)
    return Plan(config, task, model, learner_map, sampler_map, reward, resumed, exams)


@contextmanager
def open_job(plan: Plan) -> Iterator[Job]:
    """Start the engines, in a new run folder or in that of the run that is resumed.

    On the way out everything is stopped and the report is written. Raises SpecMismatch before the first rollout
    when the engines do not compute under one specification.
    """
    config = plan.config
    folder, checkpoint = plan.resumed or (_new_folder(config), None)
    resumed_at = None if plan.resumed is None else checkpoint.step if checkpoint else _BEFORE_THE_FIRST_STEP
    folder.replace_config(to_yaml(config))
    with ExitStack() as stack:
        stack.callback(_report, folder)
        record = config.logging
        logger = RunLogger(folder, wandb=record.wandb, project=record.project, resumed_at=resumed_at)
        stack.enter_context(logger)
        record_launch(folder, resumed_at)
        view = stack.enter_context(open_view(record.view, folder.title, config.run.iterations))
        stack.enter_context(_log_to(folder, view))
        for line in summary(plan.task.prompts.describe()):
            view.message(line)
            log.info("%s", line)
        rewards = RewardPool(
            plan.reward, config.reward.workers, config.reward.timeout_s, log=folder.path / "rewards.log"
        )
        stack.enter_context(rewards)
        stack.enter_context(local_cluster(config.run.object_store_mib))
        learner, samplers, weight_sync, reference, critic = _start_engines(plan, folder, view)
        if checkpoint:
            learner.restore(checkpoint.path / _LEARNER)
            if critic is not None:
                critic.restore(checkpoint.path / _CRITIC)
        checkpoints = CheckpointStore(folder.checkpoints, config.run.keep_checkpoints)
        restored = (
            {key: value for key, value in checkpoint.state.items() if key != _DATA} if checkpoint else {}
        )
        job = Job(
            config,
            plan.task,
            learner,
            samplers,
            weight_sync,
            rewards,
            folder,
            logger,
            view,
            checkpoints,
            restored,
            reference,
            critic,
            plan.exams,
            load_rollouts(checkpoint.path / _ROLLOUTS, plan.task.prompts.training) if checkpoint else None,
        )
        reports = job.engine_reports()
        record_engines(folder, reports)
        line = check_specifications(reports, config.spec.allow_difference)
        view.message(f"execution specification {config.spec.name}: {line}")
        log.info("execution specification %s: %s", config.spec.name, line)
        yield job
        reports = job.engine_reports()
        if any(checkpoints.steps()):  # more than step 0: there was something to learn
            check_experts_ran(reports)
        record_engines(folder, reports)


def _report(folder: RunFolder) -> None:
    """Write the report; if that fails, say so, without hiding what ended the run."""
    try:
        write_report(folder)
    except Exception:
        log.exception(
            "the report could not be written (python -m rl.records.report %s tries again)", folder.path
        )


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


def _new_folder(config: Config) -> RunFolder:
    return RunFolder.create(Path(config.run.output_dir), config.run.name, to_yaml(config))


@contextmanager
def _log_to(folder: RunFolder, view: RunView) -> Iterator[None]:
    """Send log records to run.log, and warnings to the terminal too."""
    file, terminal = logging.FileHandler(folder.log, encoding="utf-8"), view.log_handler()
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal.setLevel(logging.WARNING)
    logger = logging.getLogger("rl")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in (file, terminal):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, terminal):
            logger.removeHandler(handler)
        file.close()


def _start_engines(
    plan: Plan, folder: RunFolder, view: RunView
) -> tuple[Remote, list[Remote], Remote, Remote | None, Remote | None]:
    """Learner, samplers, weight sync, reference policy and critic, after a warm start where one is asked for."""
    config = plan.config
    model = _warm_model(plan, folder, view)
    view.message("starting vLLM (sampler) and Megatron-core (learner)")
    learner = _start_learner(plan, model, plan.learner_map, folder)
    sampler_log = folder.path / "sampler.log"
    sampler = start_actor(
        SamplerActor, "sampler", config.sampler.threads, sampler_log, model, plan.sampler_map, config.sampler
    )
    wait([learner.later.ready(), sampler.later.ready()])
    sync_log = folder.path / "weight_sync.log"
    weight_sync = start_actor(
        WeightSyncActor, "weight_sync", 1, sync_log, learner, [sampler], plan.sampler_map
    )
    reference = critic = None
    if config.algorithm.needs_reference:
        reference = _start_learner(plan, model, plan.learner_map, folder, "reference")
    if config.algorithm.objective.critic is not None:
        critic = _start_critic(plan, model, folder)
    wait([engine.later.ready() for engine in (reference, critic) if engine is not None])
    return learner, [sampler], weight_sync, reference, critic


def _start_learner(
    plan: Plan, model: Path, precision_map: PrecisionMap, folder: RunFolder, name: str = "learner"
) -> Remote:
    config, log_file = plan.config, folder.path / f"{name}.log"
    arguments = (model, precision_map, config.learner, config.run.seed)
    return start_actor(LearnerActor, name, config.learner.threads, log_file, *arguments)


def _start_critic(plan: Plan, model: Path, folder: RunFolder) -> Remote:
    config, log_file = plan.config, folder.path / "critic.log"
    arguments = (
        model,
        plan.learner_map,
        config.learner,
        config.algorithm.objective.critic,
        config.run.seed,
    )
    return start_actor(CriticActor, "critic", config.learner.threads, log_file, *arguments)


def _warm_model(plan: Plan, folder: RunFolder, view: RunView) -> Path:
    """The folder to start from: the initial policy, or what a supervised start made of it (cached by content).

    The supervised start runs under `bf16`, as models are pretrained before they are trained in 4 bits.
    """
    config, settings = plan.config, plan.config.model.warm_start
    if not settings.steps:
        return plan.model

    def progress(step: int, loss: float) -> None:
        view.stage(f"warm start {step}/{settings.steps}")
        if step % 100 == 0 or step == settings.steps:
            view.message(f"warm start: step {step}/{settings.steps}, loss {loss:.3f}")

    precision_map = PrecisionMap.resolve(len(plan.learner_map.layers), named_spec("bf16"))

    def make(out: Path) -> None:
        learner = _start_learner(plan, plan.model, precision_map, folder)
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
    return cached_folder(Path(config.run.cache_dir), "warm", key, make)
