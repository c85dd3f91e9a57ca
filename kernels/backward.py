"""The gradient's products: which operands they multiply, as `Backward` says.

An expert's product y = x @ W.T, x [R, K], W [N, K], has the gradients

    dgrad   d_x = d_y @ W        reduction over N
    wgrad   d_W = d_y.T @ x      reduction over R

whose operands are

    bf16_straight_through, fp32   the values from before quantisation, W being the master weight, in `spec.operand`
    dequantized                   x and W as the forward multiplied them, decoded, in `spec.operand`
    quantized                     all three from before quantisation, each put through `spec.gradient` along the
                                  reduction (padded with zeros to a multiple of its width): d_y, x and W for what
                                  they are in the product, rounded stochastically only where they are gradients, and
                                  rotated (`transform`) in wgrad only, as Transformer Engine does (its recipe
                                  NVFP4BlockScaling)

Sums run in FP32 in the library's order; outer scales g of the gradient's quantiser multiply them as acc * (ga * gb).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

import torch
import torch.nn.functional as F

from kernels.experts import TORCH_TYPE
from kernels.grouped import Decoded, grouped_operand
from kernels.guard import NonFiniteGuard, Operand
from kernels.quantize import NonFiniteReport, decode, decode_scale, quantize_activation
from kernels.quantizer_spec import QuantizerSpec, Rounding, Transform
from kernels.routing import Routing
from kernels.spec import Backward, ExecutionSpec
from kernels.transform import SIZE, hadamard_matrix


@dataclass(frozen=True)
class GradientProducts:
    """dgrad and wgrad under `spec`.

    seed: of stochastic rounding; needed when `spec.gradient` has that. guard: as in `kernels.reference.forward`.
    """

    spec: ExecutionSpec
    seed: int | None = None
    guard: NonFiniteGuard | None = None

    def activations(
        self, x: torch.Tensor, rows: torch.Tensor | None, routing: Routing, name: Operand
    ) -> Callable[[slice], torch.Tensor]:
        """The left operand of a forward product, as wgrad takes it: a function from grouped rows to [R, K]."""
        kind = TORCH_TYPE[self.spec.operand]
        quantizer = self.spec.activation
        if self.spec.backward is not Backward.DEQUANTIZED or quantizer is None:
            return lambda own: (x[own] if rows is None else x[rows[own]]).to(kind)
        operand = grouped_operand(x, rows, routing, self.spec, name, self.guard)
        values = _unrotated(operand.dequantized(quantizer, self.spec.epilogue), quantizer).to(kind)
        return lambda own: values[own]

    def weight(self, master: torch.Tensor, prepared: Decoded, expert: int) -> torch.Tensor:
        """An expert's weight [N, K] as dgrad takes it."""
        quantizer, kind = self.spec.weight, TORCH_TYPE[self.spec.operand]
        if self.spec.backward is not Backward.DEQUANTIZED or quantizer is None:
            return master[expert].to(kind)
        own = prepared.select(lambda tensor: tensor[expert : expert + 1])
        return _unrotated(own.dequantized(quantizer, self.spec.epilogue)[0], quantizer).to(kind)

    def dgrad(self, d_y: torch.Tensor, weight: torch.Tensor, expert: int, name: str) -> torch.Tensor:
        """[R, N], [N, K] -> float32 [R, K]. name: of the product, for the seed and for errors."""
        if self.spec.gradient is None:
            return d_y.float() @ weight.float()
        quantizer = replace(self.spec.gradient, transform=Transform.NONE)
        return self._quantized_product(d_y, weight.T, quantizer, expert, f"dgrad of {name}")

    def wgrad(self, d_y: torch.Tensor, x: torch.Tensor, expert: int, name: str) -> torch.Tensor:
        """[R, N], [R, K] -> float32 [N, K]."""
        if self.spec.gradient is None:
            return d_y.float().T @ x.float()
        return self._quantized_product(d_y.T, x.T, self.spec.gradient, expert, f"wgrad of {name}")

    def _quantized_product(
        self, gradient: torch.Tensor, other: torch.Tensor, quantizer: QuantizerSpec, expert: int, name: str
    ) -> torch.Tensor:
        """[A, K], [B, K] -> float32 [A, B]."""
        record = None
        if self.guard is not None:
            record = partial(self.guard.record, Operand.GRADIENT, experts=expert)
        seed = None
        if quantizer.rounding is Rounding.STOCHASTIC:
            assert self.seed is not None
            seed = derived_seed(self.seed, f"{name} {expert}")
        a, ga = _decoded(gradient, quantizer, seed, f"gradient in {name}", record)
        nearest = replace(quantizer, rounding=Rounding.NEAREST_EVEN)
        b, gb = _decoded(other, nearest, None, f"operand of {name}", record)
        result = a @ b.T
        return result if ga is None or gb is None else result.mul_(ga * gb.T)


def _decoded(
    x: torch.Tensor, quantizer: QuantizerSpec, seed: int | None, what: str, record: NonFiniteReport | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[A, K] -> code times block scale, float32 [A, K padded], and g, float32 [A, 1] or [1, 1]."""
    multiple = max(quantizer.width_multiple, SIZE if quantizer.transform is Transform.HADAMARD_16 else 1)
    padded = F.pad(x, (0, -x.shape[1] % multiple))
    quantized = quantize_activation(padded, quantizer, seed=seed, what=what, on_non_finite=record)
    return decode(quantized, quantizer), decode_scale(quantized, quantizer)


def _unrotated(values: torch.Tensor, quantizer: QuantizerSpec) -> torch.Tensor:
    """float32 [*, K], decoded in the quantiser's rotated basis -> in the basis of its input."""
    if quantizer.transform is Transform.NONE:
        return values
    return (values.unflatten(-1, (-1, SIZE)) @ hadamard_matrix(values.device).T).flatten(-2)


def derived_seed(seed: int, name: str) -> int:
    """A seed in [0, 2^63) of its own for every product of a layer."""
    return int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=8).digest()) >> 1
