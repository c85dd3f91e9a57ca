"""The kernels of the emulated expert layer on small inputs: what compute-sanitizer is run on.

    PYTHONPATH=. compute-sanitizer --tool memcheck --error-exitcode 1 python scripts/bench/small_layers.py
    PYTHONPATH=. compute-sanitizer --tool racecheck --error-exitcode 1 python scripts/bench/small_layers.py

24 layers: both specifications, three shapes, FP32 and BF16 masters, weights decoded ahead and in 4 bits alone. Each
goes forward by the products that read 4 bits, in tiles of every size, and with many rows an expert, whose first tokens
must have the same bits, and backward. Needs a GPU.
"""

from __future__ import annotations

import itertools
import sys

import torch

from kernels.catalogue import named_spec
from kernels.guard import NonFiniteGuard
from kernels.layer_input import LayerShape, synthetic_layer
from kernels.triton import layer, tuning

SPECS = ("minite", "minite_expert")
MANY = 4000  # so many that weights in 4 bits alone are decoded first
SHAPES = tuple(  # odd numbers of tokens; experts without any; one expert a token
    LayerShape(tokens=MANY, hidden=hidden, ffn=ffn, experts=experts, top_k=top_k)
    for hidden, ffn, experts, top_k in ((256, 128, 4, 2), (128, 256, 7, 3), (384, 128, 2, 1))
)
FEW = (1, 9, 33, 100, 230)


def run(spec_name: str, shape: LayerShape, masters: torch.dtype, compact: bool) -> None:
    """Raises ValueError where few rows give other bits than many, or anything is not finite."""
    spec = named_spec(spec_name)
    given = synthetic_layer(shape, "gaussian", 0)
    x = given.x.bfloat16().cuda()
    ids, p = given.topk_ids.cuda(), given.topk_weights.cuda()
    w13, w2 = given.w13.to("cuda", masters), given.w2.to("cuda", masters)
    prepared = layer.prepare(layer.quantize(w13, w2, spec), spec, compact=compact)
    guard = NonFiniteGuard(0, shape.experts)
    tiles = {tuning.tile_rows(tokens * shape.top_k, shape.experts) for tokens in FEW}
    every = tiles == {*tuning.FEW_ROWS, *tuning.PACKED}
    if not every or tuning.reads_packed(ids.numel(), shape.experts, compact=True):
        raise ValueError(f"{shape} does not take every way: tiles of {sorted(tiles)} rows")
    many = layer.forward(x, ids, p, prepared, spec, guard)
    for tokens in FEW:
        few = layer.forward(x[:tokens], ids[:tokens], p[:tokens], prepared, spec, guard)
        if not torch.equal(few, many[:tokens]):
            raise ValueError(
                f"{spec_name}, {shape}: {tokens} tokens have other bits than among {shape.tokens}"
            )
    leaves = [tensor.detach().requires_grad_() for tensor in (x, p, w13, w2)]
    output = layer.expert_layer(leaves[0], ids, leaves[1], *leaves[2:], prepared, spec, guard=guard)
    gradients = torch.autograd.grad(output.float().square().sum(), leaves)
    if not all(bool(tensor.isfinite().all()) for tensor in (many, *gradients)):
        raise ValueError(f"{spec_name}, {shape}: values that are not finite")


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("needs an NVIDIA GPU")
    cases = list(itertools.product(SPECS, SHAPES, (torch.float32, torch.bfloat16), (False, True)))
    for case in cases:
        run(*case)
    torch.cuda.synchronize()
    print(f"{len(cases)} layers on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
