"""The same scenarios through our operators: no Spark, one page, its state as bytes between batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from poundlock.errors import UsageError
from poundlock.stream import evictors, triggers, windows
from poundlock.stream.aggregates import Aggregate
from poundlock.stream.keyed import IntervalJoinOperator
from poundlock.stream.matching import MatchOperator
from poundlock.stream.operator import Event, Operator, Page
from poundlock.stream.pattern import (
    Pattern,
    begin,
    skip_past_last_event,
    skip_to_first,
    skip_to_last,
    skip_to_next,
)
from poundlock.stream.process import ProcessFunction, ProcessOperator
from poundlock.stream.rows import row_type
from poundlock.stream.state import ValueState
from poundlock.stream.times import BEGINNING, END, Clock, Domain
from poundlock.stream.windowing import WindowOperator

COLUMNS = ("key", "time", "value")
Item = row_type(COLUMNS)
Batch = tuple[int, list[list[Any]]]  # a watermark, and the rows that come after it


def batches(scenario: dict[str, Any]) -> list[Batch]:
    """Return the rows between two watermarks as one batch each."""
    found: list[Batch] = [(BEGINNING, [])]
    for event in scenario["events"]:
        if event[0] == "watermark":
            found.append((event[1], []))
        else:
            found[-1][1].append(event)
    return [*found, (END, [])]


def row_by_row(scenario: dict[str, Any]) -> list[Batch]:
    """Return every row as its own batch, so that only the scenario orders them."""
    return [
        each
        for watermark, rows in batches(scenario)
        for each in [(watermark, []), *((watermark, [row]) for row in rows)]
    ]


def in_order(scenario: dict[str, Any]) -> bool:
    """Return whether the rows between two watermarks come in the order of their times.

    Rows of a batch are sorted before an operator is given them; Flink takes them as they come. A
    pattern's rows are sorted by Flink, too.
    """
    return scenario["operator"]["kind"] == "match" or all(
        rows == sorted(rows, key=lambda row: row[2]) for _, rows in batches(scenario)
    )


def answer(scenario: dict[str, Any], cut: Sequence[Batch]) -> dict[str, list[Any]]:
    """Return the rows of each output, in the order they were emitted."""
    try:
        operator = OPERATORS[scenario["operator"]["kind"]](scenario["operator"])
    except UsageError as error:
        return {"main": [], "refused": [str(error)]}
    operator.open()
    data, outputs = None, {"main": []}
    for watermark, rows in cut:
        events: dict[tuple[Any, ...], list[Event]] = {}
        for _, key, time, value, *more in sorted(rows, key=lambda row: row[2]):
            events.setdefault((key,), []).append(Event(time, Item((key, time, value)), *more))
        done = Page(operator, data, Clock(watermark)).run(events)
        data = done.data
        for name, made in done.outputs.items():
            outputs.setdefault(name, []).extend(made)
    return outputs


# Windows


def listed(key: Any, window: Any, rows: Any, context: Any) -> list[Any]:
    return [(*head(key, window), [row.value for row in rows], context.watermark)]


def counted(key: Any, window: Any, rows: Any, context: Any) -> list[Any]:
    told = [*head(key, window), [row.value for row in rows], context.watermark]
    for state in (context.state, context.key_state):
        state["fired"] = state.get("fired", 0) + 1
        told.append(state["fired"])
    return [told]


def told(key: Any, window: Any, result: Any, context: Any) -> list[Any]:
    return [(*head(key, window), list(result), context.watermark)]


def head(key: Any, window: Any) -> tuple[Any, ...]:
    return (*key, None, None) if window is windows.GLOBAL else (*key, *window)


class Statistics(Aggregate):
    """Sum, count, minimum and maximum."""

    def create(self) -> Any:
        return [0, 0, 2**63 - 1, -(2**63)]

    def add(self, accumulator: Any, row: Any) -> Any:
        return self.merge(accumulator, [row.value, 1, row.value, row.value])

    def merge(self, one: Any, other: Any) -> Any:
        return [one[0] + other[0], one[1] + other[1], min(one[2], other[2]), max(one[3], other[3])]

    def result(self, accumulator: Any) -> Any:
        return accumulator


def ms(time: int) -> str:
    return f"{time} ms"


def assigner(spec: dict[str, Any]) -> windows.Assigner:
    match spec:
        case {"kind": "tumbling"}:
            return windows.tumbling(ms(spec["size"]), offset=ms(spec["offset"]))
        case {"kind": "sliding"}:
            return windows.sliding(ms(spec["size"]), ms(spec["slide"]), offset=ms(spec["offset"]))
        case {"kind": "session", "gap": gap}:
            return windows.sessions(ms(gap))
        case {"kind": "own gaps"}:
            return windows.sessions(lambda row: ms(row.value))
        case {"kind": "count", "size": size}:
            return windows.count(size, spec.get("slide"))
    return windows.global_windows()


def trigger(spec: dict[str, Any] | None) -> triggers.Trigger | None:
    match spec:
        case None:
            return None
        case {"kind": "event"}:
            return triggers.event_time()
        case {"kind": "count", "size": size}:
            return triggers.on_count(size)
        case {"kind": "continuous", "interval": interval}:
            return triggers.continuous(ms(interval))
        case {"kind": "delta", "threshold": threshold}:
            return triggers.delta(threshold, lambda before, row: row.value - before.value)
    return triggers.purging(trigger(spec["inner"]))


def evictor(spec: dict[str, Any] | None) -> evictors.Evictor | None:
    match spec:
        case None:
            return None
        case {"kind": "count", "size": size}:
            return evictors.by_count(size, after=spec.get("after", False))
        case {"kind": "time", "size": size}:
            return evictors.by_time(ms(size), after=spec.get("after", False))
    return evictors.by_delta(
        spec["threshold"],
        lambda row, last: abs(row.value - last.value),
        after=spec.get("after", False),
    )


def window_operator(spec: dict[str, Any]) -> Operator:
    function = {"rows": listed, "states": counted, "aggregate": told}[spec["result"]]
    fields = ["key", "start", "end", "result", "watermark"]
    return WindowOperator(
        "windows",
        assigner(spec["windows"]),
        domain=Domain.EVENT,
        columns=COLUMNS,
        keys=["key"],
        fields=[*fields, "window_fired", "key_fired"] if spec["result"] == "states" else fields,
        aggregate=Statistics() if spec["result"] == "aggregate" else None,
        function=function,
        trigger=trigger(spec.get("trigger")),
        evictor=evictor(spec.get("evictor")),
        allowed_lateness=spec.get("lateness", 0),
        late="late" if spec.get("late") else None,
    )


# Process functions


class Obeys(ProcessFunction):
    """Executes the commands in its rows: see FlinkRun.java."""

    timers = "event"
    count = ValueState()
    again = ValueState()

    def process(self, row: Any, ctx: Any) -> Iterator[Any]:
        word, _, after = row.value.partition(" ")
        time = row.time + int(after or 0)
        self.count.value = (self.count.value or 0) + 1
        if word == "set":
            ctx.set_event_timer(time)
        elif word == "delete":
            ctx.delete_event_timer(time)
        elif word == "again":
            self.again.value = 2
            ctx.set_event_timer(time)
        else:
            ctx.emit((row.key, row.time, self.count.value), "side")
            self.count.clear()
        yield ctx.key.key, "row", ctx.timestamp, ctx.watermark, self.count.value

    def on_timer(self, time: int, ctx: Any) -> Iterator[Any]:
        yield ctx.key.key, "timer", time, ctx.watermark, self.count.value
        if self.again.value is not None:
            ctx.set_event_timer(time + 10)
            self.again.value = self.again.value - 1 or None


def process_operator(spec: dict[str, Any]) -> Operator:
    outputs = {"main": ("key", "what", "time", "watermark", "count"), "side": COLUMNS}
    return ProcessOperator("process", Obeys(), outputs, Domain.EVENT, ("key",))


# Joins


def join_operator(spec: dict[str, Any]) -> Operator:
    def pair(left: Any, right: Any, ctx: Any) -> Any:
        # Flink's side has values as text.
        return (
            left.key,
            str(left.value),
            str(right.value),
            ctx.left_timestamp,
            ctx.right_timestamp,
        )

    return IntervalJoinOperator(
        "join",
        spec["lower"],
        spec["upper"],
        COLUMNS,
        COLUMNS,
        function=pair,
        outputs={"main": ("key", "left", "right", "left_time", "right_time")},
        lower_inclusive=not spec.get("lower_exclusive"),
        upper_inclusive=not spec.get("upper_exclusive"),
    )


# Patterns

SKIPS = {
    "next": skip_to_next,
    "past": skip_past_last_event,
    "first": skip_to_first,
    "last": skip_to_last,
}


def fits(letters: str, above: str | None = None) -> Any:
    def test(row: Any) -> bool:
        return row.value[0] in letters

    def test_above(row: Any, earlier: Any) -> bool:
        number = int(row.value[1:])
        return test(row) and all(number > int(each.value[1:]) for each in earlier[above])

    return test_above if above else test


def pattern(stages: list[dict[str, Any]], skip: Any = None) -> Pattern:
    made: Any = None
    for stage in stages:
        what = pattern(stage["group"]) if "group" in stage else stage["name"]
        made = begin(what, skip) if made is None else getattr(made, stage["how"])(what)
        if "is" in stage:
            made = made.where(fits(stage["is"], stage.get("above")))
        if "times" in stage:
            made = made.times(*stage["times"])
        if "more" in stage:
            made = made.times_or_more(stage["more"])
        if "until" in stage:
            made = made.until(fits(stage["until"]))
        for word, method in (
            ("consecutive", "consecutive"),
            ("combinations", "allow_combinations"),
            ("greedy", "greedy"),
            ("optional", "optional"),
        ):
            if stage.get(word):
                made = getattr(made, method)()
        if "gap" in stage:
            made = made.within(ms(stage["gap"]), since="previous")
    return made


def match_operator(spec: dict[str, Any]) -> Operator:
    kind, *stage = spec.get("skip", [None])
    made = pattern(spec["stages"], SKIPS[kind](*stage) if kind else None)
    if "within" in spec:
        made = made.within(ms(spec["within"]))

    def select(match: Any, context: Any) -> Any:
        values = {stage: [row.value for row in rows] for stage, rows in match.items() if rows}
        return context.key.key, values, context.timestamp

    fields = ("key", "match", "time")
    return MatchOperator(
        made,
        columns=COLUMNS,
        key_fields=("key",),
        select=select,
        fields=fields,
        timed_out=("timed_out", select, fields) if made.length or made.gaps() else None,
        late_output="late",
    )


OPERATORS = {
    "window": window_operator,
    "process": process_operator,
    "join": join_operator,
    "match": match_operator,
}
