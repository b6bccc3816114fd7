"""The runner of a page: order, timers, state as bytes, errors that name the operator."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poundlock.errors import OperatorFailed, UsageError
from poundlock.stream.codec import decode, encode
from poundlock.stream.operator import Event, Operator, Page, read_key, read_page
from poundlock.stream.rows import row_type, shaped
from poundlock.stream.times import Clock, Domain, milliseconds

Reading = row_type(("id", "v"))


class Recorder(Operator):
    """Counts a key's rows, sets a timer ten after each, and emits everything it sees."""

    name = "recorder"
    outputs = MappingProxyType({"main": ("what", "time"), "side": ("v",)})
    domains = frozenset(Domain)

    def on_rows(self, key, events):
        for event in events:
            key.state["n"] = key.state.get("n", 0) + 1
            key.emit((f"row {event.row.v}", event.time))
            key.set_timer(event.time + 10, "t")
            if event.row.v == "boom":
                raise ZeroDivisionError("no")
            if event.row.v == "lost":
                key.emit((1,), "nowhere")

    def on_timer(self, key, timer, domain):
        key.emit({"time": timer.time, "what": f"timer {key.value[0]}"})
        if timer.time < 15:
            key.set_timer(timer.time + 1, "t")
        elif not key.timers():
            key.state.clear()


def run(data, events, clock):
    rows = {}
    for key, at, value in events:
        rows.setdefault((key,), []).append(Event(at, Reading((key, value))))
    return Page(Recorder(), data, clock).run(rows)


def test_due_timers_fire_before_the_rows_and_in_time_order():
    first = run(None, [("b", 1, "x"), ("a", 2, "y")], Clock(0, 0))
    assert first.outputs["main"] == [("row y", 2), ("row x", 1)]
    assert first.due == {Domain.EVENT: 11, Domain.PROCESSING: None}
    second = run(first.data, [("a", 20, "z")], Clock(12, 0))
    assert second.outputs["main"][:2] == [("timer b", 11), ("timer a", 12)]
    assert second.outputs["main"][2:] == [("timer b", 12), ("row z", 20)]


def test_timers_fire_until_none_is_due():
    first = run(None, [("a", 1, "x")], Clock(0, 0))
    last = run(first.data, [], Clock(100, 0))
    assert [at for _, at in last.outputs["main"]] == [11, 12, 13, 14, 15]
    assert last.data is None  # nothing left of the key


def test_an_unchanged_page_is_not_written():
    first = run(None, [("a", 1, "x")], Clock(0, 0))
    assert run(first.data, [], Clock(5, 0)).data is first.data


def test_rows_of_another_operator_are_processed_before_the_clock_advances():
    data = run(None, [("a", 1, "x")], Clock(0, 0)).data
    event = Event(3, Reading(("a", "y")))
    done = Page(Recorder(), data, Clock(11, 0), before=Clock(5, 0)).run({("a",): [event]})
    assert done.outputs["main"] == [("row y", 3), ("timer a", 11)]


class Shares(Operator):
    """Emits a list that is also its state, and sets a timer that it has not declared."""

    name = "shares"
    outputs = MappingProxyType({"main": ("all",)})

    def on_rows(self, key, events):
        for event in events:
            kept = key.state.setdefault("all", [])
            kept.append(event.row.v)
            key.emit((kept,))
            if event.row.v == "timer":
                key.set_timer(1)
            if event.row.v == "odd":
                key.state["odd"] = object()


def test_emitted_rows_do_not_change_with_the_state():
    events = {("a",): [Event(1, Reading(("a", 1))), Event(2, Reading(("a", 2)))]}
    assert Page(Shares(), None, Clock()).run(events).outputs["main"] == [([1],), ([1, 2],)]


@pytest.mark.parametrize(
    ("v", "message"),
    [("timer", "'shares': a timer of event time was set"), ("odd", "'shares': a value of type")],
)
def test_an_invalid_state_or_timer_names_the_operator(v, message):
    with pytest.raises(UsageError, match=message):
        Page(Shares(), None, Clock()).run({("a",): [Event(1, Reading(("a", v)))]})


def test_state_can_be_read_from_outside():
    data = run(None, [("a", 1, "x"), ("a", 2, "x")], Clock(0, 0)).data
    _, entries = read_page(data)
    [(key, state, timers)] = [read_key(k, entry) for k, entry in entries.items()]
    assert key == ("a",) and state == {"n": 2}
    assert json.dumps(timers) == '[[[11, "t"], [12, "t"]], []]'


def test_errors_name_the_operator_and_what_to_do():
    with pytest.raises(
        OperatorFailed,
        match=r"failed: ZeroDivisionError in on_rows \(test_operator.py, line \d+\)\. .*start again",
    ):
        run(None, [("a", 1, "boom")], Clock())
    with pytest.raises(UsageError, match=r"'recorder': there is no output 'nowhere'.*main, side"):
        run(None, [("a", 1, "lost")], Clock())


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.datetimes()
    | st.times()
    | st.timedeltas(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers(), inner)
    ),
    max_leaves=10,
)


@given(plain)
def test_plain_values_are_decoded_unchanged(value):
    back = decode(encode(value))
    assert back == value and type(back) is type(value)


def test_values_that_are_not_plain_are_rejected():
    with pytest.raises(UsageError, match="cannot be kept as state"):
        encode({"x": object()})
    for value in (
        datetime(2026, 1, 1, tzinfo=timezone.utc),
        date(2026, 1, 1),
        time(1),
        Decimal("1.0"),
    ):
        assert decode(encode(value)) == value
    for value in (frozenset({1}), {frozenset({1}): "a"}, {frozenset({1, 2})}):
        assert decode(encode(value)) == value and type(decode(encode(value))) is type(value)
    for value in (np.array([1.5]), np.datetime64("2026-01-01")):
        with pytest.raises(UsageError, match="cannot be kept as state"):
            encode(value)
    assert decode(encode([np.int64(1), np.float32(0.5)])) == [1, 0.5]
    assert decode(encode({1, 2})) == {1, 2} and decode(encode(timedelta(1))) == timedelta(1)


def test_rows_are_emitted_by_name_or_by_position():
    row = Reading(("a", 1))
    assert (row.id, row["v"], row[1]) == ("a", 1, 1)
    assert row.replace(v=2) == ("a", 2) and row.as_dict() == {"id": "a", "v": 1}
    assert shaped(row, ("v", "id")) == (1, "a")
    assert shaped(5, ("n",)) == (5,)
    assert row_type(("count",))((3,)).count == 3
    with pytest.raises(UsageError, match="1 values for the 2 columns"):
        shaped((1,), ("a", "b"))
    with pytest.raises(UsageError, match="emitted a row with id, v, but the output has a, b"):
        shaped(row, ("a", "b"))
    with pytest.raises(AttributeError, match="no column 'w', it has id, v"):
        _ = row.w


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10 seconds", 10_000),
        ("1 minute 30 s", 90_000),
        (1.5, 1500),
        (timedelta(days=1), 86_400_000),
        ("250ms", 250),
        ("interval 2 hours", 7_200_000),
        ("0 seconds", 0),
    ],
)
def test_durations_are_parsed(text, expected):
    assert milliseconds(text, "gap") == expected


@pytest.mark.parametrize("wrong", ["", "ten", "10", "10 parsecs", "5 s and", None, True, "-1 s"])
def test_invalid_durations_are_rejected(wrong):
    with pytest.raises(UsageError, match="gap="):
        milliseconds(wrong, "gap")
