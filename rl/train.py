"""``python -m rl.train +recipe=NAME [group.key=value ...]``: the main job."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rl.command import override_parser, run_command
from rl.compose import differing_keys, from_yaml, load_config, recipes
from rl.config import Config
from rl.errors import ConfigError
from rl.process import loading
from rl.run_folder import RunFolder

_MAY_CHANGE = (
    "run.resume",
    "run.iterations",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.output_dir",
)
_MAY_CHANGE_GROUPS = ("logging.", "cluster.")
_PLAN = "plan="  # no key of the configuration: what to do with it
_NEWEST = "latest"  # of run.resume: the newest run of that name, and a new one where there is none


def main(arguments: list[str] | None = None) -> int:
    """The exit status; see `rl.command.run_command`."""
    parser = override_parser(
        "rl.train",
        "Reinforcement learning of an MoE language model with NVFP4 experts in sampler and learner.",
        f"recipes: {', '.join(recipes())}. Every key that --show-config prints can be set: learner.lr=1e-5."
        " plan=true starts nothing: it prints what each rank will hold and what moves, or says what cannot work.",
        "+recipe=NAME group.key=value",
    )
    options = parser.parse_args(arguments)
    wishes = [item for item in options.overrides if item.startswith(_PLAN)]
    options.overrides = [item for item in options.overrides if item not in wishes]

    def load(overrides: list[str]) -> Config:
        if wrong := [wish for wish in wishes if wish.removeprefix(_PLAN) not in ("true", "false")]:
            raise ConfigError(f"{wrong[0]}: true or false")
        return _load(overrides)

    what = _print_plan if f"{_PLAN}true" in wishes else run
    return run_command(options, load, what, "go on with run.resume=<the run's folder>")


def _print_plan(config: Config) -> None:
    from rl.preflight.report import report
    from rl.preflight.run import preflight

    print(report(preflight(config)))


def run(config: Config) -> None:
    """Train as `config` says, in a new run folder or in that of the run that is resumed. Raises UserError."""
    from rl.quiet import silence_libraries

    silence_libraries()
    with loading():
        from rl.job import open_job
        from rl.loop import train
        from rl.plan import make_plan

    with open_job(make_plan(config)) as job:
        train(job)
    if job.folder.report.exists():  # if not, the log has said why
        print(f"report: {job.folder.report}")


def _load(overrides: list[str]) -> Config:
    """The configuration asked for; a resumed run has its own, in which only some keys may change."""
    resume = [item.partition("=")[2] for item in overrides if item.startswith("run.resume=")]
    if resume and resume[-1] == _NEWEST:
        overrides = [item for item in overrides if not item.startswith("run.resume=")]
        run = load_config(overrides).run
        newest = Path(run.output_dir) / run.name / _NEWEST
        resume = [str(newest.resolve())] if newest.is_dir() else []
        overrides += [f"run.resume='{folder}'" for folder in resume]
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


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
