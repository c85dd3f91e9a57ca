"""``python -m rl.train +recipe=NAME [group.key=value ...]``: the main job."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from rl.compose import differing_keys, from_yaml, load_config, recipes, to_yaml
from rl.config import Config
from rl.errors import ConfigError, UserError
from rl.run_folder import RunFolder

_MAY_CHANGE = (
    "run.resume",
    "run.iterations",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.output_dir",
)
_MAY_CHANGE_GROUPS = ("logging.",)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 an error that the user can mend (one line on stderr), 130 interrupted."""
    options, overrides = _parse(arguments)
    try:
        config = _load(overrides)
        if options.show_config:
            print(to_yaml(config), end="")
            return 0
        run(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; go on with run.resume=<the run's folder>", file=sys.stderr)
        return 130
    return 0


def run(config: Config) -> None:
    """Train as `config` says, in a new run folder or in that of the run that is resumed. Raises UserError."""
    from rl.quiet import silence_libraries

    silence_libraries()
    from rl.job import make_plan, open_job
    from rl.loop import train

    with open_job(make_plan(config)) as job:
        train(job)
    if job.folder.report.exists():  # if not, the log has said why
        print(f"report: {job.folder.report}")


def _load(overrides: list[str]) -> Config:
    """The configuration asked for; a resumed run has its own, in which only some keys may change."""
    resume = [item.partition("=")[2] for item in overrides if item.startswith("run.resume=")]
    if not resume:
        return load_config(overrides)
    saved_file = RunFolder.open(Path(resume[-1])).config
    saved = from_yaml(saved_file, [])
    composed = load_config(overrides) if _names_recipe(overrides) else from_yaml(saved_file, overrides)
    changed = {
        key: values
        for key, values in differing_keys(saved, composed).items()
        if key not in _MAY_CHANGE and not key.startswith(_MAY_CHANGE_GROUPS)
    }
    if changed:
        shown = ", ".join(f"{key} ({old!r} -> {new!r})" for key, (old, new) in changed.items())
        raise ConfigError(f"run.resume={resume[-1]}: a resumed run cannot change {shown}")
    return composed


def _names_recipe(overrides: list[str]) -> bool:
    return any(item.startswith("+recipe=") for item in overrides)


def _parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m rl.train",
        description="Reinforcement learning of an MoE language model with NVFP4 experts in sampler and learner.",
        epilog=f"recipes: {', '.join(recipes())}. Every key that --show-config prints can be set: learner.lr=1e-5",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="+recipe=NAME group.key=value", help="Hydra overrides"
    )
    parser.add_argument(
        "--show-config", action="store_true", help="print the resolved configuration and stop"
    )
    options = parser.parse_args(arguments)
    return options, options.overrides


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
