"""The driver: group-relative or critic-based policy optimisation, one iteration after another.

What an iteration learns from its responses is in `rl.training_batch`, the loss in `learner.objective`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from learner.batch import TrainBatch
from rl.collect import collect
from rl.gap import measure_gap
from rl.groups import AllSolved, TooFewGroups
from rl.job import Job
from rl.metrics import reduce
from rl.pipeline import Pipeline, open_pipeline, staleness
from rl.rollout import Sequences, response_statistics, to_sequences
from rl.stages import Stages
from rl.training_batch import mini_batches, training_batch

if TYPE_CHECKING:
    from learner.batch import Scores

Metrics = dict[str, float]


@dataclass(frozen=True)
class Progress:
    """Where a run stands: finished iterations and the data cursor."""

    iteration: int = 0
    position: int = 0

    @property
    def version(self) -> int:
        """Of the learner's weights; version 0 is what a sampler loads by itself."""
        return self.iteration + 1


def train(job: Job) -> None:
    """Run the job from its last checkpoint, or from the start, to its last iteration."""
    progress = Progress(**job.restored)
    left = job.config.run.iterations - progress.iteration
    drawn_before = job.ahead, job.backlog
    with open_pipeline(job.config.algorithm.pipeline, partial(collect, job), left, *drawn_before) as pipeline:
        run_iterations(job, pipeline, progress)


def run_iterations(job: Job, pipeline: Pipeline, progress: Progress) -> None:
    """Iterate, evaluate, record and save, until the last iteration or until there is nothing left to learn."""
    run, evaluation = job.config.run, job.config.evaluation
    job.engines.weight_sync.sync(progress.version)
    if progress.iteration == 0:
        job.record(0, evaluate(job) | job.answer_benchmarks() | job.engines.memory())
    while progress.iteration < run.iterations:
        stages = Stages(job.view.stage)
        try:
            progress, metrics = iterate(job, pipeline, progress, stages)
        except TooFewGroups as shortage:
            end_early(job, pipeline, progress, shortage)
            break
        last = progress.iteration == run.iterations
        if last or progress.iteration % evaluation.every == 0:
            with stages("evaluate"):
                metrics |= evaluate(job)
        if last or progress.iteration % (evaluation.benchmarks_every or evaluation.every) == 0:
            with stages("evaluate"):
                metrics |= job.answer_benchmarks()
        metrics |= stages.metrics(metrics["tokens/generated"]) | job.engines.memory()
        job.record(progress.iteration, metrics | job.engines.hardware.usage(metrics))
        save = partial(job.save, progress.iteration, asdict(progress), pipeline.ahead, pipeline.backlog)
        if last or progress.iteration % run.checkpoint_every == 0:
            save()
        job.watch(progress.iteration, metrics, save)
    if pipeline.backlog:
        job.view.message(f"the run ends, and {pipeline.backlog}; the last checkpoint holds them")


def end_early(job: Job, pipeline: Pipeline, progress: Progress, shortage: TooFewGroups) -> None:
    """Keep what was learned. A policy that solves every problem is done; any other shortage of groups is an error."""
    if progress.iteration not in job.checkpoints.steps():
        job.save(progress.iteration, asdict(progress), backlog=pipeline.backlog)
    if not isinstance(shortage, AllSolved):
        raise shortage
    job.view.message(f"every problem drawn is solved: the run ends after iteration {progress.iteration}")
    if not job.logger.has(progress.iteration, "held_out/reward"):
        job.record(progress.iteration, evaluate(job))


def iterate(job: Job, pipeline: Pipeline, progress: Progress, stages: Stages) -> tuple[Progress, Metrics]:
    """One iteration: roll out, score, measure the gap, update, sync."""
    algorithm = job.config.algorithm
    drawn = pipeline.take(progress.position, stages)
    groups = drawn.groups
    metrics = drawn.metrics | staleness(groups, progress.version, algorithm.max_staleness)
    sequences = to_sequences(groups)
    job.engines.weight_sync.rest()
    with stages("score"):
        scores, reference_logp, values = score(job, sequences)
    metrics |= job.engines.work(sequences)
    metrics |= measure_gap(scores, sequences, algorithm.objective, progress.version, algorithm.behind)
    routes = {"off": None, "r2": scores.routes, "r3": sequences.routes}[algorithm.routing_replay]
    with stages("update"):
        batch, statistics = training_batch(
            groups,
            sequences,
            scores.logp,
            algorithm,
            reference_logp=reference_logp,
            values=values,
            routes=routes,
        )
        metrics |= statistics | update(job, batch, progress)
    pipeline.settle(stages)
    with stages("sync"):
        metrics |= job.engines.weight_sync.sync(progress.version + 1)
    metrics["data/epoch"] = drawn.position / job.task.prompts.training_count
    return Progress(progress.iteration + 1, drawn.position), metrics


def score(job: Job, sequences: Sequences) -> tuple[Scores, torch.Tensor | None, torch.Tensor | None]:
    """What the learner thinks of the responses before the update; with a KL penalty the reference policy's logp; with a
    critic the values of their states.
    """
    algorithm, engines = job.config.algorithm, job.engines
    arguments = (sequences, algorithm.sampling.temperature, algorithm.sampling.top_p)
    scores = engines.learner.score(*arguments, replay=algorithm.routing_replay)
    reference_logp = None if engines.reference is None else engines.reference.score(*arguments).logp
    values = None if engines.critic is None else engines.critic.values(sequences)
    return scores, reference_logp, values


def update(job: Job, batch: TrainBatch, progress: Progress) -> Metrics:
    """One optimiser step for each of `updates_per_iteration` mini-batches, of the critic and then of the policy; the
    critic alone learns in its warm-up iterations.
    """
    algorithm, engines = job.config.algorithm, job.engines
    sampling, critic = algorithm.sampling, algorithm.objective.critic
    parts = mini_batches(batch, algorithm.updates_per_iteration)
    metrics: Metrics = {"tokens/trained": sum(part.totals.tokens for part in parts)}
    if engines.critic is not None:
        metrics |= combined("critic", [engines.critic.update(part) for part in parts])
    if critic is None or progress.iteration >= critic.warmup_iterations:
        arguments = (algorithm.objective, sampling.temperature, sampling.top_p)
        metrics |= combined("policy", [engines.learner.update(part, *arguments) for part in parts])
    return metrics


def combined(section: str, steps: list[Metrics]) -> Metrics:
    """The metrics of an iteration from those of its optimiser steps."""
    tokens = [step["tokens"] for step in steps]
    names = [name for name in steps[0] if name != "tokens"]
    return {
        f"{section}/{name}": reduce(f"{section}/{name}", [step[name] for step in steps], tokens)
        for name in names
    }


def evaluate(job: Job) -> Metrics:
    """Sample answers to the held-out problems, always with the same seeds."""
    evaluation = job.config.evaluation
    sampling = replace(job.config.algorithm.sampling, temperature=evaluation.temperature, return_routes=False)
    prompts = job.task.prompts.held_out
    groups = job.score(prompts, job.generate(prompts, evaluation.samples, "held_out", sampling))
    statistics = response_statistics(groups)
    return {
        "held_out/reward": statistics["reward/mean"],
        "held_out/accuracy": statistics["reward/accuracy"],
        "held_out/error_rate": statistics["reward/error_rate"],
        "held_out/length_mean": statistics["response/length_mean"],
        "held_out/truncated": statistics["response/truncated"],
    }
