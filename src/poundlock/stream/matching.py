"""The operator that finds a pattern in each key's rows.

In event time, rows wait until the watermark passes them, and are then matched in order of time. In
processing time, rows are matched at once, in order of arrival.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any, NamedTuple

from poundlock.errors import UsageError
from poundlock.stream.machine import Machine
from poundlock.stream.nfa import BEGAN, TIME, Finding, Matcher, group_rows, rows_from_columns
from poundlock.stream.operator import MAIN, Event, Key, Operator, Timer
from poundlock.stream.pattern import Pattern
from poundlock.stream.process import rows_of
from poundlock.stream.rows import Row, row_type
from poundlock.stream.times import END, Domain, to_datetime

_time_of = itemgetter(0)

Match = dict[str, list[Row]]
Select = Callable[[Match, "MatchContext"], Any]


class MatchContext(NamedTuple):
    """What a select function gets besides the rows.

    `timestamp`: when the match completed or timed out, in milliseconds. `start`, `end`: the times of
    its first and last row. `watermark`, `now`: the times of the batch.
    """

    key: Row
    timestamp: int
    start: datetime
    end: datetime
    watermark: int
    now: int


class TimedOut(NamedTuple):
    """The side output for partial matches that timed out, and the function that makes its rows."""

    output: str
    select: Select
    fields: Sequence[str]


class MatchOperator(Operator):
    """Passes each match of a pattern to `select`, and emits what it returns.

    A list or an iterator is several rows. A tuple, a dictionary or a row is one row. None is no row.
    Without `select`, a match is one row: the key, its start and end, and a list of rows per stage.

    `columns`: those of the input, including the results of conditions (`Pattern.bind`).
    `late_output`: the side output for late rows. Without it, they are dropped and counted in
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
            raise UsageError(f"pattern={pattern!r} is not a pattern: start one with begin(name)")
        if select is not None and fields is None:
            raise UsageError("select= needs fields=: name the columns that it returns")
        if timed_out is not None and not (pattern.length or pattern.gaps()):
            raise UsageError(
                "timed_out= needs a time limit, and the pattern has none: add within(...)"
            )
        if late_output is not None and domain is Domain.PROCESSING:
            raise UsageError(
                "late_output= needs event time, and the flow goes by processing time: leave it out"
            )
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
        self.outputs = self._name_outputs(fields)

    def _name_outputs(self, fields: Sequence[str]) -> dict[str, tuple[str, ...]]:
        outputs = {MAIN: tuple(fields)}
        sides = [(self._timed_out.output, self._timed_out.fields)] if self._timed_out else []
        sides += [(self._late, self._machine.visible)] if self._late is not None else []
        for output, columns in sides:
            if output in outputs or not output:
                raise UsageError(
                    f"the side output {output!r} needs a name of its own: choose another"
                )
            outputs[output] = tuple(columns)
        for columns in outputs.values():
            row_type(columns)  # raises for duplicate columns
        return outputs

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
            columns = [column[:ready] for column in columns]
            rows = rows_from_columns(columns, self._machine.row, ready)
            matcher.feed(times[:ready], rows)
            if ready == len(times):
                del key.state["held"]
            else:
                key.state["held"] = [column[ready:] for column in held]
        matcher.advance(clock)
        self._finish(key, matcher)

    def _hold(self, key: Key, events: Sequence[Event]) -> None:
        """Keep rows, by column, until the watermark passes them."""
        if late := bisect_right(events, key.watermark, key=_time_of):
            for event in events[:late]:
                self._handle_late(key, event.row)
            events = events[late:]
            if not events:
                return
        new = [
            [event.time for event in events],
            *map(list, zip(*(e.row for e in events), strict=True)),
        ]
        held = key.state.get("held")
        if held:
            behind = held[0][-1] > new[0][0]
            for column, more in zip(held, new, strict=True):
                column.extend(more)
            if behind:  # the sort is stable: rows of one time stay in order of arrival
                order = sorted(range(len(held[0])), key=held[0].__getitem__)
                held = [[column[at] for at in order] for column in held]
        key.state["held"] = held = held or new
        self._set_only_timer(key, held[0][0])

    def _handle_late(self, key: Key, row: Row) -> None:
        if self._late is None:
            self.late_dropped += 1
        else:
            key.emit(self._machine.keep(row), self._late)

    def _set_only_timer(self, key: Key, time: int) -> None:
        """Keep one timer, at the earliest time that anything can happen."""
        timers = key.timers(self._domain)
        if timers and timers[0].time <= time:
            return
        for timer in timers:
            key.delete_timer(timer.time, timer.tag, self._domain)
        key.set_timer(time, domain=self._domain)

    def _finish(self, key: Key, matcher: Matcher) -> None:
        for finding in matcher.matches:
            for row in self._select_rows(key, finding):
                key.emit(row)
        if self._timed_out:
            for finding in matcher.timed_out:
                match = group_rows(finding.node, self._machine.names)
                for row in rows_of(self._timed_out.select(match, self._context(key, finding))):
                    key.emit(row, self._timed_out.output)
        left = matcher.dump()
        if left is None:
            key.state.pop("match", None)
        else:
            key.state["match"] = left
        held = key.state.get("held")
        due = min(matcher.next_due(), held[0][0] if held else END)
        if due < END:
            self._set_only_timer(key, due)

    def _select_rows(self, key: Key, finding: Finding) -> Iterator[Any]:
        context = self._context(key, finding)
        match = group_rows(finding.node, self._machine.names)
        if self._select is not None:
            yield from rows_of(self._select(match, context))
        else:
            stages = ([tuple(row) for row in match.get(s, ())] for s in self._machine.names)
            yield (*key.value, context.start, context.end, *stages)

    def _context(self, key: Key, finding: Finding) -> MatchContext:
        node = finding.node
        return MatchContext(
            self._key(key.value),
            finding.time,
            to_datetime(node[BEGAN]),
            to_datetime(node[TIME]),
            key.watermark,
            key.now,
        )
