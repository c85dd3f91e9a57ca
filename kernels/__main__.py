"""The catalogue of execution specs, or the fields of one of them.

python -m kernels                    every name, its fingerprint and source, as a Markdown table
python -m kernels minite             every field of a spec: value and meaning
"""

from __future__ import annotations

import argparse

from kernels.catalogue import CATALOGUE, named_spec
from kernels.spec import ExecutionSpec, meanings


def catalogue_table() -> str:
    """Markdown: one row for each spec."""
    lines = ["| spec | fingerprint | computed by |", "| --- | --- | --- |"]
    for name, entry in CATALOGUE.items():
        source = entry.source
        words = [f"{source.library} {source.version}", source.settings.replace("_", r"\_")]
        lines.append(f"| `{name}` | `{named_spec(name).fingerprint}` | {', '.join(filter(None, words))} |")
    return "\n".join(lines)


def field_table(spec: ExecutionSpec) -> str:
    """Plain text: one line for each field, with its value and what it decides."""
    rows = [(key, str(value), meanings()[key]) for key, value in spec.to_dict().items() if key != "name"]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{key.ljust(widths[0])}  {value.ljust(widths[1])}  {meaning}" for key, value, meaning in rows]
    return "\n".join([f"{spec.name} {spec.fingerprint}", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kernels", description="The catalogue of execution specs."
    )
    parser.add_argument("name", nargs="?", help="show the fields of this spec")
    name = parser.parse_args().name
    if name is None:
        print(catalogue_table())
    elif name in CATALOGUE:
        print(field_table(named_spec(name)))
    else:
        parser.error(f"no execution spec is called {name!r}; there are: {', '.join(CATALOGUE)}")


if __name__ == "__main__":
    main()
