from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.groups import AllSolved, GroupBuffer, TooFewGroups, Verdict, judge
from rl.rewards.score import Score


@dataclass(frozen=True)
class Group:
    name: str
    scores: tuple[Score, ...]


def group(name: str, *values: float | str) -> Group:
    """Numbers are rewards (right from 1), text is an error."""
    scores = [Score.failed(v) if isinstance(v, str) else Score(v, correct=v >= 1) for v in values]
    return Group(name, tuple(scores))


def mixed(name: str) -> Group:
    return group(name, 1.0, 0.0)


def buffer(needed: int = 2, group_size: int = 2, max_rounds: int = 3, **settings) -> GroupBuffer[Group]:
    settings.setdefault("at_least", needed)
    return GroupBuffer(needed=needed, group_size=group_size, max_rounds=max_rounds, **settings)


def names(groups: list[Group]) -> str:
    return "".join(g.name for g in groups)


@pytest.mark.parametrize(
    "values, verdict",
    [
        ((1.0, 0.0, 0.0), Verdict.MIXED),
        ((1.0, 1.0, 1.0), Verdict.SOLVED),
        ((0.0, 0.0, 0.0), Verdict.UNSOLVED),
        ((0.1,) * 7, Verdict.UNSOLVED),  # their float32 standard deviation is not exactly 0
        ((0.1,) * 6 + (0.1 + 2**-56,), Verdict.MIXED),
        ((-1.0, -1.0), Verdict.UNSOLVED),
        ((1.0, 0.0, "timeout"), Verdict.FAILED),
        (("timeout",) * 3, Verdict.FAILED),
        (
            (0.0, 0.0, "timeout"),
            Verdict.FAILED,
        ),  # the error counts as 0, but the group is not one of wrong answers
    ],
)
def test_verdicts(values, verdict):
    assert judge(group("g", *values).scores) is verdict


def test_right_answers_with_different_rewards_are_mixed_and_equal_rewards_are_not():
    assert judge([Score(1.0, correct=True), Score(0.5, correct=True)]) is Verdict.MIXED
    assert judge([Score(0.5, correct=True), Score(0.5, correct=False)]) is Verdict.UNSOLVED


def test_rounds_until_enough_are_kept():
    groups = buffer(needed=3)
    assert groups.missing == 3
    groups.add([mixed("a"), group("b", 0, 0), group("c", 1, "boom")])
    assert (names(groups.kept), groups.missing) == ("a", 2)
    groups.add([group("d", 1, 1), mixed("e")])
    assert (names(groups.kept), groups.missing) == ("ae", 1)
    groups.add([mixed("f")])
    assert (names(groups.kept), groups.drawn, groups.missing) == ("aef", 6, 0)
    assert groups.metrics() == {
        "groups/kept": 3,
        "groups/drawn": 6,
        "groups/rounds": 3,
        "groups/dropped_constant": 2,
        "groups/dropped_error": 1,
    }


def test_a_first_round_that_is_wholly_valid_is_kept():
    groups = buffer(needed=2, max_rounds=1)
    groups.add([mixed("a"), mixed("b")])
    assert (names(groups.kept), groups.missing) == ("ab", 0)


def test_surplus_of_the_last_round_is_set_apart():
    groups = buffer(needed=2)
    groups.add([mixed("a"), group("b", 0, 0), mixed("c"), mixed("d"), group("e", 1, 1), mixed("f")])
    assert (names(groups.kept), names(groups.surplus)) == ("ac", "df")


@pytest.mark.parametrize(
    ("waited", "kept", "surplus"), [("a", "ac", "d"), ("ab", "ab", "cd"), ("abe", "ab", "ecd")]
)
def test_groups_that_waited_come_first_and_a_round_is_taken_all_the_same(waited, kept, surplus):
    before = [mixed(name) for name in waited]
    groups = buffer(needed=2, kept=before[:2], surplus=before[2:])
    groups.add([mixed("c"), group("x", 0, 0), mixed("d")])
    assert (names(groups.kept), names(groups.surplus)) == (kept, surplus)
    assert groups.metrics()["groups/drawn"] == 3
    with pytest.raises(ValueError, match="another round is not needed"):
        groups.add([mixed("f")])


def test_without_dynamic_sampling_only_failures_are_dropped():
    groups = buffer(needed=3, dynamic_sampling=False)
    groups.add([group("a", 0, 0), group("b", "boom", 1), group("c", 1, 1)])
    groups.add([mixed("d")])
    assert names(groups.kept) == "acd"
    assert groups.metrics()["groups/dropped_constant"] == 0
    assert groups.metrics()["groups/dropped_error"] == 1


def test_the_bound_is_an_error_with_all_counts():
    groups = buffer(needed=2, max_rounds=2)
    groups.add([group("a", 1, 1), group("b", 0, 0)])
    with pytest.raises(TooFewGroups) as failure:
        groups.add([mixed("c"), group("d", 0, "boom"), group("e", 1, 1)])
    message = str(failure.value)
    assert "1 groups kept, 2 needed, after 2 rounds" in message
    assert "5 drawn: 2 with only right answers, 1 with only wrong ones, 1 with a failed reward" in message
    assert "algorithm.max_rounds" in message


def test_a_shortage_because_everything_is_solved_is_told_apart():
    with pytest.raises(AllSolved, match="2 drawn: 2 with only right answers"):
        buffer(needed=2, max_rounds=1).add([group("a", 1, 1), group("b", 1, 1)])
    for other in (group("b", 0, 0), group("b", "boom", 1)):
        with pytest.raises(TooFewGroups) as shortage:
            buffer(needed=2, max_rounds=1).add([group("a", 1, 1), other])
        assert not isinstance(shortage.value, AllSolved)


def test_fewer_groups_suffice_once_the_rounds_are_used_up():
    groups = buffer(needed=3, at_least=1, max_rounds=2)
    groups.add([mixed("a"), group("b", 1, 1)])
    assert not groups.complete  # another round may still fill the batch
    groups.add([group("c", 1, 1)])
    assert groups.complete
    assert (names(groups.kept), groups.missing) == ("a", 2)


def test_at_least_lies_between_one_and_needed():
    for at_least in (0, 3):
        with pytest.raises(ValueError, match=f"at_least={at_least}"):
            buffer(needed=2, at_least=at_least)


def test_incomplete_groups_and_needless_rounds_are_refused():
    groups = buffer(needed=1, group_size=2)
    with pytest.raises(ValueError, match="group 1 has 3 scores, and group_size is 2"):
        groups.add([mixed("a"), group("b", 1, 0, 1)])
    assert (groups.rounds, groups.kept) == (0, [])  # nothing of a refused round is taken
    groups.add([mixed("a")])
    with pytest.raises(ValueError, match="1 groups are there: another"):
        groups.add([mixed("b")])
    for name in ("needed", "group_size", "max_rounds"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            buffer(**{name: 0})


one_group = st.lists(st.sampled_from([0.0, 1.0, "boom"]), min_size=2, max_size=2)


@settings(deadline=None)
@given(
    rounds=st.lists(st.lists(one_group, max_size=5), max_size=6),
    needed=st.integers(1, 6),
    dynamic=st.booleans(),
)
def test_counts_add_up_and_a_restored_buffer_goes_on_alike(rounds, needed, dynamic):
    groups = buffer(needed=needed, max_rounds=4, dynamic_sampling=dynamic)
    number = 0
    for values in rounds:
        if groups.complete or groups.rounds == groups.max_rounds:
            break
        drawn = [group(chr(97 + number + index), *pair) for index, pair in enumerate(values)]
        number += len(drawn)
        restored = GroupBuffer(**{f.name: _copy(getattr(groups, f.name)) for f in fields(groups)})
        for each in (groups, restored):
            try:
                each.add(drawn)
            except TooFewGroups:
                assert each.missing
                assert each.rounds == 4
        assert asdict(groups) == asdict(restored)
    dropped = groups.solved + groups.unsolved + groups.failed
    assert groups.drawn == number == len(groups.kept) + dropped + len(groups.surplus)
    assert len(groups.kept) <= needed
    assert [g.name for g in groups.kept] == sorted(g.name for g in groups.kept)


def _copy(value):
    return list(value) if isinstance(value, list) else value
