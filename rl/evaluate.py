"""``python -m rl.evaluate checkpoint=FOLDER [benchmarks=[...]] [key=value ...]``: benchmark scores of a policy."""

from __future__ import annotations

import logging
import sys
from functools import partial

from rl.command import override_parser, run_command
from rl.compose import compose_defaults
from rl.evaluation.benchmarks import BENCHMARKS, SPECS
from rl.evaluation.config import EvaluateConfig
from rl.process import loading


def main(arguments: list[str] | None = None) -> int:
    """The exit status; see `rl.command.run_command`."""
    parser = override_parser(
        "rl.evaluate",
        "Benchmark scores of a checkpoint, under the spec that trained it and under others.",
        f"benchmarks: {', '.join(BENCHMARKS)}. specs: {', '.join(SPECS)}. Every key that --show-config prints can be"
        " set: protocol.aime24.samples=32",
        "checkpoint=FOLDER key=value",
    )
    load = partial(compose_defaults, "evaluate", EvaluateConfig)
    return run_command(
        parser.parse_args(arguments), load, run, "the same command goes on from the samples that are saved"
    )


def run(config: EvaluateConfig) -> None:
    """Evaluate as `config` says; print the table and where the results are. Raises UserError."""
    from rl.quiet import silence_libraries

    silence_libraries()
    with loading():
        from rl.evaluation.session import evaluate, make_plan
        from rl.evaluation.view import open_console

    print(f"results: {evaluate(make_plan(config), open_console())}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    sys.exit(main())
