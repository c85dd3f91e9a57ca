"""Labels of execution specs, as the commands take them and `ExecutionSpec.name` has them: name[field=value,...]."""

from __future__ import annotations

import re

from kernels.catalogue import named_spec
from kernels.fields import PlainValue
from kernels.quantizer_spec import QuantizerSpec
from kernels.spec import ExecutionSpec, meanings

# Values contain commas and equals signs (`S=M/A,g=1/S`), so an override begins only where a field's name does.
_NEXT_OVERRIDE = re.compile(r",(?=(?:" + "|".join(map(re.escape, meanings())) + r")=)")


def spec_from_label(label: str) -> ExecutionSpec:
    """The spec called `name` or `name[field=value,field=value]`.

    Raises ValueError for a label of another form and as `named_spec` does.
    """
    match = re.fullmatch(r"(\w+)(?:\[(.+)\])?", label)
    if match is None:
        raise ValueError(f"{label!r} is not of the form name or name[field=value,...]")
    name, inside = match.groups()
    overrides: dict[str, PlainValue] = {}
    for part in _NEXT_OVERRIDE.split(inside) if inside else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{label!r}: {part!r} is not of the form field=value")
        integer = QuantizerSpec.types().get(key.rpartition(".")[2]) is int and re.fullmatch(r"-?\d+", value)
        overrides[key] = int(value) if integer else value
    return named_spec(name, overrides)


def base_name(spec: ExecutionSpec) -> str:
    """The name in the catalogue of which `spec` is made: its label without overrides."""
    return spec.name.partition("[")[0]
