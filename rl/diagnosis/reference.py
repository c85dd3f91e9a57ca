"""What an expert layer under a spec must be on an input, by `kernels.reference`; and which other spec an engine's
tensors are those of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import get_type_hints

import torch

from kernels import reference
from kernels.experts import ExpertWeights
from kernels.fields import PlainValue
from kernels.probe import listening
from kernels.quantizer_spec import QuantizerSpec
from kernels.spec import QUANTIZERS, ExecutionSpec
from rl.diagnosis.engine import Given, Seen, Trace

Weights = tuple[torch.Tensor, torch.Tensor]  # w13 and w2, the masters
# Fields that change no value of a forward pass: layouts in memory, values that are not finite, and the gradient.
NO_VALUES = ("non_finite", "scale_layout", "code_layout", "backward")


def reference_trace(spec: ExecutionSpec, masters: Weights, given: Given) -> Trace:
    """The layer on `given`; its output in the type of the input, as engines hand it on."""
    weights = ExpertWeights.quantize(*masters, spec)
    seen = Seen()
    with listening(seen), torch.no_grad():
        prepared = reference.prepare(weights, spec)
        combined = reference.forward(given.x, given.ids, given.coefficients, prepared, spec)
    return Trace(
        spec,
        "reference",
        combined.device.type,
        weights.tensors(),
        (),
        seen.operands,
        seen.tensors["fc1"],
        seen.tensors["swiglu"],
        seen.tensors["fc2"],
        combined.to(given.x.dtype),
    )


def changes_values(field: str) -> bool:
    """Whether a field can change a value of a forward pass."""
    return not field.startswith("gradient") and field.rpartition(".")[2] not in NO_VALUES


def alternatives(spec: ExecutionSpec) -> Iterator[tuple[str, PlainValue, ExecutionSpec]]:
    """Field, value and spec, for each other value that a single field can have."""
    plain = spec.to_dict()
    for field, value in plain.items():
        for other in _values(field):
            if other == value or not changes_values(field):
                continue
            try:
                yield field, other, ExecutionSpec.from_dict({**plain, field: other, "name": spec.name})
            except ValueError:
                continue  # it contradicts the rest


def _values(field: str) -> list[PlainValue]:
    role, _, inner = field.rpartition(".")
    kind = (
        QuantizerSpec.types().get(inner) if role in QUANTIZERS else get_type_hints(ExecutionSpec).get(field)
    )
    if field == "name" or kind is None:
        return []
    if kind is int:
        return [256, 448]
    return [str(member) for member in kind] if isinstance(kind, type) and issubclass(kind, StrEnum) else []


def subset(given: Given, rows: torch.Tensor) -> Given:
    """Some rows of an input, int64."""
    index = rows.numpy()
    return replace(
        given,
        x=given.x[rows],
        ids=given.ids[rows],
        coefficients=given.coefficients[rows],
        sequences=given.sequences[index],
        positions=given.positions[index],
    )


def swapped(masters: Weights) -> Weights:
    """Gate and up in each other's place."""
    gate, up = masters[0].chunk(2, dim=1)
    return torch.cat((up, gate), dim=1), masters[1]
