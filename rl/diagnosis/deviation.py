"""An engine that does not compute the spec that it reports: where it shows, and what it computes instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.experts import ExpertWeights
from kernels.spec import ExecutionSpec
from rl.diagnosis.compare import compare, differing_experts
from rl.diagnosis.engine import Given, Trace
from rl.diagnosis.reference import Weights, alternatives, reference_trace, subset, swapped

FEW = 64  # tokens on which specs are tried one after another
ROUNDING = 2.0**-8  # relative L2 below which an output is within what the order of a sum may move it, in BF16


@dataclass(frozen=True)
class Deviation:
    """An engine that does not compute what it says: the first part that is not the reference's, and what it is instead,
    as far as it can be named. rounding: no more than another order of summation makes.
    """

    engine: str
    part: str
    share: float
    relative_l2: float
    named: tuple[str, ...]
    rounding: bool


def deviation_of(
    trace: Trace, expected: Trace, engine: Any, layer: int, given: Given, masters: Weights
) -> tuple[str, float, float, tuple[str, ...], bool] | None:
    """(part, share, relative L2, what it is instead, rounding) where a trace is not the reference's."""
    found = next((d for d in compare(expected, trace) if d.differs), None)
    if trace.stale:
        share = 0.0 if found is None else found.values
        named = tuple(f"{name} is not what the stored weights give now (stale)" for name in trace.stale)
        return (found.part if found else "w13"), share, found.relative_l2 if found else 0.0, named, False
    if found is None:
        return None
    outputs = found.part not in ("w13", "w2", "FC1 input", "FC2 input")
    elsewhere = trace.backend != "reference" or trace.device != expected.device
    rounding = elsewhere and outputs and found.relative_l2 < ROUNDING
    if rounding:
        return found.part, found.values, found.relative_l2, ("another order of summation",), True
    named = _named_weights(trace, expected, masters) if found.part in ("w13", "w2") else ()
    if not named:
        named = _named_fields(engine, layer, given, masters, trace.spec)
    return found.part, max(found.values, found.memory or 0.0), found.relative_l2, named, False


def _named_weights(trace: Trace, expected: Trace, masters: Weights) -> tuple[str, ...]:

    if trace.weights.keys() != expected.weights.keys():
        return ()
    other = ExpertWeights.quantize(*swapped(masters), trace.spec).tensors()
    if all(torch.equal(trace.weights[name], tensor) for name, tensor in other.items()):
        return ("gate and up are swapped in w13",)
    wrong = differing_experts(expected, trace)
    scales = {name for name in wrong if name.endswith("outer_scales")}
    count = len(masters[0])
    return tuple(
        f"{name} of expert{'s' if len(experts) > 1 else ''} {', '.join(map(str, experts))}"
        " is not that of the master weights"
        for name, experts in wrong.items()
        if len(experts) < count or name in scales
    )


def _named_fields(
    engine: Any, layer: int, given: Given, masters: Weights, spec: ExecutionSpec
) -> tuple[str, ...]:
    """Single fields with another value under which the reference gives the engine's tensors, bit for bit."""
    few = subset(given, torch.arange(min(FEW, len(given.x))))
    for own in (few, given) if len(given.x) > FEW else (few,):
        trace = engine.trace(layer, own)
        expected = reference_trace(spec, masters, own)
        first = next((d.part for d in compare(expected, trace) if d.differs), None)
        if first is None:
            continue  # not on these few tokens
        named = []
        for name, value, other in alternatives(spec):
            try:
                tried = reference_trace(other, masters, own)
            except ValueError:
                continue
            if _agree(tried, trace):
                named.append(f"computes as if {name} were {value} (it says {spec.to_dict()[name]})")
        return tuple(named)
    return ()


def _agree(tried: Trace, trace: Trace) -> bool:
    """Whether all that was computed is the same, whatever the specs call themselves."""
    comparable = Trace(
        tried.spec,
        trace.backend,
        trace.device,
        trace.weights,
        (),
        trace.operands,
        trace.fc1,
        trace.swiglu,
        trace.fc2,
        trace.combined,
    )
    try:
        return not any(d.differs for d in compare(tried, comparable))
    except (ValueError, RuntimeError, AssertionError, KeyError):
        return False  # stored in another layout
