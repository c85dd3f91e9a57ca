"""Drawing a batch of groups: prompts, responses, rewards, round after round."""

from __future__ import annotations

from rl.groups import GroupBuffer
from rl.job import Job
from rl.partial import Backlog, begin, separate
from rl.pipeline import RolloutBatch
from rl.rollout import Group, response_statistics
from rl.stages import Stages


def collect(job: Job, position: int, backlog: Backlog, stages: Stages) -> RolloutBatch:
    """Draw prompts from the data cursor until enough groups have mixed outcomes (dynamic sampling, DAPO section 3.2).

    A round writes on what is under way, and fills itself up with new groups. What it leaves unfinished goes on in the
    next round, be that of the same iteration or, by way of the `backlog`, of a later one; so do complete groups that
    the batch has no room for, and an iteration's first round begins as many fewer. Every iteration has a round, so that
    whatever is under way goes on. Without `algorithm.partial_rollouts` a round finishes all that it begins, and groups
    beyond the batch are dropped: a batch then holds responses of one policy.
    """
    algorithm = job.config.algorithm
    needed, size = algorithm.prompts_per_iteration, algorithm.group_size
    buffer: GroupBuffer[Group] = GroupBuffer(
        needed=needed,
        at_least=algorithm.min_groups or needed,
        group_size=size,
        max_rounds=algorithm.max_rounds * algorithm.parts,
        dynamic_sampling=algorithm.dynamic_sampling,
        kept=list(backlog.waiting[:needed]),
        surplus=list(backlog.waiting[needed:]),
    )
    under_way, drawn = list(backlog.under_way), list[Group]()
    written = -sum(group.tokens for group in under_way)
    while not (buffer.rounds and buffer.complete):
        there = len(under_way) + (0 if buffer.rounds else len(backlog.waiting))
        begun = max(0, algorithm.round_size - there)
        under_way += [begin(job.task.prompts.training(position + n), size) for n in range(begun)]
        position += begun
        with stages("generate"):
            complete, under_way = separate(job.write_on(under_way))
        with stages("reward"):
            groups = job.score([g.prompt for g in complete], [g.completions for g in complete])
        written += sum(group.tokens for group in complete)
        drawn += groups
        buffer.add(groups)
    left = Backlog(tuple(under_way), tuple(buffer.surplus) if algorithm.parts > 1 else ())
    written += sum(group.tokens for group in under_way)
    metrics = buffer.metrics() | response_statistics(drawn or buffer.kept) | {"tokens/generated": written}
    if algorithm.parts > 1:
        metrics |= left.metrics() | {
            "partial/token_budget": algorithm.token_budget,
            "partial/continued": backlog.unfinished,
        }
    return RolloutBatch(buffer.kept, position, metrics, left)
