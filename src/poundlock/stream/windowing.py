"""The window operator: Flink's WindowOperator, with evictors and merging session windows.

A window is late when the watermark has passed its last time by the allowed lateness. Until then its
state is kept, and a late row fires it again with all its rows. A row whose windows are all late goes
to the late output.

A key's state has these parts. Empty parts are left out:

    w   {window: accumulator}; the window's rows, if there is no aggregate or there is an evictor
    t   {window: state of the trigger}
    s   {window: state of the window function}
    g   the window function's state for the key

A timer's tag is the mark of its window. With an assigner's default trigger, a window has one timer at
a time: first for its end, then for its cleanup. Rows are then added in runs, one run for all rows that
belong to the same windows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from poundlock.errors import UsageError
from poundlock.stream import evictors, triggers
from poundlock.stream.aggregates import Aggregate, Aggregates, Reduce
from poundlock.stream.evictors import Evictor
from poundlock.stream.operator import MAIN, Event, Key, Operator, Timer
from poundlock.stream.rows import Row, row_type, shaped
from poundlock.stream.times import BEGINNING, END, Domain, to_datetime
from poundlock.stream.triggers import Context, Pane, Trigger, TriggerResult
from poundlock.stream.windows import (
    Assigner,
    CountWindows,
    GlobalWindow,
    SessionWindows,
    TimeWindows,
    Window,
)

WINDOW_COLUMNS = ("window_start", "window_end")

_instant: Callable[[int], datetime] = lru_cache(maxsize=1024)(to_datetime)


class WindowContext(Pane):
    """What a window function gets besides its rows."""

    __slots__ = ("_merges",)

    def __init__(self, key: Key, mark: Any, window: Window | GlobalWindow, merges: bool) -> None:
        super().__init__(key, mark, window)
        self._merges = merges

    @property
    def state(self) -> dict[str, Any]:
        """Plain data that lasts from one firing of the window to the next, until its cleanup."""
        if self._merges:
            raise UsageError(
                "session windows have no state of their own, because they merge: use "
                "`context.key_state`"
            )
        return self._key.state.setdefault("s", {}).setdefault(self._mark, {})

    @property
    def key_state(self) -> dict[str, Any]:
        """Plain data of the key, shared by its windows. It lasts until the function empties it."""
        return self._key.state.setdefault("g", {})

    def emit(self, value: Any, output: str) -> None:
        """Send a row to a side output."""
        self._key.emit(value, output)


WindowFunction = Callable[
    [tuple[Any, ...], Window | GlobalWindow, Any, WindowContext], Iterable[Any] | None
]


@dataclass(frozen=True)
class _Rows(Aggregate):
    """The rows themselves, for a function of all rows. They are kept as lists, which pack faster."""

    columns: tuple[str, ...]

    def create(self) -> list[Any]:
        return []

    def add(self, accumulator: list[Any], row: Row) -> list[Any]:
        accumulator.append(list(row))
        return accumulator

    def add_all(self, accumulator: list[Any], rows: Sequence[Row]) -> list[Any]:
        accumulator.extend(map(list, rows))
        return accumulator

    def merge(self, one: list[Any], other: list[Any]) -> list[Any]:
        return one + other

    def result(self, accumulator: list[Any]) -> list[Row]:
        return list(map(row_type(self.columns), accumulator))


class WindowOperator(Operator):
    """Collects each key's rows in windows, and emits a result when a window fires.

    `columns` are those of the input, `keys` the key columns among them. With an aggregate alone, a
    result is the key, the window's start and end in UTC, and `fields`. Count windows and global windows
    have no start and end. With a function, the results are the rows of `fields` that
    `function(key, window, rows, context)` returns. With both, `rows` is the aggregate's result.

    `late` names the output for late rows, with the columns of the input. Without it they are dropped
    and counted in `late_dropped`. `sides` are the function's side outputs, by name. `hidden` is the
    number of columns at the end that only the aggregate reads, and that late rows leave out.
    """

    def __init__(
        self,
        name: str,
        assigner: Assigner,
        *,
        domain: Domain,
        columns: Sequence[str],
        keys: Sequence[str],
        fields: Sequence[str] = (),
        aggregate: Aggregate | None = None,
        function: WindowFunction | None = None,
        trigger: Trigger | None = None,
        evictor: Evictor | None = None,
        allowed_lateness: int = 0,
        late: str | None = None,
        sides: Mapping[str, Sequence[str]] | None = None,
        hidden: int = 0,
    ) -> None:
        _expected(assigner, Assigner, "tumbling('1 minute')")
        _expected(trigger, Trigger, "triggers.on_count(100)")
        _expected(evictor, Evictor, "evictors.by_count(10)")
        _expected(aggregate, Aggregate, "Aggregates([('count', ())])")
        self.name = name
        self.late_dropped = 0
        self._assigner = assigner
        self._domain = domain
        self._event_time = assigner.timed and domain is Domain.EVENT
        self._columns = tuple(columns)
        self._visible = len(columns) - hidden
        self._function = function
        self._lateness = allowed_lateness
        self._late = late
        default = _default_trigger(assigner, domain)
        self._trigger = _choose_trigger(assigner, trigger, default)
        self._evictor = _choose_evictor(assigner, evictor)
        self._plain = (  # the default trigger, for which rows are added in runs
            isinstance(assigner, TimeWindows | SessionWindows)
            and self._trigger == default
            and self._evictor is None
        )
        self._aggregate = aggregate.over(self._columns) if aggregate else None
        self._contents: Aggregate = self._aggregate or _Rows(self._columns)
        self._fields = self._choose_fields(fields, keys)
        self.outputs = self._name_outputs(keys, sides or {})
        self.domains = self._trigger.domains | ({domain} if assigner.timed else set())
        if (allowed_lateness or late) and not self._event_time:
            raise UsageError(
                "rows are late only in event-time windows: remove the allowed lateness and the late "
                "output, or give the flow an event time"
            )
        if allowed_lateness < 0:
            raise UsageError(f"allowed_lateness={allowed_lateness} is negative: give 0 or more")

    def _choose_fields(self, fields: Sequence[str], keys: Sequence[str]) -> tuple[str, ...]:
        if missing := [name for name in keys if name not in self._columns]:
            raise UsageError(
                f"the key column {missing[0]!r} does not exist: there are {', '.join(self._columns)}"
            )
        if self._aggregate is None and self._function is None:
            raise UsageError("a window needs an aggregate, a function, or both: give one")
        if self._function is None and isinstance(self._aggregate, Reduce) and not fields:
            fields = [name for name in self._columns if name not in keys]
        elif not fields:
            raise UsageError("the window's results have no column names: give fields=[...]")
        parts = self._aggregate.parts if isinstance(self._aggregate, Aggregates) else fields
        if self._function is None and len(parts) != len(fields):
            raise UsageError(
                f"there are {len(parts)} aggregate functions and the columns {', '.join(fields)}: name "
                "one column for each function"
            )
        return tuple(fields)

    def _name_outputs(
        self, keys: Sequence[str], sides: Mapping[str, Sequence[str]]
    ) -> dict[str, tuple[str, ...]]:
        fields = self._fields
        if self._function is None:
            fields = (*keys, *(WINDOW_COLUMNS if self._assigner.timed else ()), *fields)
        late = [(self._late, self._columns[: self._visible])] if self._late else []
        outputs = {MAIN: fields}
        for name, each in (*sides.items(), *late):
            if name in outputs:
                raise UsageError(f"two outputs have the name {name!r}: give each its own")
            outputs[name] = tuple(each)
        for each in outputs.values():
            row_type(each)  # raises for duplicate columns
        return outputs

    def on_rows(self, key: Key, events: Sequence[Event]) -> None:
        windows = key.state.setdefault("w", {})
        if not self._plain:
            self._add_by_trigger(key, windows, events)
        elif isinstance(self._assigner, TimeWindows):
            self._add_in_runs(key, windows, events, self._assigner)
        elif isinstance(self._assigner, SessionWindows):
            self._add_to_sessions(key, windows, events, self._assigner)
        if not windows:
            key.state.pop("w", None)

    def on_timer(self, key: Key, timer: Timer, domain: Domain) -> None:
        windows = key.state.get("w", {})
        mark = timer.tag
        window = self._assigner.window(mark)
        ends = self._cleanup_time(window)
        if not self._plain:
            context = self._context(key, mark)
            result = self._trigger.on_timer(timer.time, domain, context)
            self._save(key, context)
            self._apply(key, windows, mark, result)
        elif timer.time == window.max_time:
            self._fire(key, windows, mark)
        if self._assigner.timed:
            if timer.time == ends and domain is self._domain:
                self._clean_up(key, windows, mark)
            else:
                # The cleanup timer is not set yet, or the trigger may have deleted it.
                key.set_timer(ends, mark, self._domain)
        if not windows:
            key.state.pop("w", None)

    # The default trigger: a window fires at its end, and at each later row.

    def _add_in_runs(
        self, key: Key, windows: dict[int, Any], events: Sequence[Event], assigner: TimeWindows
    ) -> None:
        size, slide = assigner.size, assigner.slide
        over = self._watermark(key) - size + 1  # windows that start here or before have ended
        late = over - self._lateness
        at, count = 0, len(events)
        while at < count:
            time = events[at][0] if self._domain is Domain.EVENT else key.clock.now
            starts = assigner.starts(time)
            # Up to the next start or end of a window, all rows are in the same windows.
            until = starts.start + slide
            if starts:
                until = min(until, starts[-1] + size)
            to = count
            if self._domain is Domain.EVENT and events[-1][0] >= until:
                to = bisect_left(events, (until,), at)
            run = events if to - at == count else events[at:to]
            live = [start for start in starts if start > late]
            if not live:
                for event in run:
                    self._skip(key, event)
            elif live[-1] > over:
                self._add_run(key, windows, live, size, [event[1] for event in run])
            else:
                for event in run:
                    for start in live:
                        self._add_late(key, windows, start, event[1], ended=start <= over)
            at = to

    def _add_run(
        self, key: Key, windows: dict[int, Any], starts: list[int], size: int, rows: list[Row]
    ) -> None:
        """Add rows to windows that have not ended."""
        for start in reversed(starts):  # sets the timers in order
            accumulator = windows.get(start)
            if accumulator is None:
                accumulator = self._contents.create()
                key.set_timer(start + size - 1, start, self._domain)
            windows[start] = self._contents.add_all(accumulator, rows)

    def _add_late(
        self, key: Key, windows: dict[int, Any], start: int, row: Row, *, ended: bool
    ) -> None:
        accumulator = windows.get(start)
        if accumulator is None:
            accumulator = self._contents.create()
            window = self._assigner.window(start)
            first = self._cleanup_time(window) if ended else window.max_time
            key.set_timer(first, start, self._domain)
        windows[start] = self._contents.add(accumulator, row)
        if ended:
            self._fire(key, windows, start)

    def _add_to_sessions(
        self,
        key: Key,
        windows: dict[tuple[int, int], Any],
        events: Sequence[Event],
        assigner: SessionWindows,
    ) -> None:
        before, watermark, spans = set(windows), self._watermark(key), sorted(windows)
        at = 0
        while at < len(events):
            event = events[at]
            at += 1
            time = event[0] if self._domain is Domain.EVENT else key.clock.now
            start, end = assigner.span(time, event[1])
            first, last = _touched(spans, start, end)
            merged = spans[first:last]
            if merged:
                start, end = min(start, merged[0][0]), max(end, merged[-1][1])
            elif end - 1 + self._lateness <= watermark:
                self._skip(key, event)
                continue
            rows = [event[1]]
            if end - 1 > watermark:
                following = spans[last][0] if last < len(spans) else END
                at, end = self._extend(key, events, at, end, following, assigner, rows)
            accumulators = [windows.pop(span) for span in merged]
            accumulator = self._merge_contents([each for each in accumulators if each is not None])
            if accumulator is None:
                accumulator = self._contents.create()
            spans[first:last] = [(start, end)]
            windows[start, end] = self._contents.add_all(accumulator, rows)
            if end - 1 <= watermark:
                self._fire(key, windows, (start, end))
        # Timers fire after all rows, so they are only corrected now.
        for mark in sorted(before - windows.keys()):
            self._delete_timers(key, mark)
        for mark in sorted(windows.keys() - before):
            window = assigner.window(mark)
            ended = window.max_time <= watermark
            time = self._cleanup_time(window) if ended else window.max_time
            key.set_timer(time, mark, self._domain)

    def _extend(
        self,
        key: Key,
        events: Sequence[Event],
        at: int,
        end: int,
        following: int,
        assigner: SessionWindows,
        rows: list[Row],
    ) -> tuple[int, int]:
        """Append to `rows` the next rows that extend a session without touching the following one.

        Return the place of the first row after them, and the end of the session.
        """
        while at < len(events):
            event = events[at]
            time = event[0] if self._domain is Domain.EVENT else key.clock.now
            if time > end:
                break
            extended = max(end, assigner.span(time, event[1])[1])
            if extended >= following:
                break
            end = extended
            rows.append(event[1])
            at += 1
        return at, end

    # Any other trigger, and evictors.

    def _add_by_trigger(self, key: Key, windows: dict[Any, Any], events: Sequence[Event]) -> None:
        trigger = self._trigger
        for event in events:
            skipped = True
            for mark in self._assign(key, windows, event):
                skipped = False
                self._add(windows, mark, event)
                context = self._context(key, mark)
                result = trigger.on_element(event.time, event.row, context)
                self._save(key, context)
                self._apply(key, windows, mark, result)
                if self._assigner.timed:
                    key.set_timer(self._cleanup_time(context.window), mark, self._domain)
            if skipped:
                self._skip(key, event)

    def _assign(self, key: Key, windows: dict[Any, Any], event: Event) -> Iterable[Any]:
        """Return the windows of a row that are not late. Merge session windows that touch."""
        assigner = self._assigner
        time = event.time if self._domain is Domain.EVENT else key.clock.now
        marks = assigner.marks(time, event.row)
        if assigner.merges:
            marks = [self._merge(key, windows, mark) for mark in marks]
        watermark = self._watermark(key)
        return [mark for mark in marks if self._cleanup_time(assigner.window(mark)) > watermark]

    def _merge(self, key: Key, windows: dict[Any, Any], mark: tuple[int, int]) -> tuple[int, int]:
        """Merge a new session with those that it touches. Return the merged session."""
        merged = [each for each in sorted(windows) if each[0] <= mark[1] and mark[0] <= each[1]]
        if not merged:
            return mark
        whole = min(mark[0], merged[0][0]), max(mark[1], merged[-1][1])
        if merged == [whole]:
            return whole
        context = self._context(key, whole)
        self._trigger.on_merge(context, [self._context(key, each).state for each in merged])
        self._save(key, context)
        for each in merged:
            self._clear(key, each)
        present = [each for each in map(windows.pop, merged) if each is not None]
        windows[whole] = self._merge_contents(present)
        return whole

    def _merge_contents(self, contents: Sequence[Any]) -> Any:
        """Return one accumulator made of several; None if there are none."""
        whole = contents[0] if contents else None
        for each in contents[1:]:
            whole = whole + each if self._evictor else self._contents.merge(whole, each)
        return whole

    def _add(self, windows: dict[Any, Any], mark: Any, event: Event) -> None:
        contents = windows.get(mark)
        if self._evictor:
            if contents is None:
                contents = windows[mark] = []
            contents.append([event.time, list(event.row)])
        else:
            if contents is None:
                contents = self._contents.create()
            windows[mark] = self._contents.add(contents, event.row)

    def _context(self, key: Key, mark: Any) -> Context:
        state = key.state.get("t", {}).get(mark)
        return Context(key, mark, self._assigner.window(mark), {} if state is None else state)

    def _save(self, key: Key, context: Context) -> None:
        _put(key.state, "t", context._mark, context.state)

    def _apply(self, key: Key, windows: dict[Any, Any], mark: Any, result: TriggerResult) -> None:
        """Fire or purge the window, as the trigger decided."""
        if not isinstance(result, TriggerResult):
            raise UsageError(
                f"the trigger {type(self._trigger).__name__} returned {result!r}: return CONTINUE, "
                "FIRE, PURGE or FIRE_AND_PURGE"
            )
        if result.fires:
            self._fire(key, windows, mark)
        if result.purges:
            self._purge(windows, mark)

    # For all triggers.

    def _watermark(self, key: Key) -> int:
        """Return the watermark by which windows are late. In processing time no window is late."""
        return key.clock.watermark if self._event_time else BEGINNING

    def _cleanup_time(self, window: Window | GlobalWindow) -> int:
        return window.max_time + self._lateness

    def _skip(self, key: Key, event: Event) -> None:
        """Drop a row without a live window. If it is late, count it or send it to the late output."""
        if self._event_time and event.time + self._lateness <= key.clock.watermark:
            if self._late:
                key.emit(tuple(event.row)[: self._visible], self._late)
            else:
                self.late_dropped += 1

    def _fire(self, key: Key, windows: dict[Any, Any], mark: Any) -> None:
        """Emit a window's result, if the window has contents."""
        contents = windows.get(mark)
        if contents is None:
            return
        window = self._assigner.window(mark)
        context = WindowContext(key, mark, window, self._assigner.merges)
        if self._evictor is None:
            self._emit(key, window, contents, context)
            return
        kind = row_type(self._columns)
        rows = [(time, kind(row)) for time, row in contents]
        rows = self._evictor.evict_before(rows, context)
        fold = self._contents
        self._emit(key, window, fold.add_all(fold.create(), [row for _, row in rows]), context)
        rows = self._evictor.evict_after(rows, context)
        if rows:
            windows[mark] = [[time, list(row)] for time, row in rows]
        else:
            self._purge(windows, mark)

    def _purge(self, windows: dict[Any, Any], mark: Any) -> None:
        """Delete a window's contents. An empty session stays, as later rows may merge with it."""
        if self._assigner.merges:
            windows[mark] = None
        else:
            windows.pop(mark, None)

    def _emit(
        self, key: Key, window: Window | GlobalWindow, accumulator: Any, context: WindowContext
    ) -> None:
        if accumulator is None:
            return
        value = self._contents.result(accumulator)
        if self._function is None:
            if isinstance(value, Row):
                value = [value[name] for name in self._fields]
            times = (_instant(window.start), _instant(window.end)) if self._assigner.timed else ()
            key.emit((*key.value, *times, *shaped(value, self._fields)))
            return
        rows = self._function(key.value, window, value, context)
        if isinstance(rows, Mapping | Row | str):
            raise UsageError("a window function returned one row: return a list of rows")
        for row in rows or ():
            key.emit(row)
        # Reading `context.state` creates it: remove it if it is still empty.
        if "s" in key.state:
            _put(key.state, "s", context._mark, key.state["s"].get(context._mark))
        if not key.state.get("g", True):
            del key.state["g"]

    def _clean_up(self, key: Key, windows: dict[Any, Any], mark: Any) -> None:
        """Delete a window with its state and timers."""
        windows.pop(mark, None)
        if not self._plain:
            self._clear(key, mark)
        _put(key.state, "s", mark, None)

    def _clear(self, key: Key, mark: Any) -> None:
        """Delete the trigger's state and the window's timers, even if the trigger leaves some."""
        self._trigger.clear(self._context(key, mark))
        _put(key.state, "t", mark, None)
        self._delete_timers(key, mark)

    def _delete_timers(self, key: Key, mark: Any) -> None:
        for domain in self.domains:
            for timer in key.timers(domain):
                if timer.tag == mark:
                    key.delete_timer(timer.time, timer.tag, domain)


def _touched(spans: list[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Return the range of the sorted sessions that a new one touches, as for a slice."""
    first = bisect_left(spans, (start,))
    last = first
    if first and spans[first - 1][1] >= start:
        first -= 1
    while last < len(spans) and spans[last][0] <= end:
        last += 1
    return first, last


def _put(state: dict[str, Any], part: str, mark: Any, value: Any) -> None:
    """Set a window's entry in a part of the state. Remove the entry if the value is empty."""
    if value:
        state.setdefault(part, {})[mark] = value
    elif part in state:
        state[part].pop(mark, None)
        if not state[part]:
            del state[part]


def _expected(value: Any, kind: type, what: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"{value!r} is not of class {kind.__name__}: give one, such as {what}")


def _default_trigger(assigner: Assigner, domain: Domain) -> Trigger | None:
    if isinstance(assigner, CountWindows):
        if assigner.slide == assigner.size:
            return triggers.purging(triggers.on_count(assigner.size))
        return triggers.on_count(assigner.slide)
    if not assigner.timed:
        return None
    return triggers.event_time() if domain is Domain.EVENT else triggers.processing_time()


def _choose_trigger(assigner: Assigner, given: Trigger | None, default: Trigger | None) -> Trigger:
    if isinstance(assigner, CountWindows) and given is not None:
        raise UsageError("count windows have their own trigger: for another, use global_windows()")
    if (trigger := given or default) is None:
        raise UsageError(
            "global windows have no default trigger and never fire: give one, such as on_count(100)"
        )
    if assigner.merges and not trigger.can_merge():
        raise UsageError(
            f"the trigger {type(trigger).__name__} cannot merge, but session windows do: use a "
            "trigger whose can_merge() is true"
        )
    return trigger


def _choose_evictor(assigner: Assigner, given: Evictor | None) -> Evictor | None:
    if not isinstance(assigner, CountWindows):
        return given
    if given is not None:
        raise UsageError("count windows have their own evictor: for another, use global_windows()")
    return None if assigner.slide == assigner.size else evictors.by_count(assigner.size)
