from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import AutoTokenizer

from rl.data.addition_pairs import AdditionPairs
from rl.data.arithmetic import Arithmetic
from rl.data.problem import Message
from rl.data.sums import Sums
from rl.errors import DataError


def summands(identifier: str) -> tuple[int, int]:
    a, b = identifier.split("+")
    return int(a), int(b)


@settings(max_examples=30, deadline=None)
@given(bound=st.integers(2, 30), seed=st.integers(0, 2**32 - 1), share=st.floats(0, 0.9))
def test_held_out_sums_are_never_trained_in_either_order(bound, seed, share):
    held_out = int(share * bound * (bound + 1) // 2)
    pairs = AdditionPairs(0, bound, held_out, seed)
    trained = {pairs.drawn(position) for position in range(len(pairs))}
    secret = {frozenset(pair) for pair in pairs.held_out}
    assert len(secret) == len(pairs.held_out) == held_out
    assert not {frozenset(pair) for pair in trained} & secret
    # Nothing else is lost: every pair that is not held out, nor the mirror image of one, is trained on.
    everything = {(a, b) for a in range(bound) for b in range(bound)}
    assert trained == {pair for pair in everything if frozenset(pair) not in secret}


def test_plain_digits_are_zero_padded_to_a_fixed_width():
    source = Arithmetic(bound=100, reversed_digits=False, held_out=10, seed=0)
    for position in range(0, source.training_count, 97):
        problem = source.training(position)
        a, b = summands(problem.id)
        assert problem.prompt == f"{a:02d}+{b:02d}="
        assert problem.answer == f"{a + b:03d}"


def test_reversed_digits_begin_with_the_least_significant():
    source = Arithmetic(bound=100, reversed_digits=True, held_out=10, seed=0)
    for position in range(0, source.training_count, 97):
        problem = source.training(position)
        assert len(problem.answer) == 3
        assert int(problem.answer[::-1]) == sum(summands(problem.id))


def test_a_bound_of_fifty_has_two_digit_answers():
    assert Arithmetic(50, True, 0, 0).format_answer(7) == "70"
    assert Arithmetic(51, True, 0, 0).format_answer(7) == "700"


def test_same_seed_same_problems_other_seed_others():
    first, second, other = (Arithmetic(100, True, 64, seed) for seed in (1, 1, 2))
    assert first.held_out == second.held_out != other.held_out
    assert [first.training(p) for p in range(50)] == [second.training(p) for p in range(50)]
    assert [first.training(p) for p in range(50)] != [other.training(p) for p in range(50)]
    assert first.describe() == second.describe()
    assert first.describe()["content_hash"] != other.describe()["content_hash"]


def test_describe_counts_what_is_there():
    about = Arithmetic(bound=10, reversed_digits=True, held_out=5, seed=0).describe()
    assert about["held_out"] == 5
    assert 100 - 10 <= about["training"] <= 100 - 5  # a pair and its mirror image, or a pair of equals


def test_demonstrations_are_right_at_the_given_rate_and_otherwise_evenly_wrong():
    source = Arithmetic(bound=4, reversed_digits=True, held_out=0, seed=0)
    wrong = []
    count = 4000
    for position in range(count):
        prompt, answer = source.demonstrations(position, correct_share=0.6)
        problem = source.training(position)
        assert prompt == problem.prompt
        assert len(answer) == len(problem.answer)
        if answer != problem.answer:
            total, right = int(answer[::-1]), sum(summands(problem.id))
            assert 0 <= total <= 6
            wrong.append((total - right) % 7)  # 1 ... 6, each equally likely whatever the right answer is
    assert abs(len(wrong) / count - 0.4) < 4 * (0.24 / count) ** 0.5
    assert chisquare([wrong.count(offset) for offset in range(1, 7)]).pvalue > 1e-4
    assert source.demonstrations(7, 0.6) == Arithmetic(4, True, 0, 0).demonstrations(7, 0.6)


def test_demonstrations_at_the_extremes():
    source = Arithmetic(bound=20, reversed_digits=False, held_out=5, seed=0)
    problems = [source.training(position) for position in range(300)]
    right = [source.demonstrations(position, 1.0)[1] for position in range(300)]
    wrong = [source.demonstrations(position, 0.0)[1] for position in range(300)]
    assert right == [problem.answer for problem in problems]
    assert all(answer != problem.answer for answer, problem in zip(wrong, problems, strict=True))


def test_tokenizer_is_one_token_a_character_and_loads_as_a_folder(tmp_path):
    source = Arithmetic(bound=100, reversed_digits=True, held_out=0, seed=0)
    source.tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 14
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    ids = tokenizer("07+45=")["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "07+45="
    assert tokenizer.decode([*ids, 1], skip_special_tokens=True) == "07+45="
    with pytest.raises(Exception, match="UNK"):
        tokenizer("7 + 5")


@pytest.mark.parametrize("digits, low, high", [(1, 0, 9), (2, 10, 99)])
def test_sums_ask_in_a_chat(digits, low, high):
    source = Sums(digits=digits, held_out=16, seed=0)
    seen = set()
    for position in range(source.training_count):
        problem = source.training(position)
        a, b = summands(problem.id)
        seen |= {a, b}
        assert problem.prompt == (Message("user", f"Compute {a} + {b}. Answer with only the number."),)
        assert problem.answer == str(a + b)
    assert (min(seen), max(seen)) == (low, high)
    assert len(source.held_out) == source.describe()["held_out"] == 16


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Arithmetic(1, True, 0, 0), "2 to 1000"),
        (lambda: Arithmetic(1001, True, 0, 0), "2 to 1000"),
        (lambda: Arithmetic(10, True, 55, 0), r"data\.held_out=55.*less than 55"),
        (lambda: Arithmetic(10, True, -1, 0), r"data\.held_out=-1"),
        (lambda: Sums(0, 1, 0), r"data\.digits=0"),
        (lambda: Sums(4, 1, 0), r"data\.digits=4"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(DataError, match=message):
        make()
