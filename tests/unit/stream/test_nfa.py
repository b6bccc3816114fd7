"""The matcher: loops, conditions, time limits and state."""

from __future__ import annotations

import pytest
from nfa_rows import Item, a, b, c, is_, items, labels, price_above, run

from poundlock.errors import UsageError
from poundlock.stream.machine import Machine
from poundlock.stream.nfa import Matcher
from poundlock.stream.pattern import (
    Pattern,
    begin,
    no_skip,
    skip_past_last_event,
    skip_to_first,
    skip_to_next,
)

LOOP_ROWS = "c1@1 d1@2 a1@3 a2@4 a3@4 d2@5 a4@6 b1@7"


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (Pattern.consecutive, "a1 | a1 a2 | a1 a2 a3"),
        (lambda pattern: pattern, "a1 | a1 a2 | a1 a2 a3 | a1 a2 a3 a4"),
        (
            Pattern.allow_combinations,
            "a1 | a1 a2 | a1 a3 | a1 a4 | a1 a2 a3 | a1 a2 a4 | a1 a3 a4 | a1 a2 a3 a4",
        ),
    ],
    ids=["consecutive", "relaxed", "combinations"],
)
def test_contiguity_sets_which_rows_a_loop_may_skip(inner, expected):
    loop = begin("start").where(c).followed_by("middle").where(a).one_or_more()
    matches, _ = run(inner(loop).followed_by("end").where(b), LOOP_ROWS)
    assert sorted(matches) == sorted(f"c1 {rows} b1" for rows in expected.split(" | "))


def test_or_where_adds_an_alternative_condition():
    pattern = begin("start").where(a).or_where(b).next("end").where(price_above(1)).where(c)
    matches, _ = run(pattern, "a1 c1=2 b1 c2=2 a2 c3=1 d1 c4=2")
    assert matches == ["a1 c1", "b1 c2"]


def below_five(row, earlier):
    return row.name == "foo" and sum(each.price for each in earlier["middle"]) + row.price < 5


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (
            lambda pattern: pattern,
            "s1 foo1 | s1 foo1 foo2 | s1 foo1 foo2 foo4 | s2 foo3 | s2 foo3 foo4",
        ),
        (
            Pattern.allow_combinations,
            "s1 foo1 | s1 foo1 foo2 | s1 foo1 foo3 | s1 foo1 foo4"
            " | s1 foo1 foo2 foo4 | s2 foo3 | s2 foo3 foo4",
        ),
    ],
    ids=["relaxed", "combinations"],
)
def test_a_condition_on_earlier_rows_is_evaluated_for_each_partial_match(inner, expected):
    loop = begin("start").where(is_("s")).followed_by("middle").where(below_five).one_or_more()
    pattern = inner(loop).followed_by("end").where(is_("end"))
    rows = "s1=1@1 foo1=1@2 foo2=2@3 s2=2@4 foo3=3@5 foo4=1@5 x1=1@6 end1=1@8"
    matches, _ = run(pattern, rows)
    assert sorted(matches) == sorted(f"{rows} end1" for rows in expected.split(" | "))


def test_a_match_waits_for_an_earlier_partial_match():
    pattern = (
        begin("a", skip_to_first("c"))
        .where(a)
        .followed_by("c")
        .where(c)
        .followed_by("b")
        .where(b)
        .where(lambda row, earlier: earlier["a"][0].price == row.price)
    )
    assert run(pattern, "a1=0 c1=0 a2=1 c2=0 b1=1 b2=0")[0] == ["a1 c1 b2", "a2 c2 b1"]


def test_until_can_read_earlier_rows():
    def enough(row, earlier):
        return sum(each.price for each in earlier["middle"]) >= 4

    loop = begin("start").where(c).followed_by("middle").where(a).one_or_more().until(enough)
    matches, _ = run(loop.followed_by("end").where(b), "c1 a1=2 a2=2 a3=2 b1")
    assert sorted(matches) == ["c1 a1 a2 b1", "c1 a1 b1"]


def test_an_unknown_stage_among_earlier_rows_is_rejected():
    pattern = begin("a").where(lambda row, earlier: earlier["nobody"])
    with pytest.raises(UsageError, match=r"earlier\['nobody'\] names no stage: the pattern has a"):
        run(pattern, "a1")


TIMED_ROWS = "a1@1 a2@2 b1@3 d1@4 c1@11 c2@13"


def test_a_time_limit_can_start_at_the_first_row():
    pattern = begin("s").where(a).followed_by_any("m").where(b).followed_by_any("e").where(c)
    matches, timed_out = run(pattern.within("10 ms"), TIMED_ROWS)
    assert matches == ["a2 b1 c1"]
    assert sorted(timed_out) == [("a1", 11), ("a1 b1", 11), ("a2", 12), ("a2 b1", 12)]


def test_a_time_limit_can_start_at_the_previous_row():
    pattern = begin("s").where(a).followed_by_any("m").where(b).followed_by_any("e").where(c)
    matches, timed_out = run(pattern.within("10 ms", since="previous"), TIMED_ROWS)
    assert matches == ["a1 b1 c1", "a2 b1 c1"]
    assert sorted(timed_out) == [("a1 b1", 13), ("a2 b1", 13)]


def test_a_match_is_shorter_than_its_time_limit():
    pattern = begin("s").where(a).followed_by("e").where(b).within("10 ms")
    assert run(pattern, "a1@0 b1@9") == (["a1 b1"], [])
    assert run(pattern, "a1@0 b1@10") == ([], [("a1", 10)])
    pattern = begin("s").where(a).followed_by("e").where(b).within("10 s")
    assert run(pattern, "a1@0 a2@1 b1@9999") == (["a1 b1", "a2 b1"], [])
    assert run(pattern, "a1@0 a2@1 b1@10000") == (["a2 b1"], [("a1", 10_000)])


def test_the_shortest_of_several_time_limits_applies():
    pattern = begin("s").where(a).within("5 ms").followed_by("e").where(b).within("10 ms")
    assert run(pattern, "a1@0 b1@7")[0] == []


@pytest.mark.parametrize("since", ["first", "previous"])
def test_a_final_negative_stage_completes_when_the_time_limit_ends(since):
    pattern = begin("a").where(a).not_followed_by("b").where(b)
    rows = "a1@1 b1@2 a2@4 c1@5 b2@10 a3@11 b3@13"
    assert run(pattern.within("3 ms", since=since), rows) == (["a2"], [])
    rows = "a1@1 b1@4 a2@5 a3@11 b2@18"
    assert run(pattern.within("5 ms", since=since), rows) == (["a2", "a3"], [])


@pytest.mark.parametrize("skip", [no_skip(), skip_to_next(), skip_past_last_event()])
def test_the_steps_of_the_clock_do_not_change_the_matches(skip):
    """The skips of a match that a time-out completes do not depend on the clock's steps."""
    pattern = begin("a", skip).where(a).followed_by("c").where(c).not_followed_by("b").where(b)
    machine = Machine(pattern.within("5 ms"), Item._fields, timed_out=True)
    found = []
    for steps in ([1000], range(1000)):
        matcher = Matcher(machine)
        events = items("a1@1 a2@2 c1@3 a3@4")
        matcher.feed([event.time for event in events], [event.row for event in events])
        for time in steps:
            matcher.advance(time)
        found.append((labels(matcher.matches), labels(matcher.timed_out)))
    assert found[0] == found[1]
    assert found[0][0] == (["a1 c1"] if skip == skip_past_last_event() else ["a1 c1", "a2 c1"])


def test_a_condition_is_evaluated_once_per_row_for_all_partial_matches():
    asked = []

    def fits(row):
        asked.append(row.label)
        return row.name == "b"

    pattern = begin("s").where(a).followed_by("e").where(fits)
    run_rows = " ".join(f"a{n}" for n in range(50)) + " c1 b1"
    machine = Machine(pattern, Item._fields)
    events = items(run_rows)
    matcher = Matcher(machine)
    matcher.feed([0] * len(events), [event.row for event in events])
    assert len(matcher.matches) == 50
    # The first row is not asked about: nothing waited for it.
    assert asked == [event.row.label for event in events][1:]


def test_a_failed_simple_condition_skips_the_iterative_one():
    asked = []

    def same(row, earlier):
        asked.append(row.label)
        return row.price == earlier["s"][0].price

    pattern = begin("s").where(a).followed_by("e").where(b).where(same)
    assert run(pattern, "a1=1 a2=2 c1 b1=2 b2=1")[0] == ["a2 b1", "a1 b2"]
    assert set(asked) == {"b1", "b2"}


def test_partial_matches_share_their_rows():
    pattern = begin("s").where(a).followed_by_any("m").where(b).one_or_more().allow_combinations()
    machine = Machine(pattern.followed_by("e").where(c), Item._fields)
    matcher = Matcher(machine)
    events = items("a1 b1 b2 b3 b4 b5 b6 d1")
    matcher.feed([0] * len(events), [event.row for event in events])
    state = matcher.dump()
    assert state["ids"] == [0, 1, 2, 3, 4, 5, 6]
    assert state["rows"][2] == ["a1", "b1", "b2", "b3", "b4", "b5", "b6"]
    assert (
        len(state["parents"]) == 2**6
    )  # one node for each set of rows, not one for each row of it


def test_nothing_is_kept_of_expired_partial_matches():
    pattern = begin("s").where(a).followed_by("m").where(b).followed_by("e").where(c)
    machine = Machine(pattern.within("10 ms"), Item._fields)
    matcher = Matcher(machine)
    for time in range(10_000):
        matcher.feed([time], [Item(("b" if time % 7 == 0 else "a", 0.0, ""))])
    assert len(matcher.dump()["ids"]) <= 12
    matcher.advance(10_010)
    assert matcher.dump() is None


def test_state_of_another_pattern_is_rejected():
    pattern = begin("s").where(a).followed_by("m").where(b).followed_by("e").where(c)
    matcher = Matcher(Machine(pattern, Item._fields))
    matcher.feed([0, 0], [Item(("a", 0.0, "")), Item(("b", 0.0, ""))])
    with pytest.raises(UsageError, match="the pattern has changed"):
        Matcher(Machine(begin("s").where(a), Item._fields), matcher.dump())
