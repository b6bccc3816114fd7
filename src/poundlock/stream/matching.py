"""The operator that finds a pattern in each key's rows.

In event time rows wait until the watermark has passed them, and are then matched in order of time; in
processing time they are matched at once, in the order they come.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from poundlock.errors import UsageError
from poundlock.stream.machine import Machine
from poundlock.stream.nfa import BEGAN, TIME, Found, Matcher, by_row, rows_of
from poundlock.stream.operator import MAIN, Event, Key, Operator, Timer
from poundlock.stream.pattern import Pattern
from poundlock.stream.rows import Row, row_type
from poundlock.stream.times import END, Domain, to_datetime

Match = dict[str, list[Row]]
Select = Callable[[Match, "MatchContext"], Any]


class MatchContext(NamedTuple):
    """What a select function knows beside the rows.

    `timestamp`: when the match was complete, or its time over, in milliseconds. `start`, `end`: the
    times of its first and last row. `watermark`, `now`: the batch's own times.
    """

    key: Row
    timestamp: int
    start: datetime
    end: datetime
    watermark: int
    now: int


class TimedOut(NamedTuple):
    """Where partial matches go whose time is over, and what becomes of them."""

    output: str
    select: Select
    fields: Sequence[str]


class MatchOperator(Operator):
    """Gives each match of a pattern to `select`, and emits what it returns.

    A list or an iterator is as many rows; a tuple, a dictionary or a row is one, and None is none.
    Without `select` a match is a row of the key, its start and end, and a list of rows for each stage.

    `columns`: of the rows that come in, with those that hold conditions (`Pattern.bind`).
    `late_output`: where rows go that the watermark has passed; else they are dropped and counted in
    `late_dropped`.
    """

    def __init__(
        self,
        pattern: Pattern,
        *,
        columns: Sequence[str],
        key_fields: Sequence[str] = (),
        select: Select | None = None,
        fields: Sequence[str] | None = None,
        name: str = "match",
        domain: Domain = Domain.EVENT,
        timed_out: TimedOut | tuple[str, Select, Sequence[str]] | None = None,
        late_output: str | None = None,
    ) -> None:
        if not isinstance(pattern, Pattern):
            raise UsageError(f"pattern={pattern!r}: start one with begin(name)")
        if select is not None and fields is None:
            raise UsageError("select needs fields: say which columns it returns")
        if timed_out is not None and not (pattern.length or pattern.gaps()):
            raise UsageError(
                "timed_out: the pattern has no time limit, give it one with within(...)"
            )
        if late_output is not None and domain is Domain.PROCESSING:
            raise UsageError("late_output: no row is late in processing time")
        self.name = name
        self.domains = frozenset({domain})
        self.late_dropped = 0
        self._domain = domain
        self._select = select
        self._key = row_type(tuple(key_fields))
        self._timed_out = TimedOut(*timed_out) if timed_out else None
        self._late = late_output
        self._machine = Machine(pattern, columns, timed_out=timed_out is not None)
        if fields is None:
            fields = (*key_fields, "match_start", "match_end", *pattern.names())
        outputs = {MAIN: tuple(fields)}
        others = [(self._timed_out.output, self._timed_out.fields)] if self._timed_out else []
        others += [(late_output, self._machine.visible)] if late_output is not None else []
        for output, its_fields in others:
            if output in outputs or not output:
                raise UsageError(f"the output {output!r} needs a name of its own")
            outputs[output] = tuple(its_fields)
        for its_fields in outputs.values():
            row_type(its_fields)  # two columns of one name are found here
        self.outputs = outputs

    def on_rows(self, key: Key, events: Sequence[Event]) -> None:
        if self._domain is Domain.EVENT:
            self._hold(key, events)
            return
        matcher = Matcher(self._machine, key.state.get("match"))
        matcher.advance(key.now)
        matcher.feed([key.now] * len(events), [event.row for event in events])
        self._finish(key, matcher)

    def on_timer(self, key: Key, timer: Timer, domain: Domain) -> None:
        matcher = Matcher(self._machine, key.state.get("match"))
        clock = key.clock.of(domain)
        if held := key.state.get("held"):
            times, *columns = held
            ready = bisect_right(times, clock)
            rows = by_row([column[:ready] for column in columns], self._machine.row, ready)
            matcher.feed(times[:ready], rows)
            if ready == len(times):
                del key.state["held"]
            else:
                key.state["held"] = [column[ready:] for column in held]
        matcher.advance(clock)
        self._finish(key, matcher)

    def _hold(self, key: Key, events: Sequence[Event]) -> None:
        """Keep rows until the watermark has passed them."""
        watermark = key.watermark
        if events[0].time <= watermark:
            for event in events:
                if event.time <= watermark:
                    self._drop(key, event.row)
            events = [event for event in events if event.time > watermark]
            if not events:
                return
        came = [
            [event.time for event in events],
            *map(list, zip(*(e.row for e in events), strict=True)),
        ]
        held = key.state.get("held")
        if held:
            behind = held[0][-1] > came[0][0]
            for column, more in zip(held, came, strict=True):
                column.extend(more)
            if behind:  # rows of one time stay in the order they came
                order = sorted(range(len(held[0])), key=held[0].__getitem__)
                held = [[column[at] for at in order] for column in held]
        key.state["held"] = held = held or came
        self._wake(key, held[0][0])

    def _drop(self, key: Key, row: Row) -> None:
        if self._late is None:
            self.late_dropped += 1
        else:
            key.emit(self._machine.keep(row), self._late)

    def _wake(self, key: Key, time: int) -> None:
        """Have one timer, at the earliest time that anything can happen."""
        timers = key.timers(self._domain)
        if timers and timers[0].time <= time:
            return
        for timer in timers:
            key.delete_timer(timer.time, timer.tag, self._domain)
        key.set_timer(time, domain=self._domain)

    def _finish(self, key: Key, matcher: Matcher) -> None:
        for found in matcher.matches:
            for row in self._selected(key, found):
                key.emit(row)
        if self._timed_out:
            for found in matcher.timed_out:
                context, match = self._context(key, found), rows_of(found.node, self._machine.names)
                for row in _rows(self._timed_out.select(match, context)):
                    key.emit(row, self._timed_out.output)
        left = matcher.dump()
        if left is None:
            key.state.pop("match", None)
        else:
            key.state["match"] = left
        held = key.state.get("held")
        due = min(matcher.next_due(), held[0][0] if held else END)
        if due < END:
            self._wake(key, due)

    def _selected(self, key: Key, found: Found) -> Iterator[Any]:
        context, match = self._context(key, found), rows_of(found.node, self._machine.names)
        if self._select is not None:
            yield from _rows(self._select(match, context))
        else:
            stages = ([tuple(row) for row in match.get(s, ())] for s in self._machine.names)
            yield (*key.value, context.start, context.end, *stages)

    def _context(self, key: Key, found: Found) -> MatchContext:
        node = found.node
        return MatchContext(
            self._key(key.value),
            found.time,
            to_datetime(node[BEGAN]),
            to_datetime(node[TIME]),
            key.watermark,
            key.now,
        )


def _rows(result: Any) -> Iterator[Any]:
    """Give one row, several or none, as a select function has returned them."""
    if result is None:
        return
    if isinstance(result, list | Iterator):
        yield from result
    else:
        yield result
