"""The order in tiles: PyTorch's permutation against the kernel's, its inverse, and what back ends make of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import ExpertWeights, StoredLayout, can_stand_in_tiles, expert_layout, operand_layout
from kernels.quantizer_spec import ScaleDomain
from kernels.reference import forward, prepare
from kernels.routing import sort_slots
from kernels.tiles import from_tiles, to_tiles
from kernels.triton import layer
from kernels.triton.tiles import tiles_of
from tests.kernels.triton_env import DEVICE

E, H, F = 3, 128, 128
ROWS, TILES = StoredLayout.ROWS, StoredLayout.TILES
PACKED = (
    "minite",
    "minite_expert",
    "te_exact",
    "four_over_six",
)  # linear and swizzled scales, row and expert


def masters(seed: int = 0, hidden: int = H, ffn: int = F) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(E, 2 * ffn, hidden, generator=generator)
    return w13.bfloat16(), torch.randn(E, hidden, ffn, generator=generator).bfloat16()


def stored(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    return {name: tensor.view(torch.uint8) for name, tensor in weights.tensors().items()}


def same(left: ExpertWeights, right: ExpertWeights) -> bool:
    a, b = stored(left), stored(right)
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=8, deadline=None)
def test_the_order_is_the_kernels_and_its_inverse_is_exact(experts: int, down: int, across: int, seed: int):
    """Any bytes: all 16 codes, and scales that no quantiser writes."""
    generator = torch.Generator().manual_seed(seed)
    shape = experts, 128 * down, 128 * across
    codes = torch.randint(256, (*shape[:2], shape[2] // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(256, (*shape[:2], shape[2] // 16), generator=generator, dtype=torch.uint8)
    words, word_scales = to_tiles(codes, scales)
    expected = tiles_of(codes.to(DEVICE), scales.to(DEVICE), shape)
    assert torch.equal(words.flatten(), expected[0].cpu())
    assert torch.equal(word_scales.flatten(), expected[1].cpu())
    again = from_tiles(words, word_scales)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


def test_other_widths_have_no_tiles() -> None:
    codes, scales = torch.zeros(1, 128, 48, dtype=torch.uint8), torch.zeros(1, 128, 6, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiples of 128 features and elements, got 128 x 96"):
        to_tiles(codes, scales)


@pytest.mark.parametrize("name", PACKED)
def test_weights_go_there_and_back(name: str) -> None:
    spec = named_spec(name)
    rows = ExpertWeights.quantize(*masters(), spec)
    tiles = rows.in_layout(TILES)
    assert (rows.layout, tiles.layout) == (ROWS, TILES)
    found = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tiles.tensors().items()}
    assert found == expert_layout(E, H, F, spec, TILES)
    assert same(tiles.in_layout(ROWS), rows)
    assert tiles.in_layout(TILES) is tiles and rows.in_layout(ROWS) is rows
    assert same(ExpertWeights.from_tensors(tiles.tensors(), spec), tiles)
    assert sum(t.nbytes for t in tiles.tensors().values()) == sum(t.nbytes for t in rows.tensors().values())
    shapes = {key: tuple(tensor.shape) for key, tensor in tiles.tensors().items()}
    assert operand_layout(shapes, spec)["w2.weight"][0] == (E, H, F)


@pytest.mark.parametrize("name", CATALOGUE)
def test_weights_that_have_no_tiles_stay_in_rows(name: str) -> None:
    spec = named_spec(name)
    for hidden, ffn in ((H, F), (H, 64), (96, F)):
        weights = ExpertWeights.quantize(*masters(0, hidden, ffn), spec)
        fits = can_stand_in_tiles(hidden, ffn, spec)
        assert fits == ((hidden, ffn) == (H, F) and "w13.codes" in weights.tensors() and _in_16(spec))
        assert weights.in_layout(TILES).layout is (TILES if fits else ROWS)
        assert list(expert_layout(E, hidden, ffn, spec, TILES)) == list(weights.in_layout(TILES).tensors())


def _in_16(spec) -> bool:
    return spec.weight.block == "1x16" and spec.weight.code_layout == "even_low"


def test_tensors_of_another_shape_are_refused() -> None:
    spec = named_spec("minite")
    tensors = ExpertWeights.quantize(*masters(), spec).in_layout(TILES).tensors()
    for name, changed, message in (
        ("w2.words", tensors["w2.words"][:, :, :, :-1], r"w2.words is torch.int32 \(3, 1, 1, 2047\)"),
        ("w13.words", tensors["w13.words"].flatten(), "need w13.words"),
        ("w13.word_scales", None, "w13.word_scales is missing"),
    ):
        wrong = (
            {**tensors, name: changed}
            if changed is not None
            else {k: t for k, t in tensors.items() if k != name}
        )
        with pytest.raises(ValueError, match=message):
            ExpertWeights.from_tensors(wrong, spec)


def slots(tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    scores = torch.rand(tokens, E, generator=generator)
    ids, p = sort_slots(scores.topk(2).indices, scores.topk(2).values)
    return x, ids, p


@pytest.mark.parametrize("name", PACKED)
def test_the_reference_computes_the_same_bits_from_tiles(name: str) -> None:
    spec = named_spec(name)
    rows = ExpertWeights.quantize(*masters(), spec)
    a, b = (prepare(weights, spec) for weights in (rows, rows.in_layout(TILES)))
    for key, tensor in a.derived().items():
        assert torch.equal(tensor, b.derived()[key])
    assert torch.equal(forward(*slots(), a, spec), forward(*slots(), b, spec))


@pytest.mark.parametrize("name", ["minite", "minite_expert"])
def test_the_kernels_read_stored_tiles_as_they_are(name: str) -> None:
    """What is held is what is computed with: there is no copy in another order, and what is written there counts."""
    spec = named_spec(name)
    rows, other = (
        ExpertWeights.quantize(*(w[:1].to(DEVICE) for w in masters(seed)), spec) for seed in (0, 1)
    )
    tiles = rows.in_layout(TILES)
    prepared, wide = (layer.prepare(tiles, spec, compact=compact) for compact in (True, False))
    expected = prepare(rows, spec)
    for key in ("w13", "w2"):
        matrix = getattr(prepared, key)
        assert matrix.words is tiles.stored[f"{key}.words"] and matrix.decoded is None
        assert matrix.word_scales is tiles.stored[f"{key}.word_scales"]
        assert torch.equal(getattr(wide, key).decoded.float(), getattr(expected, key).elements.float())
    assert spec.weight is not None
    shared = spec.weight.outer_domain is ScaleDomain.EXPERT
    for found in (prepared, wide):
        assert set(found.derived()) == ({"w13.outer", "w2.outer"} if shared else set())
    for key, tensor in other.in_layout(TILES).tensors().items():
        tiles.stored[key].copy_(tensor)
    assert torch.equal(prepared.w2.elements().float(), prepare(other, spec).w2.elements.float())
