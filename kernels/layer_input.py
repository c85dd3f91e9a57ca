"""Activations, routing and master weights on which an expert layer is measured: from a seed or from a file."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch

ROW_SIGMA = {"gaussian": None, "heavy": 1.0, "extreme": 3.0}  # of the logarithm of a row's factor


@dataclass(frozen=True)
class LayerShape:
    """T tokens of H features, E experts of F features, k of them for each token."""

    tokens: int = 256
    hidden: int = 256
    ffn: int = 128
    experts: int = 8
    top_k: int = 2

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) < 1:
                raise ValueError(f"{entry.name} must be at least 1, got {getattr(self, entry.name)}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k must be at most experts={self.experts}, got {self.top_k}")

    def __str__(self) -> str:
        return f"T={self.tokens} H={self.hidden} F={self.ffn} E={self.experts} k={self.top_k}"


@dataclass(frozen=True, eq=False)
class LayerInput:
    """x: [T, H]; topk_ids: integer [T, k]; topk_weights: float32 [T, k]; w13: [E, 2F, H], gate rows first;
    w2: [E, H, F]; label: where they come from.
    """

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    label: str

    def __post_init__(self) -> None:
        """Raises ValueError for types and shapes that do not fit."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        for name, dimensions in TENSORS.items():
            if tensors[name].dim() != dimensions:
                raise ValueError(
                    f"{name} must have {dimensions} dimensions, got {tuple(tensors[name].shape)}"
                )
            if tensors[name].is_floating_point() is (name == "topk_ids"):
                expected = "an integer type" if name == "topk_ids" else "a floating-point type"
                raise ValueError(f"{name} must be of {expected}, got {tensors[name].dtype}")
        (tokens, hidden), (experts, two_ffn, _) = self.x.shape, self.w13.shape
        expected_shapes = {
            "topk_ids": (tokens, self.topk_ids.shape[1]),
            "topk_weights": tuple(self.topk_ids.shape),
            "w13": (experts, two_ffn // 2 * 2, hidden),
            "w2": (experts, hidden, two_ffn // 2),
        }
        for name, shape in expected_shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} must be {shape} to fit the rest, got {tuple(tensors[name].shape)}")
        if not tokens or not self.topk_ids.shape[1]:
            raise ValueError(
                f"topk_ids must have a token and an expert at least, got {tuple(self.topk_ids.shape)}"
            )
        low, high = int(self.topk_ids.min()), int(self.topk_ids.max())
        if low < 0 or high >= experts:
            raise ValueError(f"topk_ids must be in [0, {experts}), got values in [{low}, {high}]")


TENSORS = {"x": 2, "topk_ids": 2, "topk_weights": 2, "w13": 3, "w2": 3}  # and their dimensions


def synthetic_layer(shape: LayerShape, distribution: str, seed: int) -> LayerInput:
    """BF16 activations and weights, random routing.

    Weights are normal, divided by the root of their input width. Activations are standard normal (gaussian), or
    Student's t with 3 degrees of freedom, each row times a log-normal factor (heavy; extreme: tokens of such
    different size that scales shared by tokens underflow). The coefficients are a softmax over the k largest of
    normal logits. Raises ValueError for another distribution.
    """
    if distribution not in ROW_SIGMA:
        raise ValueError(f"distribution must be one of {', '.join(ROW_SIGMA)}, got {distribution!r}")
    sigma = ROW_SIGMA[distribution]
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    x = normal(shape.tokens, shape.hidden)
    if sigma is not None:
        chi_square = normal(3, shape.tokens, shape.hidden).square().mean(0)
        x = x / chi_square.sqrt() * (sigma * normal(shape.tokens, 1)).exp()
    w13 = normal(shape.experts, 2 * shape.ffn, shape.hidden) / math.sqrt(shape.hidden)
    w2 = normal(shape.experts, shape.hidden, shape.ffn) / math.sqrt(shape.ffn)
    top = normal(shape.tokens, shape.experts).topk(shape.top_k)
    x, w13, w2 = (tensor.to(torch.bfloat16) for tensor in (x, w13, w2))
    return LayerInput(
        x, top.indices, top.values.softmax(-1), w13, w2, f"{distribution}, {shape}, seed {seed}"
    )


def load_layer(path: Path) -> LayerInput:
    """A safetensors file with `x`, `topk_ids`, `topk_weights`, `w13` and `w2`, as in `LayerInput`; others are ignored.

    Raises ValueError for a file that cannot be read, a missing tensor, and tensors that do not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path} as safetensors: {error}") from error
    missing = [name for name in TENSORS if name not in tensors]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}; it has: {', '.join(sorted(tensors)) or 'nothing'}"
        )
    chosen = {name: tensors[name] for name in TENSORS}
    chosen["topk_weights"] = chosen["topk_weights"].float()
    try:
        return LayerInput(**chosen, label=str(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
