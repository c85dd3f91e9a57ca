"""The precision map: which execution spec each layer of a model runs under."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from kernels.catalogue import named_spec
from kernels.model_spec import ModelSpec
from kernels.spec import ExecutionSpec, format_diff, spec_diff


@dataclass(frozen=True)
class PrecisionMap:
    """One execution spec per transformer layer, resolved once, used by learner, sampler and weight sync."""

    layers: tuple[ExecutionSpec, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a precision map needs at least one layer")
        if any(spec.model != self.model for spec in self.layers):
            names = ", ".join(dict.fromkeys(spec.name for spec in self.layers))
            raise ValueError(f"a strict spec holds for all layers alike, got {names}")

    @property
    def model(self) -> ModelSpec | None:
        """How everything outside the experts is computed, if the specs are strict."""
        return self.layers[0].model

    @classmethod
    def resolve(
        cls, num_layers: int, spec: ExecutionSpec, first_layers_bf16: int = 0, last_layers_bf16: int = 0
    ) -> PrecisionMap:
        """`spec` everywhere except in the first and last layers named, which run under `bf16`.

        Raises ValueError when a count is negative, when the BF16 layers do not fit into the model, and for BF16 layers
        beside a strict spec.
        """
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {num_layers}")
        if min(first_layers_bf16, last_layers_bf16) < 0 or first_layers_bf16 + last_layers_bf16 > num_layers:
            raise ValueError(
                f"first_layers_bf16={first_layers_bf16} and last_layers_bf16={last_layers_bf16} must not be"
                f" negative and must fit into {num_layers} layers"
            )
        bf16 = named_spec("bf16")
        middle = num_layers - first_layers_bf16 - last_layers_bf16
        return cls((bf16,) * first_layers_bf16 + (spec,) * middle + (bf16,) * last_layers_bf16)

    def spec_for(self, layer: int) -> ExecutionSpec:
        """Raises IndexError when `layer` is not in [0, number of layers)."""
        if not 0 <= layer < len(self.layers):
            raise IndexError(f"layer {layer} is not in a precision map of {len(self.layers)} layers")
        return self.layers[layer]

    @property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of SHA-256 over the layers' fingerprints."""
        joined = "\n".join(spec.fingerprint for spec in self.layers)
        return hashlib.sha256(joined.encode()).hexdigest()[:16]

    def spans(self) -> list[tuple[ExecutionSpec, str]]:
        """Runs of layers under one spec, each with its numbers: "3", or "4 to 27"."""
        spans = []
        for spec, run in groupby(range(len(self.layers)), key=self.layers.__getitem__):
            numbers = list(run)
            spans.append((spec, f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])))
        return spans

    def describe(self) -> str:
        """One line: each spec and its layers, and the map, each with the fingerprint of its own."""
        specs = ", ".join(
            f"{spec.name} {spec.fingerprint} in layer{'s' if ' ' in layers else ''} {layers}"
            for spec, layers in self.spans()
        )
        return f"{specs}; precision map {self.fingerprint}"

    def to_dict(self) -> dict[str, list[dict[str, str | int | bool]]]:
        """Plain values; `from_dict` is the inverse."""
        return {"layers": [spec.to_dict() for spec in self.layers]}

    @classmethod
    def from_dict(cls, values: Mapping[str, list[dict[str, str | int | bool]]]) -> PrecisionMap:
        """Raises ValueError for any key but `layers` and for a layer that is not an execution spec."""
        if set(values) != {"layers"}:
            raise ValueError(f"a precision map has the single key 'layers', got {sorted(values)}")
        return cls(tuple(ExecutionSpec.from_dict(layer) for layer in values["layers"]))

    def diff(self, other: PrecisionMap, self_name: str = "left", other_name: str = "right") -> str:
        """Where the maps differ, one table per run of layers that differ alike; empty when they are equal."""
        if len(self.layers) != len(other.layers):
            return f"{self_name} has {len(self.layers)} layers, {other_name} has {len(other.layers)}"
        differences = [spec_diff(a, b) for a, b in zip(self.layers, other.layers, strict=True)]
        tables = []
        for difference, run in groupby(range(len(differences)), key=differences.__getitem__):
            layers = list(run)
            if difference:
                title = f"layers {layers[0]} to {layers[-1]}:"
                tables.append(f"{title}\n{format_diff(difference, self_name, other_name)}")
        return "\n".join(tables)
