"""Expert weights as they are stored and travel."""

from __future__ import annotations

import pytest
import torch

from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import ExpertWeights, wire_name
from kernels.quantize import QuantizedTensor, dequantize, quantize_weight
from kernels.reference import prepare
from kernels.spec import ExecutionSpec
from kernels.swizzle import swizzle_128x4

E, H, F = 3, 96, 64
SPECS = [named_spec(name) for name in CATALOGUE]


def masters(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * F, H, generator=generator)
    return w13.to(dtype), torch.randn(E, H, F, generator=generator).to(dtype)


U8, F32 = torch.uint8, torch.float32
PACKED = {"w13.codes": ((E, 2 * F, H // 2), U8), "w2.codes": ((E, H, F // 2), U8)}
BYTES = {"w13.codes": ((E, 2 * F, H), U8), "w2.codes": ((E, H, F), U8)}
LINEAR_16 = {"w13.block_scales": ((E, 2 * F, H // 16), U8), "w2.block_scales": ((E, H, F // 16), U8)}
LINEAR_32 = {"w13.block_scales": ((E, 2 * F, H // 32), U8), "w2.block_scales": ((E, H, F // 32), U8)}
# 128 x 6 blocks: 1 x 2 tiles of 512 bytes; 96 x 4 blocks: 1 x 1
SWIZZLED = {"w13.block_scales": ((E, 1024), U8), "w2.block_scales": ((E, 512), U8)}
TILES = {"w13.block_scales": ((E, 2 * F // 16, H // 16), U8), "w2.block_scales": ((E, H // 16, F // 16), U8)}


def outer(of_w13: int, of_w2: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {"w13.outer_scales": ((E, of_w13), F32), "w2.outer_scales": ((E, of_w2), F32)}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (named_spec("minite"), PACKED | LINEAR_16 | outer(2 * F, H)),
        (named_spec("minite_expert"), PACKED | LINEAR_16 | outer(1, 1)),
        (named_spec("minite", {"weight.outer_domain": "expert_half"}), PACKED | LINEAR_16 | outer(2, 1)),
        (named_spec("te_exact"), PACKED | SWIZZLED | outer(1, 1)),
        (named_spec("te_per_tensor_2d"), PACKED | SWIZZLED | outer(1, 1)),
        (named_spec("minite_expert", {"weight.block": "16x16"}), PACKED | TILES | outer(1, 1)),
        (named_spec("mxfp4"), PACKED | LINEAR_32),
        (named_spec("mxfp6_e2m3"), BYTES | LINEAR_32),
        (named_spec("mxfp8"), BYTES | LINEAR_32),
        (named_spec("fp8_per_token"), BYTES | outer(2 * F, H)),
    ],
    ids=lambda value: value.name if isinstance(value, ExecutionSpec) else "",
)
def test_stored_tensors_of_a_quantised_layer(
    spec: ExecutionSpec, expected: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    weights = ExpertWeights.quantize(*masters(), spec)
    assert {key: (tuple(t.shape), t.dtype) for key, t in weights.tensors().items()} == expected
    assert spec.weight is not None
    for matrix, master, halves in zip((weights.w13, weights.w2), masters(), (True, False), strict=True):
        assert isinstance(matrix, QuantizedTensor)
        direct = quantize_weight(master.bfloat16(), spec.weight, halves=halves)
        assert torch.equal(dequantize(matrix, spec.weight), dequantize(direct, spec.weight))


def test_swizzled_scales_travel_in_the_order_of_the_tensor_cores() -> None:
    linear, swizzled = (
        ExpertWeights.quantize(*masters(), named_spec("te_exact", {"weight.scale_layout": layout})).tensors()
        for layout in ("linear", "swizzled_128x4")
    )
    for key in linear:
        same = swizzle_128x4(linear[key]) if key.endswith("block_scales") else linear[key]
        assert torch.equal(swizzled[key], same)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_what_is_written_into_the_stored_tensors_is_what_is_prepared(spec: ExecutionSpec) -> None:
    """As a sampler's update in place does it."""
    full = ExpertWeights.quantize(*masters(), spec)
    live = ExpertWeights.empty(E, H, F, spec)
    for key, view in live.tensors().items():
        view.copy_(full.tensors()[key])
    for name in ("w13", "w2"):
        expected, found = getattr(prepare(full, spec), name), getattr(prepare(live, spec), name)
        assert found.elements.any() and torch.equal(found.elements, expected.elements)
        assert (found.outer_scales is None) is (expected.outer_scales is None)
        assert found.outer_scales is None or torch.equal(found.outer_scales, expected.outer_scales)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_stored_tensors_of_a_plain_layer(name: str, dtype: torch.dtype) -> None:
    w13, w2 = masters()
    tensors = ExpertWeights.quantize(w13, w2, named_spec(name)).tensors()
    assert set(tensors) == {"w13.weight", "w2.weight"}
    assert torch.equal(tensors["w13.weight"], w13.to(dtype)) and torch.equal(
        tensors["w2.weight"], w2.to(dtype)
    )


def test_gate_and_up_share_the_outer_scale_of_an_expert() -> None:
    w13, w2 = masters()
    w13[1, :F] *= 100
    weights = ExpertWeights.quantize(w13, w2, named_spec("minite_expert"))
    assert isinstance(weights.w13, QuantizedTensor)
    expected = w13.bfloat16().float().abs().amax((1, 2)) / torch.tensor(2688.0)
    assert torch.equal(weights.w13.outer_scales[:, 0], expected)


def test_masters_are_cast_to_bf16_first() -> None:
    w13, w2 = masters()
    spec = named_spec("minite")
    once, twice = (
        ExpertWeights.quantize(w13, w2, spec),
        ExpertWeights.quantize(w13.bfloat16(), w2.bfloat16(), spec),
    )
    for key, tensor in once.tensors().items():
        assert torch.equal(tensor, twice.tensors()[key])
    assert isinstance(once.w2, QuantizedTensor)
    assert spec.weight is not None
    expected = dequantize(quantize_weight(w2.bfloat16(), spec.weight), spec.weight)
    assert torch.equal(dequantize(once.w2, spec.weight), expected)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_tensors_round_trip_and_empty_has_the_same_layout(spec: ExecutionSpec) -> None:
    tensors = ExpertWeights.quantize(*masters(), spec).tensors()
    again = ExpertWeights.from_tensors(tensors, spec).tensors()
    empty = ExpertWeights.empty(E, H, F, spec).tensors()
    assert list(tensors) == list(again) == list(empty)
    for key, tensor in tensors.items():
        assert tensor is again[key]
        assert (tensor.shape, tensor.dtype) == (empty[key].shape, empty[key].dtype) and not empty[key].any()


@pytest.mark.parametrize("name", ["bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_plain_weights_are_a_snapshot(name: str, dtype: torch.dtype) -> None:
    w13, w2 = masters(dtype)
    weights = ExpertWeights.quantize(w13.requires_grad_(), w2, named_spec(name))
    assert isinstance(weights.w13, torch.Tensor) and not weights.w13.requires_grad
    before = weights.w13.clone()
    with torch.no_grad():
        w13.zero_()
    assert torch.equal(weights.w13, before)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_stored_tensor_is_checked(spec: ExecutionSpec) -> None:
    tensors = ExpertWeights.quantize(*masters(), spec).tensors()
    for key, tensor in tensors.items():
        without = {name: value for name, value in tensors.items() if name != key}
        wrong = [without, without | {key: tensor[:-1]}, without | {key: tensor.double()}]
        wrong += [without | {key: tensor[..., :-1]}, without | {key: tensor[None]}]
        for candidate in wrong:
            with pytest.raises(ValueError, match=r"w13|w2"):
                ExpertWeights.from_tensors(candidate, spec)
    with pytest.raises(ValueError, match=r"w3\.weight is unknown"):
        ExpertWeights.from_tensors(tensors | {"w3.weight": torch.zeros(1)}, spec)


def test_tensors_of_another_spec_are_refused() -> None:
    row = ExpertWeights.quantize(*masters(), named_spec("minite")).tensors()
    with pytest.raises(
        ValueError, match=r"w13.outer_scales is torch.float32 \(3, 128\), expected .* \(3, 1\)"
    ):
        ExpertWeights.from_tensors(row, named_spec("minite_expert"))
    with pytest.raises(ValueError, match=r"need w13.weight"):
        ExpertWeights.from_tensors(row, named_spec("bf16"))


def test_shapes_that_do_not_fit_are_refused() -> None:
    w13, w2 = masters()
    for bad13, bad2 in [(w13, w2[:, :, :16]), (w13[:, :127], w2), (w13[:2], w2), (w13, w2.mT)]:
        with pytest.raises(ValueError, match=r"w13 \[E, 2F, H\] and w2 \[E, H, F\]"):
            ExpertWeights.quantize(bad13, bad2, named_spec("minite"))
    for name, ffn, multiple in (("minite", 24, 16), ("mxfp8", 48, 32)):
        with pytest.raises(
            ValueError, match=f"w2 under '{name}' must have rows of a positive multiple of {multiple}"
        ):
            ExpertWeights.empty(2, 32, ffn, named_spec(name))


def test_wire_name() -> None:
    assert wire_name(7, "w13.codes") == "model.layers.7.experts.w13.codes"
