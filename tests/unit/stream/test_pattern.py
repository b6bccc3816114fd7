"""The pattern builder: immutable values, and errors that say what to do."""

from __future__ import annotations

import functools

import pytest

from poundlock.errors import UsageError
from poundlock.stream.pattern import (
    All,
    Column,
    Contiguity,
    Either,
    Expression,
    Function,
    Repeat,
    begin,
    no_skip,
    skip_past_last_event,
    skip_to_first,
    skip_to_last,
    skip_to_next,
)


def simple(row):
    return row.x


def iterative(row, earlier):
    return earlier["a"]


def test_every_call_returns_another_pattern():
    first = begin("a").where(simple)
    second = first.one_or_more()
    third = first.followed_by("b").within("1 minute")
    assert first.stages[0].repeat is Repeat.ONCE and first.length is None
    assert second.stages[0].repeat is Repeat.LOOP
    assert [stage.name for stage in third.stages] == ["a", "b"] and third.length == 60_000
    assert first == begin("a").where(simple)


def test_each_method_sets_the_contiguity_of_its_stage():
    pattern = begin("a").next("b").followed_by("c").followed_by_any("d").not_next("e")
    pattern = pattern.not_followed_by("f").followed_by("g")
    assert [stage.contiguity for stage in pattern.stages] == [
        Contiguity.STRICT,
        Contiguity.STRICT,
        Contiguity.RELAXED,
        Contiguity.ANY,
        Contiguity.NOT_NEXT,
        Contiguity.NOT_FOLLOWED,
        Contiguity.RELAXED,
    ]
    assert pattern.names() == ["a", "b", "c", "d", "g"]


def test_conditions_are_combined_in_the_given_order():
    stage = begin("a").where("x > 1").where(simple).or_where(iterative).stages[0]
    assert stage.condition == Either(
        (All((Expression("x > 1"), Function(simple, False))), Function(iterative, True))
    )


@pytest.mark.parametrize(
    ("function", "earlier"),
    [
        (simple, False),
        (iterative, True),
        (lambda row, limit=3: row.x > limit, False),
        (lambda *anything: True, False),
        (functools.partial(lambda limit, row: row.x > limit, 3), False),
        (functools.partial(lambda limit, row, earlier: True, 3), True),
        (bool, False),
    ],
)
def test_a_function_with_two_arguments_receives_the_earlier_rows(function, earlier):
    assert begin("a").where(function).stages[0].condition == Function(function, earlier)


def test_quantifiers_set_how_often_a_stage_occurs():
    def stage(pattern):
        last = pattern.stages[-1]
        return last.repeat, last.low, last.high, last.optional, last.greedy, last.inner

    relaxed = Contiguity.RELAXED
    assert stage(begin("a").times(3)) == (Repeat.TIMES, 3, 3, False, False, relaxed)
    assert stage(begin("a").times(2, 4).greedy()) == (Repeat.TIMES, 2, 4, False, True, relaxed)
    assert stage(begin("a").times(0, 4)) == (Repeat.TIMES, 1, 4, True, False, relaxed)
    assert stage(begin("a").one_or_more().consecutive())[-1] is Contiguity.STRICT
    assert stage(begin("a").times_or_more(2).allow_combinations())[-1] is Contiguity.ANY
    assert stage(begin("a").optional()) == (Repeat.ONCE, 1, 1, True, False, relaxed)


def test_sql_conditions_are_listed_once_and_bound_to_columns():
    inner = begin("b").where("x > 1").or_where("y > 1")
    pattern = (
        begin("a").where(" x > 1 ").where(simple).followed_by(inner).one_or_more().until("stop")
    )
    assert pattern.expressions() == ["x > 1", "y > 1", "stop"]
    bound = pattern.bind({"x > 1": "_0", "y > 1": "_1", "stop": "_2"})
    assert bound.expressions() == [] and bound.columns() == ["_0", "_1", "_2"]
    assert bound.stages[0].condition == All((Column("_0"), Function(simple, False)))
    assert bound.stages[1].group[0].condition == Either((Column("_0"), Column("_1")))
    assert pattern.columns() == []
    with pytest.raises(UsageError, match="no column is given for the condition 'y > 1'"):
        pattern.bind({"x > 1": "_0"})


def test_each_skip_strategy_is_stored_in_the_pattern():
    assert begin("a").skip == no_skip()
    for skip in (skip_to_next(), skip_past_last_event(), skip_to_first("b"), skip_to_last("a")):
        pattern = begin("a", skip).followed_by("b")
        pattern.check()
        assert pattern.skip == skip


LOOP = begin("a").one_or_more()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda: begin(""), "cannot name a stage"),
        (lambda: begin(None), "cannot name a stage"),
        (lambda: begin("a", skip="next"), "give a skip strategy"),
        (lambda: begin("a").next("b").followed_by("a"), "'a' is used twice"),
        (lambda: begin("a").next(begin("b").next("a")), "'a' is used twice"),
        (lambda: begin("a").where(3), "is not a condition"),
        (lambda: begin("a").where(" "), "is not a condition"),
        (lambda: begin("a").where(lambda row, earlier, more: True), "takes 3 arguments"),
        (lambda: begin("a").where(lambda row, *, more: True), "take the row, or"),
        (lambda: begin("a").times(0), "at least 1"),
        (lambda: begin("a").times(3, 2), "the lower one first"),
        (lambda: begin("a").times(-1, 2), "at least 1"),
        (lambda: begin("a").times(1.5), "whole numbers"),
        (lambda: begin("a").times_or_more(0), "at least 1"),
        (lambda: LOOP.times(2), "repeats already"),
        (lambda: LOOP.optional().optional(), "is optional already"),
        (lambda: LOOP.greedy().next("b").optional(), "after a greedy stage"),
        (lambda: begin("a").greedy(), "does not repeat"),
        (lambda: LOOP.allow_combinations().greedy(), "cannot be greedy"),
        (lambda: LOOP.greedy().allow_combinations(), "is greedy and cannot allow"),
        (lambda: begin(LOOP).times(2).greedy(), "a group cannot be greedy"),
        (lambda: begin("a").consecutive(), "does not repeat"),
        (lambda: LOOP.consecutive().allow_combinations(), "choose one"),
        (lambda: LOOP.consecutive().consecutive(), "choose one"),
        (lambda: begin("a").until(simple), "does not repeat without limit"),
        (lambda: begin("a").times(2).until(simple), "does not repeat without limit"),
        (lambda: LOOP.until(simple).until(simple), "has a condition already"),
        (lambda: begin("a").optional().not_next("b"), "use two patterns"),
        (lambda: begin("a").optional().not_followed_by("b"), "use two patterns"),
        (lambda: begin("a").not_next("b").optional(), "is negative and cannot be optional"),
        (lambda: begin("a").not_followed_by("b").one_or_more(), "cannot repeat"),
        (lambda: begin("a").not_followed_by("b").times(2), "cannot repeat"),
        (lambda: begin("a").not_followed_by("b").not_next("c"), "swap them"),
        (lambda: begin("a").not_next(begin("b")), "a group cannot be negative"),
        (lambda: begin(begin("a")).where(simple), "no condition of its own"),
        (lambda: begin(begin("a").not_followed_by("b")), "put it after the group"),
        (lambda: begin(begin("a").within("1 s")), "give them to the whole pattern"),
        (lambda: begin(begin("a", skip_to_next())), "give them to the whole pattern"),
        (lambda: begin("a").within("0 s"), "too short"),
        (lambda: begin("a").within("soon"), "cannot be read"),
        (lambda: begin("a").next("b").within("1 s", since="start"), "'first' or 'previous'"),
        (lambda: begin("a").within("1 s", since="previous"), "has no previous row"),
        (lambda: begin("a").next("b").times(2).within("1 s", since="previous"), "single stage"),
        (
            lambda: begin("a").next("b").within("1 s", since="previous").times(2),
            "and cannot repeat",
        ),
    ],
)
def test_an_invalid_pattern_is_rejected_immediately(wrong, reason):
    with pytest.raises(UsageError, match=reason):
        wrong()


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (begin("a").not_followed_by("b"), r"say until when nothing may follow"),
        (
            begin("a").not_followed_by("b").not_followed_by("c").within("1 s"),
            "join their conditions with or_where",
        ),
        (begin("a", skip_to_first("c")), r"skip_to_first\('c'\): no stage of this name"),
        (begin("a", skip_to_last("b")).not_next("b"), "choose from a"),
        (
            begin("a").next("b").within("2 s", since="previous").within("1 s"),
            "than that of the whole pattern",
        ),
    ],
)
def test_errors_of_a_whole_pattern_are_raised_when_it_is_used(pattern, reason):
    with pytest.raises(UsageError, match=reason):
        pattern.check()
