"""The matcher against what Flink's own tests say a pattern finds, and against the clock."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from poundlock.errors import OperatorFailed, UsageError
from poundlock.stream.codec import decode, encode
from poundlock.stream.machine import Machine
from poundlock.stream.matching import MatchOperator, TimedOut
from poundlock.stream.nfa import PARENT, ROW, Finding, Matcher
from poundlock.stream.operator import Event, Page
from poundlock.stream.pattern import (
    Pattern,
    begin,
    no_skip,
    skip_past_last_event,
    skip_to_first,
    skip_to_last,
    skip_to_next,
)
from poundlock.stream.rows import row_type
from poundlock.stream.times import END, Clock, Domain

Item = row_type(("name", "price", "label"))


def is_(name: str) -> Callable[[Any], bool]:
    return lambda row: row.name == name


def has(*names: str) -> Callable[[Any], bool]:
    return lambda row: any(name in row.name for name in names)


def price_is(price: float) -> Callable[[Any], bool]:
    return lambda row: row.price == price


def price_above(price: float) -> Callable[[Any], bool]:
    return lambda row: row.price > price


a, b, c, d, e, f = map(is_, "abcdef")


def items(text: str) -> list[Event]:
    """Read "a1@3 b1=5@4": an a at 3, and a b of price 5 at 4. Without times, all at 0."""
    found = []
    for word in text.split():
        rest, _, time = word.partition("@")
        label, _, price = rest.partition("=")
        name = re.match("[a-z]+", label)[0]
        found.append(Event(int(time or 0), Item((name, float(price or 0), label))))
    return found


def labels(found: list[Finding]) -> list[str]:
    """Return each match as text, its rows in the order they came."""
    texts = []
    for node, _ in found:
        words = []
        while node is not None:
            words.append(node[ROW].label)
            node = node[PARENT]
        texts.append(" ".join(reversed(words)))
    return texts


def run(pattern: Pattern, text: str) -> tuple[list[str], list[tuple[str, int]]]:
    """Give all rows at once and one by one, with the state as bytes between: both find the same.

    As does a matcher that need not tell of partial matches whose time is over.
    """
    machine = Machine(pattern, Item._fields, timed_out=True)
    events = items(text)
    whole, untold = Matcher(machine), Matcher(Machine(pattern, Item._fields))
    for matcher in (whole, untold):
        matcher.feed([event.time for event in events], [event.row for event in events])
    state, matches, timed_out = None, [], []
    for event in events:
        matcher = Matcher(machine, state)
        matcher.feed([event.time], [event.row])
        matches += labels(matcher.matches)
        late = matcher.timed_out
        timed_out += zip(labels(late), [each.time for each in late], strict=True)
        left = matcher.dump()
        state = left and decode(encode(left))
    assert matches == labels(whole.matches) == labels(untold.matches)
    assert [label for label, _ in timed_out] == labels(whole.timed_out)
    return matches, timed_out


# Pattern, rows, matches: the outcomes that Flink's tests of the same name expect.
SEQUENCES = [
    ("no condition",
     begin("start").followed_by("end"),
     "a1@1 b1@2 c1@3 d1@4 e1@5", "a1 b1 | b1 c1 | c1 d1 | d1 e1"),
    ("no condition looping",
     begin("start").followed_by("end").one_or_more(),
     "a1@1 b1@2 c1@3 d1@4 e1@5",
     "a1 b1 c1 d1 e1 | a1 b1 c1 d1 | a1 b1 c1 | a1 b1 | b1 c1 d1 e1 | b1 c1 d1 | b1 c1 | c1 d1 "
     "e1 | c1 d1 | d1 e1"),
    ("any with no condition",
     begin("start").followed_by_any("end"),
     "a1@1 b1@2 c1@3 d1@4 e1@5",
     "a1 b1 | a1 c1 | a1 d1 | a1 e1 | b1 c1 | b1 d1 | b1 e1 | c1 d1 | c1 e1 | d1 e1"),
    ("strict continuity with results",
     begin("middle").where(a).next("end").where(b),
     "a1@3 b1@5", "a1 b1"),
    ("strict continuity no results",
     begin("middle").where(a).next("end").where(b),
     "a1@3 c1@4 b1@5", ""),
    ("simple pattern with time window within first and last",
     begin("start").where(is_("start")).followed_by("middle").where(is_("middle"))
     .followed_by("end").where(is_("end")).within("10 ms"),
     "start1@1 start2@2 middle1@3 foobar1@4 end1@11 end2@13", "start2 middle1 end1"),
    ("simple pattern with time window within previous and current",
     begin("start").where(is_("start")).followed_by("middle").where(is_("middle"))
     .followed_by("end").where(is_("end")).within("9 ms", since="previous"),
     "start1@1 start2@2 middle1@3 foobar1@4 end1@11 end2@13",
     "start1 middle1 end1 | start2 middle1 end1"),
    ("complex branching after zero or more",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more()
     .allow_combinations().optional().followed_by_any("end1").where(b).followed_by_any("end2")
     .where(d).followed_by_any("end3").where(e),
     "c1@1 a1@3 a2@4 a3@5 b1@6 d1@7 d2@8 e1@9",
     "c1 a1 a2 a3 b1 d1 e1 | c1 a1 a2 b1 d1 e1 | c1 a1 a3 b1 d1 e1 | c1 a2 a3 b1 d1 e1 | c1 a1 "
     "b1 d1 e1 | c1 a2 b1 d1 e1 | c1 a3 b1 d1 e1 | c1 b1 d1 e1 | c1 a1 a2 a3 b1 d2 e1 | c1 a1 "
     "a2 b1 d2 e1 | c1 a1 a3 b1 d2 e1 | c1 a2 a3 b1 d2 e1 | c1 a1 b1 d2 e1 | c1 a2 b1 d2 e1 | "
     "c1 a3 b1 d2 e1 | c1 b1 d2 e1"),
    ("zero or more",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more()
     .allow_combinations().optional().followed_by("end1").where(b),
     "c1@1 a1@3 a2@4 b1@6", "c1 a1 a2 b1 | c1 a1 b1 | c1 a2 b1 | c1 b1"),
    ("eager zero or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@3 a2@4 d1@5 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a1 b1 | c1 b1"),
    ("begin with zero or more",
     begin("middle").where(a).one_or_more().optional().followed_by("end").where(b),
     "a1@3 a2@4 a3@5 b1@6", "a1 a2 a3 b1 | a1 a2 b1 | a2 a3 b1 | a1 b1 | a2 b1 | a3 b1 | b1"),
    ("zero or more after zero or more",
     begin("start").where(c).followed_by_any("middle-first").where(a).one_or_more()
     .allow_combinations().optional().followed_by("middle-second").where(d).one_or_more()
     .allow_combinations().optional().followed_by("end").where(e),
     "c1@1 a1@3 d1@4 d2@5 e1@6",
     "c1 a1 d1 d2 e1 | c1 a1 d1 e1 | c1 d1 d2 e1 | c1 d1 e1 | c1 a1 e1 | c1 e1"),
    ("zero or more after branching",
     begin("start").where(c).followed_by_any("branching").where(a).followed_by_any("merging")
     .where(f).followed_by_any("kleene").where(d).one_or_more().allow_combinations().optional()
     .followed_by("end").where(e),
     "c1@1 a1@3 a2@4 f1@5 d1@6 d2@7 e1@8",
     "c1 a1 f1 e1 | c1 a1 f1 d1 e1 | c1 a1 f1 d2 e1 | c1 a1 f1 d1 d2 e1 | c1 a2 f1 e1 | c1 a2 "
     "f1 d1 e1 | c1 a2 f1 d2 e1 | c1 a2 f1 d1 d2 e1"),
    ("strict continuity no results after zero or more",
     begin("start").where(d).followed_by("middle").where(a).one_or_more().optional().next("end")
     .where(b),
     "d1@1 a1@2 a2@3 c1@4 b1@5", ""),
    ("strict continuity results after zero or more",
     begin("start").where(d).followed_by_any("middle").where(a).one_or_more().optional()
     .allow_combinations().next("end").where(b),
     "d1@1 a1@2 a2@3 b1@5", "d1 a1 a2 b1 | d1 a2 b1"),
    ("at least one",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more()
     .allow_combinations().followed_by_any("end1").where(b),
     "c1@1 a1@3 a2@4 b1@6", "c1 a1 a2 b1 | c1 a1 b1 | c1 a2 b1"),
    ("begin with at least one",
     begin("start").where(a).one_or_more().allow_combinations().followed_by("end").where(b),
     "a1@3 a2@4 a3@5 b1@6",
     "a1 a2 a3 b1 | a1 a2 b1 | a1 a3 b1 | a2 a3 b1 | a1 b1 | a2 b1 | a3 b1"),
    ("at least one eager",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more()
     .followed_by_any("end1").where(b),
     "c1@1 a1@3 a2@4 a3@5 b1@6",
     "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a2 a3 b1 | c1 a3 b1 | c1 a2 b1 | c1 a1 b1"),
    ("optional",
     begin("start").where(c).followed_by("middle").where(a).optional().followed_by("end1")
     .where(b),
     "c1@1 a1@5 b1@6", "c1 a1 b1 | c1 b1"),
    ("times",
     begin("start").where(c).next("middle").where(a).times(2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 a2@3 a3@4 b1@6", "c1 a1 a2 b1 | c1 a1 a3 b1"),
    ("start with times",
     begin("middle").where(a).times(2).consecutive().followed_by("end1").where(b),
     "a1@2 a2@3 a3@4 b1@6", "a1 a2 b1 | a2 a3 b1"),
    ("times non strict with next",
     begin("start").where(c).next("middle").where(a).times(2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 f1@3 a2@4 f2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 a1 a3 b1"),
    ("times not strict with followed by eager",
     begin("start").where(c).followed_by("middle").where(a).times(2).followed_by("end1").where(b),
     "c1@1 a1@2 a2@4 a3@6 b1@7", "c1 a1 a2 b1"),
    ("times not strict with followed by not eager",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 a2@4 a3@6 b1@7", "c1 a1 a2 b1 | c1 a2 a3 b1 | c1 a1 a3 b1"),
    ("times strict with next and consecutive",
     begin("start").where(c).next("middle").where(a).times(2).consecutive().followed_by("end1")
     .where(b),
     "c1@1 a1@2 f1@3 a2@4 a3@6 b1@7", ""),
    ("start with optional",
     begin("start").where(c).optional().followed_by("end1").where(b),
     "c1@1 b1@6", "c1 b1 | b1"),
    ("end with zero or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional(),
     "c1@1 a1@3 a2@4 a3@5", "c1 a1 a2 a3 | c1 a1 a2 | c1 a1 | c1"),
    ("start and end with zero or more",
     begin("start").where(a).one_or_more().optional(),
     "c1@1 a1@3 a2@4 a3@5 d1@6 d2@6 d3@6", "a1 a2 a3 | a1 a2 | a1 | a2 a3 | a2 | a3"),
    ("end with optional",
     begin("start").where(c).followed_by("middle").where(a).optional(),
     "c1@1 a1@3", "c1 a1 | c1"),
    ("end with one or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more(),
     "c1@1 a1@3 a2@4 a3@5", "c1 a1 a2 a3 | c1 a1 a2 | c1 a1"),
    ("times non strict optional 1",
     begin("start").where(c).followed_by("middle").where(a).times(3).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 b1@7", "c1 b1"),
    ("times non strict optional 2",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).allow_combinations()
     .optional().followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 a1 a3 b1 | c1 a2 a3 b1 | c1 b1"),
    ("times non strict optional 3",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 a2 a3 b1 | c1 b1"),
    ("times strict optional",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).consecutive().optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a2 a3 b1 | c1 b1"),
    ("one or more strict optional",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more().consecutive()
     .optional().followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7",
     "c1 a2 a3 b1 | c1 a1 b1 | c1 a2 b1 | c1 a3 b1 | c1 b1"),
    ("times strict optional 1",
     begin("start").where(c).next("middle").where(a).times(2).consecutive().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@3 a2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 b1"),
    ("optional times non strict with next",
     begin("start").where(c).next("middle").where(a).times(2).allow_combinations().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@2 f1@3 a2@4 f2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 a1 a3 b1 | c1 b1"),
    ("times strict",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).consecutive()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a2 a3 b1"),
    ("times non strict",
     begin("start").where(c).followed_by_any("middle").where(a).times(2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a1 a2 b1 | c1 a1 a3 b1 | c1 a2 a3 b1"),
    ("multiple takes version collision",
     begin("start").where(c).followed_by("middle1").where(a).one_or_more().allow_combinations()
     .followed_by("middle2").where(a).one_or_more().allow_combinations().followed_by("end")
     .where(b),
     "c1@1 a1@3 a2@4 a3@5 a4@6 a5@7 b1@10",
     "c1 a1 a2 a3 a4 a5 b1 | c1 a1 a2 a3 a4 a5 b1 | c1 a1 a2 a3 a4 a5 b1 | c1 a1 a2 a3 a4 a5 "
     "b1 | c1 a1 a2 a3 a4 b1 | c1 a1 a2 a4 a5 b1 | c1 a1 a2 a3 a4 b1 | c1 a1 a2 a3 a5 b1 | c1 "
     "a1 a3 a4 a5 b1 | c1 a1 a3 a4 a5 b1 | c1 a1 a2 a3 a4 b1 | c1 a1 a2 a3 a5 b1 | c1 a1 a2 a4 "
     "a5 b1 | c1 a1 a2 a3 b1 | c1 a1 a3 a4 b1 | c1 a1 a4 a5 b1 | c1 a1 a2 a3 b1 | c1 a1 a2 a4 "
     "b1 | c1 a1 a2 a5 b1 | c1 a1 a2 b1"),
]  # fmt: skip

RANGES = [
    ("times range",
     begin("start").where(c).next("middle").where(a).times(1, 3).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 a2@3 a3@4 b1@6", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a1 a3 b1 | c1 a1 b1"),
    ("times range from zero",
     begin("start").where(c).next("middle").where(a).times(0, 2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 a2@3 a3@4 b1@6", "c1 a1 a2 b1 | c1 a1 a3 b1 | c1 a1 b1 | c1 b1"),
    ("times range strict",
     begin("start").where(c).followed_by_any("middle").where(a).times(0, 3).consecutive()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7",
     "c1 a2 a3 b1 | c1 a1 b1 | c1 a2 b1 | c1 a3 b1 | c1 b1"),
    ("times range strict optional",
     begin("start").where(c).followed_by_any("middle").where(a).times(1, 3).consecutive()
     .optional().followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7",
     "c1 a2 a3 b1 | c1 a1 b1 | c1 a2 b1 | c1 a3 b1 | c1 b1"),
    ("times range strict optional 1",
     begin("start").where(c).next("middle").where(a).times(1, 3).consecutive().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@3 a2@5 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a1 b1 | c1 b1"),
    ("times range non strict optional 1",
     begin("start").where(c).followed_by("middle").where(a).times(1, 3).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 b1@7", "c1 b1"),
    ("times range non strict optional 3",
     begin("start").where(c).followed_by_any("middle").where(a).times(2, 3).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a2 a3 b1 | c1 b1"),
    ("times range not strict with followed by",
     begin("start").where(c).followed_by("middle").where(a).times(2, 3).followed_by("end1")
     .where(b),
     "c1@1 a1@2 a2@4 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1"),
]  # fmt: skip

AT_LEAST = [
    ("times or more",
     begin("start").where(c).followed_by("middle").where(a).times_or_more(2).allow_combinations()
     .followed_by("end1").where(b),
     "c1@1 a1@2 a2@3 a3@4 b1@6", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a1 a3 b1"),
    ("times or more strict optional",
     begin("start").where(c).followed_by_any("middle").where(a).times_or_more(2).consecutive()
     .optional().followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a2 a3 b1 | c1 b1"),
    ("times or more strict optional 2",
     begin("start").where(c).next("middle").where(a).times_or_more(2).consecutive().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@3 a2@5 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 b1"),
    ("times or more non strict optional",
     begin("start").where(c).followed_by("middle").where(a).times_or_more(2).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 b1@7", "c1 b1"),
    ("times or more non strict optional 3",
     begin("start").where(c).followed_by_any("middle").where(a).times_or_more(2).optional()
     .followed_by("end1").where(b),
     "c1@1 f1@2 a1@3 f2@4 a2@5 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1 | c1 a2 a3 b1 | c1 b1"),
    ("times or more not strict with followed by",
     begin("start").where(c).followed_by("middle").where(a).times_or_more(2).followed_by("end1")
     .where(b),
     "c1@1 a1@2 a2@4 a3@6 b1@7", "c1 a1 a2 a3 b1 | c1 a1 a2 b1"),
]  # fmt: skip

GREEDY = [
    ("greedy zero or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 a3@4 d1@5", "c1 a1 a2 a3 d1"),
    ("greedy zero or more in between",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .followed_by("end").where(d),
     "c1@1 dummy1@2 a1@3 dummy2@4 a2@5 dummy3@6 a3@7 d1@8", "c1 a1 a2 a3 d1"),
    ("greedy zero or more with dummy events after quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 dummy1@4 d1@5", "c1 a1 a2 d1"),
    ("greedy zero or more with dummy events before quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .followed_by("end").where(d),
     "c1@1 dummy1@2 d1@5", "c1 d1"),
    ("greedy until zero or more with dummy events after quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .until(price_above(3)).followed_by("end").where(d),
     "c1=1@1 a1=2@2 a2=3@3 a3=3@4 a4=4@5 d1=3@6", "c1 a1 a2 a3 d1"),
    ("greedy until with dummy events before quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .until(price_above(3)).followed_by("end").where(d),
     "c1=1@1 a1=4@2 a2=2@3 a3=3@4 a4=3@5 d1=3@6", "c1 d1"),
    ("greedy one or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 a3@4 d1@5", "c1 a1 a2 a3 d1"),
    ("greedy one or more in between",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .followed_by("end").where(d),
     "c1@1 dummy1@2 a1@3 dummy2@4 a2@5 dummy3@6 a3@7 d1@8", "c1 a1 a2 a3 d1"),
    ("greedy one or more with dummy events after quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 dummy1@4 d1@5", "c1 a1 a2 d1"),
    ("greedy one or more with dummy events before quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .followed_by("end").where(d),
     "c1@1 dummy1@2 d1@5", ""),
    ("greedy until one or more with dummy events after quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .until(price_above(3)).followed_by("end").where(d),
     "c1=1@1 a1=2@2 a2=3@3 a3=3@4 a4=4@5 d1=3@6", "c1 a1 a2 a3 d1"),
    ("greedy until one or more with dummy events before quantifier",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().greedy()
     .until(price_above(3)).followed_by("end").where(d),
     "c1=1@1 a1=4@2 a2=2@3 a3=3@4 a4=3@5 d1=3@6", ""),
    ("greedy zero or more before group pattern",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional().greedy()
     .followed_by(begin("middle1").where(d).followed_by("middle2").where(e)).times(2)
     .followed_by("end").where(f),
     "c1@1 a1@2 a2@3 dummy1@4 a3@5 d1@6 e1@7 d2@8 e2@9 f1@10", "c1 a1 a2 a3 d1 e1 d2 e2 f1"),
    ("end with zero or more greedy",
     begin("start").where(c).followed_by("end").where(a).one_or_more().optional().greedy(),
     "c1@1 a1@2 a2@3 dummy1@4 a3@5", "c1 | c1 a1 | c1 a1 a2 | c1 a1 a2 a3"),
    ("end with zero or more consecutive greedy",
     begin("start").where(c).followed_by("end").where(a).one_or_more().optional().consecutive()
     .greedy(),
     "c1@1 a1@2 a2@3 dummy1@4 a3@5", "c1 | c1 a1 | c1 a1 a2"),
    ("end with greedy times range",
     begin("start").where(c).followed_by("end").where(a).times(2, 5).greedy(),
     "c1@1 a1@2 a2@3 a3@4 a4@5 dummy1@6", "c1 a1 a2 | c1 a1 a2 a3 | c1 a1 a2 a3 a4"),
    ("greedy times range",
     begin("start").where(c).followed_by("middle").where(a).times(2, 5).greedy()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 a3@4 a4@5 d1@6", "c1 a1 a2 a3 a4 d1"),
]  # fmt: skip

UNTIL = [
    ("until condition followed by one or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().until(price_is(5))
     .followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@6 a4=6@7", "c1 a1 a2 a3 | c1 a1 a3"),
    ("until condition followed by one or more combinations",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().allow_combinations()
     .until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=4@5 a4=5@6 a5=6@7",
     "c1 a1 a2 a3 a4 | c1 a1 a2 a4 | c1 a1 a3 a4 | c1 a1 a4"),
    ("until condition followed by one or more consecutive",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().consecutive()
     .until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@7 a4=6@8", "c1 a1 a2 a3 | c1 a1 a3"),
    ("until condition followed by one or more consecutive 2",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().consecutive()
     .until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 b1=3@4 a2=4@5 a3=5@7 a4=6@8", "c1 a1 a3"),
    ("until condition followed by zero or more",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional()
     .until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@6 a4=6@7", "c1 a1 a2 a3 | c1 a1 a3 | c1 a3"),
    ("until condition followed by zero or more combinations",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional()
     .allow_combinations().until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=4@5 a4=5@6 a5=6@7",
     "c1 a1 a2 a3 a4 | c1 a1 a2 a4 | c1 a1 a3 a4 | c1 a1 a4 | c1 a4"),
    ("until condition followed by zero or more consecutive",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional()
     .consecutive().until(price_is(5)).followed_by("end").where(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@7 a4=6@8", "c1 a1 a2 a3 | c1 a1 a3 | c1 a3"),
    ("until condition followed by any one or more",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more().until(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@6 a4=6@7", "c1 a1 a2 | c1 a1 | c1 a2 | c1 a4"),
    ("until condition followed by any zero or more",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more().optional()
     .until(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 a3=5@6 a4=6@7", "c1 a1 a2 | c1 a1 | c1 a2 | c1 a4 | c1"),
    ("until condition with empty where",
     begin("start").where(c).followed_by("middle").one_or_more().until(price_is(5)),
     "c1=1@1 a1=2@3 a2=3@4 d1=1@5 a3=5@6 a4=6@7", "c1 a1 a2 d1 | c1 a1 a2 | c1 a1"),
]  # fmt: skip

NEGATIVE = [
    ("not next",
     begin("start").where(a).not_next("notPattern").where(b).followed_by_any("middle").where(c)
     .followed_by("end").where(d),
     "a1@1 c1@2 b1@3 c2@4 d1@5", "a1 c1 d1 | a1 c2 d1"),
    ("not next no matches",
     begin("start").where(a).not_next("notPattern").where(b).followed_by("middle").where(c)
     .followed_by("end").where(d),
     "a1@1 b1@2 c1@3 c2@4 d1@5", ""),
    ("not next no matches at the end",
     begin("start").where(a).followed_by_any("middle").where(c).followed_by_any("end").where(d)
     .not_next("notPattern").where(b),
     "a1@1 c1@2 c2@3 d1@4 b1@5", ""),
    ("not followed by",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by_any("middle")
     .where(c).followed_by("end").where(d),
     "a1@1 c1@2 b1@3 c2@4 d1@5", "a1 c1 d1"),
    ("not followed by before optional",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by_any("middle")
     .where(c).optional().followed_by("end").where(d),
     "a1@1 c1@2 b1@3 c2@4 d1@5", "a1 c1 d1"),
    ("times with not followed by",
     begin("start").where(a).followed_by_any("middle").where(b).times(2)
     .not_followed_by("notPattern").where(c).followed_by("end").where(d),
     "a1@1 b1@2 c1@3 b2@4 d1@5", ""),
    ("ignore state of times with not followed by",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by_any("middle")
     .where(c).times(2).optional().followed_by("end").where(d),
     "a1@1 d1@2 e1@1 b1@3 c1@2 c2@4 d2@5", "a1 d1"),
    ("times with not followed by after",
     begin("start").where(a).followed_by_any("middle").where(b).times(2)
     .not_followed_by("notPattern").where(c).followed_by("end").where(d),
     "a1@1 d1@2 e1@1 b1@3 b2@3 c1@2 d2@5", ""),
    ("not followed by before optional at the end",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by_any("end")
     .where(c).optional(),
     "a1@1 c1@2 b1@3 c2@4", "a1 c1 | a1"),
    ("not followed by before optional times",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by_any("middle")
     .where(c).times(2).optional().followed_by("end").where(d),
     "a1@1 c1@2 b1@3 c2@4 d1@5", "a1 c1 c2 d1"),
    ("not followed by with branching at start",
     begin("start").where(a).not_followed_by("notPattern").where(b).followed_by("middle")
     .where(c).followed_by("end").where(d),
     "a1@1 b1@2 c1@3 a2@4 c2@5 d1@6", "a2 c2 d1"),
    ("not follow by before times within",
     begin("a").where(a).not_followed_by("b").where(b).followed_by("c").where(c).times(0, 2)
     .within("3 ms"),
     "a1@1 b1@2 a2@10 c1@11 c2@12 a3@20 c3@21 c4@24", "a1 | a2 | a2 c1 | a2 c1 c2 | a3 | a3 c3"),
    ("not followed by within at end after match",
     begin("a", skip_past_last_event()).where(a).one_or_more().allow_combinations()
     .followed_by("c").where(c).not_followed_by("b").where(b).within("5 ms"),
     "a1@1 a2@2 a3@3 c1@4 c2@10", "a1 a2 a3 c1"),
]  # fmt: skip

SKIPS = [
    ("no skip",
     begin("start", no_skip()).where(a).times(3),
     "a1 a2 a3 a4 a5 a6", "a1 a2 a3 | a2 a3 a4 | a3 a4 a5 | a4 a5 a6"),
    ("no skip with followed by any",
     begin("start", no_skip()).where(a).followed_by_any("end").where(b),
     "a1 b1 a2 b2", "a1 b1 | a1 b2 | a2 b2"),
    ("skip to next with followed by any",
     begin("start", skip_to_next()).where(a).followed_by_any("end").where(b),
     "a1 b1 a2 b2", "a1 b1 | a2 b2"),
    ("no skip with quantifier at the end",
     begin("start", no_skip()).where(a).next("end").where(b).one_or_more(),
     "a1 b1 b2 b3", "a1 b1 b2 b3 | a1 b1 b2 | a1 b1"),
    ("skip to next with quantifier at the end",
     begin("start", skip_to_next()).where(a).next("end").where(b).one_or_more(),
     "a1 b1 b2 b3", "a1 b1"),
    ("skip past last",
     begin("start", skip_past_last_event()).where(a).times(3),
     "a1 a2 a3 a4 a5 a6", "a1 a2 a3 | a4 a5 a6"),
    ("skip to first",
     begin("start", skip_to_first("end")).where(has("a")).times(2).next("end").where(has("b"))
     .times(2),
     "ab1 ab2 ab3 ab4 ab5 ab6", "ab1 ab2 ab3 ab4 | ab3 ab4 ab5 ab6"),
    ("skip to last",
     begin("start", skip_to_last("end")).where(has("a")).times(2).next("end").where(has("b"))
     .times(2),
     "ab1 ab2 ab3 ab4 ab5 ab6 ab7", "ab1 ab2 ab3 ab4 | ab4 ab5 ab6 ab7"),
    ("skip past last 2",
     begin("a", skip_past_last_event()).where(has("a")).followed_by_any("b").where(has("b"))
     .followed_by_any("c").where(has("c")).followed_by("d").where(has("d")),
     "a1 a2 b1 b2 c1 c2 d1 d2", "a1 b1 c1 d1"),
    ("skip past last 3",
     begin("a", skip_past_last_event()).where(has("a")).next("b").where(has("b")),
     "a1 c1 a2 b1", "a2 b1"),
    ("skip to first with optional match",
     begin("x", skip_to_first("b")).where(has("x")).one_or_more().optional().next("b")
     .where(has("b")).next("c").where(has("c")),
     "ab1 c1 ab2 c2", "ab1 c1 | ab2 c2"),
    ("skip to first at start position",
     begin("b", skip_to_first("b")).where(has("b")).next("c").where(has("c")),
     "ab1 c1 ab2 c2", "ab1 c1 | ab2 c2"),
    ("skip to first with one or more",
     begin("a", skip_to_first("b")).where(has("a")).next("b").where(has("b")).one_or_more()
     .consecutive(),
     "a1 b1 a2 b2 b3 a3 b4", "a1 b1 | a2 b2 | a3 b4"),
    ("skip to first non existent position without exception",
     begin("a", skip_to_first("b")).where(has("a")).next("b").where(has("b")).one_or_more()
     .optional().consecutive().next("c").where(has("c")),
     "a1 c1", "a1 c1"),
    ("skip to last with one or more",
     begin("a", skip_to_last("b")).where(has("a")).next("b").where(has("b")).one_or_more()
     .consecutive(),
     "a1 b1 a2 b2 b3 a3 b4", "a1 b1 | a2 b2 | a3 b4"),
    ("skip past last with one or more at beginning",
     begin("a", skip_past_last_event()).where(has("a")).one_or_more().consecutive().greedy()
     .next("b").where(has("b")),
     "a1 a2 a3 b1", "a1 a2 a3 b1"),
    ("skip to last with one or more at beginning",
     begin("a", skip_to_last("a")).where(has("a")).one_or_more().consecutive().greedy().next("b")
     .where(has("b")),
     "a1 a2 a3 b1", "a1 a2 a3 b1 | a3 b1"),
    ("skip to first with one or more at beginning",
     begin("a", skip_to_first("a")).where(has("a")).one_or_more().consecutive().greedy()
     .next("b").where(has("b")),
     "a1 a2 a3 b1", "a1 a2 a3 b1 | a2 a3 b1 | a3 b1"),
    ("no skip with one or more at beginning",
     begin("a", no_skip()).where(has("a")).one_or_more().consecutive().greedy().next("b")
     .where(has("b")),
     "a1 a2 a3 b1", "a1 a2 a3 b1 | a2 a3 b1 | a3 b1"),
    ("skip to first discarding",
     begin("a or c", skip_to_first("c*")).where(has("a", "c")).followed_by("b or c")
     .where(has("b", "c")).followed_by("c*").where(has("c")).one_or_more().greedy()
     .followed_by("d").where(has("d")),
     "a1 b1 c1 c2 c3 d1", "a1 b1 c1 c2 c3 d1 | c1 c2 c3 d1"),
]  # fmt: skip

GROUPS = [
    ("group followed by times",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).times(2)
     .followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 d1@6", "c1 a1 b1 a2 b2 d1"),
    ("group followed by optional",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).optional()
     .followed_by("end").where(d),
     "c1@1 a1@2 a2@3 b1@4 d1@5", "c1 d1 | c1 a1 b1 d1"),
    ("followed by group times optional",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).times(2).optional()
     .followed_by("end").where(d),
     "c1@1 a1@2 d1@3", "c1 d1"),
    ("group followed by one or more",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).one_or_more()
     .followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 d1@6", "c1 a1 b1 d1 | c1 a1 b1 a2 b2 d1"),
    ("group followed by zero or more",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).one_or_more()
     .optional().followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 d1@6", "c1 d1 | c1 a1 b1 d1 | c1 a1 b1 a2 b2 d1"),
    ("group followed by any times combinations",
     begin("start").where(c)
     .followed_by_any(begin("middle1").where(a).followed_by("middle2").where(b)).times(2)
     .allow_combinations().followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 a3@6 b3@7 d1@8",
     "c1 a1 b1 a2 b2 d1 | c1 a1 b1 a3 b3 d1 | c1 a2 b2 a3 b3 d1"),
    ("group followed by any times optional",
     begin("start").where(c)
     .followed_by_any(begin("middle1").where(a).followed_by("middle2").where(b)).times(2)
     .optional().followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 a3@6 b3@7 d1@8", "c1 d1 | c1 a1 b1 a2 b2 d1 | c1 a2 b2 a3 b3 d1"),
    ("group followed by any one or more",
     begin("start").where(c)
     .followed_by_any(begin("middle1").where(a).followed_by("middle2").where(b)).one_or_more()
     .followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 a3@6 b3@7 d1@8",
     "c1 a1 b1 d1 | c1 a2 b2 d1 | c1 a3 b3 d1 | c1 a1 b1 a2 b2 d1 | c1 a2 b2 a3 b3 d1 | c1 a1 "
     "b1 a2 b2 a3 b3 d1"),
    ("group not followed by",
     begin("start").where(c)
     .followed_by_any(begin("middle1").where(a).followed_by("middle2").where(b))
     .not_followed_by("notPattern").where(d).followed_by("end").where(e),
     "c1@1 a1@2 b1@3 d1@4 a2@5 b2@6 e1@7", "c1 a2 b2 e1"),
    ("group not next",
     begin("start").where(c)
     .followed_by_any(begin("middle1").where(a).followed_by("middle2").where(b))
     .not_next("notPattern").where(d).followed_by("end").where(e),
     "c1@1 a1@2 b1@3 d1@4 a2@5 b2@6 e1@7", "c1 a2 b2 e1"),
    ("group nest",
     begin("start").where(d)
     .followed_by(begin("middle1").where(a).followed_by(
         begin("middle2").where(b).followed_by("middle3").where(c)).one_or_more().optional())
     .optional().followed_by("end").where(e),
     "d1@1 a1@2 b1@3 c1@4 b2@5 c2@6 e1@7",
     "d1 e1 | d1 a1 e1 | d1 a1 b1 c1 e1 | d1 a1 b1 c1 b2 c2 e1"),
    ("group nest times",
     begin("start").where(d)
     .followed_by_any(begin("middle1").where(a).followed_by(
         begin("middle2").where(b).followed_by("middle3").where(c)).times(3))
     .times(0, 2).followed_by("end").where(e),
     "d1@1 a1@2 b1@3 c1@4 b2@5 c2@6 b3@7 c3@8 a2@9 b4@10 c4@11 b5@12 c5@13 b6@14 c6@15 e1@16",
     "d1 e1 | d1 a1 b1 c1 b2 c2 b3 c3 e1 | d1 a2 b4 c4 b5 c5 b6 c6 e1 | d1 a1 b1 c1 b2 c2 b3 "
     "c3 a2 b4 c4 b5 c5 b6 c6 e1"),
    ("group nest times consecutive",
     begin("start").where(d)
     .followed_by_any(begin("middle1").where(a).followed_by(
         begin("middle2").where(b).followed_by("middle3").where(c)).times(3).consecutive())
     .times(0, 2).consecutive().followed_by("end").where(e),
     "d1@1 a1@2 b1@3 c1@4 b2@5 c2@6 b3@7 c3@8 a2@9 b4@10 c4@11 "
     "breaking1@12 b5@13 c5@14 b6@15 c6@16 e1@17",
     "d1 e1 | d1 a1 b1 c1 b2 c2 b3 c3 e1"),
    ("group begin",
     begin(begin("middle1").where(a).followed_by("middle2").where(b)).times(1, 2)
     .followed_by("end").where(d),
     "a1@1 b1@2 a2@3 b2@4 d1@5", "a1 b1 d1 | a2 b2 d1 | a1 b1 a2 b2 d1"),
    ("group followed by one or more with until condition",
     begin("start").where(c)
     .followed_by(begin("middle1").where(a).followed_by("middle2").where(b)).one_or_more()
     .until(d).followed_by("end").where(d),
     "c1@1 a1@2 b1@3 a2@4 b2@5 d1@6", "c1 a1 b1 d1 | c1 a1 b1 a2 b2 d1"),
    ("group starts with optional pattern",
     begin("start").where(a).next(begin("middle1").where(b).optional().next("middle2").where(c))
     .next("d").where(d),
     "a1@1 c1@2 d1@3", "a1 c1 d1"),
    ("followed by optional group pattern",
     begin("start").where(a).followed_by(begin("middle1").where(b).next("middle2").where(c))
     .optional().next("d").where(d),
     "a1@1 d1@2 d2@3", "a1 d1"),
]  # fmt: skip

SAME_TIME = [
    ("eager zero or more same element",
     begin("start").where(c).followed_by("middle").where(a).one_or_more().optional()
     .followed_by("end1").where(b),
     "c1@1 a1@3 a1@3 a1@3 a2@4 d1@5 a3@6 a3@6 b1@7",
     "c1 a1 a1 a1 a2 a3 a3 b1 | c1 a1 a1 a1 a2 a3 b1 | c1 a1 a1 a1 a2 b1 | c1 a1 a1 a1 b1 | c1 "
     "a1 a1 b1 | c1 a1 b1 | c1 b1"),
    ("clearing buffer",
     begin("a").where(a).followed_by("b").where(b).followed_by("c").where(c).followed_by("d")
     .where(d),
     "a1@1 b1@2 c1@2 d1@2", "a1 b1 c1 d1"),
    ("simple pattern wsame element",
     begin("start").where(c).followed_by_any("middle").where(a).followed_by("end1").where(b),
     "c1@1 a1@3 a1@3 b1@7", "c1 a1 b1 | c1 a1 b1"),
    ("end wlooping wsame element",
     begin("start").where(c).followed_by_any("middle").where(a).one_or_more().optional(),
     "c1@1 a1@3 a2@3 a3@3 b1@7",
     "c1 | c1 a1 | c1 a2 | c1 a3 | c1 a1 a2 | c1 a2 a3 | c1 a1 a2 a3"),
    ("repeating pattern wsame element",
     begin("start").where(c).followed_by("middle1").where(a).one_or_more().optional()
     .followed_by("middle2").where(b).optional().followed_by("end").where(a),
     "c1@1 a1@3 a1@3 a2@3 d1@5 b1@6 a3@7",
     "c1 a1 | c1 a1 a1 | c1 b1 a3 | c1 a1 a1 a2 | c1 a1 b1 a3 | c1 a1 a1 a2 a3 | c1 a1 a1 b1 "
     "a3 | c1 a1 a1 a2 b1 a3"),
]  # fmt: skip

CASES = SEQUENCES + RANGES + AT_LEAST + GREEDY + UNTIL + NEGATIVE + SKIPS + GROUPS + SAME_TIME


@pytest.mark.parametrize(
    ("pattern", "rows", "expected"),
    [case[1:] for case in CASES],
    ids=[case[0].replace(" ", "-") for case in CASES],
)
def test_finds_what_flink_finds(pattern, rows, expected):
    matches, _ = run(pattern, rows)
    assert sorted(matches) == sorted(expected.split(" | ") if expected else [])


LOOP_ROWS = "c1@1 d1@2 a1@3 a2@4 a3@4 d2@5 a4@6 b1@7"


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (Pattern.consecutive, "a1 | a1 a2 | a1 a2 a3"),
        (lambda pattern: pattern, "a1 | a1 a2 | a1 a2 a3 | a1 a2 a3 a4"),
        (Pattern.allow_combinations, "a1 | a1 a2 | a1 a3 | a1 a4 | a1 a2 a3 | a1 a2 a4 | a1 a3 a4"
         " | a1 a2 a3 a4"),
    ],
    ids=["consecutive", "relaxed", "combinations"],
)  # fmt: skip
def test_what_may_lie_between_the_rows_of_a_loop(inner, expected):
    loop = begin("start").where(c).followed_by("middle").where(a).one_or_more()
    matches, _ = run(inner(loop).followed_by("end").where(b), LOOP_ROWS)
    assert sorted(matches) == sorted(f"c1 {rows} b1" for rows in expected.split(" | "))


def test_or_where_is_another_way_to_fit():
    pattern = begin("start").where(a).or_where(b).next("end").where(price_above(1)).where(c)
    matches, _ = run(pattern, "a1 c1=2 b1 c2=2 a2 c3=1 d1 c4=2")
    assert matches == ["a1 c1", "b1 c2"]


def below_five(row, earlier):
    return row.name == "foo" and sum(each.price for each in earlier["middle"]) + row.price < 5


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (lambda pattern: pattern, "s1 foo1 | s1 foo1 foo2 | s1 foo1 foo2 foo4"
         " | s2 foo3 | s2 foo3 foo4"),
        (Pattern.allow_combinations, "s1 foo1 | s1 foo1 foo2 | s1 foo1 foo3 | s1 foo1 foo4"
         " | s1 foo1 foo2 foo4 | s2 foo3 | s2 foo3 foo4"),
    ],
    ids=["relaxed", "combinations"],
)  # fmt: skip
def test_a_condition_on_earlier_rows_is_asked_for_each_partial_match(inner, expected):
    loop = begin("start").where(is_("s")).followed_by("middle").where(below_five).one_or_more()
    pattern = inner(loop).followed_by("end").where(is_("end"))
    rows = "s1=1@1 foo1=1@2 foo2=2@3 s2=2@4 foo3=3@5 foo4=1@5 x1=1@6 end1=1@8"
    matches, _ = run(pattern, rows)
    assert sorted(matches) == sorted(f"{rows} end1" for rows in expected.split(" | "))


def test_a_match_waits_for_one_that_started_before_it():
    pattern = (
        begin("a", skip_to_first("c")).where(a).followed_by("c").where(c)
        .followed_by("b").where(b).where(lambda row, earlier: earlier["a"][0].price == row.price)
    )  # fmt: skip
    assert run(pattern, "a1=0 c1=0 a2=1 c2=0 b1=1 b2=0")[0] == ["a1 c1 b2", "a2 c2 b1"]


def test_until_may_look_at_earlier_rows():
    def enough(row, earlier):
        return sum(each.price for each in earlier["middle"]) >= 4

    loop = begin("start").where(c).followed_by("middle").where(a).one_or_more().until(enough)
    matches, _ = run(loop.followed_by("end").where(b), "c1 a1=2 a2=2 a3=2 b1")
    assert sorted(matches) == ["c1 a1 a2 b1", "c1 a1 b1"]


def test_an_unknown_stage_among_earlier_rows_is_refused():
    pattern = begin("a").where(lambda row, earlier: earlier["nobody"])
    with pytest.raises(UsageError, match=r"earlier\['nobody'\] names no stage: the pattern has a"):
        run(pattern, "a1")


TIMED_ROWS = "a1@1 a2@2 b1@3 d1@4 c1@11 c2@13"


def test_timed_out_since_the_first_row():
    pattern = begin("s").where(a).followed_by_any("m").where(b).followed_by_any("e").where(c)
    matches, timed_out = run(pattern.within("10 ms"), TIMED_ROWS)
    assert matches == ["a2 b1 c1"]
    assert sorted(timed_out) == [("a1", 11), ("a1 b1", 11), ("a2", 12), ("a2 b1", 12)]


def test_timed_out_since_the_previous_row():
    pattern = begin("s").where(a).followed_by_any("m").where(b).followed_by_any("e").where(c)
    matches, timed_out = run(pattern.within("10 ms", since="previous"), TIMED_ROWS)
    assert matches == ["a1 b1 c1", "a2 b1 c1"]
    assert sorted(timed_out) == [("a1 b1", 13), ("a2 b1", 13)]


def test_a_match_is_shorter_than_its_time():
    pattern = begin("s").where(a).followed_by("e").where(b).within("10 ms")
    assert run(pattern, "a1@0 b1@9") == (["a1 b1"], [])
    assert run(pattern, "a1@0 b1@10") == ([], [("a1", 10)])
    pattern = begin("s").where(a).followed_by("e").where(b).within("10 s")
    assert run(pattern, "a1@0 a2@1 b1@9999") == (["a1 b1", "a2 b1"], [])
    assert run(pattern, "a1@0 a2@1 b1@10000") == (["a2 b1"], [("a1", 10_000)])


def test_several_within_are_as_the_shortest():
    pattern = begin("s").where(a).within("5 ms").followed_by("e").where(b).within("10 ms")
    assert run(pattern, "a1@0 b1@7")[0] == []


@pytest.mark.parametrize("since", ["first", "previous"])
def test_what_is_not_followed_is_complete_when_its_time_is_over(since):
    pattern = begin("a").where(a).not_followed_by("b").where(b)
    rows = "a1@1 b1@2 a2@4 c1@5 b2@10 a3@11 b3@13"
    assert run(pattern.within("3 ms", since=since), rows) == (["a2"], [])
    rows = "a1@1 b1@4 a2@5 a3@11 b2@18"
    assert run(pattern.within("5 ms", since=since), rows) == (["a2", "a3"], [])


@pytest.mark.parametrize("skip", [no_skip(), skip_to_next(), skip_past_last_event()])
def test_the_clock_may_jump(skip):
    """What a match that times out into being complete skips does not depend on the clock's steps."""
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


def test_a_condition_is_asked_once_for_a_row_however_many_wait():
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


def test_a_condition_that_a_simple_one_settles_is_not_asked():
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


def test_nothing_is_kept_of_what_is_over():
    pattern = begin("s").where(a).followed_by("m").where(b).followed_by("e").where(c)
    machine = Machine(pattern.within("10 ms"), Item._fields)
    matcher = Matcher(machine)
    for time in range(10_000):
        matcher.feed([time], [Item(("b" if time % 7 == 0 else "a", 0.0, ""))])
    assert len(matcher.dump()["ids"]) <= 12
    matcher.advance(10_010)
    assert matcher.dump() is None


def test_state_of_another_pattern_is_refused():
    pattern = begin("s").where(a).followed_by("m").where(b).followed_by("e").where(c)
    matcher = Matcher(Machine(pattern, Item._fields))
    matcher.feed([0, 0], [Item(("a", 0.0, "")), Item(("b", 0.0, ""))])
    with pytest.raises(UsageError, match="the pattern has changed"):
        Matcher(Machine(begin("s").where(a), Item._fields), matcher.dump())


# The operator.

PAIR = begin("s").where(a).followed_by("e").where(b).within("10 ms")


def joined(match, ctx):
    text = " ".join(row.label for rows in match.values() for row in rows)
    return (ctx.key.k, text, ctx.timestamp)


def operator(pattern=PAIR, **options):
    options = {"select": joined, "fields": ("k", "rows", "at")} | options
    return MatchOperator(pattern, columns=Item._fields, key_fields=("k",), **options)


def page(operator, data, text, watermark=-1, now=0, key=("k",)):
    events = {key: sorted(items(text), key=lambda event: event.time)} if text else {}
    return Page(operator, data, Clock(watermark, now)).run(events)


def test_rows_wait_for_the_watermark_and_are_matched_in_order_of_time():
    op = operator()
    first = page(op, None, "b1@5 a1@3")
    assert first.outputs == {} and first.due[Domain.EVENT] == 3
    second = page(op, first.data, "a2@4", watermark=2)
    third = page(op, second.data, "", watermark=5)
    assert third.outputs == {"main": [("k", "a1 b1", 5), ("k", "a2 b1", 5)]}
    assert third.data is None


def test_late_rows_have_an_output_of_their_own_or_are_counted():
    op = operator(late_output="late")
    assert op.outputs["late"] == Item._fields
    done = page(op, None, "a1@5 a2@6", watermark=5)
    assert done.outputs == {"late": [("a", 0.0, "a1")]}
    op = operator()
    done = page(op, None, "a1@4 a2@5", watermark=5)
    assert done.outputs == {} and done.data is None and op.late_dropped == 2


def test_timed_out_matches_have_an_output_of_their_own():
    op = operator(timed_out=TimedOut("partial", joined, ("k", "rows", "at")))
    first = page(op, None, "a1@3 a2@4 b1@12")
    done = page(op, first.data, "", watermark=12)
    assert done.outputs == {"main": [("k", "a1 b1", 12), ("k", "a2 b1", 12)]}
    first = page(op, None, "a1@3 a2@4")
    second = page(op, first.data, "", watermark=12)
    assert second.outputs == {} and second.due[Domain.EVENT] == 13
    third = page(op, second.data, "", watermark=13)
    assert third.outputs == {"partial": [("k", "a1", 13)]} and third.due[Domain.EVENT] == 14
    last = page(op, third.data, "", watermark=14)
    assert last.outputs == {"partial": [("k", "a2", 14)]} and last.data is None


def test_processing_time_matches_at_once():
    op = operator(domain=Domain.PROCESSING, timed_out=("partial", joined, ("k", "rows", "at")))
    first = page(op, None, "a1 a2", now=100)
    assert first.due[Domain.PROCESSING] == 110
    second = page(op, first.data, "b1", now=109)
    assert second.outputs["main"] == [("k", "a1 b1", 109), ("k", "a2 b1", 109)]
    again = page(op, first.data, "b1", now=110)
    assert again.outputs == {"partial": [("k", "a1", 110), ("k", "a2", 110)]}


def test_a_match_may_become_no_row_or_several():
    kinds = {
        "none": lambda match, ctx: None,
        "row": lambda match, ctx: {"x": match["s"][0].label},
        "rows": lambda match, ctx: [("one",), ("two",)],
        "flow": lambda match, ctx: ((row.label,) for rows in match.values() for row in rows),
    }
    given = {}
    for kind, select in kinds.items():
        op = operator(select=select, fields=("x",))
        first = page(op, None, "a1@1 b1@2")
        given[kind] = page(op, first.data, "", watermark=2).outputs.get("main", [])
    assert given == {
        "none": [], "row": [("a1",)], "rows": [("one",), ("two",)], "flow": [("a1",), ("b1",)],
    }  # fmt: skip


def test_without_select_a_match_is_its_rows():
    op = operator(select=None, fields=None)
    assert op.outputs == {"main": ("k", "match_start", "match_end", "s", "e")}
    first = page(op, None, "a1@1000 b1@1002")
    [(key, start, end, s, e)] = page(op, first.data, "", watermark=1002).outputs["main"]
    assert (key, s, e) == ("k", [("a", 0.0, "a1")], [("b", 0.0, "b1")])
    assert start.isoformat() == "1970-01-01T00:00:01+00:00" and (end - start).microseconds == 2000


def test_conditions_in_sql_are_read_from_columns_that_matches_do_not_show():
    pattern = begin("s").where("name = 'a'").followed_by("e").where("name = 'b'")
    pattern = pattern.where(lambda row: row.price > 1)
    columns = (*Item._fields, "_0", "_1")
    bound = pattern.bind({"name = 'a'": "_0", "name = 'b'": "_1"})
    op = MatchOperator(bound, columns=columns, late_output="late")
    assert op.outputs == {"main": ("match_start", "match_end", "s", "e"), "late": Item._fields}
    row = row_type(columns)
    rows = [
        Event(time, row((*event.row, event.row.name == "a", event.row.name == "b" or None)))
        for time, event in enumerate(items("b0=2 a1 b1=1 b2=2"), 1)
    ]
    first = Page(op, None, Clock(0)).run({(): rows})
    done = Page(op, first.data, Clock(4)).run({(): [Event(2, rows[0].row)]})
    assert done.outputs["main"][0][2:] == ([("a", 0.0, "a1")], [("b", 2.0, "b2")])
    assert done.outputs["late"] == [("b", 2.0, "b0")]
    with pytest.raises(UsageError, match="is in SQL: bind it"):
        MatchOperator(pattern, columns=columns)
    with pytest.raises(UsageError, match="there is no column '_0'"):
        MatchOperator(bound, columns=Item._fields)


def test_rows_may_have_no_columns_but_conditions():
    pattern = begin("s").where("a").followed_by("e").where("b").bind({"a": "_0", "b": "_1"})
    op = MatchOperator(pattern, columns=("_0", "_1"))
    row = row_type(("_0", "_1"))
    first = Page(op, None, Clock(0)).run({(): [Event(1, row((True, False)))]})
    second = Page(op, first.data, Clock(1)).run({(): [Event(2, row((False, True)))]})
    last = Page(op, second.data, Clock(2)).run({})
    assert [found[2:] for found in last.outputs["main"]] == [([()], [()])]


def test_keys_do_not_see_each_other():
    op = operator()
    rows = {
        (k,): items(text) for k, text in (("x", "a1@1"), ("y", "b1@2 a2@3"), ("z", "a3@1 b2@2"))
    }
    first = Page(op, None, Clock(0)).run(rows)
    assert Page(op, first.data, Clock(5)).run({}).outputs["main"] == [("z", "a3 b2", 2)]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("pattern", [begin("s").where(a), begin("s").where(a).within("5 ms")])
def test_the_last_watermark_of_all_ends_a_stream(pattern):
    pattern = pattern.followed_by("e").where(b)
    op = operator(pattern)
    first = page(op, None, "a1@1 b1@2 a2@3")
    last = page(op, first.data, "", watermark=END)
    assert last.outputs["main"] == [("k", "a1 b1", 2)]
    machine = Machine(pattern, Item._fields, timed_out=True)
    matcher = Matcher(machine)
    matcher.feed([3], [items("a2@3")[0].row])
    matcher.advance(END)
    assert len(matcher.timed_out) == (1 if pattern.length else 0)


def test_a_condition_that_fails_names_the_operator():
    op = operator(begin("s").where(lambda row: row.nothing), name="pairs")
    first = page(op, None, "a1@1")
    with pytest.raises(OperatorFailed, match=r"'pairs' failed: NoColumn: .*no column 'nothing'"):
        page(op, first.data, "", watermark=1)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda: operator("s"), "start one with begin"),
        (lambda: operator(fields=None), "select= needs fields="),
        (
            lambda: operator(begin("s"), timed_out=("x", joined, ("k",))),
            "needs a time limit, and the pattern has none",
        ),
        (
            lambda: operator(late_output="x", domain=Domain.PROCESSING),
            "late_output= needs event time",
        ),
        (lambda: operator(late_output="main"), "'main' needs a name of its own"),
        (lambda: operator(fields=("k", "k")), "same name"),
        (lambda: operator(begin("s").not_followed_by("e")), "say until when"),
    ],
)
def test_wrong_use(wrong, reason):
    with pytest.raises(UsageError, match=reason):
        wrong()
