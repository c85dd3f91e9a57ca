from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from learner.config import CorrectionConfig
from learner.correction import Correction, correct

RATIOS = [[0.5, 2.0, 1.0], [4.0, 1.0, 1.0], [1e-5, 1.0, 1.0], [1.0, 1.0, 0.0]]
MASK = torch.tensor(RATIOS) > 0  # the last row has two tokens


def corrected(**changes: Any) -> Correction:
    """Of tokens with RATIOS, out of order of nothing: row after row."""
    d = torch.tensor(RATIOS).clamp(min=1e-9).log()
    return correct(d - 1.0, torch.full_like(d, -1.0), MASK, CorrectionConfig(**changes))


def weights(correction: Correction) -> list[list[float]]:
    lengths = MASK.sum(1).tolist()
    return [[round(w, 5) for w in part.tolist()] for part in correction.weight.split(lengths)]


def test_token_weights_are_capped_ratios() -> None:
    assert weights(corrected(cap=2.0)) == [[0.5, 2.0, 1.0], [2.0, 1.0, 1.0], [1e-5, 1.0, 1.0], [1.0, 1.0]]
    assert corrected(cap=2.0).capped.nonzero().flatten().tolist() == [
        3
    ]  # a ratio equal to the cap is not cut
    assert weights(corrected(cap=None))[1] == [4.0, 1.0, 1.0]


def test_sequence_weights_are_capped_products() -> None:
    found = corrected(weight="sequence", cap=3.0)
    assert weights(found) == [[1.0] * 3, [3.0] * 3, [1e-5] * 3, [1.0] * 2]
    assert found.capped.tolist() == [False] * 3 + [True] * 3 + [False] * 5


def test_off_means_weight_one() -> None:
    found = corrected(weight="off", cap=None)
    assert set(found.weight.tolist()) == {1.0}
    assert found.statistics() == {
        **dict.fromkeys(("weight_mean", "weight_max", "ess"), 1.0),
        **dict.fromkeys(("clipped", "rejected", "token_rejected", "sequence_rejected", "vetoed"), 0.0),
    }


def test_masked_importance_sampling_keeps_the_ratio_inside_the_band_and_nothing_outside() -> None:
    found = corrected(cap=None, token_band=(0.5, 2.0))  # bounds are inclusive
    assert weights(found) == [[0.5, 2.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0]]
    assert found.statistics()["token_rejected"] == found.statistics()["rejected"] == pytest.approx(2 / 11)


def test_geometric_mean_rejects_whole_sequences() -> None:
    """Geometric means: 1, 4^(1/3) = 1.587, 1e-5^(1/3) = 0.0215, 1."""
    found = corrected(weight="off", sequence_band=(0.9, 1.6))
    assert weights(found) == [[1.0] * 3, [1.0] * 3, [0.0] * 3, [1.0] * 2]
    found = corrected(weight="off", sequence_band=(0.02, 1.5))
    assert found.sequence_rejected.tolist() == [False, True, False, False]
    assert found.statistics()["sequence_rejected"] == pytest.approx(1 / 4)
    assert found.statistics()["rejected"] == pytest.approx(3 / 11)


def test_a_mean_does_not_hide_what_the_veto_sees() -> None:
    d = torch.tensor([[-6.0, 6.0, 0.0], [-0.1, 0.1, 0.0]])
    settings = CorrectionConfig(weight="off", sequence_band=(0.99, 1.01), veto=1e-2)
    found = correct(d, torch.zeros_like(d), torch.ones_like(d) > 0, settings)
    assert found.sequence_rejected.tolist() == [False, False]
    assert found.vetoed.tolist() == [True, False]
    assert found.weight.tolist() == [0.0] * 3 + [1.0] * 3


def test_rules_work_together() -> None:
    found = corrected(cap=2.0, token_band=(0.6, 10.0), veto=1e-4)
    assert weights(found) == [[0.0, 2.0, 1.0], [2.0, 1.0, 1.0], [0.0] * 3, [1.0] * 2]
    statistics = found.statistics()
    assert statistics["rejected"] == pytest.approx(4 / 11)
    assert statistics["token_rejected"] == pytest.approx(2 / 11)
    assert statistics["vetoed"] == pytest.approx(1 / 4)


def test_statistics_against_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    d = 0.8 * torch.randn(40, 30, generator=generator)
    mask = torch.rand(40, 30, generator=generator) > 0.3
    mask[5] = False
    found = correct(d, torch.zeros_like(d), mask, CorrectionConfig(cap=2.0, token_band=(0.4, 3.0), veto=0.12))
    statistics = found.statistics()
    ratio = np.where(mask.numpy(), np.exp(d.double().numpy()), np.nan)
    vetoed = np.nanmin(np.where(mask, ratio, np.inf), axis=1) < 0.12
    outside = (ratio < 0.4) | (ratio > 3.0)
    w = np.where(outside | vetoed[:, None], 0.0, np.minimum(ratio, 2.0))[mask.numpy()]
    assert statistics == pytest.approx(
        {
            "weight_mean": w.mean(),
            "weight_max": w.max(),
            "ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
            "clipped": (ratio > 2.0)[mask.numpy()].mean(),
            "rejected": (w == 0).mean(),
            "token_rejected": outside[mask.numpy()].mean(),
            "sequence_rejected": 0.0,
            "vetoed": vetoed.sum() / 39,  # of the rows that have a token
        },
        rel=1e-6,
    )
    assert 0 < statistics["vetoed"] < 1 and 0 < statistics["ess"] < 1


def test_everything_rejected_has_no_effective_sample() -> None:
    found = corrected(weight="off", cap=None, sequence_band=(1.0, 1.0), veto=0.9).statistics()
    assert found["rejected"] == pytest.approx(9 / 11)
    d = torch.full((1, 2), -9.0)
    found = correct(d, torch.zeros_like(d), d < 0, CorrectionConfig(veto=0.5)).statistics()
    assert found["ess"] == found["weight_max"] == 0 and found["rejected"] == 1


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_infinite_looking_ratios_times_a_mask_are_no_nan(weight: str) -> None:
    """exp(500) is infinite in FP32, and infinity times a mask of zero is not a number."""
    d = torch.tensor([[500.0, 400.0], [-500.0, -400.0]])
    settings = CorrectionConfig(weight=weight, cap=None, token_band=(0.5, 5.0), sequence_band=(0.9, 1.1))
    found = correct(d, torch.zeros_like(d), torch.ones_like(d) > 0, settings)
    assert found.weight.tolist() == [0.0] * 4
    uncapped = correct(d, torch.zeros_like(d), d != 0, CorrectionConfig(weight=weight, cap=None))
    assert bool(uncapped.weight.isfinite().all())
    assert uncapped.weight[0].item() == pytest.approx(math.exp(20), rel=1e-6)


def test_a_long_sequence_is_summed_exactly() -> None:
    """10,000 ratios of 1.0001: the product is e^0.99995, and FP32 sums of logs would lose digits."""
    d = torch.full((1, 10_000), 1.0001).log()
    found = correct(d, torch.zeros_like(d), d > 0, CorrectionConfig(weight="sequence", cap=None))
    assert found.weight[0].item() == pytest.approx(math.exp(10_000 * d[0, 0].double().item()), rel=1e-6)


def test_no_tokens_have_no_statistics() -> None:
    nothing = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="no tokens"):
        correct(nothing, nothing, nothing > 0, CorrectionConfig()).statistics()
