"""What the commands share: Hydra overrides as arguments, and one line for an error that the user can mend."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from rl.compose import to_yaml
from rl.deaths import ActorDied
from rl.errors import DiskFull, NodeLost, UserError

ENGINE_DIED = 1
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the same command may well work next time

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Configuration = TypeVar("Configuration", bound="DataclassInstance")


def override_parser(program: str, description: str, epilog: str, overrides: str) -> argparse.ArgumentParser:
    """A parser of Hydra overrides, shown as `overrides` in the help, and of --show-config."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description, epilog=epilog)
    parser.add_argument("overrides", nargs="*", metavar=overrides, help="Hydra overrides")
    parser.add_argument(
        "--show-config", action="store_true", help="print the resolved configuration and stop"
    )
    return parser


def run_command(
    options: argparse.Namespace,
    load: Callable[[list[str]], Configuration],
    run: Callable[[Configuration], None],
    interrupted: str,
) -> int:
    """`run` what `load` makes of the overrides, or print it with --show-config.

    Returns the exit status: 0 done, 1 a process of an engine died, 2 an error that the user can mend, 75 a node lost,
    130 interrupted. All but the first come with one line on stderr; `interrupted` says how to go on after a death, a
    lost node, an interruption, and a disk that was full.
    """
    try:
        config = load(options.overrides)
        if options.show_config:
            print(to_yaml(config), end="")
            return 0
        run(config)
    except DiskFull as error:
        print(f"error: {error}; make room, then {interrupted}", file=sys.stderr)
        return 2
    except NodeLost as error:
        print(f"error: {error}; {interrupted}", file=sys.stderr)
        return TRY_AGAIN
    except ActorDied as error:
        print(f"error: {error}; {interrupted}", file=sys.stderr)
        return ENGINE_DIED
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted}", file=sys.stderr)
        return 130
    return 0
