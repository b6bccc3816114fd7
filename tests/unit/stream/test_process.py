"""Process functions: the worked examples of Flink's tutorials, timers, two inputs, broadcast rules."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from poundlock.errors import OperatorFailed, UsageError
from poundlock.stream.operator import Event, Page
from poundlock.stream.process import (
    BroadcastProcessFunction,
    BroadcastProcessOperator,
    CoProcessFunction,
    CoProcessOperator,
    ProcessFunction,
    ProcessOperator,
    declared_outputs,
)
from poundlock.stream.rows import row_type
from poundlock.stream.state import BroadcastState, ListState, OperatorListState, ValueState
from poundlock.stream.times import Clock, Domain

Reading = row_type(("id", "celsius"))


class Flow:
    """One operator's page over many batches, stored as bytes between them."""

    def __init__(self, kind, function, outputs, domain=Domain.EVENT):
        self.operator = kind("flow", function, outputs, domain, ("id",))
        self.data = None

    def __call__(self, *rows, watermark=-1, now=0, broadcast=()):
        """Take (time, key, value) or (time, key, value, input)."""
        events = {}
        for time, key, value, *at in sorted(rows, key=lambda row: row[0]):
            events.setdefault((key,), []).append(Event(time, Reading((key, value)), *at))
        rules = [Event(0, Reading(each)) for each in broadcast]
        done = Page(self.operator, self.data, Clock(watermark, now)).run(events, rules)
        self.data = done.data
        return done.outputs


class TemperatureRise(ProcessFunction):
    """Warns of a sensor whose temperature does not fall for ten seconds."""

    outputs = {"main": "id string, message string"}  # noqa: RUF012
    last = ValueState()
    timer = ValueState()

    def process(self, row, ctx):
        before, self.last.value = self.last.value, row.celsius
        if before is not None and row.celsius < before:
            if self.timer.value is not None:
                ctx.delete_event_timer(self.timer.value)
                self.timer.clear()
        elif before is not None and row.celsius > before and self.timer.value is None:
            self.timer.value = ctx.timestamp + 10_000
            ctx.set_event_timer(self.timer.value)

    def on_timer(self, time, ctx):
        self.timer.clear()
        yield ctx.key.id, f"rising for 10 s until {time}, {ctx.domain}"


def test_a_temperature_that_rises_for_ten_seconds_raises_a_warning():
    flow = Flow(ProcessOperator, TemperatureRise(), {"main": ("id", "message")})
    assert flow((0, "a", 1), (1000, "a", 2), (1000, "b", 2), (2000, "a", 3), (2000, "b", 9)) == {}
    assert flow((5000, "b", 1), watermark=3000) == {}  # b falls
    assert flow((10_500, "a", 5), watermark=10_999) == {}
    out = flow(watermark=12_000)
    assert out == {"main": [("a", "rising for 10 s until 11000, event")]}
    assert flow((12_500, "a", 6), watermark=12_400) == {}
    # The timer fires before the rows of the batch that makes it due: they cannot undo it.
    out = flow((23_000, "a", 0), watermark=22_500)
    assert out == {"main": [("a", "rising for 10 s until 22500, event")]}


def test_rows_can_be_returned_yielded_or_emitted_to_any_output():
    class Ways(ProcessFunction):
        def process(self, row, ctx):
            match row.celsius:
                case 1:
                    return row
                case 2:
                    return row.id, 2
                case 3:
                    return {"celsius": 3, "id": row.id}
                case 4:
                    return [(row.id, 4), row.replace(celsius=44)]
                case 5:
                    return (each for each in [(row.id, 5), (row.id, 55)])
                case 6:
                    ctx.emit(row)
                    ctx.emit("side", "low")
            return None

    flow = Flow(ProcessOperator, Ways(), {"main": ("id", "celsius"), "low": ("x",)})
    out = flow(*[(n, "a", n) for n in range(8)])
    assert [v for _, v in out["main"]] == [1, 2, 3, 4, 44, 5, 55, 6]
    assert out["low"] == [("side",)]


def test_a_generator_can_use_state_while_it_yields():
    class Last(ProcessFunction):
        seen = ListState()

        def process(self, row, ctx):
            self.seen.add(row.celsius)
            for each in self.seen:
                yield (each,)

    flow = Flow(ProcessOperator, Last(), {"main": ("v",)})
    assert flow((0, "a", 1), (0, "b", 9), (1, "a", 2))["main"] == [(1,), (1,), (2,), (9,)]
    assert flow((5, "b", 8))["main"] == [(9,), (8,)]


def test_the_context_describes_rows_and_timers():
    seen = []

    class Looks(ProcessFunction):
        timers = ("event", "processing")

        def process(self, row, ctx):
            seen.append((ctx.key, ctx.key.id, ctx.timestamp, ctx.watermark, ctx.now, ctx.domain))
            ctx.set_event_timer(datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc))
            ctx.set_processing_timer(2000)
            ctx.set_processing_timer(2000)
            ctx.set_processing_timer(3000)
            ctx.delete_processing_timer(datetime(1970, 1, 1, 0, 0, 3))

        def on_timer(self, time, ctx):
            seen.append((time, ctx.key.id, ctx.timestamp, ctx.watermark, ctx.now, ctx.domain))

    flow = Flow(ProcessOperator, Looks(), {"main": ("v",)})
    assert flow.operator.domains == set(Domain)
    flow((7, "a", 1), watermark=5, now=100)
    flow(watermark=1000, now=2500)
    flow(watermark=9000, now=9000)
    assert seen == [
        (("a",), "a", 7, 5, 100, None),
        (1000, "a", 1000, 1000, 2500, "event"),
        (2000, "a", 2000, 1000, 2500, "processing"),
    ]
    assert flow.data is None


def test_timers_of_the_other_time_domain_must_be_declared():
    class Sets(ProcessFunction):
        def process(self, row, ctx):
            ctx.set_processing_timer(1)

        def on_timer(self, time, ctx): ...

    flow = Flow(ProcessOperator, Sets(), {"main": ("v",)})
    with pytest.raises(UsageError, match=r'of processing time .* `timers = "processing"`'):
        flow((0, "a", 1))
    assert Flow(ProcessOperator, Sets(), {"main": ("v",)}, Domain.PROCESSING)((0, "a", 1)) == {}

    Sets.timers = "lunar"
    with pytest.raises(UsageError, match="Sets has timers = 'lunar'"):
        Flow(ProcessOperator, Sets(), {"main": ("v",)})
    Sets.timers = "event"
    with pytest.raises(UsageError, match=r"uses event time, but the flow has none"):
        Flow(ProcessOperator, Sets(), {"main": ("v",)}, Domain.PROCESSING)


def test_a_timer_needs_a_method_and_an_integer_time():
    class Sets(ProcessFunction):
        def process(self, row, ctx):
            ctx.set_event_timer(row.celsius)

    flow = Flow(ProcessOperator, Sets(), {"main": ("v",)})
    with pytest.raises(UsageError, match=r"set for 1\.5: give whole milliseconds"):
        flow((0, "a", 1.5))
    flow((0, "a", 1))
    with pytest.raises(UsageError, match="Sets set a timer and has no on_timer"):
        flow(watermark=1)


def test_errors_name_the_method():
    class Breaks(ProcessFunction):
        def open(self, runtime):
            assert runtime.operator == "flow"
            assert runtime.outputs == {"main": ("v",)} and runtime.key_fields == ("id",)

        def close(self):
            raise OSError("gone")

        def process(self, row, ctx):
            ctx.set_event_timer(5)
            yield (1 / row.celsius,)

        def on_timer(self, time, ctx):
            raise ValueError("late")

    flow = Flow(ProcessOperator, Breaks(), {"main": ("v",)})
    flow.operator.open()
    with pytest.raises(
        OperatorFailed,
        match=r"operator 'flow': Breaks\.process failed: ZeroDivisionError.*start again",
    ):
        flow((0, "a", 0))
    flow((0, "a", 1))
    with pytest.raises(
        OperatorFailed, match=r"Breaks\.on_timer failed: ValueError in on_timer \(test_process.py"
    ):
        flow(watermark=5)
    with pytest.raises(OperatorFailed, match=r"Breaks\.close failed: OSError in close"):
        flow.operator.close()


class Switch(CoProcessFunction):
    """Passes a key's words for a while after a row of the control input."""

    until = ValueState()

    def process_1(self, row, ctx):
        if self.until.value is not None:
            yield row

    def process_2(self, row, ctx):
        if self.until.value is not None:
            ctx.delete_event_timer(self.until.value)
        self.until.value = ctx.timestamp + row.celsius
        ctx.set_event_timer(self.until.value)

    def on_timer(self, time, ctx):
        self.until.clear()


def test_two_inputs_share_state_and_timers():
    flow = Flow(CoProcessOperator, Switch(), {"main": ("id", "celsius")})
    out = flow((0, "a", 1), (1, "a", 100, 1), (2, "a", 2), (2, "b", 3))
    assert out == {"main": [("a", 2)]}
    out = flow((50, "a", 100, 1), (60, "a", 4), (60, "b", 5), watermark=40)
    assert out == {"main": [("a", 4)]}
    assert flow((151, "a", 5), watermark=149) == {"main": [("a", 5)]}  # prolonged until 150
    assert flow((152, "a", 6), watermark=150) == {}
    assert flow.data is None


class Rules(BroadcastProcessFunction):
    """Marks the rows that are above their limit. Limits come as broadcast rows."""

    limits = BroadcastState()
    changes = OperatorListState()
    count = ValueState(default=0)

    def process(self, row, ctx):
        self.count.value += 1
        limit = ctx.broadcast["limits"].get(row.id)
        if limit is not None and row.celsius > limit:
            yield row.id, self.count.value

    def process_broadcast(self, row, ctx):
        limits = ctx.broadcast["limits"]
        self.changes.add(row.id)
        if row.celsius is None:
            limits.remove(row.id)
        elif row.celsius == "emit":
            ctx.emit((1, 2))
        elif row.celsius == "state":
            self.count.value = 1
        else:
            limits[row.id] = row.celsius


def test_broadcast_rows_are_processed_first_and_every_key_sees_them():
    flow = Flow(BroadcastProcessOperator, Rules(), {"main": ("id", "n")})
    assert flow((0, "a", 5), (0, "b", 5), broadcast=[("a", 3)]) == {"main": [("a", 1)]}
    assert flow((0, "a", 5), (0, "b", 5), broadcast=[("a", 9), ("b", 4)]) == {"main": [("b", 2)]}
    assert flow((0, "a", 10)) == {"main": [("a", 3)]}
    assert flow((0, "a", 10), broadcast=[("a", None)]) == {}


@pytest.mark.parametrize(
    ("change", "arguments"),
    [("__setitem__", ("a", 1)), ("__delitem__", "a"), ("remove", "a"), ("pop", "a"), ("clear", ())],
)
def test_only_broadcast_rows_can_change_broadcast_state(change, arguments):
    class Changes(Rules):
        def process(self, row, ctx):
            getattr(ctx.broadcast["limits"], change)(*arguments)

    flow = Flow(BroadcastProcessOperator, Changes(), {"main": ("id", "n")})
    flow(broadcast=[("a", 3)])
    with pytest.raises(UsageError, match=r"'limits' .* only in process_broadcast"):
        flow((0, "a", 1))


def test_a_broadcast_row_has_no_key():
    flow = Flow(BroadcastProcessOperator, Rules(), {"main": ("id", "n")})
    flow((0, "a", 5))  # the operator has seen a key, which must not be there any more
    with pytest.raises(UsageError, match=r"no ctx\.emit: it belongs to no key"):
        flow(broadcast=[("a", "emit")])
    with pytest.raises(UsageError, match="there is no key"):
        flow(broadcast=[("a", "state")])


def test_outputs_are_declared_in_exactly_one_way():
    class One(ProcessFunction):
        schema = "id string"

        def process(self, row, ctx): ...

    class Many(One):
        schema = None
        outputs = {"late": ["id"], "main": "id string"}  # noqa: RUF012

    assert declared_outputs(One()) == {"main": "id string"}
    assert list(declared_outputs(Many())) == ["main", "late"]
    One.outputs = {"main": "x int"}
    with pytest.raises(UsageError, match="One has both"):
        declared_outputs(One())
    with pytest.raises(UsageError, match="Rules does not declare the columns"):
        declared_outputs(Rules())


def test_the_kind_of_function_must_match_the_operator():
    with pytest.raises(UsageError, match="an instance of a subclass of ProcessFunction"):
        ProcessOperator("x", TemperatureRise, {"main": ("v",)}, Domain.EVENT, ("id",))
    with pytest.raises(UsageError, match="CoProcessFunction"):
        CoProcessOperator("x", TemperatureRise(), {"main": ("v",)}, Domain.EVENT, ("id",))
