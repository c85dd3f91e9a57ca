"""``python -m rl.preflight [group.key=value ...]``: the preflight of every recipe, a line each, with overrides."""

from __future__ import annotations

import sys

from rl.compose import load_config, recipes
from rl.errors import UserError
from rl.preflight.checks import gib
from rl.preflight.run import preflight

_ROWS = ("recipe", "parameters", "tokens an update", "learner's rank", "sampler's rank", "sync", "layout")


def main(overrides: list[str]) -> int:
    """Prints a table; the exit status is 2 when a recipe is refused."""
    print("| " + " | ".join(_ROWS) + " |")
    print("| " + " | ".join("---" for _ in _ROWS) + " |")
    status = 0
    for recipe in recipes():
        try:
            found = preflight(load_config([f"+recipe={recipe}", *_needed(recipe), *overrides]))
        except UserError as error:
            status = 2
            print(f"| `{recipe}` | refused: {error} |" + " |" * (len(_ROWS) - 2))
            continue
        others = sum(memory.total for memory in found.others.values())
        cells = (
            f"`{recipe}`",
            f"{found.parameters.total / 1e9:.3g} B",
            f"{found.batch.tokens:,}",
            gib(found.learner.total + others),
            gib(found.sampler.total),
            gib(found.sync.total),
            f"{found.layout}; samplers {found.config.run.samplers}",
        )
        print("| " + " | ".join(cells) + " |")
    return status


def _needed(recipe: str) -> list[str]:
    """What a recipe leaves to the user and the preflight does not read."""
    return ["data.path=FILE"] if recipe.endswith("gsm8k") else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
