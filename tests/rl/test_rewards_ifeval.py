from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from rl.data.problem import Message, Problem
from rl.rewards.pool import RewardPool
from rl.rewards.registry import load_reward
from rl.rewards.score import Score


@pytest.fixture(scope="module", autouse=True)
def sentence_table(tmp_path_factory):
    """NLTK's table of sentences in small, in the four files of the real one."""
    import nltk

    data = tmp_path_factory.mktemp("nltk_data")
    folder = data / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    (folder / "abbrev_types.txt").write_text("dr\nmr")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(data))
        patch.setattr(nltk.data, "path", [str(data)])
        yield


def problem(*instructions: tuple[str, dict], prompt: str = "p") -> Problem:
    names, arguments = zip(*instructions, strict=True)
    answer = json.dumps({"instruction_id_list": names, "kwargs": arguments})
    return Problem("7", (Message("user", prompt),), answer, "ifeval")


def score(response: str, *instructions: tuple[str, dict]) -> Score:
    return load_reward("ifeval")(response, problem(*instructions))


NO_COMMA = ("punctuation:no_comma", {})
LOWER = ("change_case:english_lowercase", {})
TITLE = ("detectable_format:title", {})
FEW_WORDS = ("length_constraints:number_words", {"relation": "less than", "num_words": 6})
SENTENCES = ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 3})


@pytest.mark.parametrize(
    "instruction, follows, breaks",
    [
        (NO_COMMA, "one and two", "one, two"),
        (LOWER, "all of this is written in small letters", "All of this is not"),
        (TITLE, "<<Title>>\ntext", "Title\ntext"),
        (FEW_WORDS, "five words and no more", "here are six words in all"),
        (SENTENCES, "We met Dr. Who. He left. We stayed.", "We met Dr. Who. He left."),
        (("keywords:existence", {"keywords": ["owl", "elm"]}), "an Owl in an elm", "an owl in a tree"),
        (("keywords:forbidden_words", {"forbidden_words": ["owl"]}), "the owls", "an owl"),
        (("detectable_format:json_format", {}), '```json\n{"a": 1}\n```', "{a: 1}"),
        (("detectable_format:number_bullet_lists", {"num_bullets": 2}), "* a\n- b", "* a\n* b\n* c"),
        (("startend:end_checker", {"end_phrase": "The end."}), "So it was. The end.", "The end. So it was."),
        (("startend:quotation", {}), '"all of it"', 'some "of it"'),
        (("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}), "Say hi. Hi!", "Hi! Say hi."),
        (
            ("language:response_language", {"language": "de"}),
            "Das ist ein ganz gew\u00f6hnlicher Satz.",
            "This is English.",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_an_instruction_is_followed_or_not(instruction, follows, breaks):
    assert score(follows, instruction) == Score(
        1.0, True, details={"instructions": 1, "strict": 1, "loose": 1}
    )
    assert not score(breaks, instruction).correct


def test_all_instructions_must_be_followed_and_each_is_counted():
    partly = score("An owl, all in all", NO_COMMA, LOWER, FEW_WORDS)
    assert (partly.value, partly.correct, partly.error) == (0.0, False, None)
    assert partly.details == {"instructions": 3, "strict": 1, "loose": 1}
    assert score("an owl in all", NO_COMMA, LOWER, FEW_WORDS).correct


def test_loose_forgives_a_first_line_and_asterisks_but_strict_does_not():
    found = score("Sure, here it is:\nan owl", NO_COMMA)
    assert (found.correct, found.details["strict"], found.details["loose"]) == (False, 0, 1)
    found = score('**"quoted"**', ("startend:quotation", {}))
    assert (found.details["strict"], found.details["loose"]) == (0, 1)


@pytest.mark.parametrize("response", ["", " \n"])
def test_an_empty_response_follows_nothing(response):
    assert score(response, NO_COMMA, LOWER).details == {"instructions": 2, "strict": 0, "loose": 0}


def test_the_reasoning_part_is_not_judged():
    assert score("<think>Hm, well,</think>\n\nan owl", NO_COMMA).correct
    assert score("Hm, well,</think>an owl", NO_COMMA).correct  # the template had opened it
    assert not score("<think>no comma yet", NO_COMMA).correct  # it never came to an answer


def test_what_the_checkers_would_draw_at_random_is_the_same_each_time():
    hashes = ("keywords:letter_frequency", {"letter": "#", "let_frequency": 4, "let_relation": "at least"})
    responses = ["".join(random.Random(n).choices("abcdefgh", k=30)) for n in range(20)]
    first = [score(response, hashes) for response in responses]
    state = random.getstate()
    assert [score(response, hashes) for response in responses[::-1]][::-1] == first
    assert random.getstate() == state
    english = ("language:response_language", {"language": "en"})
    assert len({score("Ja, no.", english).correct for _ in range(20)}) == 1  # langdetect draws too


@pytest.mark.parametrize(
    "instruction, message",
    [
        (("length_constraints:number_verbs", {}), "no instruction is called"),
        (("length_constraints:number_words", {"relation": "at least"}), r"needs \['num_words', 'relation'\]"),
        (("length_constraints:number_words", {"relation": "at least", "num_words": 0}), "not 0, not empty"),
        (("length_constraints:number_words", {"relation": "most", "num_words": 3}), "cannot take"),
        (("punctuation:no_comma", {"commas": 3}), "cannot take"),
        (("combination:repeat_prompt", {}), "cannot take"),
    ],
)
def test_instructions_that_cannot_be_checked_are_errors_and_not_wrong_answers(instruction, message):
    found = score("text", instruction)
    assert found.error is not None
    import re

    assert re.search(message, found.error), found.error


def test_a_problem_of_another_kind_is_an_error():
    assert "JSONDecodeError" in (load_reward("ifeval")("34", Problem("p", "q", "x = 34", "t")).error or "")


def test_null_arguments_count_as_absent():
    assert score("an owl", ("punctuation:no_comma", {"num_words": None, "relation": None})).correct


def test_it_runs_in_the_pool_with_its_details():
    samples = [("an owl" if n % 2 else "an owl, too", problem(NO_COMMA)) for n in range(50)]
    with RewardPool(load_reward("ifeval"), workers=2, timeout_s=20) as pool:
        found = pool.score(samples)
    assert [one.correct for one in found] == [bool(n % 2) for n in range(50)]
    assert found[1].details == {"instructions": 1, "strict": 1, "loose": 1}


def loading(environment: dict[str, str], before: str = "") -> str:
    program = f"""
{before}
import sys
from rl.errors import ConfigError
from rl.rewards.registry import load_reward
try:
    load_reward("ifeval")
except ConfigError as error:
    print(error)
else:
    print(sorted(set(sys.modules) & {{"datasets", "pandas", "torch", "lm_eval", "lm_eval.tasks"}}))
"""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


def test_loading_brings_in_the_checkers_alone():
    assert loading({}).strip() == "[]"


def test_a_missing_table_of_sentences_is_said_at_once_and_not_downloaded(tmp_path):
    before = "import nltk; nltk.data.path = [%r]; nltk.download = None" % str(tmp_path)  # noqa: UP031
    message = loading({}, before)
    assert "punkt_tab" in message
    assert "set NLTK_DATA" in message
    assert str(tmp_path) in message


def test_a_missing_package_is_named():
    message = loading({}, "import sys; sys.modules['langdetect'] = None")
    assert "langdetect" in message
    assert "minite[ifeval]" in message


@pytest.mark.skipif(
    not Path(os.environ.get("MINITE_DATA", "/nowhere")).is_dir(), reason="MINITE_DATA is not set"
)
def test_every_prompt_of_ifeval_can_be_checked():
    rows = (Path(os.environ["MINITE_DATA"]) / "ifeval.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        answer = json.dumps({key: row[key] for key in ("instruction_id_list", "kwargs")})
        found = load_reward("ifeval")(
            "An answer. And more.", Problem(str(row["key"]), row["prompt"], answer, "ifeval")
        )
        assert found.error is None, (row["key"], found.error)
        assert found.details["instructions"] == len(row["instruction_id_list"])
