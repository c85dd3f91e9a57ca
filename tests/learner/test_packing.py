"""Sequences packed one after another are what they are alone."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.packing import Packing
from learner.policy import Policy
from tests.learner.conftest import MakeFolder, Sequences, config, precision_map
from tests.learner.test_parity import relative

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(LENGTHS)
def test_padding_is_left_out_and_put_back(lengths: list[int]) -> None:
    packing = Packing.of(torch.tensor(lengths))
    rows = [[100 * row + place for place in range(length)] for row, length in enumerate(lengths)]
    padded = torch.full((len(lengths), max(lengths) + 2), -1)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = torch.tensor(values)
    packed = packing.pack(padded)
    assert packed.tolist() == sum(rows, [])
    assert torch.equal(packing.unpack(packed, -1), padded[:, : max(lengths)])


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_runs_of_like_lengths_hold_all_and_pad_little(lengths: list[int]) -> None:
    packing = Packing.of(torch.tensor(lengths))
    numbers = torch.arange(sum(lengths))
    assert torch.cat([numbers[tokens] for tokens, _ in packing.alike]).equal(numbers)
    assert [size for _, own in packing.alike for size in own.sizes] == lengths
    for tokens, own in packing.alike:
        assert own.unpack(numbers[tokens]).numel() <= 2 * sum(own.sizes)
        assert own.pack(own.unpack(numbers[tokens])).equal(numbers[tokens])


@given(LENGTHS, st.data())
def test_the_token_before_is_the_one_before_in_its_own_sequence(
    lengths: list[int], data: st.DataObject
) -> None:
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.bool)
    for row, length in enumerate(lengths):
        for place in data.draw(st.sets(st.integers(1, length - 1))) if length > 1 else ():
            mask[row, place] = True
    packing = Packing.of(torch.tensor(lengths))
    numbers = torch.arange(mask.numel()).view(mask.shape)
    assert torch.equal(packing.pack(numbers)[packing.before(mask)], numbers[mask] - 1)
    behind = torch.tensor([[-1], [-1]])  # rows of no sequence
    hidden = torch.cat((packing.pack(numbers)[:, None], behind))
    assert torch.equal(packing.states_before(hidden, mask).squeeze(1), numbers[mask] - 1)


@given(LENGTHS, st.booleans())
def test_gradients_go_back_to_where_values_came_from(lengths: list[int], back: bool) -> None:
    """As those of indexing, which autograd knows."""
    packing = Packing.of(torch.tensor(lengths))
    width = max(lengths) + (0 if back else 2)
    shape = (sum(lengths), 3) if back else (len(lengths), width, 3)
    own, other = (torch.arange(prod(shape)).view(shape).double().requires_grad_() for _ in range(2))
    if back:
        found = packing.unpack(own)
        expected = torch.zeros(len(lengths), width, 3, dtype=torch.float64)
        expected = expected.index_put((packing.sequences, packing.positions), other)
    else:
        found, expected = packing.pack(own), other[packing.sequences, packing.positions]
    assert torch.equal(found, expected)
    direction = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        *(torch.autograd.grad(value, leaf, direction)[0] for value, leaf in ((found, own), (expected, other)))
    )


def test_the_gradient_of_states_before() -> None:
    packing = Packing.of(torch.tensor([3, 2]))
    mask = torch.tensor([[False, True, True], [False, True, False]])
    hidden = torch.zeros(6, 2, requires_grad=True)
    packing.states_before(hidden, mask).backward(torch.tensor([[1.0, 2], [3, 4], [5, 6]]))
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[1, 2], [3, 4], [0, 0], [5, 6], [0, 0], [0, 0]]
    none = packing.states_before(hidden, torch.zeros_like(mask))  # a sequence may have no token in the loss
    assert none.shape == (0, 2)
    assert not torch.autograd.grad(none.sum(), hidden)[0].any()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_states_and_gradients_do_not_depend_on_what_is_packed_together(
    model_folder: MakeFolder, sequences: Sequences, family: str
) -> None:
    tokens, lengths, _ = sequences
    policy = Policy(model_folder(family), precision_map("fp32"), config(), seed=0)
    direction = torch.randn(
        *tokens.shape, policy.architecture.hidden, generator=torch.Generator().manual_seed(0)
    )

    def computed(packs: list[list[int]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        states = torch.zeros_like(direction)
        policy.model.zero_grad()
        for rows in packs:
            packing = Packing.of(lengths[rows])
            hidden = policy.model.hidden_states(packing.pack(tokens[rows]), packing)
            (hidden.float() * packing.pack(direction[rows])).sum().backward()
            states[rows, : packing.longest] = packing.unpack(hidden.detach().float())
        gradients = {
            name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None
        }
        return states, gradients

    rows = list(range(len(tokens)))
    alone, gradients = computed([[row] for row in rows])
    assert alone[0, 0].norm() > 0.1
    for packs in ([rows], [rows[::-1]], [rows[1::2], rows[::2]], [rows[:1], rows[1:]]):
        states, found = computed(packs)
        torch.testing.assert_close(states, alone, rtol=1e-5, atol=1e-5)
        for name, gradient in gradients.items():
            assert relative(found[name], gradient) < 1e-5, name
