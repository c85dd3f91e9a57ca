"""Products with a weight: projections, router, output layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.model_spec import Products
from kernels.strict.fixed_point import ACTIVATION_BITS, WEIGHT_BITS, FixedPoint, fixed_point, product
from kernels.strict.gradient import with_gradient_of


class Weight:
    """A weight [N, K] of any float type in the form in which `linear` takes it, made once for each of its versions.

    A write into the weight is noticed by its version and its address. After one that raises neither (through another
    tensor on the same storage, as in-place updates of a live model are), call `changed`.
    """

    def __init__(self) -> None:
        self._made: tuple[tuple[int, int], FixedPoint] | None = None

    def changed(self) -> None:
        self._made = None

    def of(self, weight: torch.Tensor) -> FixedPoint:
        version = (0 if weight.is_inference() else weight._version, weight.data_ptr())
        if self._made is None or self._made[0] != version:
            with torch.no_grad():
                self._made = (version, fixed_point(weight.detach(), WEIGHT_BITS))
        return self._made[1]


def linear(
    x: torch.Tensor, weight: torch.Tensor, form: Weight, rule: Products, out: torch.dtype | None = None
) -> torch.Tensor:
    """[..., K] and [N, K] of any float types -> x @ weight.T [..., N], rounded to FP32 and then to `out` (None: x's).

    form: of this weight. Differentiable in x and weight, with the gradient of the library's product in type `out`.
    """
    kind = out or x.dtype

    def usual(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(kind), weight.to(kind))

    if rule is Products.LIBRARY:
        return usual(x, weight)

    def strict(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        exact = product(fixed_point(rows, ACTIVATION_BITS), form.of(weight))
        return exact.view(*x.shape[:-1], weight.shape[0]).to(kind)

    return with_gradient_of(usual, strict, x, weight)
