"""A spec is read from the label that it has."""

from __future__ import annotations

import pytest

from kernels.labels import base_name, spec_from_label


@pytest.mark.parametrize(
    "label",
    [
        "minite",
        "minite_expert[weight.block_scale_max=256,weight.selector=4over6_mse]",
        "minite[activation.outer_scale=S=M/A,g=1/S,activation.zero_group=A=0:S=1]",
        "minite[activation=none]",
        "bf16[combine=expert_order,output=fp32]",
    ],
)
def test_a_label_is_read_as_it_is_written(label: str) -> None:
    spec = spec_from_label(label)
    assert spec.name == label
    assert spec_from_label(spec.name) == spec
    assert base_name(spec) == label.partition("[")[0]


@pytest.mark.parametrize(
    ("label", "part"),
    [
        ("nothing", "no execution spec is called 'nothing'"),
        ("minite[", "not of the form"),
        ("minite[output]", "'output' is not of the form field=value"),
        ("minite[output=fp64]", "fp64"),
        ("minite[colour=red]", "colour"),
    ],
)
def test_a_label_that_cannot_be_read_is_refused(label: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        spec_from_label(label)
