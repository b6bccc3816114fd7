"""Rows written as text, conditions on them, and the matches of a pattern as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from poundlock.stream.codec import decode, encode
from poundlock.stream.machine import Machine
from poundlock.stream.nfa import PARENT, ROW, Finding, Matcher
from poundlock.stream.operator import Event
from poundlock.stream.pattern import Pattern
from poundlock.stream.rows import row_type

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
    """Return each match as text, with its rows in the order of arrival."""
    texts = []
    for node, _ in found:
        words = []
        while node is not None:
            words.append(node[ROW].label)
            node = node[PARENT]
        texts.append(" ".join(reversed(words)))
    return texts


def run(pattern: Pattern, text: str) -> tuple[list[str], list[tuple[str, int]]]:
    """Feed all rows at once and one by one, with the state as bytes between: both find the same.

    A matcher that does not report timed-out partial matches finds the same, too.
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
