"""The order of slots in one launch against the definition."""

from __future__ import annotations

import pytest
import torch

from kernels.routing import sort_slots
from kernels.triton import slot_order
from tests.kernels.triton_env import DEVICE


def slots(tokens: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts without repetition; coefficients of few values, so that many are equal."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 2 * k, generator=generator).argsort(1)[:, :k].to(dtype)
    return ids.to(DEVICE), (torch.randint(4, (tokens, k), generator=generator) / 4).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "k"), [(0, 8), (1, 1), (5, 3), (40, 8), (9, 10)])
def test_the_order_is_that_of_the_definition(tokens: int, k: int, dtype: torch.dtype) -> None:
    ids, p = slots(tokens, k, dtype)
    expected = sort_slots(ids, p)
    found = slot_order.sort_slots(ids, p)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert found[0].dtype is dtype


def test_padding_has_no_expert_and_no_number_takes_anothers_place() -> None:
    ids, p = slots(6, 4, torch.int32)
    p[1] = torch.nan
    padding = torch.tensor([False, False, False, True, False, True], device=DEVICE)
    places = torch.where(padding, -1, torch.arange(6, device=DEVICE))
    found_ids, found_p = slot_order.sort_slots(ids, p, places)
    assert (found_ids[padding] == -1).all() and not found_p[padding].any()
    expected = sort_slots(ids[~padding], p[~padding])
    assert torch.equal(found_ids[~padding][[0, 2, 3]], expected[0][[0, 2, 3]])
    assert torch.equal(found_ids[1].sort().values, ids[1].sort().values) and found_p[1].isnan().all()
