"""Random numbers made from seed, position and token: their distribution, and what they do not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from sampler.config import SamplingConfig
from sampler.draws import exponential_noise
from sampler.engine import Sampler
from tests.sampler.conftest import LAYERS, MakeModel, StartSampler, prompts

CPU = torch.device("cpu")


def noise(seeds: list[int], positions: list[int], width: int) -> torch.Tensor:
    return exponential_noise(np.array(seeds, np.uint64), np.array(positions, np.uint64), width, CPU)


def test_numbers_are_exponential_variables() -> None:
    """Kolmogorov and Smirnov, over columns, over positions and over seeds, neighbours all."""
    wide = noise([2**62 + 1], [17], 200_000)[0]
    deep = noise([5] * 200_000, list(range(200_000)), 2)[:, 1]
    many = noise(list(range(200_000)), [9] * 200_000, 2)[:, 0]
    for own in (wide, deep, many):
        assert (own > 0).all()
        assert stats.kstest(own.numpy(), "expon").pvalue > 1e-3


@pytest.mark.parametrize(("seed", "position"), [(1, 0), (0, 1), (2**32, 0)])
def test_neighbouring_rows_are_unrelated(seed: int, position: int) -> None:
    assert abs(np.corrcoef(*noise([0, seed], [0, position], 100_000))[0, 1]) < 4 / np.sqrt(100_000)


def test_neighbouring_columns_are_unrelated() -> None:
    [row] = noise([0], [0], 100_001)
    assert abs(np.corrcoef(row[:-1], row[1:])[0, 1]) < 4 / np.sqrt(100_000)


def test_a_row_does_not_depend_on_the_others() -> None:
    seeds, positions = [3, 2**63 - 1, 3, 8], [1, 5, 2, 5]
    together = noise(seeds, positions, 50)
    assert len({tuple(row.tolist()) for row in together}) == 4
    for index in range(4):
        assert torch.equal(
            together[index], noise(seeds[index : index + 1], positions[index : index + 1], 50)[0]
        )


def test_draws_have_the_probabilities() -> None:
    """As many draws of each token as its probability says, also of rare ones (chi-squared)."""
    p = torch.tensor([0.5, 0.25, 0.2, 0.04, 0.009, 0.001])
    drawn = (p / noise([11] * 200_000, list(range(200_000)), 6)).argmax(-1)
    found = torch.bincount(drawn, minlength=6)
    assert stats.chisquare(found.numpy(), (p.double() / p.double().sum()).numpy() * 200_000).pvalue > 1e-3


@pytest.fixture(scope="module")
def sampler(model_folder: MakeModel, start_sampler: StartSampler) -> Sampler:
    precision_map = PrecisionMap.resolve(LAYERS, named_spec("bf16"))
    return start_sampler(model_folder("qwen3_moe"), precision_map, draws="batched")


def test_an_engine_draws_by_seed_and_position(sampler: Sampler) -> None:
    """Whatever shares the call; responses of one prompt differ, and are drawn from what is said."""
    sampling = SamplingConfig(max_tokens=12, temperature=0.9, top_p=0.9)
    own = prompts()
    together = sampler.generate(own, [[7, 7, 8], *([100 + i] for i in range(len(own) - 1))], sampling)
    one, same, other = together[0]
    assert one == same
    assert one.token_ids != other.token_ids
    for index in range(1, len(own)):
        [[alone]] = sampler.generate(own[index : index + 1], [[99 + index]], sampling)
        assert alone.token_ids == together[index][0].token_ids


def test_first_tokens_have_the_models_probabilities(sampler: Sampler) -> None:
    count = 2000
    [drawn] = sampler.generate(prompts()[:1], [list(range(count))], SamplingConfig(max_tokens=1))
    logp = {completion.token_ids[0]: completion.logp[0] for completion in drawn}
    found = {token: sum(c.token_ids[0] == token for c in drawn) for token in logp}
    likely = [token for token in logp if np.exp(logp[token]) * count >= 10]
    expected = [np.exp(logp[token]) * count for token in likely]
    rest = count - sum(expected)
    observed = [found[token] for token in likely]
    assert stats.chisquare([*observed, count - sum(observed)], [*expected, rest]).pvalue > 1e-3
