"""The steps of few rows an expert, each of which goes on with the tiles that the one before has finished."""

from __future__ import annotations

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights
from kernels.guard import NonFiniteGuard
from kernels.layer_input import LayerShape, synthetic_layer
from kernels.probe import listening
from kernels.triton import layer, ops
from kernels.triton.combine import combine
from kernels.triton.decode_gemm import decode_gemm
from kernels.triton.grouping import ExpertGroups, group
from kernels.triton.quantize import permute_quantize
from kernels.triton.swiglu import swiglu_quantize
from tests.kernels.triton_env import DEVICE, GPU

SPEC = named_spec("minite")
SMALL = LayerShape(tokens=18, hidden=128, ffn=128, experts=2, top_k=1)
QWEN3 = LayerShape(tokens=32, hidden=2048, ffn=768, experts=128, top_k=8)


class Steps:
    """A layer's input on the device, and what its steps leave."""

    def __init__(self, shape: LayerShape) -> None:
        given = synthetic_layer(shape, "gaussian", 0)
        stored = ExpertWeights.quantize(given.w13, given.w2, SPEC).tensors()
        on_device = {name: tensor.to(DEVICE) for name, tensor in stored.items()}
        self.prepared = layer.prepare(ExpertWeights.from_tensors(on_device, SPEC), SPEC)
        self.x = given.x.bfloat16().to(DEVICE)
        self.ids, self.p = given.topk_ids.to(DEVICE), given.topk_weights.to(DEVICE)

    def run(self) -> tuple[torch.Tensor, ExpertGroups]:
        w13, w2, activation = self.prepared.w13, self.prepared.w2, SPEC.activation
        assert activation is not None
        bad, output = ops.no_bad_rows(w13), torch.empty_like(self.x)
        groups = group(self.ids, w13.shape[0], 16)
        assert groups.finished is not None
        of_fc1, of_swiglu, of_fc2 = groups.finished
        operand = permute_quantize(self.x, groups, activation, packed=False, decoded=True, bad_counts=bad[0])
        fc1, fc2 = (
            torch.empty(groups.rows, own.shape[1], dtype=torch.bfloat16, device=DEVICE) for own in (w13, w2)
        )
        decode_gemm(operand, w13, groups, out=fc1, finished=of_fc1)
        inner, _ = swiglu_quantize(
            fc1,
            groups,
            activation,
            packed=False,
            decoded=True,
            keep_act=False,
            bad_counts=bad[1],
            after=of_fc1,
            finished=of_swiglu,
        )
        decode_gemm(inner, w2, groups, out=fc2, after=of_swiglu, finished=of_fc2)
        return combine(fc2, groups, self.p, SPEC, overlap=True, after=of_fc2, out=output), groups


@pytest.mark.parametrize("shape", [SMALL, pytest.param(QWEN3, marks=GPU)])
def test_every_step_counts_what_it_has_finished_of_each_tile(shape: LayerShape) -> None:
    """Products a program for each 128 features, SwiGLU the rows; of two tiles for the expert with more than 16 rows."""
    steps = Steps(shape)
    if shape is SMALL:
        steps.ids[:17], steps.ids[17:] = 1, 0
    for _ in range(2 if DEVICE.type == "cuda" else 1):  # counts begin at zero again
        output, groups = steps.run()
        if DEVICE.type == "cuda":  # in the interpreter the layer's own tests are enough
            assert torch.equal(output, layer.forward(steps.x, steps.ids, steps.p, steps.prepared, SPEC))
        counts = torch.bincount(steps.ids.flatten().cpu(), minlength=shape.experts).tolist()
        rows = [min(16, count - done) for count in counts for done in range(0, count, 16)]
        assert groups.finished is not None
        of_fc1, of_swiglu, of_fc2 = groups.finished[:, : len(rows)].tolist()
        assert of_fc1 == [2 * shape.ffn // 128] * len(rows)
        assert of_swiglu == rows
        assert of_fc2 == [shape.hidden // 128] * len(rows)


def test_waiting_for_tiles_is_for_few_rows_and_for_memory_of_its_own() -> None:
    groups = group(torch.zeros(20, 1, dtype=torch.int64, device=DEVICE), 1, 16)
    coefficients = torch.ones(20, 1, device=DEVICE)
    fc1 = torch.zeros(groups.rows, 256, dtype=torch.bfloat16, device=DEVICE)
    fc2 = torch.zeros(groups.rows, 256, dtype=torch.bfloat16, device=DEVICE)
    assert groups.finished is not None and SPEC.activation is not None
    with pytest.raises(ValueError, match="they take bad_counts"):
        swiglu_quantize(
            fc1,
            groups,
            SPEC.activation,
            packed=False,
            decoded=True,
            keep_act=False,
            after=groups.finished[0],
        )
    with pytest.raises(ValueError, match="memory of its own"):
        combine(fc2, groups, coefficients, SPEC, overlap=True, after=groups.finished[2])
    with pytest.raises(ValueError, match="out must be contiguous bfloat16"):
        combine(
            fc2, groups, coefficients, SPEC, out=torch.empty(20, 255, dtype=torch.bfloat16, device=DEVICE)
        )


@pytest.mark.parametrize("ids", [[[-1, -1]], [[2, 5], [-1, 2]]])
def test_counts_begin_at_zero_in_tiles_without_rows_too(ids: list[list[int]]) -> None:
    """Where a CUDA graph is rehearsed there are no tokens: every id is -1, and nothing may be waited for."""
    garbage = torch.full((1 << 16,), -1, dtype=torch.int32, device=DEVICE)
    del garbage  # whose memory is what counts are likely to get
    groups = group(torch.tensor(ids, device=DEVICE), 6, 16)
    assert groups.finished is not None and groups.finished.shape[1] >= groups.rows // 16
    assert not groups.finished.any()


def test_tokens_without_an_expert_are_not_waited_for() -> None:
    """Their output is NaN, whatever the others'."""
    steps = Steps(SMALL)
    steps.ids[1:] = -1
    if DEVICE.type == "cpu":
        steps.ids, steps.p, steps.x = steps.ids[:3], steps.p[:3], steps.x[:3]
    output, _ = steps.run()
    assert output[0].isfinite().all() and output[1:].isnan().all()
    steps.ids[:] = -1
    assert steps.run()[0].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("tokens", [1, 7, 32, 64, 200, 400])
def test_steps_that_overlap_give_the_same_bits_beside_other_work(tokens: int) -> None:
    """Programs start in other orders then. Inputs and experts of tokens take turns, in memory that layers share, so
    that what a step reads too early is another layer's: in a CUDA graph and without. With a listener steps do not
    overlap.
    """
    shape = LayerShape(tokens=tokens, hidden=2048, ffn=768, experts=128, top_k=8)
    steps, guard = Steps(shape), NonFiniteGuard(0, shape.experts)
    inputs = [(steps.x, steps.ids), (steps.x.flip(1) * 2, (steps.ids + 40) % shape.experts)]
    inputs.append((steps.x.roll(7, 1), (steps.ids * 3 + 1) % shape.experts))

    def forward(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return layer.forward(x, ids, steps.p, steps.prepared, SPEC, guard)

    with listening(lambda name, value: None):
        expected = [forward(*own).clone() for own in inputs]
    for own in inputs:  # which compiles, and so waits between steps
        forward(*own)
    torch.cuda.synchronize()
    assert not any(torch.equal(expected[0], other) for other in expected[1:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = [forward(*own).clone() for _ in range(2) for own in inputs]
    other, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda").bfloat16()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        with torch.cuda.stream(other):
            matrix @ matrix
        graph.replay()
        for number, output in enumerate(replayed):
            wrong += (output != expected[number % len(inputs)]).any()
        for own, right in zip(inputs, expected, strict=True):
            wrong += (forward(*own) != right).any()
    assert int(wrong) == 0
