"""A run's parts, put together from its plan: task, engines, rewards, records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rl.checkpoint import Checkpoint, CheckpointStore
from rl.cluster import open_cluster
from rl.compose import to_yaml
from rl.config import Config
from rl.data.prompts import Prompt
from rl.data.summary import summary
from rl.engines import Engines, start_engines
from rl.errors import DiskFull
from rl.evaluation.during_training import benchmark_metrics
from rl.evaluation.exams import Exam
from rl.gap_limit import GapLimitExceeded, GapWatch
from rl.nodes import open_nodes, watched
from rl.partial import NOTHING, Backlog, PartialGroup, Request, grown, requests
from rl.pipeline import RolloutBatch
from rl.placement import described
from rl.plan import DATA, Plan
from rl.records.history import read_history
from rl.records.logger import RunLogger
from rl.records.provenance import record_engines, record_launch
from rl.records.report import write_report
from rl.records.view import RunView, open_view
from rl.rewards.pool import RewardPool
from rl.rollout import Group, Rollout, response_seed
from rl.rollout_store import load_backlog, load_rollouts, save_backlog, save_rollouts
from rl.run_folder import RunFolder
from rl.specs import check_experts_ran, check_specifications
from rl.task import Task
from sampler.config import SamplingConfig
from sampler.engine import Completion

log = logging.getLogger(__name__)

_ROLLOUTS, _BACKLOG = "rollouts", "backlog"  # folders in a checkpoint
_BEFORE_THE_FIRST_STEP = -1  # where a run goes on that was stopped before its first checkpoint


@dataclass(frozen=True)
class Job:
    """What the driver works with. `restored` is the driver's state in the checkpoint, empty for a new run; `ahead` a
    batch of rollouts that the checkpoint holds, and `backlog` the rollouts in it that were put aside.
    """

    config: Config
    task: Task
    engines: Engines
    rewards: RewardPool
    folder: RunFolder
    logger: RunLogger
    view: RunView
    checkpoints: CheckpointStore
    restored: dict[str, Any]
    exams: Sequence[Exam] = ()
    ahead: RolloutBatch | None = None
    backlog: Backlog = NOTHING
    gap_watch: GapWatch | None = None

    def generate(
        self, prompts: Sequence[Prompt], samples: int, purpose: str, sampling: SamplingConfig
    ) -> list[list[Completion]]:
        """`samples` responses to each prompt, in the order of `prompts`, which the samplers share out."""
        seed = self.config.run.seed
        return self._ask(
            [
                Request(
                    list(prompt.token_ids),
                    [response_seed(seed, purpose, prompt.position, k) for k in range(samples)],
                    sampling.max_tokens,
                )
                for prompt in prompts
            ],
            sampling,
        )

    def write_on(self, groups: Sequence[PartialGroup]) -> list[PartialGroup]:
        """Every unfinished response to a training prompt, longer by up to the budget of a round."""
        algorithm = self.config.algorithm
        sampling, budget = algorithm.rollout_sampling, algorithm.token_budget
        asked = requests(
            groups, partial(response_seed, self.config.run.seed, "train"), sampling.max_tokens, budget
        )
        return grown(groups, chain.from_iterable(self._ask(asked, sampling)), sampling.max_tokens)

    def _ask(self, asked: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        sampling = replace(sampling, stop_token_ids=self.task.stop_token_ids)
        count = len(self.engines.samplers)
        shares = [
            ([r.tokens for r in share], [r.seeds for r in share], sampling, [r.limit for r in share])
            for share in (asked[index::count] for index in range(count))
        ]
        results = [iter(responses) for responses in self.engines.weight_sync.generate(shares)]
        return [next(results[index % len(results)]) for index in range(len(asked))]

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
            partial(self.engines.weight_sync.ask, 0),
            seed=self.config.run.seed,
            workers=reward.workers,
            timeout_s=reward.timeout_s,
        )

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of a step, which may come in parts, to metrics.jsonl, W&B and the terminal."""
        self.logger.log(step, metrics)
        self.view.step(step, metrics)

    def watch(self, step: int, metrics: Mapping[str, float], save: Callable[[], None]) -> None:
        """Hold the gap of an iteration to `algorithm.gap_limit`.

        Warns, or raises GapLimitExceeded, after `save` where the iteration has no checkpoint yet.
        """
        found = self.gap_watch.see(step, metrics) if self.gap_watch else None
        if found is None:
            return
        if self.config.algorithm.gap_limit.action == "warn":
            log.warning("%s", found)
            return
        if step not in self.checkpoints.steps():
            save()
        raise GapLimitExceeded(found)

    def save(
        self,
        step: int,
        state: dict[str, Any],
        ahead: RolloutBatch | None = None,
        backlog: Backlog = NOTHING,
    ) -> None:
        """Write a checkpoint: engines, the driver's state (data cursor: state["position"]), and rollouts."""
        started = time.perf_counter()
        self.view.stage("checkpoint")
        state = state | {DATA: self.task.prompts.bookmark(state["position"])}

        def write(folder: Path) -> None:
            self.engines.checkpoint(folder)
            if ahead is not None:
                save_rollouts(folder / _ROLLOUTS, ahead)
            if backlog:
                save_backlog(folder / _BACKLOG, backlog)

        self.checkpoints.save(step, write, state)
        self.logger.log(step, {"time/checkpoint": time.perf_counter() - started})


@contextmanager
def open_job(plan: Plan) -> Iterator[Job]:
    """Start the engines, in a new run folder or in that of the run that is resumed.

    On the way out everything is stopped and the report is written. Raises SpecMismatch before the first rollout
    when the engines do not compute under one specification, ClusterError when Ray does not start, and DiskFull.
    """
    config = plan.config
    folder, checkpoint = plan.resumed or (_new_folder(config), None)
    resumed_at = None if plan.resumed is None else checkpoint.step if checkpoint else _BEFORE_THE_FIRST_STEP
    folder.replace_config(to_yaml(config))
    with ExitStack() as stack:
        stack.push(lambda kind, error, trace: _report(folder, error))
        record = config.logging
        logger = RunLogger(folder, wandb=record.wandb, project=record.project, resumed_at=resumed_at)
        stack.enter_context(logger)
        record_launch(folder, resumed_at)
        view = stack.enter_context(open_view(record.view, folder.title, config.run.iterations))
        stack.enter_context(_log_to(folder, view))
        _say(view, *summary(plan.task.prompts.describe()))
        rewards = RewardPool(
            plan.reward, config.reward.workers, config.reward.timeout_s, log=folder.path / "rewards.log"
        )
        stack.enter_context(rewards)
        stack.enter_context(open_cluster(config.cluster.ray_address, config.run.object_store_mib))
        nodes = open_nodes(config, folder.path, plan.model)
        if len(nodes) > 1:
            _say(view, described(config, [f"node {node.address}" for node in nodes]))
        stack.enter_context(watched(nodes))
        engines = start_engines(plan, folder, view, nodes)
        checkpoints = CheckpointStore(folder.checkpoints, config.run.keep_checkpoints)
        restored, ahead, backlog = _restore(checkpoint, engines, plan.task)
        job = Job(
            config,
            plan.task,
            engines,
            rewards,
            folder,
            logger,
            view,
            checkpoints,
            restored,
            plan.exams,
            ahead,
            backlog,
            GapWatch(config.algorithm.gap_limit, read_history(folder.metrics)),
        )
        reports = engines.reports()
        record_engines(folder, reports)
        _say(view, *check_specifications(reports, config.spec.allow_difference))
        yield job
        reports = engines.reports_at_end()
        if has_learned(checkpoints.steps(), checkpoint):
            check_experts_ran(reports)
        record_engines(folder, reports)


def has_learned(steps: Sequence[int], begun_from: Checkpoint | None) -> bool:
    """Whether a launch has learned anything. steps: of the checkpoints that there are at its end; a run, or what is
    left of one, may have nothing to learn.
    """
    return max(steps, default=0) > (begun_from.step if begun_from else 0)


def _restore(
    checkpoint: Checkpoint | None, engines: Engines, task: Task
) -> tuple[dict[str, Any], RolloutBatch | None, Backlog]:
    """Put the engines where `checkpoint` has them; the driver's state in it, and the rollouts that it holds."""
    if checkpoint is None:
        return {}, None, NOTHING
    engines.restore(checkpoint.path)
    state = {key: value for key, value in checkpoint.state.items() if key != DATA}
    prompt_at = task.prompts.training
    ahead = load_rollouts(checkpoint.path / _ROLLOUTS, prompt_at)
    return state, ahead, load_backlog(checkpoint.path / _BACKLOG, prompt_at)


def _say(view: RunView, *lines: str) -> None:
    for line in lines:
        view.message(line)
        log.info("%s", line)


def _report(folder: RunFolder, ended_by: BaseException | None) -> None:
    """Write the report; if that fails, say so, without hiding what ended the run."""
    if isinstance(ended_by, DiskFull):
        return  # there is no room for a report either
    try:
        write_report(folder)
    except DiskFull as full:
        if ended_by is None:
            raise
        log.warning("%s", full)
    except Exception:
        log.exception(
            "the report could not be written (python -m rl.records.report %s tries again)", folder.path
        )


def _new_folder(config: Config) -> RunFolder:
    return RunFolder.create(Path(config.run.output_dir), config.run.name, to_yaml(config))


class _LogFile(logging.FileHandler):
    """Loses what a full disk does not take, without a word: what a run cannot do without says so itself."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def _log_to(folder: RunFolder, view: RunView) -> Iterator[None]:
    """Send log records to run.log, and warnings to the terminal too."""
    file, terminal = _LogFile(folder.log, encoding="utf-8"), view.log_handler()
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
