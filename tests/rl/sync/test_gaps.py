"""The arithmetic of the delta codec."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.sync import gaps


def literal(positions: list[int], values: list[int], width: int) -> bytes:
    """The stream as the module's text has it, one unit after another."""
    escape, units, before = 2**width - 1, [], -1
    for position in positions:
        gap = position - before - 1
        units += [escape] * (gap // escape) + [gap % escape]
        before = position
    head = b"".join(unit.to_bytes(width // 8, "little") for unit in units)
    return head + bytes(-len(head) % 4) + bytes(values)


@settings(max_examples=150, deadline=None)
@given(
    st.sets(st.integers(0, 200_000), min_size=1, max_size=40),
    st.sampled_from(gaps.WIDTHS),
    st.integers(0, 2**32),
)
def test_streams_are_as_defined_and_come_back(found: set[int], width: int, seed: int) -> None:
    positions = torch.tensor(sorted(found))
    values = torch.randint(
        256, (len(found),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    stream = gaps.encode(positions, values, width)
    assert bytes(stream.tolist()) == literal(positions.tolist(), values.tolist(), width)
    assert len(stream) == gaps.encoded_size(positions, width)
    assert gaps.smallest_width(positions)[1] == min(gaps.encoded_size(positions, w) for w in gaps.WIDTHS)
    back, new = gaps.decode(stream, width, len(found), int(positions[-1]) + 1)
    assert torch.equal(back, positions)
    assert torch.equal(new, values)


@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_changes_applied_to_the_old_give_the_new(size: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    hit = torch.rand(size, generator=generator) < share
    new = torch.where(hit, torch.randint(256, (size,), dtype=torch.uint8, generator=generator), old)
    positions = gaps.changed_positions(old, new)
    assert torch.equal(positions, torch.nonzero(old != new).flatten())
    assert torch.equal(gaps.changed_positions(old[1:], new[1:]), torch.nonzero(old[1:] != new[1:]).flatten())
    if len(positions):
        for width in gaps.WIDTHS:
            where, values = gaps.decode(
                gaps.encode(positions, new[positions], width), width, len(positions), size
            )
            old_copy = old.clone()
            old_copy[where] = values
            assert torch.equal(old_copy, new)


BROKEN = [
    (lambda stream: stream[:-1], 3, 600, "cannot hold 3"),
    (lambda stream: torch.cat((stream, stream[:1])), 3, 600, "cannot hold 3"),
    (lambda stream: torch.cat((stream[:4], stream)), 3, 600, "cannot hold 3"),
    (lambda stream: stream, 7, 600, "cannot hold 7"),
    (lambda stream: stream, 0, 600, "cannot hold 0"),
    (lambda stream: stream[:2], 3, 600, "cannot hold 3"),
    (lambda stream: stream, 3, 500, "a change at byte 500 of 500"),
]


@pytest.mark.parametrize("width", gaps.WIDTHS)
@pytest.mark.parametrize(("change", "count", "size", "message"), BROKEN)
def test_streams_that_cannot_be_are_refused(change, count: int, size: int, message: str, width: int) -> None:
    stream = gaps.encode(torch.tensor([0, 299, 500]), torch.tensor([7, 8, 9], dtype=torch.uint8), width)
    with pytest.raises(ValueError, match=message):
        gaps.decode(change(stream), width, count, size)
