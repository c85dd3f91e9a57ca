"""``python -m rl.diagnose model=NAME data=NAME [key=value ...]``: where two engines disagree, and by how much."""

from __future__ import annotations

import logging
import sys
import time
from functools import partial

from rl.command import override_parser, run_command
from rl.compose import load_extended
from rl.diagnosis.config import ENGINES, STUDIES, DiagnoseConfig
from rl.process import loading

_REPORT_EVERY = 300.0  # seconds, at least, between reports of what is done so far: each takes some itself


def main(arguments: list[str] | None = None) -> int:
    """The exit status: that of `rl.command.run_command`, and 1 when the gap exceeds a bound of the gate."""
    parser = override_parser(
        "rl.diagnose",
        "Where two engines disagree about the same tokens, and by how much.",
        f"studies: {', '.join(STUDIES)}. engines: {', '.join(ENGINES)}. Recipes and groups are those of rl.train; every"
        " key that --show-config prints can be set: conditions=[bf16,minite] gate.p99=0.3",
        "+recipe=NAME key=value",
    )
    exceeded: list[str] = []
    status = run_command(
        parser.parse_args(arguments),
        partial(load_extended, "diagnose", DiagnoseConfig),
        lambda config: exceeded.extend(run(config)),
        "the same command goes on from what is stored",
    )
    for line in exceeded:
        print(f"gate: {line}", file=sys.stderr)
    return 1 if exceeded and not status else status


def run(config: DiagnoseConfig) -> list[str]:
    """Diagnose as `config` says; print what was found and where the report is. Returns the gate's bounds that were
    exceeded, a sentence each. Raises UserError.
    """
    from rl.quiet import silence_libraries

    silence_libraries()
    with loading():
        from rl.diagnosis.gate import exceeded
        from rl.diagnosis.plan import make_plan
        from rl.diagnosis.report import write_results
        from rl.diagnosis.session import diagnose
        from rl.diagnosis.summary import summarise
        from rl.diagnosis.view import print_summary
        from rl.evaluation.view import open_console

    console = open_console()
    reported = time.monotonic()
    for outcome in diagnose(make_plan(config), console):
        if time.monotonic() - reported > _REPORT_EVERY:  # for whoever looks at it meanwhile, or ends it early
            write_results(outcome, summarise(outcome))
            reported = time.monotonic()
    summary = summarise(outcome)
    written = write_results(outcome, summary)
    print_summary(console, summary)
    print(f"report: {written}")
    return exceeded(config.gate, summary)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    sys.exit(main())
