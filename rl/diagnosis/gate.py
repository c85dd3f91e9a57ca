"""Bounds on the gap, by which a diagnosis is a regression test."""

from __future__ import annotations

from rl.diagnosis.config import GateConfig
from rl.diagnosis.summary import Summary

_AT_MOST = ("p99", "p999", "max", "k3", "beyond_clip")


def exceeded(gate: GateConfig, summary: Summary) -> list[str]:
    """A sentence for each bound that a condition exceeds; estimates count, not the ends of their intervals."""
    found = []
    for gap in summary.gaps:
        if gate.conditions and gap.label not in gate.conditions:
            continue
        for name in _AT_MOST:
            bound, value = getattr(gate, name), gap.statistics[name].value
            if bound is not None and value > bound:
                found.append(f"{name} under {gap.label} is {value:.6g}, more than {bound:g}")
        if gate.ess is not None and gap.statistics["ess"].value < gate.ess:
            value = gap.statistics["ess"].value
            found.append(f"ess under {gap.label} is {value:.6g}, less than {gate.ess:g}")
    if gate.same_layers:
        for verdict in summary.verdicts:
            if gate.conditions and verdict.label not in gate.conditions:
                continue
            if any(layer.first is not None for layer in verdict.layers):
                found.append(f"expert layers under {verdict.label} differ on the same input. {verdict.text}")
    return found
