"""Windows by example: which rows they contain, when they fire, what is late, what is left."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from poundlock.errors import OperatorFailed, UsageError
from poundlock.stream import evictors, triggers
from poundlock.stream.aggregates import Aggregate, Aggregates, Reduce
from poundlock.stream.operator import Event, Page, read_key, read_page
from poundlock.stream.rows import row_type
from poundlock.stream.times import Clock, Domain
from poundlock.stream.windowing import WindowOperator
from poundlock.stream.windows import (
    GLOBAL,
    Assigner,
    Window,
    count,
    global_windows,
    sessions,
    sliding,
    tumbling,
)

COLUMNS = ("id", "v")
Reading = row_type(COLUMNS)


def at(ms):
    return datetime.fromtimestamp(ms / 1000, timezone.utc)


def listed(key, window, rows, context):
    """A window function that returns its key, window and values."""
    return [(*key, window.start, window.end, [row.v for row in rows])]


class Flow:
    """Runs batches through one operator, with its state as bytes in between."""

    def __init__(self, assigner, **given):
        if "aggregate" not in given:
            given.setdefault("function", listed)
        given.setdefault("fields", ["id", "start", "end", "vs"] if "function" in given else ["r"])
        given.setdefault("domain", Domain.EVENT)
        self.operator = WindowOperator("w", assigner, columns=COLUMNS, keys=["id"], **given)
        self.data = None

    def batch(self, watermark=-1, *rows, now=0, output="main"):
        """Rows are (time, value) of key a, or (time, value, key)."""
        events = {}
        for time, value, *key in rows:
            name = key[0] if key else "a"
            events.setdefault((name,), []).append(Event(time, Reading((name, value))))
        done = Page(self.operator, self.data, Clock(watermark, now)).run(events)
        self.data = self.data if done.data == b"" else done.data
        self.outputs = done.outputs
        return done.outputs.get(output, [])

    def state(self):
        _, entries = read_page(self.data)
        [(_, state, timers)] = [read_key(key, entry) for key, entry in entries.items()]
        return state, timers


# Assigners


def test_tumbling_windows_start_at_multiples_of_the_size():
    days = tumbling("1 day")
    assert [*days.starts(0)] == [0] and [*days.starts(86_399_999)] == [0]
    assert [*days.starts(86_400_000)] == [86_400_000]
    assert [*days.starts(-1)] == [-86_400_000]
    assert days.window(0) == Window(0, 86_400_000) and days.window(0).max_time == 86_399_999


def test_an_offset_shifts_windows_forwards_or_backwards():
    # Midnight eight hours ahead of UTC is 16:00 of the day before.
    assert [*tumbling("1 day", offset="-8 hours").starts(0)] == [-8 * 3_600_000]
    assert [*tumbling("1 hour", offset="15 minutes").starts(0)] == [-45 * 60_000]
    assert [*tumbling("1 hour", offset="15 minutes").starts(15 * 60_000)] == [15 * 60_000]
    assert [*sliding(10, 5, offset=-1).starts(3_999)] == [-1_000, -6_000]
    assert [*sliding(10, 5, offset=-1).starts(4_000)] == [4_000, -1_000]


def test_a_row_is_in_every_overlapping_sliding_window():
    assert [*sliding("10 s", "5 s").starts(12_000)] == [10_000, 5_000]
    # Seven is no multiple of three: a time is in two windows or in three.
    assert [*sliding("7 ms", "3 ms").starts(6)] == [6, 3, 0]
    assert [*sliding("7 ms", "3 ms").starts(7)] == [6, 3]
    # With gaps between windows a time may be in none.
    assert [*sliding("2 ms", "5 ms").starts(6)] == [5]
    assert [*sliding("2 ms", "5 ms").starts(7)] == []


def test_the_gap_of_a_session_is_fixed_or_set_by_each_row():
    assert sessions("30 s").span(5, Reading(("a", 1))) == (5, 30_005)
    assert sessions(lambda row: f"{row.v} ms").span(5, Reading(("a", 7))) == (5, 12)
    with pytest.raises(UsageError, match="gap=0 is too short"):
        sessions(lambda row: 0).span(5, Reading(("a", 7)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tumbling("0 s"), "size='0 s' is too short"),
        (lambda: tumbling("1 h", offset="1 h"), "offset='1 h' must be shorter than the size"),
        (
            lambda: tumbling("1 h", offset="-60 min"),
            "shorter than the size, whether positive or negative",
        ),
        (lambda: sliding("1 h", "5 min", offset="5 min"), "must be shorter than the slide"),
        (lambda: sessions("0 s"), "gap='0 s' is too short"),
        (lambda: count(0), "size=0: give a whole number of rows"),
        (lambda: count(5, 0), "slide=0: give a whole number of rows"),
        (lambda: count(2.5), "size=2.5: give a whole number"),
    ],
)
def test_invalid_windows_are_rejected(make, message):
    with pytest.raises(UsageError, match=message):
        make()


# Firing, lateness, late rows


def test_a_window_fires_once_the_watermark_reaches_its_last_time():
    flow = Flow(tumbling("10 ms"))
    assert flow.batch(-1, (1, "x"), (9, "y"), (10, "z")) == []
    assert flow.batch(8) == []
    assert flow.batch(9) == [("a", 0, 10, ["x", "y"])]
    assert flow.batch(100) == [("a", 10, 20, ["z"])]
    assert flow.data is None


def test_an_aggregate_emits_the_key_the_window_and_the_results():
    flow = Flow(
        tumbling("10 ms"), aggregate=Aggregates([("sum", "v"), ("count", ())]), fields=["s", "n"]
    )
    assert flow.operator.outputs == {"main": ("id", "window_start", "window_end", "s", "n")}
    flow.batch(-1, (1, 5), (2, 6), (3, None))
    assert flow.batch(9) == [("a", at(0), at(10), 11, 3)]


def test_state_is_an_accumulator_and_one_timer_for_each_window():
    flow = Flow(tumbling("10 ms"), aggregate=Aggregates([("sum", "v")]), allowed_lateness=5)
    flow.batch(-1, (1, 5), (2, 6), (12, 7))
    assert flow.state() == ({"w": {0: [11], 10: [7]}}, [[[9, 0], [19, 10]], []])
    flow.batch(9)
    assert flow.state() == ({"w": {0: [11], 10: [7]}}, [[[14, 0], [19, 10]], []])
    flow.batch(14)
    assert flow.state() == ({"w": {10: [7]}}, [[[19, 10]], []])


def test_a_late_row_fires_its_window_again_within_the_lateness():
    flow = Flow(tumbling("10 ms"), allowed_lateness=5, late="late")
    flow.batch(-1, (1, "x"))
    assert flow.batch(9) == [("a", 0, 10, ["x"])]
    assert flow.batch(13, (2, "y"), (3, "z")) == [
        ("a", 0, 10, ["x", "y"]),
        ("a", 0, 10, ["x", "y", "z"]),
    ]
    assert flow.batch(14, (4, "late")) == [] and flow.outputs == {"late": [("a", "late")]}
    assert flow.data is None


def test_a_window_that_starts_late_fires_immediately_and_is_cleaned_up():
    flow = Flow(tumbling("10 ms"), allowed_lateness=5)
    assert flow.batch(12, (1, "x")) == [("a", 0, 10, ["x"])]
    assert flow.batch(14) == [] and flow.data is None


def test_late_rows_without_a_late_output_are_counted():
    flow = Flow(tumbling("10 ms"))
    assert flow.batch(50, (1, "x"), (2, "y"), (60, "z")) == []
    assert flow.operator.late_dropped == 2


def test_columns_that_only_the_aggregate_needs_are_not_in_late_rows():
    flow = Flow(tumbling("10 ms"), late="late", hidden=1)
    flow.batch(50, (1, "x"))
    assert flow.outputs == {"late": [("a",)]}


def test_a_row_is_late_only_if_all_its_windows_are():
    flow = Flow(sliding("10 ms", "5 ms"), late="late")
    # At 12 the window 0-10 is over, 5-15 is not.
    assert flow.batch(12, (7, "x")) == [] and "late" not in flow.outputs
    assert flow.batch(14, (7, "y")) == [("a", 5, 15, ["x"])]
    assert flow.outputs["late"] == [("a", "y")]


def test_only_its_own_time_makes_a_row_between_windows_late():
    flow = Flow(sliding("2 ms", "10 ms"), late="late")
    assert flow.batch(4, (3, "late"), (5, "between")) == []
    assert flow.outputs == {"late": [("a", "late")]} and flow.data is None


def test_each_key_has_its_own_windows():
    flow = Flow(tumbling("10 ms"))
    flow.batch(-1, (1, "x"), (2, "y", "b"))
    assert sorted(flow.batch(9)) == [("a", 0, 10, ["x"]), ("b", 0, 10, ["y"])]


# Sessions


def test_sessions_end_after_the_gap_and_adjacent_sessions_merge():
    flow = Flow(sessions("10 ms"))
    flow.batch(-1, (0, "x"), (10, "y"), (21, "z"))
    assert flow.batch(18) == []
    assert flow.batch(30) == [("a", 0, 20, ["x", "y"]), ("a", 21, 31, ["z"])]
    assert flow.data is None


def test_a_row_can_merge_two_sessions_with_their_rows_and_timers():
    flow = Flow(sessions("10 ms"))
    flow.batch(-1, (0, "x"), (15, "z"))
    assert flow.state()[1][0] == [[9, (0, 10)], [24, (15, 25)]]
    assert flow.batch(5, (8, "y")) == []
    assert flow.state()[1][0] == [[24, (0, 25)]]
    assert flow.batch(24) == [("a", 0, 25, ["x", "z", "y"])]


def test_a_late_row_is_accepted_if_it_joins_a_live_session():
    flow = Flow(sessions("10 ms"), late="late")
    flow.batch(-1, (12, "x"))
    # Alone, 3 to 13 would be over at 15.
    assert flow.batch(15, (3, "y")) == [] and not flow.outputs
    assert flow.batch(16, (1, "z")) == [] and not flow.outputs
    assert flow.batch(30) == [("a", 1, 22, ["x", "y", "z"])]


def test_a_session_that_grows_within_its_lateness_fires_again():
    flow = Flow(sessions("10 ms"), allowed_lateness=20)
    flow.batch(-1, (0, "x"))
    assert flow.batch(9) == [("a", 0, 10, ["x"])]
    assert flow.batch(12, (1, "y")) == [("a", 0, 11, ["x", "y"])]
    # This one reaches beyond the watermark: the session is open again.
    assert flow.batch(12, (8, "z")) == []
    assert flow.batch(17) == [("a", 0, 18, ["x", "y", "z"])]
    assert flow.batch(36) == [] and flow.data is not None
    assert flow.batch(37) == [] and flow.data is None


def test_accumulators_merge_in_time_order():
    flow = Flow(sessions("10 ms"), aggregate=Aggregates([("first", "v")]))
    flow.batch(-1, (0, "x"), (15, "z"))
    flow.batch(-1, (8, "y"))
    assert flow.batch(50) == [("a", at(0), at(25), "x")]


# Processing time


def test_processing_time_windows_use_the_time_of_the_batch():
    flow = Flow(tumbling("10 ms"), domain=Domain.PROCESSING)
    assert flow.operator.domains == {Domain.PROCESSING}
    assert flow.batch(10**6, (500, "x"), now=3) == []
    assert flow.batch(10**6, (1, "y"), now=7) == []
    assert flow.batch(10**6, (2, "z"), now=12) == [("a", 0, 10, ["x", "y"])]
    assert flow.batch(10**6, now=19) == [("a", 10, 20, ["z"])]
    assert flow.data is None


def test_sessions_work_in_processing_time():
    flow = Flow(sessions("10 ms"), domain=Domain.PROCESSING)
    flow.batch(0, (0, "x"), now=0)
    assert flow.batch(0, (0, "y"), now=8) == []
    assert flow.batch(0, now=16) == []
    assert flow.batch(0, now=17) == [("a", 0, 18, ["x", "y"])]


# By count, and without end


def test_count_windows_fire_and_start_again():
    flow = Flow(count(3), aggregate=Aggregates([("collect_list", "v")]))
    assert flow.operator.outputs == {"main": ("id", "r")} and not flow.operator.domains
    assert flow.batch(9, (5, 1), (1, 2), (1, "other", "b")) == []
    assert flow.batch(9, (2, 3), (3, 4)) == [("a", [1, 2, 3])]
    assert flow.batch(9, (2, 5), (3, 6)) == [("a", [4, 5, 6])]


def test_a_count_window_leaves_no_state_after_firing():
    flow = Flow(count(2), aggregate=Aggregates([("sum", "v")]))
    assert flow.batch(0, (1, 1), (1, 2)) == [("a", 3)] and flow.data is None


def test_sliding_count_windows_contain_the_last_rows():
    flow = Flow(count(4, 2), aggregate=Aggregates([("collect_list", "v")]))
    assert flow.batch(0, *[(1, n) for n in range(1, 8)]) == [
        ("a", [1, 2]),
        ("a", [1, 2, 3, 4]),
        ("a", [3, 4, 5, 6]),
    ]
    assert flow.batch(0, (1, 8)) == [("a", [5, 6, 7, 8])]


def test_global_windows_fire_when_their_trigger_does():
    flow = Flow(global_windows(), trigger=triggers.on_count(2))
    rows = [(1, "x"), (2, "y"), (3, "z"), (4, "w")]
    assert [vs for *_, vs in flow.batch(0, *rows)] == [["x", "y"], ["x", "y", "z", "w"]]
    assert GLOBAL.max_time == 2**63 - 1


# Aggregates of one's own, and functions


class Longest(Aggregate):
    def create(self):
        return ""

    def add(self, accumulator, row):
        return max(accumulator, row.v, key=len)

    def merge(self, one, other):
        return max(one, other, key=len)

    def result(self, accumulator):
        return {"r": accumulator.upper()}


@pytest.mark.parametrize("assigner", [tumbling("20 ms"), sessions("10 ms")])
def test_a_custom_aggregate_can_be_used(assigner):
    flow = Flow(assigner, aggregate=Longest())
    flow.batch(-1, (0, "hi"), (15, "hello"))
    flow.batch(-1, (8, "hey"))
    assert [row[-1] for row in flow.batch(50)] == ["HELLO"]


def test_reduce_over_a_window_takes_rows_and_returns_a_row():
    flow = Flow(sessions("10 ms"), aggregate=Reduce(lambda a, b: a.replace(v=a.v + b.v)), fields=())
    assert flow.operator.outputs["main"] == ("id", "window_start", "window_end", "v")
    flow.batch(-1, (0, "x"), (15, "z"))
    flow.batch(-1, (8, "y"))
    assert flow.batch(50) == [("a", at(0), at(25), "xzy")]


def test_a_function_can_receive_the_result_of_an_aggregate():
    flow = Flow(
        tumbling("10 ms"),
        aggregate=Aggregates([("sum", "v")]),
        function=lambda key, window, result, context: [(*key, *window, result)],
    )
    flow.batch(-1, (1, 2), (2, 3))
    assert flow.state()[0] == {"w": {0: [5]}}
    assert flow.batch(9) == [("a", 0, 10, (5,))]


def test_a_function_has_window_state_key_state_and_side_outputs():
    def function(key, window, rows, context):
        context.state["firings"] = context.state.get("firings", 0) + 1
        context.key_state["all"] = context.key_state.get("all", 0) + 1
        context.emit({"watermark": context.watermark, "now": context.now}, "times")
        assert context.window == window
        return [(context.state["firings"], context.key_state["all"])]

    flow = Flow(
        tumbling("10 ms"),
        function=function,
        fields=["here", "all"],
        allowed_lateness=5,
        sides={"times": ["watermark", "now"]},
    )
    flow.batch(-1, (1, "x"), (11, "y"))
    assert flow.batch(9, (2, "z"), now=77) == [(1, 1), (2, 2)]
    assert flow.outputs["times"] == [(9, 77), (9, 77)]
    assert flow.batch(50) == [(1, 3)]
    assert flow.state() == ({"g": {"all": 3}}, [[], []])


def test_state_that_was_only_read_is_not_stored():
    def function(key, window, rows, context):
        return [(len(context.state) + len(context.key_state),)]

    flow = Flow(
        global_windows(),
        trigger=triggers.purging(triggers.on_count(1)),
        function=function,
        fields=["n"],
    )
    assert flow.batch(0, (1, "x")) == [(0,)] and flow.data is None


def test_sessions_have_no_window_state():
    flow = Flow(sessions("1 ms"), function=lambda key, window, rows, context: context.state)
    flow.batch(-1, (0, "x"))
    with pytest.raises(UsageError, match=r"because they merge: use `context\.key_state`"):
        flow.batch(9)


@pytest.mark.parametrize("wrong", [{"a": 1}, "text", Reading(("a", 1))])
def test_a_window_function_must_return_a_list_of_rows(wrong):
    flow = Flow(tumbling("1 ms"), function=lambda *_: wrong)
    flow.batch(-1, (0, "x"))
    with pytest.raises(UsageError, match="returned one row: return a list of rows"):
        flow.batch(9)


def test_a_function_can_return_nothing_or_fail():
    flow = Flow(tumbling("1 ms"), function=lambda *_: None)
    flow.batch(-1, (0, "x"))
    assert flow.batch(9) == [] and flow.data is None
    flow = Flow(tumbling("1 ms"), function=lambda *_: 1 / 0)
    flow.batch(-1, (0, "x"))
    with pytest.raises(OperatorFailed, match="'w' failed: ZeroDivisionError"):
        flow.batch(9)


class Weekend(Assigner):
    """A custom assigner: every row is in the same window."""

    def marks(self, time, row):
        return ("weekend",)

    def window(self, mark):
        return Window(0, 100)


def test_a_custom_assigner_can_be_used():
    flow = Flow(Weekend(), allowed_lateness=3)
    flow.batch(-1, (5, "x"), (500, "y"))
    assert flow.batch(99) == [("a", 0, 100, ["x", "y"])]
    assert flow.batch(102) == [] and flow.data is None


@pytest.mark.parametrize(
    ("assigner", "given", "message"),
    [
        (
            "1 minute",
            {},
            r"'1 minute' is not of class Assigner: give one, such as tumbling\('1 minute'\)",
        ),
        (tumbling(1), {"trigger": 100}, "100 is not of class Trigger: give one, such as"),
        (tumbling(1), {"evictor": 10}, "10 is not of class Evictor"),
        (tumbling(1), {"aggregate": Reduce}, "is not of class Aggregate: give one"),
        (global_windows(), {}, "have no default trigger and never fire: give one"),
        (count(5), {"trigger": triggers.on_count(2)}, "have their own trigger"),
        (count(5), {"evictor": evictors.by_count(2)}, "have their own evictor"),
        (sessions("1 s"), {"trigger": triggers.delta(1, max)}, "Delta cannot merge, but session"),
        (count(5), {"late": "late"}, "rows are late only in event-time windows"),
        (
            tumbling(1),
            {"domain": Domain.PROCESSING, "allowed_lateness": 1},
            "late only in event-time windows",
        ),
        (tumbling(1), {"allowed_lateness": -1}, "allowed_lateness=-1 is negative"),
        (tumbling(1), {"function": None}, "needs an aggregate, a function, or both"),
        (tumbling(1), {"fields": ()}, "results have no column names: give fields"),
        (tumbling(1), {"fields": ("x", "x")}, "two columns have the same name"),
        (tumbling(1), {"late": "main"}, "two outputs have the name 'main'"),
        (tumbling(1), {"late": "s", "sides": {"s": ["x"]}}, "two outputs have the name 's'"),
        (tumbling(1), {"aggregate": Aggregates([("sum", "w")])}, "no column 'w' to aggregate"),
        (
            tumbling(1),
            {"aggregate": Aggregates([("sum", "v"), ("count", ())])},
            "2 aggregate functions and the columns r: name one",
        ),
    ],
)
def test_invalid_options_are_rejected_immediately(assigner, given, message):
    with pytest.raises(UsageError, match=message):
        Flow(assigner, **given)


def test_a_key_consists_of_columns():
    with pytest.raises(UsageError, match="key column 'k' does not exist: there are id, v"):
        WindowOperator(
            "w",
            tumbling(1),
            domain=Domain.EVENT,
            columns=COLUMNS,
            keys=["k"],
            function=listed,
            fields=["x"],
        )
