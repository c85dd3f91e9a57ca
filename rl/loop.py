"""The driver: DAPO (arXiv 2503.14476) with truncated importance sampling, one iteration after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from learner.batch import TrainBatch
from rl.advantages import group_advantages
from rl.gap import gap_statistics
from rl.groups import GroupBuffer
from rl.job import Job
from rl.rollout import Group, Sequences, generate_groups, to_sequences
from rl.stages import Stages

Metrics = dict[str, float]


@dataclass(frozen=True)
class Progress:
    """Where a run stands: finished iterations (also the version of the weights) and the data cursor."""

    iteration: int = 0
    position: int = 0


def train(job: Job) -> None:
    """Run the job from its last checkpoint, or from the start, to its last iteration."""
    run = job.config.run
    progress = Progress(**job.restore())
    job.weight_sync.sync(progress.iteration)
    if progress.iteration == 0:
        job.record(0, evaluate(job))
    while progress.iteration < run.iterations:
        stages = Stages()
        progress, metrics = iterate(job, progress, stages)
        if progress.iteration % job.config.evaluation.every == 0 or progress.iteration == run.iterations:
            with stages("evaluate"):
                metrics |= evaluate(job)
        job.record(progress.iteration, metrics | stages.metrics())
        if progress.iteration % run.checkpoint_every == 0 or progress.iteration == run.iterations:
            job.save(progress.iteration, vars(progress))


def iterate(job: Job, progress: Progress, stages: Stages) -> tuple[Progress, Metrics]:
    """Roll out, score, update, sync: one iteration."""
    algorithm = job.config.algorithm
    groups, position, metrics = collect(job, progress.position, stages)
    sequences = to_sequences(groups)
    with stages("score"):
        scores = job.learner.score(sequences, algorithm.sampling.temperature)
    mask = sequences.loss_mask
    metrics |= gap_statistics(scores.logp[mask], sequences.sampler_logp[mask], algorithm.objective)
    metrics["policy/entropy"] = scores.entropy[mask].mean().item()
    with stages("update"):
        metrics |= update(job, sequences, scores.logp, groups)
    with stages("sync"):
        metrics |= job.weight_sync.sync(progress.iteration + 1)
    return Progress(progress.iteration + 1, position), metrics


def collect(job: Job, position: int, stages: Stages) -> tuple[list[Group], int, Metrics]:
    """Draw prompts until enough groups have mixed outcomes (dynamic sampling, DAPO section 3.2)."""
    algorithm = job.config.algorithm
    buffer = GroupBuffer(
        algorithm.prompts_per_iteration, algorithm.max_rounds, keep_constant=not algorithm.dynamic_sampling
    )
    while buffer.missing:
        prompts = [job.prompts.training(position + offset) for offset in range(buffer.missing)]
        position += len(prompts)
        with stages("generate"):
            drawn = generate_groups(prompts, algorithm.group_size, "train", algorithm.sampling, job)
        buffer.add(drawn)
    return buffer.kept, position, buffer.metrics() | rollout_metrics(buffer.drawn)
