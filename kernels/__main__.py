"""The catalogue of execution specs, or the fields of one of them.

python -m kernels                    every name, its fingerprint and source, as a Markdown table
python -m kernels minite             every field of a spec: value and meaning
python -m kernels 'minite[weight.outer_domain=expert]'    the same of a spec with overrides
"""

from __future__ import annotations

import argparse

from kernels.catalogue import CATALOGUE, Source, named_spec
from kernels.command import end_quietly
from kernels.labels import base_name, spec_from_label
from kernels.spec import ExecutionSpec, meanings


def catalogue_table() -> str:
    """Markdown: one row for each spec."""
    lines = ["| spec | fingerprint | computed by |", "| --- | --- | --- |"]
    for name, entry in CATALOGUE.items():
        software = _software(entry.source).replace("_", r"\_")
        lines.append(f"| `{name}` | `{named_spec(name).fingerprint}` | {software} |")
    return "\n".join(lines)


def field_table(spec: ExecutionSpec) -> str:
    """Plain text: where the spec comes from, then one line for each field, with its value and what it decides."""
    base = base_name(spec)
    source = CATALOGUE[base].source
    origin = [f"{base} is computed by {_software(source)}"]
    if source.reference:
        origin.append(f"in {source.reference}")
    rows = [(key, str(value), meanings()[key]) for key, value in spec.to_dict().items() if key != "name"]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{key.ljust(widths[0])}  {value.ljust(widths[1])}  {meaning}" for key, value, meaning in rows]
    return "\n".join([f"{spec.name} {spec.fingerprint}", *origin, "", *lines])


def _software(source: Source) -> str:
    return ", ".join(filter(None, [f"{source.library} {source.version}", source.settings]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels", description="The catalogue of execution specs."
    )
    parser.add_argument("name", nargs="?", help="show this spec: a name, or name[field=value,...]")
    name = parser.parse_args(arguments).name
    try:
        print(catalogue_table() if name is None else field_table(spec_from_label(name)))
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(end_quietly(main))
