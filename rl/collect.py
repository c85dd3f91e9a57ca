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

    A round writes on what is under way and begins as many groups as a round has beside them. With
    `algorithm.partial_rollouts` those that it leaves unfinished go on in the next, be that in the same iteration or, by
    way of the `backlog`, in a later one; so do complete groups beyond the batch. Else a round finishes all that
    it begins, and groups beyond the batch are dropped: a batch then holds responses of one policy.
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
        begun = max(0, algorithm.round_size - len(under_way) - len(buffer.surplus))
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
