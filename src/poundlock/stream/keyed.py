"""Keyed operators: rolling aggregates, and the interval join of two inputs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from poundlock.errors import UsageError
from poundlock.stream.aggregates import EXACT
from poundlock.stream.operator import MAIN, Event, Key, Operator, Timer
from poundlock.stream.process import rows_of
from poundlock.stream.rows import Row, row_type, shaped
from poundlock.stream.times import Domain


class RollingOperator(Operator):
    """Combines all rows of a key into one, and emits it after each row: Flink's `reduce`.

    `function(one, other)` combines two rows. It returns a row, tuple or dictionary with their columns.
    """

    def __init__(
        self, name: str, fields: Sequence[str], function: Callable[[Row, Row], Any]
    ) -> None:
        if not callable(function):
            raise UsageError(
                f"operator {name!r} was given {function!r}: give a function of two rows"
            )
        self.name = name
        self.outputs = {MAIN: tuple(fields)}
        self._fields = tuple(fields)
        self._function = function

    def on_rows(self, key: Key, events: Sequence[Event]) -> None:
        kind, kept = row_type(self._fields), key.state.get("row")
        so_far = None if kept is None else kind(kept)
        for event in events:
            so_far = event.row if so_far is None else self._function(so_far, event.row)
            if type(so_far) is not kind:
                so_far = kind(shaped(so_far, self._fields))
            key.emit(so_far)
        if so_far is not None:
            key.state["row"] = list(so_far)


def rolling(name: str, fields: Sequence[str], kind: str, column: str) -> RollingOperator:
    """Return the operator of a rolling "sum", "min", "max", "min_by" or "max_by" of a column.

    As in Flink, the first three update that column in the key's first row. The other two give a whole
    row, the first of equal ones. Nulls are ignored, and NaN is greater than every number.
    """
    if kind not in _ROLLING:
        raise UsageError(
            f"operator {name!r}: {kind!r} is not a rolling aggregate: use one of {', '.join(_ROLLING)}"
        )
    if column not in fields:
        raise UsageError(
            f"operator {name!r}: there is no column {column!r}: choose from {', '.join(fields)}"
        )
    return RollingOperator(name, fields, partial(_ROLLING[kind], list(fields).index(column)))


def _sum(at: int, one: Row, other: Row) -> Row:
    value, before = other[at], one[at]
    if value is None:
        return one
    if before is not None:
        exact = isinstance(value, Decimal)
        value = EXACT.add(before, value) if exact else before + value
    return _with(one, at, value)


def _min(at: int, one: Row, other: Row) -> Row:
    return _with(one, at, other[at]) if _less(other[at], one[at]) else one


def _max(at: int, one: Row, other: Row) -> Row:
    return _with(one, at, other[at]) if _more(other[at], one[at]) else one


def _min_by(at: int, one: Row, other: Row) -> Row:
    return other if _less(other[at], one[at]) else one


def _max_by(at: int, one: Row, other: Row) -> Row:
    return other if _more(other[at], one[at]) else one


def _less(value: Any, before: Any) -> bool:
    if value is None or before is None:
        return value is not None
    # NaN differs from itself, and no comparison with it holds.
    return value < before or (before != before and value == value)


def _more(value: Any, before: Any) -> bool:
    if value is None or before is None:
        return value is not None
    return value > before or (value != value and before == before)


def _with(row: Row, at: int, value: Any) -> Row:
    values = list(row)
    values[at] = value
    return type(row)(values)


_ROLLING = {"sum": _sum, "min": _min, "max": _max, "min_by": _min_by, "max_by": _max_by}


class JoinContext:
    """The context of a pair of rows: the times of both, and `emit`."""

    __slots__ = ("emit", "left_timestamp", "now", "right_timestamp", "watermark")

    emit: Callable[..., None]  # emit(row, output="main")
    left_timestamp: int
    right_timestamp: int
    watermark: int
    now: int

    @property
    def timestamp(self) -> int:
        """The time of the pair, the later of the two."""
        return max(self.left_timestamp, self.right_timestamp)


class IntervalJoinOperator(Operator):
    """Joins the rows of two inputs by time: left + lower <= right <= left + upper.

    The left input is 0, the right one 1. A pair has the columns of the left row, then of the right one.
    With `function(left, right, ctx)`, the results are the rows that it returns, yields or emits, and
    `outputs` has their columns. Rows before the watermark go to the outputs `left_late` and
    `right_late`, or are dropped and counted in `late_dropped`. A row is kept until the watermark rules
    out further pairs with it.
    """

    domains = frozenset({Domain.EVENT})

    def __init__(
        self,
        name: str,
        lower_ms: int,
        upper_ms: int,
        left: Sequence[str],
        right: Sequence[str],
        *,
        function: Callable[[Row, Row, JoinContext], Any] | None = None,
        outputs: Mapping[str, Sequence[str]] | None = None,
        lower_inclusive: bool = True,
        upper_inclusive: bool = True,
        left_late: str | None = None,
        right_late: str | None = None,
    ) -> None:
        self.name = name
        self._lower = lower_ms if lower_inclusive else lower_ms + 1
        self._upper = upper_ms if upper_inclusive else upper_ms - 1
        if self._lower > self._upper:
            raise UsageError(
                f"operator {name!r}: no time is between {lower_ms} ms and {upper_ms} ms: make the "
                "lower bound less than the upper one"
            )
        self._fields = tuple(left), tuple(right)
        self._late = left_late, right_late
        self._function = function
        self.outputs = self._name_outputs(outputs)
        self.late_dropped = 0
        # A row of either side is kept for this long, as later rows may still join it.
        self._waits = max(self._upper, 0), max(-self._lower, 0)

    def _name_outputs(
        self, outputs: Mapping[str, Sequence[str]] | None
    ) -> dict[str, tuple[str, ...]]:
        left, right = self._fields
        if self._function is None:
            both = sorted(set(left) & set(right))
            if both and not outputs:
                raise UsageError(
                    f"operator {self.name!r}: both inputs have a column {both[0]!r}: rename one, or "
                    "name all columns in outputs"
                )
            outputs = outputs or {MAIN: left + right}
            if len(outputs[MAIN]) != len(left + right):
                raise UsageError(
                    f"operator {self.name!r}: outputs names {len(outputs[MAIN])} columns, but a "
                    f"pair has {len(left + right)}: name each of them"
                )
        elif not outputs:
            raise UsageError(
                f"operator {self.name!r}: the columns that its function returns have no names: "
                "give them in outputs"
            )
        declared = {name: tuple(fields) for name, fields in outputs.items()}
        for name, fields in zip(self._late, self._fields, strict=True):
            if name is not None and declared.setdefault(name, fields) != fields:
                raise UsageError(
                    f"operator {self.name!r}: the columns of output {name!r} are not those of the "
                    "late rows: send late rows to another output"
                )
        return declared

    def on_rows(self, key: Key, events: Sequence[Event]) -> None:
        watermark, state = key.watermark, key.state
        join = self._joiner(key)
        sides = [state.get(name) or [[], []] for name in _SIDES]
        for time, row, side in events:
            if time < watermark:
                self._handle_late(key, row, side)
                continue
            times, rows = sides[side]
            at = bisect_right(times, time)
            times.insert(at, time)
            rows.insert(at, list(row))
            other_times, other_rows = sides[1 - side]
            low, high = (-self._upper, -self._lower) if side else (self._lower, self._upper)
            for at in range(
                bisect_left(other_times, time + low), bisect_right(other_times, time + high)
            ):
                if side:
                    join(other_rows[at], row, other_times[at], time)
                else:
                    join(row, other_rows[at], time, other_times[at])
        self._keep(key, sides)

    def on_timer(self, key: Key, timer: Timer, domain: Domain) -> None:
        """Delete the rows that no later row can join."""
        sides = [key.state.get(name) or [[], []] for name in _SIDES]
        for (times, rows), wait in zip(sides, self._waits, strict=True):
            gone = bisect_right(times, key.watermark - wait)
            del times[:gone], rows[:gone]
        self._keep(key, sides)

    def _keep(self, key: Key, sides: Sequence[Any]) -> None:
        """Store the rows of both sides, and set a timer for when the first one can be deleted."""
        earliest: list[int] = []
        for name, side, wait in zip(_SIDES, sides, self._waits, strict=True):
            if side[0]:
                key.state[name] = side
                earliest.append(side[0][0] + wait)
            else:
                key.state.pop(name, None)
        # As in Flink, a row whose time equals the watermark is kept until the watermark advances.
        due = max(min(earliest), key.watermark + 1) if earliest else None
        for timer in key.timers():
            if timer.time != due:
                key.delete_timer(timer.time)
        if due is not None:
            key.set_timer(due)

    def _joiner(self, key: Key) -> Callable[[Sequence[Any], Sequence[Any], int, int], None]:
        emit, function = key.emit, self._function
        if function is None:
            return lambda left, right, *_: emit((*left, *right))
        left_kind, right_kind = map(row_type, self._fields)
        ctx = JoinContext()
        ctx.emit, ctx.watermark, ctx.now = emit, key.watermark, key.now

        def join(
            left: Sequence[Any], right: Sequence[Any], left_time: int, right_time: int
        ) -> None:
            ctx.left_timestamp, ctx.right_timestamp = left_time, right_time
            for made in rows_of(function(left_kind(left), right_kind(right), ctx)):
                emit(made)

        return join

    def _handle_late(self, key: Key, row: Row, side: int) -> None:
        late = self._late[side]
        if late is None:
            self.late_dropped += 1
        else:
            key.emit(row, late)


_SIDES = ("left", "right")
