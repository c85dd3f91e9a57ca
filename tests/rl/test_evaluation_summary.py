"""Metrics of samples: hand-made cases."""

from __future__ import annotations

import pytest

from rl.evaluation.samples import Sample
from rl.evaluation.summary import Bootstrap, Summary, differences, pass_ks, summarise

QUICK = Bootstrap(resamples=200)


def answers(*outcomes: str) -> list[Sample]:
    """One problem an argument: ``1`` a right sample, ``0`` a wrong one, ``?`` one that could not be judged."""
    return [
        Sample(
            problem=f"p{position}",
            position=position,
            sample=number,
            seed=0,
            response="",
            tokens=number + 1,
            finish_reason="length" if mark == "0" else "stop",
            correct=mark == "1",
            error="died" if mark == "?" else None,
        )
        for position, own in enumerate(outcomes)
        for number, mark in enumerate(own)
    ]


def instructions(*prompts: tuple[int, int, int]) -> list[Sample]:
    """One sample a prompt: (instructions, followed strictly, followed loosely)."""
    return [
        Sample(
            f"p{position}",
            position,
            0,
            0,
            "",
            1,
            "stop",
            asked == strict,
            None,
            {"instructions": asked, "strict": strict, "loose": loose},
        )
        for position, (asked, strict, loose) in enumerate(prompts)
    ]


def values(summary: Summary) -> dict[str, float]:
    return {name: estimate.value for name, estimate in summary.metrics.items()}


def test_avg_and_pass_at_k():
    summary = summarise(answers("1100", "0000", "1111"), QUICK)
    assert values(summary) == pytest.approx(
        {"avg": (0.5 + 0 + 1) / 3, "pass@2": (1 - 1 / 6 + 0 + 1) / 3, "pass@4": 2 / 3}
    )
    assert (summary.problems, summary.samples, summary.errors) == (3, 4, 0)
    assert summary.truncated == pytest.approx(6 / 12)
    assert summary.length_mean == pytest.approx(2.5)


def test_samples_that_could_not_be_judged_are_neither_right_nor_wrong():
    """Symptom: a verifier that fails or times out counts as a wrong answer."""
    summary = summarise(answers("1?", "??", "01"), QUICK)
    assert values(summary)["avg"] == pytest.approx((1 + 0.5) / 2)
    assert values(summary)["pass@2"] == 1  # of the one problem with two judged samples
    assert summary.errors == 3
    assert summarise(answers("??"), QUICK).metrics == {}


def test_ifeval_metrics_are_lm_evals_aggregates():
    """Prompt level: mean over prompts; instruction level: over all instructions at once, not over prompts."""
    summary = summarise(instructions((3, 3, 3), (3, 1, 2), (1, 0, 1)), QUICK)
    assert values(summary) == pytest.approx(
        {
            "prompt_strict": 1 / 3,
            "prompt_loose": 2 / 3,
            "instruction_strict": 4 / 7,
            "instruction_loose": 6 / 7,
        }
    )


def test_ifeval_prompts_that_could_not_be_judged_do_not_count():
    failed = answers("?", "?", "?")[2]
    summary = summarise([*instructions((2, 2, 2), (2, 1, 1)), failed], QUICK)
    assert values(summary) == pytest.approx(
        {"prompt_strict": 0.5, "prompt_loose": 0.5, "instruction_strict": 0.75, "instruction_loose": 0.75}
    )
    assert summary.errors == 1


def test_differences_are_paired_by_problem():
    first, second = summarise(answers("11", "10", "1?"), QUICK), summarise(answers("10", "00", "??"), QUICK)
    found = differences(first, second, QUICK)
    assert found["avg"].value == pytest.approx(0.5)  # the third problem has no result on one side
    assert (found["avg"].low, found["avg"].high) == pytest.approx((0.5, 0.5))
    assert found.keys() == {"avg", "pass@2"}
    assert differences(first, summarise(answers("??", "??", "??"), QUICK), QUICK) == {}


@pytest.mark.parametrize(
    "samples, ks", [(1, []), (2, [2]), (4, [2, 4]), (6, [2, 4, 6]), (32, [2, 4, 8, 16, 32])]
)
def test_ks_of_pass_at_k(samples: int, ks: list[int]):
    assert pass_ks(samples) == ks
