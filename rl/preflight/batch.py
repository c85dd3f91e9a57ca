"""From prompts to micro-batches: how many sequences and tokens each step of an iteration works on."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from rl.config import Config


@dataclass(frozen=True)
class Batch:
    """Of one iteration. Tokens are those of prompt and response together; `limit` is the most of one sequence, `length`
    what is expected of it.
    """

    prompts: int
    group_size: int
    drawn_a_round: int  # prompts
    rounds: int  # at most, of whole responses
    parts: int  # rounds in which the longest response is written
    token_budget: int  # most tokens of such a part
    updates: int
    limit: int
    length: int
    ranks: int  # that share out an update
    micro_batch_tokens: int

    @classmethod
    def of(cls, config: Config) -> Batch:
        algorithm = config.algorithm
        return cls(
            prompts=algorithm.prompts_per_iteration,
            group_size=algorithm.group_size,
            drawn_a_round=algorithm.round_size,
            rounds=algorithm.max_rounds,
            parts=algorithm.parts,
            token_budget=algorithm.token_budget,
            updates=algorithm.updates_per_iteration,
            limit=config.sampler.max_model_len,
            length=algorithm.expected_length or config.sampler.max_model_len,
            ranks=config.learner.data_parallel,
            micro_batch_tokens=config.learner.micro_batch_tokens,
        )

    @property
    def sequences(self) -> int:
        """Of an update."""
        return self.prompts * self.group_size // self.updates

    @property
    def tokens(self) -> int:
        """Of an update, expected."""
        return self.sequences * self.length

    @property
    def responses_a_round(self) -> int:
        return self.drawn_a_round * self.group_size

    @property
    def largest_micro_batch(self) -> int:
        """Most tokens of one."""
        return min(self.micro_batch_tokens, ceil(self.sequences / self.ranks) * self.limit)

    @property
    def micro_batches(self) -> int:
        """Of an update on the rank that has most, were all sequences of the expected length (`learner.batch.cut`)."""
        own = ceil(self.sequences / self.ranks)
        return ceil(own / max(1, self.micro_batch_tokens // self.length))

    @property
    def iteration_bytes(self) -> int:
        """What an iteration puts into Ray's object store at most: of every token, padding included, ids (8), mask (1),
        and five numbers of 4 bytes: version, log-probabilities of sampler and learner, advantage, reward.
        """
        return self.sequences * self.updates * self.limit * (8 + 1 + 5 * 4)
