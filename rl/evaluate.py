"""``python -m rl.evaluate checkpoint=FOLDER [benchmarks=[...]] [key=value ...]``: benchmark scores of a policy."""

from __future__ import annotations

import argparse
import logging
import sys

from rl.compose import compose_defaults, to_yaml
from rl.errors import UserError
from rl.evaluation.benchmarks import BENCHMARKS, SPECS
from rl.evaluation.config import EvaluateConfig


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 an error that the user can mend (one line on stderr), 130 interrupted."""
    options = _parse(arguments)
    try:
        config = compose_defaults("evaluate", EvaluateConfig, options.overrides)
        if options.show_config:
            print(to_yaml(config), end="")
            return 0
        run(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the samples that are saved", file=sys.stderr)
        return 130
    return 0


def run(config: EvaluateConfig) -> None:
    """Evaluate as `config` says; print the table and where the results are. Raises UserError."""
    from rl.quiet import silence_libraries

    silence_libraries()
    from rl.evaluation.session import evaluate, make_plan
    from rl.evaluation.view import open_console

    print(f"results: {evaluate(make_plan(config), open_console())}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rl.evaluate",
        description="Benchmark scores of a checkpoint, under the spec that trained it and under others.",
        epilog=f"benchmarks: {', '.join(BENCHMARKS)}. specs: {', '.join(SPECS)}. Every key that --show-config prints"
        " can be set: protocol.aime24.samples=32",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Hydra overrides; checkpoint= is needed"
    )
    parser.add_argument(
        "--show-config", action="store_true", help="print the resolved configuration and stop"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    sys.exit(main())
