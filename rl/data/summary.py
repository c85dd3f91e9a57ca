"""What a data set holds and what was left out of it, in words for the terminal and the log."""

from __future__ import annotations

from collections.abc import Mapping

_LEFT_OUT = {
    "repeated_rows": "repeated",
    "contradictory": "with contradictory answers",
    "other_language": "in another language",
    "dropped_as_benchmark": "that are a benchmark's",
    "also_held_out": "also held out",
    "overlong_training": "over the prompt limit",
}
_IN_BENCHMARK = "in_"


def summary(about: Mapping[str, str | int | bool | None]) -> list[str]:
    """Lines about a data set, from what `rl.data.prompts.Prompts.describe` says."""
    rows = f" {about['rows']} rows," if "rows" in about else ""
    trained = int(about["training"] or 0) - int(about["overlong_training"] or 0)
    held_out = int(about["held_out"] or 0) - int(about["overlong_held_out"] or 0)
    lines = [
        f"data {about['source']}:{rows} {trained} problems to learn from, {held_out} held out;"
        f" longest prompt {about['longest_prompt']} of {about['prompt_limit']} tokens;"
        f" fingerprint {about['fingerprint']}"
    ]
    left_out = [f"{about[key]} {words}" for key, words in _LEFT_OUT.items() if about.get(key)]
    if left_out:
        lines.append(f"left out: {', '.join(left_out)}")
    common = [
        f"{count} of {key.removeprefix(_IN_BENCHMARK)}"
        for key, count in about.items()
        if key.startswith(_IN_BENCHMARK)
    ]
    if common:
        dropped = "left out" if about["dropped_as_benchmark"] else "data.overlap=drop leaves them out"
        lines.append(f"problems that stand in a benchmark: {', '.join(common)} ({dropped})")
    return lines
