"""Which layer runs under which spec."""

from __future__ import annotations

import json

import pytest

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap

MINITE, EXPERT, BF16 = (named_spec(name) for name in ("minite", "minite_expert", "bf16"))


def test_resolve_puts_bf16_at_both_ends() -> None:
    precision_map = PrecisionMap.resolve(6, MINITE, first_layers_bf16=1, last_layers_bf16=2)
    assert precision_map.layers == (BF16, MINITE, MINITE, MINITE, BF16, BF16)
    assert [precision_map.spec_for(layer) for layer in range(6)] == list(precision_map.layers)
    assert PrecisionMap.resolve(2, MINITE, 1, 1).layers == (BF16, BF16)
    assert PrecisionMap.resolve(3, EXPERT).layers == (EXPERT,) * 3


def test_a_map_is_described_by_its_specs_and_by_a_fingerprint_of_its_own() -> None:
    precision_map = PrecisionMap.resolve(6, MINITE, first_layers_bf16=1, last_layers_bf16=2)
    assert precision_map.spans() == [(BF16, "0"), (MINITE, "1 to 3"), (BF16, "4 to 5")]
    assert precision_map.describe() == (
        f"bf16 {BF16.fingerprint} in layer 0, minite {MINITE.fingerprint} in layers 1 to 3,"
        f" bf16 {BF16.fingerprint} in layers 4 to 5; precision map {precision_map.fingerprint}"
    )


@pytest.mark.parametrize(("layers", "first", "last"), [(0, 0, 0), (4, 3, 2), (4, -1, 0), (4, 0, -1)])
def test_counts_that_do_not_fit_are_refused(layers: int, first: int, last: int) -> None:
    with pytest.raises(ValueError, match="layers"):
        PrecisionMap.resolve(layers, MINITE, first, last)


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_outside_the_model_is_refused(layer: int) -> None:
    with pytest.raises(IndexError, match=f"layer {layer}"):
        PrecisionMap.resolve(3, MINITE).spec_for(layer)


def test_an_empty_map_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        PrecisionMap(())


def test_json_round_trip_keeps_fingerprint() -> None:
    precision_map = PrecisionMap.resolve(4, MINITE, first_layers_bf16=1)
    parsed = PrecisionMap.from_dict(json.loads(json.dumps(precision_map.to_dict())))
    assert parsed == precision_map and parsed.fingerprint == precision_map.fingerprint


def test_other_keys_are_refused() -> None:
    values = PrecisionMap.resolve(1, MINITE).to_dict()
    with pytest.raises(ValueError, match="single key 'layers'"):
        PrecisionMap.from_dict(values | {"extra": []})
    with pytest.raises(ValueError, match="single key 'layers'"):
        PrecisionMap.from_dict({})


def test_fingerprint_depends_on_every_layer_and_on_their_order() -> None:
    maps = [
        (MINITE, BF16),
        (BF16, MINITE),
        (MINITE, MINITE),
        (MINITE,),
        (MINITE, BF16, BF16),
        (MINITE, EXPERT),
    ]
    assert len({PrecisionMap(layers).fingerprint for layers in maps}) == len(maps)


def test_diff_is_empty_for_equal_maps_and_groups_layers_that_differ_alike() -> None:
    left, right = PrecisionMap((MINITE,) * 5), PrecisionMap((EXPERT, EXPERT, MINITE, MINITE, BF16))
    assert left.diff(PrecisionMap((MINITE,) * 5)) == ""
    text = left.diff(right, "learner", "sampler")
    titles = [line for line in text.splitlines() if line.startswith("layers ")]
    assert titles == ["layers 0 to 1:", "layers 4 to 4:"]
    assert "weight.outer_domain  row      expert" in text
    assert "left has 5 layers, right has 3" in left.diff(PrecisionMap((MINITE,) * 3))


def test_a_strict_spec_holds_for_the_whole_model() -> None:
    strict = named_spec("strict")
    precision_map = PrecisionMap.resolve(3, strict)
    assert precision_map.model == strict.model and PrecisionMap.resolve(3, named_spec("minite")).model is None
    assert PrecisionMap.from_dict(precision_map.to_dict()) == precision_map
    other = PrecisionMap.resolve(3, named_spec("strict", {"model.rotary": "bf16"}))
    assert other.fingerprint != precision_map.fingerprint
    assert "model.rotary" in precision_map.diff(other)
    with pytest.raises(ValueError, match="a strict spec holds for all layers alike, got bf16, strict"):
        PrecisionMap.resolve(3, strict, first_layers_bf16=1)
