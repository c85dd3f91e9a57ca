"""The ways of computing an expert layer that `expert_layer.py` compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernels.catalogue import named_spec
from kernels.guard import NonFiniteGuard
from kernels.triton import layer, plain_layer
from kernels.triton.backward import Saved, expert_gradients
from kernels.triton.combine import combine
from kernels.triton.grouped_gemm import grouped_gemm
from kernels.triton.grouping import ExpertGroups, group
from kernels.triton.matrix import ExpertMatrix, _decode
from kernels.triton.operand import GroupedOperand
from kernels.triton.quantize import launch_rows

SPEC = named_spec("minite")


@dataclass(frozen=True, eq=False)
class Problem:
    """x bfloat16 [T, H], ids int64 [T, k], coefficients float32 [T, k], d_output bfloat16 [T, H]."""

    x: torch.Tensor
    ids: torch.Tensor
    p: torch.Tensor
    d_output: torch.Tensor
    load: str

    @property
    def tokens(self) -> int:
        return len(self.x)

    @classmethod
    def random(cls, ids: torch.Tensor, load: str, hidden: int) -> Problem:
        x, d_output = (torch.randn(len(ids), hidden, device="cuda").bfloat16() for _ in range(2))
        return cls(x, ids, torch.rand(ids.shape, device="cuda").softmax(-1), d_output, load)


@dataclass(frozen=True, eq=False)
class Weights:
    """BF16 masters, and what our kernels make of them."""

    w13: torch.Tensor
    w2: torch.Tensor
    ours: layer.PreparedExperts

    @classmethod
    def random(cls, experts: int, hidden: int, ffn: int) -> Weights:
        w13 = (torch.randn(experts, 2 * ffn, hidden, device="cuda") / hidden**0.5).bfloat16()
        w2 = (torch.randn(experts, hidden, ffn, device="cuda") / ffn**0.5).bfloat16()
        return cls(w13, w2, layer.prepare(layer.quantize(w13, w2, SPEC), SPEC))

    def compact(self) -> Weights:
        """The same, ours in 4 bits alone."""
        w13, w2 = (replace(matrix, decoded=None) for matrix in (self.ours.w13, self.ours.w2))
        return replace(self, ours=replace(self.ours, w13=w13, w2=w2))


class Ours:
    def __init__(self, problem: Problem, weights: Weights) -> None:
        self.problem, self.weights = problem, weights
        self.guard = NonFiniteGuard(0, len(weights.w13))

    def forward(self) -> torch.Tensor:
        own = self.problem
        return layer.forward(own.x, own.ids, own.p, self.weights.ours, SPEC, self.guard)

    def both(self) -> object:
        own = self.problem
        leaves = [t.detach().requires_grad_() for t in (own.x, own.p, self.weights.w13, self.weights.w2)]
        x, p, w13, w2 = leaves
        output = layer.expert_layer(x, own.ids, p, w13, w2, self.weights.ours, SPEC, guard=self.guard)
        return torch.autograd.grad(output, leaves, own.d_output)


class Bf16:
    """No quantisation: the product's own path for that, around PyTorch's grouped product; the same backward."""

    def __init__(self, problem: Problem, weights: Weights) -> None:
        self.problem, self.weights = problem, weights

    def forward(self) -> torch.Tensor:
        own = self.problem
        return plain_layer.run_experts(own.x, own.ids, own.p, self.weights.w13, self.weights.w2)

    def both(self) -> object:
        own, weights = self.problem, self.weights
        groups = group(own.ids, len(weights.w13))
        saved = plain_layer.steps(own.x, groups, weights.w13, weights.w2)
        combine(saved.fc2, groups, own.p, SPEC)
        return expert_gradients(own.d_output, own.p, weights.w13, weights.w2, saved, groups)


class OneByOne:
    """Per-tensor scales, each step its own pass, expert after expert: permute; largest magnitude; quantise; decode; a
    product with FP32 output; outer scales; cast. SwiGLU and the combination in PyTorch's operators. Its many launches
    keep the host busier than the device.
    """

    def __init__(self, problem: Problem, weights: Weights) -> None:
        self.problem = problem
        self.w13, self.w2 = (self._weight(w) for w in (weights.ours.w13, weights.ours.w2))

    @staticmethod
    def _weight(matrix: ExpertMatrix) -> torch.Tensor:
        assert matrix.decoded is not None
        return matrix.decoded

    def _product(self, rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
        outputs = []
        for own, w in zip(rows.split(counts), weight, strict=True):
            if not len(own):
                continue
            width = own.shape[1]
            amax = own.abs().amax().float()
            codes = torch.empty(len(own), width // 2, dtype=torch.uint8, device="cuda")
            scales = torch.empty(len(own), width // 16, dtype=torch.uint8, device="cuda")
            bad = torch.empty(len(own), dtype=torch.uint8, device="cuda")
            outer = amax / 2688
            launch_rows(own, codes, scales, outer, bad, amax.view(torch.int32), len(own))
            decoded = _decode(codes, scales, (1, len(own), width))[0]
            product = torch.mm(decoded, w.T, out_dtype=torch.float32)
            outputs.append((product * outer).bfloat16())
        return torch.cat(outputs)

    def forward(self) -> torch.Tensor:
        own = self.problem
        flat = own.ids.flatten()
        counts = torch.bincount(flat, minlength=len(self.w13)).tolist()
        order = flat.argsort(stable=True)
        fc1 = self._product(own.x[order // own.ids.shape[1]], self.w13, counts)
        gate, up = fc1.chunk(2, dim=1)
        fc2 = self._product(torch.nn.functional.silu(gate) * up, self.w2, counts)
        slots = torch.empty_like(fc2)
        slots[order] = fc2
        return (slots.view(*own.ids.shape, -1) * own.p[..., None]).sum(1).bfloat16()


class Unfused:
    """The same steps, each a pass over all experts' rows, with one scale for all of them and our grouped product."""

    def __init__(self, problem: Problem, weights: Weights) -> None:
        self.problem, self.weights = problem, weights

    def _product(self, rows: torch.Tensor, matrix: ExpertMatrix, groups: ExpertGroups) -> torch.Tensor:
        count, width = rows.shape
        amax = torch.linalg.vector_norm(rows, torch.inf).float()
        codes = torch.empty(count, width // 2, dtype=torch.uint8, device="cuda")
        scales = torch.empty(count, width // 16, dtype=torch.uint8, device="cuda")
        bad = torch.empty(count, dtype=torch.uint8, device="cuda")
        outer = amax / 2688
        launch_rows(rows, codes, scales, outer, bad, amax.view(torch.int32), count)
        decoded = _decode(codes, scales, (1, count, width))[0]
        ones = torch.ones(count, dtype=torch.float32, device="cuda")
        out = torch.empty(count, matrix.shape[1], dtype=torch.bfloat16, device="cuda")
        out[groups.row_of_slot.numel() :].zero_()  # rows that nobody writes are in the next amax
        grouped_gemm(GroupedOperand(None, None, decoded, ones, bad), matrix, groups, out=out)
        return out.mul_(outer)

    def steps(self) -> tuple[ExpertGroups, Saved, torch.Tensor]:
        own, matrices = self.problem, self.weights.ours
        groups = group(own.ids, len(self.weights.w13))
        token = (groups.slot_of_row // own.ids.shape[1]).clamp_(min=0)
        fc1 = self._product(own.x.index_select(0, token), matrices.w13, groups)
        gate, up = fc1.chunk(2, dim=1)
        act = torch.nn.functional.silu(gate) * up
        fc2 = self._product(act, matrices.w2, groups)
        slots = fc2.index_select(0, groups.row_of_slot.flatten()).view(*own.ids.shape, -1)
        return groups, Saved(own.x, fc1, act, fc2), (slots * own.p[..., None]).sum(1).bfloat16()

    def forward(self) -> torch.Tensor:
        return self.steps()[2]


def vllm_experts(problem: Problem | None, weights: Weights) -> Callable[[], object] | None:
    """vLLM's fused Triton experts in BF16; None where vLLM is not installed."""
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts
    except ImportError:
        return None
    if problem is None:
        return lambda: None
    return lambda: fused_experts(problem.x, weights.w13, weights.w2, problem.p, problem.ids.int())
