"""The table of conformance checks of a back end, or of one quantiser, under an execution spec.

python -m kernels.conformance                                        the reference under minite
python -m kernels.conformance --backend module:attribute --spec all  one's own back end under every spec it claims
python -m kernels.conformance --quantizer module:attribute --spec torchao
python -m kernels.conformance --spec 'minite[weight.outer_domain=expert]'    a spec with overrides

Exit status: 0 when nothing fails, 1 when something does, 2 for an argument that makes no sense.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kernels.catalogue import CATALOGUE
from kernels.command import check_output, end_quietly
from kernels.conformance.backend import Subject, named_adapter, named_backend
from kernels.conformance.check import Status
from kernels.conformance.suite import conformance, format_table
from kernels.labels import spec_from_label
from kernels.spec import ExecutionSpec


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.conformance", usage="%(prog)s [options]")
    parser.add_argument(
        "--backend", metavar="NAME", help="reference (default), triton_emulated, or module:attribute"
    )
    parser.add_argument("--quantizer", metavar="MODULE:ATTRIBUTE", help="an Adapter, or a function, instead")
    parser.add_argument(
        "--spec",
        default="minite",
        metavar="SPEC",
        help="a name, or name[field=value,...], or all of the catalogue",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there as well")
    options = parser.parse_args(arguments)
    try:
        if options.json is not None:
            check_output(options.json)
        pairs = _subjects(options)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")

    failed, reports = False, []
    for subject, spec in pairs:
        outcomes = conformance(subject, spec)
        failed |= any(outcome.status is Status.FAIL for outcome in outcomes)
        print(format_table(outcomes, subject.name, spec), end="\n\n", flush=True)
        checks = [outcome.plain() for outcome in outcomes]
        reports.append(
            {"subject": subject.name, "spec": spec.name, "fingerprint": spec.fingerprint, "checks": checks}
        )
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(reports, indent=2) + "\n")
        except OSError as error:
            parser.exit(2, f"{parser.prog}: --json: {error}\n")
    return int(failed)


def _subjects(options: argparse.Namespace) -> list[tuple[Subject, ExecutionSpec]]:
    """What is to be checked. Raises ValueError for names that do not exist and for specs that nothing claims."""
    if options.backend and options.quantizer:
        raise ValueError("give either --backend or --quantizer")
    labels = list(CATALOGUE) if options.spec == "all" else [options.spec]
    specs = [spec_from_label(label) for label in labels]
    if options.quantizer:
        adapter = named_adapter(options.quantizer)
        pairs = [(Subject.of_adapter(adapter), spec) for spec in specs if spec.activation is not None]
        if not pairs:
            raise ValueError(f"{options.spec} quantises no activations")
        return pairs
    backend = named_backend(options.backend or "reference")
    pairs = [(Subject.of_backend(backend, spec), spec) for spec in specs if backend.claims(spec)]
    if not pairs:
        raise ValueError(f"back end {backend.name} does not claim {options.spec}")
    return pairs


if __name__ == "__main__":
    raise SystemExit(end_quietly(main))
