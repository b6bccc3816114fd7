"""When windows fire, for each trigger, and which rows evictors keep."""

from __future__ import annotations

import pytest

from poundlock.errors import UsageError
from poundlock.stream import evictors, triggers
from poundlock.stream.aggregates import Aggregates, Reduce
from poundlock.stream.operator import Event, Page, read_key, read_page
from poundlock.stream.rows import row_type
from poundlock.stream.times import Clock, Domain
from poundlock.stream.triggers import CONTINUE, FIRE, FIRE_AND_PURGE, PURGE, Trigger
from poundlock.stream.windowing import WindowOperator
from poundlock.stream.windows import global_windows, sessions, sliding, tumbling

COLUMNS = ("id", "v")
Reading = row_type(COLUMNS)


class Flow:
    """Runs batches through one operator whose windows return their rows' values."""

    def __init__(self, assigner, trigger=None, **given):
        if "aggregate" not in given:
            given["function"] = lambda key, window, rows, context: [[[row.v for row in rows]]]
        given = {"domain": Domain.EVENT, "fields": ["vs"], **given}
        self.operator = WindowOperator(
            "w", assigner, columns=COLUMNS, keys=["id"], trigger=trigger, **given
        )
        self.data = None

    def batch(self, watermark, *rows, now=0):
        """Take rows (time, value); return what fired."""
        events = {("a",): [Event(time, Reading(("a", v))) for time, v in rows]} if rows else {}
        done = Page(self.operator, self.data, Clock(watermark, now)).run(events)
        self.data = self.data if done.data == b"" else done.data
        return [row[-1] for row in done.outputs.get("main", [])]

    def state(self):
        _, entries = read_page(self.data)
        [(_, state, timers)] = [read_key(key, entry) for key, entry in entries.items()]
        return state, timers


def test_on_count_fires_at_each_multiple_and_drops_the_remainder():
    flow = Flow(tumbling("10 ms"), triggers.on_count(2))
    assert flow.batch(-1, (1, 1), (2, 2), (3, 3)) == [[1, 2]]
    assert flow.state()[0]["t"] == {0: {"rows": 1}}
    assert flow.batch(-1, (4, 4), (5, 5)) == [[1, 2, 3, 4]]
    assert flow.batch(9) == [] and flow.data is None


def test_on_count_adds_the_counts_of_merged_sessions():
    flow = Flow(sessions("10 ms"), triggers.on_count(4))
    flow.batch(-1, (0, 1), (1, 2), (15, 3))
    assert flow.batch(-1, (8, 4)) == [[1, 2, 3, 4]]
    assert set(flow.state()[0]) == {"w"}
    assert flow.batch(50) == [] and flow.data is None


def test_purging_removes_the_rows_that_fired():
    flow = Flow(tumbling("10 ms"), triggers.purging(triggers.event_time()), allowed_lateness=5)
    flow.batch(-1, (1, 1), (2, 2))
    assert flow.batch(9, (3, 3), (4, 4)) == [[1, 2], [3], [4]]
    assert flow.batch(14) == [] and flow.data is None


def test_a_purged_session_still_merges():
    flow = Flow(sessions("10 ms"), triggers.purging(triggers.on_count(2)))
    assert flow.batch(-1, (0, 1), (1, 2)) == [[1, 2]]
    assert flow.state()[0] == {"w": {(0, 11): None}}
    assert flow.batch(-1, (9, 3)) == []
    assert flow.state()[0] == {"w": {(0, 19): [["a", 3]]}, "t": {(0, 19): {"rows": 1}}}
    assert flow.batch(18) == [] and flow.data is None


def test_count_or_timeout_fires_when_either_condition_is_met():
    flow = Flow(global_windows(), triggers.purging(triggers.count_or_timeout(3, "100 ms")))
    assert flow.operator.domains == {Domain.PROCESSING}
    assert flow.batch(0, (1, 1), now=1000) == []
    assert flow.batch(0, (1, 2), now=1050) == []
    assert flow.batch(0, now=1099) == []
    assert flow.batch(0, now=1100) == [[1, 2]] and flow.data is None
    assert flow.batch(0, (1, 3), (1, 4), now=1110) == []
    assert flow.batch(0, (1, 5), now=1120) == [[3, 4, 5]] and flow.data is None


def test_count_or_timeout_restarts_at_the_first_row_after_a_firing():
    flow = Flow(global_windows(), triggers.purging(triggers.count_or_timeout(2, "100 ms")))
    assert flow.batch(0, (1, 1), (1, 2), (1, 3), now=1000) == [[1, 2]]
    assert flow.state()[1][1] == [[1100, 0]]


def test_count_or_timeout_works_in_event_time():
    trigger = triggers.purging(triggers.count_or_timeout(9, "100 ms", Domain.EVENT))
    flow = Flow(global_windows(), trigger)
    flow.batch(0, (5, 1), (50, 2))
    assert flow.batch(104) == []
    assert flow.batch(105) == [[1, 2]] and flow.data is None


def test_count_or_timeout_fires_for_the_remaining_rows_at_the_window_end():
    flow = Flow(tumbling("10 ms"), triggers.purging(triggers.count_or_timeout(2, "1 h")))
    assert flow.batch(-1, (1, 1), (2, 2), (3, 3)) == [[1, 2]]
    assert flow.batch(9) == [[3]] and flow.data is None
    assert flow.batch(10, (11, 1), (12, 2)) == [[1, 2]]
    assert flow.batch(19) == [] and flow.data is None


def test_count_or_timeout_keeps_the_earliest_time_when_sessions_merge():
    flow = Flow(sessions("10 ms"), triggers.count_or_timeout(9, "100 ms"))
    flow.batch(-1, (0, 1), now=1000)
    flow.batch(-1, (15, 2), now=1050)
    flow.batch(-1, (8, 3), now=1060)
    assert flow.state()[0]["t"] == {(0, 25): {"rows": 3, "due": 1100}}
    assert flow.state()[1] == [[[24, (0, 25)]], [[1100, (0, 25)]]]
    assert flow.batch(-1, now=1100) == [[1, 2, 3]]


def test_a_timeout_at_the_window_end_does_not_remove_the_cleanup_timer():
    flow = Flow(tumbling("10 ms"), triggers.count_or_timeout(2, "8 ms", Domain.EVENT))
    assert flow.batch(-1, (1, 1)) == []
    assert flow.batch(0, (1, 2)) == [[1, 2]]
    assert flow.batch(9) == [] and flow.data is None


def test_continuous_fires_at_each_interval_of_event_time_and_at_the_end():
    flow = Flow(tumbling("100 ms"), triggers.continuous("30 ms"))
    assert flow.batch(-1, (5, 1)) == []
    assert flow.batch(29) == []
    assert flow.batch(30, (40, 2)) == [[1]]
    assert flow.batch(60) == [[1, 2]]
    # At 90 and at the end, 99.
    assert flow.batch(99) == [[1, 2], [1, 2]] and flow.data is None


def test_continuous_fires_immediately_for_late_rows():
    flow = Flow(tumbling("100 ms"), triggers.continuous("30 ms"), allowed_lateness=50)
    flow.batch(-1, (5, 1))
    assert flow.batch(99)[-1:] == [[1]]
    assert flow.batch(120, (6, 2)) == [[1, 2]]
    assert flow.batch(149) == [] and flow.data is None


def test_continuous_works_in_processing_time():
    trigger = triggers.continuous("30 ms", Domain.PROCESSING)
    flow = Flow(tumbling("100 ms"), trigger, domain=Domain.PROCESSING)
    assert flow.batch(0, (0, 1), now=5) == []
    assert flow.batch(0, (0, 2), now=31) == [[1]]
    assert flow.batch(0, now=65) == [[1, 2]]
    assert flow.batch(0, now=99) == [[1, 2], [1, 2]] and flow.data is None


def test_continuous_fires_once_for_several_missed_intervals():
    flow = Flow(global_windows(), triggers.continuous("30 ms", Domain.PROCESSING))
    flow.batch(0, (0, 1), now=5)
    assert flow.batch(0, now=100_000) == [[1]]
    assert flow.state()[1][1] == [[100_020, 0]]


def test_continuous_follows_a_merged_session():
    flow = Flow(sessions("10 ms"), triggers.continuous("7 ms"))
    flow.batch(-1, (0, 1), (15, 2))
    assert flow.state()[0]["t"] == {(0, 10): {"due": 7}, (15, 25): {"due": 21}}
    assert flow.batch(-1, (8, 3)) == []
    assert flow.state()[0]["t"] == {(0, 25): {"due": 7}}
    assert flow.batch(13) == [[1, 2, 3]]
    assert flow.batch(24) == [[1, 2, 3]] * 3 and flow.data is None


def test_early_and_late_fires_before_and_after_the_end_of_the_window():
    trigger = triggers.early_and_late(early=triggers.on_count(2), late=triggers.on_count(3))
    flow = Flow(tumbling("10 ms"), trigger, allowed_lateness=10)
    assert flow.batch(-1, (1, 1), (2, 2), (3, 3)) == [[1, 2]]
    assert flow.batch(9) == [[1, 2, 3]]
    assert flow.state()[0]["t"] == {0: {"fired": True}}  # nothing is left of early
    assert flow.batch(12, (4, 4), (5, 5)) == []
    assert flow.batch(13, (6, 6)) == [[1, 2, 3, 4, 5, 6]]
    assert flow.batch(19) == [] and flow.data is None


def test_without_a_late_trigger_every_late_row_fires():
    trigger = triggers.early_and_late(early=triggers.continuous("4 ms", Domain.PROCESSING))
    flow = Flow(tumbling("10 ms"), trigger, allowed_lateness=10)
    assert flow.operator.domains == set(Domain)
    flow.batch(-1, (1, 1), now=1)
    assert flow.batch(-1, now=4) == [[1]]
    assert flow.batch(9, (2, 2), (3, 3), now=5) == [[1], [1, 2], [1, 2, 3]]
    assert flow.batch(9, now=50) == []  # early firings are over
    assert flow.batch(19, now=50) == [] and flow.data is None


def test_a_window_whose_first_row_is_late_fires_as_if_on_time():
    trigger = triggers.early_and_late(late=triggers.on_count(2))
    flow = Flow(tumbling("10 ms"), trigger, allowed_lateness=10)
    assert flow.batch(12, (1, 1), (2, 2), (3, 3)) == [[1], [1, 2, 3]]


def test_early_and_late_merges_sessions_by_phase():
    trigger = triggers.early_and_late(early=triggers.on_count(3), late=triggers.on_count(2))
    flow = Flow(sessions("10 ms"), trigger, allowed_lateness=50)
    flow.batch(-1, (0, 1), (15, 2))
    assert flow.batch(-1, (8, 3)) == [[1, 2, 3]]
    assert flow.batch(24) == [[1, 2, 3]]
    # Joined late, but reaching into the future: not fired yet.
    assert flow.batch(24, (25, 4)) == []
    assert flow.batch(34) == [[1, 2, 3, 4]]
    assert flow.batch(40, (26, 5)) == [] and flow.batch(40, (27, 6)) == [[1, 2, 3, 4, 5, 6]]
    assert flow.batch(200) == [] and flow.data is None


def test_delta_fires_when_the_value_differs_enough_from_the_last_fired():
    flow = Flow(global_windows(), triggers.delta(5, lambda last, row: abs(row.v - last.v)))
    assert flow.batch(0, (1, 10), (2, 15)) == []
    assert flow.batch(0, (3, 16)) == [[10, 15, 16]]
    assert flow.batch(0, (4, 11), (5, 10)) == [[10, 15, 16, 11, 10]]


class Every(Trigger):
    """Fires at rows of value "fire", purges at "purge", and sets timers that it never clears."""

    domains = frozenset(Domain)

    def on_element(self, time, row, context):
        context.set_timer(time + 3, Domain.PROCESSING)
        context.set_timer(10**9)
        context.state["seen"] = context.state.get("seen", 0) + 1
        return {"fire": FIRE, "purge": PURGE, "both": FIRE_AND_PURGE}.get(row.v, CONTINUE)

    def on_timer(self, time, domain, context):
        return FIRE if domain is Domain.PROCESSING else CONTINUE

    def can_merge(self):
        return True


@pytest.mark.parametrize("assigner", [tumbling("20 ms"), sessions("18 ms")])
def test_a_custom_trigger_leaves_no_state_even_without_cleanup(assigner):
    flow = Flow(assigner, Every())
    assert flow.batch(-1, (1, "x"), (1, "fire"), (1, "purge"), (1, "fire")) == [
        ["x", "fire"],
        ["fire"],
    ]
    assert flow.batch(-1, (1, "both"), (1, "y")) == [["fire", "both"]]
    assert flow.batch(-1, now=4) == [["y"]]
    assert flow.batch(5, (2, "z"), now=4) == []
    assert flow.batch(19, now=4) == [] and flow.data is None


def test_an_empty_window_does_not_fire():
    flow = Flow(tumbling("20 ms"), Every())
    assert flow.batch(-1, (1, "x"), (1, "purge")) == []
    assert flow.batch(-1, now=4) == []


class Wrong(Trigger):
    def on_element(self, time, row, context):
        return True


def test_a_trigger_must_return_a_valid_result():
    with pytest.raises(UsageError, match="Wrong returned True: return CONTINUE, FIRE, PURGE"):
        Flow(tumbling("1 s"), Wrong()).batch(-1, (1, 1))


def test_every_trigger_fires_each_sliding_window():
    flow = Flow(sliding("10 ms", "5 ms"), triggers.on_count(2))
    assert flow.batch(-1, (6, 1), (7, 2), (12, 3)) == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: triggers.on_count(0), "size=0: give a whole number of rows"),
        (lambda: triggers.count_or_timeout(5, "0 s"), "timeout='0 s' is too short"),
        (lambda: triggers.continuous("1 s", "event"), "domain='event': give Domain.EVENT"),
        (lambda: triggers.purging("on_count"), "trigger='on_count': give a trigger"),
        (lambda: triggers.early_and_late(late=3), "late=3: give a trigger"),
        (lambda: triggers.delta(1, "v"), "function='v': give a function of two rows"),
        (lambda: evictors.by_delta(1, "v"), "function='v': give a function of two rows"),
        (lambda: evictors.by_count(0), "size=0: give a whole number of rows"),
        (lambda: evictors.by_time("0 s"), "size='0 s' is too short"),
    ],
)
def test_invalid_triggers_and_evictors_are_rejected(make, message):
    with pytest.raises(UsageError, match=message):
        make()


# Evictors


def test_by_count_keeps_the_last_rows():
    flow = Flow(tumbling("10 ms"), evictor=evictors.by_count(2), allowed_lateness=5)
    flow.batch(-1, (1, 1), (2, 2), (3, 3))
    assert flow.batch(9, (4, 4)) == [[2, 3], [3, 4]]


def test_by_count_can_evict_after_the_result():
    flow = Flow(tumbling("10 ms"), evictor=evictors.by_count(1, after=True), allowed_lateness=5)
    flow.batch(-1, (1, 1), (2, 2), (3, 3))
    assert flow.batch(9, (4, 4)) == [[1, 2, 3], [3, 4]]
    assert flow.batch(14) == [] and flow.data is None


def test_by_time_keeps_rows_near_the_newest():
    flow = Flow(tumbling("100 ms"), evictor=evictors.by_time("10 ms"))
    flow.batch(-1, (1, 1), (30, 2), (31, 3), (40, 4))
    assert flow.batch(99) == [[3, 4]]  # 30 is ten older, and out


def test_by_delta_keeps_rows_close_to_the_last():
    evictor = evictors.by_delta(5, lambda row, last: abs(row.v - last.v))
    flow = Flow(tumbling("100 ms"), evictor=evictor)
    flow.batch(-1, (1, 10), (2, 7), (3, 15), (4, 12))
    assert flow.batch(99) == [[10, 15, 12]]  # 7 is just five away, and out


class Nothing(evictors.Evictor):
    def evict_before(self, rows, context):
        assert context.window.end == 10 and context.watermark == 9
        return []


def test_a_custom_evictor_can_remove_all_rows():
    flow = Flow(tumbling("10 ms"), evictor=Nothing())
    flow.batch(-1, (1, 1))
    assert flow.batch(9) == [[]] and flow.data is None


@pytest.mark.parametrize(
    ("aggregate", "given", "expected"),
    [(Aggregates([("count", ())]), {}, [0]), (Reduce(max), {"fields": ()}, [])],
)
def test_an_aggregate_covers_the_rows_an_evictor_keeps(aggregate, given, expected):
    flow = Flow(tumbling("10 ms"), evictor=Nothing(), aggregate=aggregate, **given)
    flow.batch(-1, (1, 1))
    assert flow.batch(9) == expected and flow.data is None


def test_an_aggregate_with_an_evictor_is_recomputed_from_the_kept_rows():
    flow = Flow(
        sessions("10 ms"), evictor=evictors.by_count(2), aggregate=Aggregates([("sum", "v")])
    )
    flow.batch(-1, (0, 1), (15, 20))
    flow.batch(-1, (8, 300))
    assert flow.state()[0] == {"w": {(0, 25): [[0, ["a", 1]], [15, ["a", 20]], [8, ["a", 300]]]}}
    assert flow.batch(24) == [320] and flow.data is None
