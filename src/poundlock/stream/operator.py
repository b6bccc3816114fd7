"""The interface of an operator, and the runner of one page of keys.

A page is some keys of an operator. A hash assigns each key to one of a fixed number of pages, like
Flink's key groups. A page is read, run and written as a whole, so that state moves in few large
pieces and not in one call per key.

A batch has these steps:

1. The watermark and the batch's time advance. Timers that are due fire, the earliest first.
2. The operator gets each key's rows, sorted by time and source position.
3. Timers that the rows set and that are already due fire.

The result depends only on the rows and the clock, so a replayed batch gives the same result.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from poundlock.errors import OperatorFailed, PoundlockError, UsageError
from poundlock.stream.codec import decode, encode
from poundlock.stream.rows import NoColumn, Row, shaped
from poundlock.stream.times import Clock, Domain

MAIN = "main"
_HERE = str(Path(__file__).parent)
_DOMAINS = (Domain.EVENT, Domain.PROCESSING)  # in the order of a clock's fields


def user_error(who: str, error: Exception) -> OperatorFailed:
    """Return the error for an exception in a user's function: its type, and where it was raised.

    It leaves out the exception's text, which may hold row data. Raise it from the exception.
    """
    what = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_HERE)] or frames
    if isinstance(error, PoundlockError | NoColumn):  # these texts hold no row data
        what = f"{what}: {error}"
    elif outside:
        at = outside[-1]
        what = f"{what} in {at.name} ({Path(at.filename).name}, line {at.lineno})"
    return OperatorFailed(
        f"{who} failed: {what}. The batch was aborted and nothing of it was "
        "written. Correct the function and start again"
    )


def operator_error(operator: str, error: Exception) -> PoundlockError:
    """Return an error that names the operator. A user's exception is given by its type."""
    if isinstance(error, PoundlockError):
        return type(error)(f"operator {operator!r}: {error}")
    return user_error(f"operator {operator!r}", error)


class Event(NamedTuple):
    """A row for an operator."""

    time: int  # event time in milliseconds, or the batch's time in a flow without event time
    row: Row
    input: int = 0  # the number of its input


_time_of = itemgetter(0)
_MUTABLE = frozenset({list, dict, set, bytearray})


class Timer(NamedTuple):
    """A timer. Two timers of a key with equal fields are one."""

    time: int
    tag: Any = None  # plain data by which the operator knows the timer's purpose


def _find(timers: list[Timer], timer: Timer) -> int | None:
    """Return the place of a timer in a list that is sorted by time."""
    at = bisect_left(timers, timer.time, key=_time_of)
    while at < len(timers) and timers[at].time == timer.time:
        if timers[at] == timer:
            return at
        at += 1
    return None


class Operator(ABC):
    """Processes each key's rows.

    An instance belongs to one task. It keeps no data between calls, except in `key.state`, which is
    plain data. A key without state and timers is deleted.
    """

    name: str = "operator"
    outputs: Mapping[str, Sequence[str]] = {}  # the columns of each output; MAIN comes first
    domains: frozenset[Domain] = frozenset()  # the kinds of timers that it sets
    late_dropped: int = 0  # late rows of this task that were dropped for lack of an output

    def open(self) -> None:  # noqa: B027
        """Called once in a task, at its start."""

    def close(self) -> None:  # noqa: B027
        """Called once in a task, at its end."""

    @abstractmethod
    def on_rows(self, key: Key, events: Sequence[Event]) -> None:
        """Process the rows of one key in this batch, in order."""

    def on_timer(self, key: Key, timer: Timer, domain: Domain) -> None:  # noqa: B027
        """Process a timer that is due. It is already deleted, and may be set again."""

    def on_broadcast(self, shared: dict[str, Any], event: Event) -> None:  # noqa: B027
        """Process a row for every page. `shared` is the page's own state."""


@dataclass(slots=True, eq=False)
class Key:
    """One key in a batch: its state, its timers, the clock and the outputs."""

    value: tuple[Any, ...]
    state: dict[str, Any]
    _timers: tuple[list[Timer], list[Timer]]  # of event time, of processing time
    clock: Clock
    outputs: Mapping[str, Sequence[str]]
    _out: dict[str, list[tuple[Any, ...]]]
    shared: dict[str, Any]  # the page's own state, which all its keys share
    _domains: frozenset[Domain]

    @property
    def watermark(self) -> int:
        return self.clock.watermark

    @property
    def now(self) -> int:
        return self.clock.now

    def emit(self, value: Any, output: str = MAIN) -> None:
        """Send a row to an output: a row or dictionary by name, a tuple by place."""
        try:
            fields = self.outputs[output]
        except KeyError:
            raise UsageError(
                f"there is no output {output!r}: declare it, or use {', '.join(self.outputs)}"
            ) from None
        row = shaped(value, fields)
        for cell in row:
            if type(cell) in _MUTABLE:  # it may be part of the state, and change later
                row = deepcopy(row)
                break
        self._out.setdefault(output, []).append(row)

    def set_timer(self, time: int, tag: Any = None, domain: Domain = Domain.EVENT) -> None:
        """Set a timer: `on_timer` is called when the clock reaches `time`. Equal timers are one."""
        if domain not in self._domains:
            raise UsageError(
                f"a timer of {domain.value} time was set, but the operator has not declared it: add it "
                "to its `domains`"
            )
        timer, timers = Timer(time, tag), self._timers[domain is Domain.PROCESSING]
        if not timers or timers[-1].time < time:
            timers.append(timer)
        elif _find(timers, timer) is None:
            insort(timers, timer, key=_time_of)

    def delete_timer(self, time: int, tag: Any = None, domain: Domain = Domain.EVENT) -> None:
        """Delete a timer, if it is set."""
        timers = self._timers[domain is Domain.PROCESSING]
        if (at := _find(timers, Timer(time, tag))) is not None:
            del timers[at]

    def timers(self, domain: Domain = Domain.EVENT) -> list[Timer]:
        """Return the timers that are set, the earliest first."""
        return list(self._timers[domain is Domain.PROCESSING])


# A stored key: its bytes, and the times of its next timers by domain. Decoded only when it is needed.
_Entry = Sequence[Any]


class Done(NamedTuple):
    """A page after a batch."""

    data: bytes | None  # None: there is no state
    outputs: dict[str, list[tuple[Any, ...]]]
    due: dict[Domain, int | None]  # the earliest timers


FORMAT = 1


def read_page(data: bytes | None) -> tuple[dict[str, Any], dict[bytes, Sequence[Any]]]:
    """Return a page's own state, and each key's entry by the key's bytes: (body, due, due)."""
    if not data:
        return {}, {}
    version, shared, entries = decode(data)
    if version != FORMAT:
        raise UsageError(
            f"the state has format {version}, and this version reads {FORMAT}: use the version of "
            "Poundlock that wrote it"
        )
    return shared, {key: rest for key, *rest in entries}


def read_key(key: bytes, entry: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """Return a key, its state and its timers by domain, from an entry of `read_page`."""
    state, timers = decode(entry[0])
    return decode(key), state, timers


class Page:
    """A page with its keys' state and timers, during one batch."""

    def __init__(
        self, operator: Operator, data: bytes | None, clock: Clock, before: Clock | None = None
    ) -> None:
        """Open a page from its bytes.

        `before`: the previous clock, if another operator made the rows. That operator emitted them
        while the clock moved from `before` to `clock`. So they are processed at `before`; otherwise
        all rows from its timers would be late here.
        """
        self._operator = operator
        self._clock = clock
        self._before = before
        self._data = data
        self._shared, entries = read_page(data)
        self._shared_was = encode(self._shared)
        self._entries: dict[bytes, _Entry] = entries
        self._open: dict[bytes, Key] = {}
        self._changed = False
        self._out: dict[str, list[tuple[Any, ...]]] = {}

    def run(
        self, events: Mapping[tuple[Any, ...], Sequence[Event]], broadcast: Iterable[Event] = ()
    ) -> Done:
        """Run a batch: due timers, broadcast rows, each key's rows, and timers that are due then."""
        clock, rows_clock = self._clock, self._before or self._clock
        self._clock = rows_clock
        self._fire()
        for event in broadcast:
            self._call("on_broadcast", self._shared, event)
        keyed: dict[bytes, Sequence[Event]] = {}
        for value, rows in events.items():
            data = encode(value)
            keyed[data] = [*keyed[data], *rows] if data in keyed else rows
        for data in sorted(keyed):
            self._call("on_rows", self._opened(data), keyed[data])
        self._clock = clock
        for key in self._open.values():
            key.clock = clock
        self._fire()
        return self._finish()

    def _fire(self) -> None:
        """Fire due timers, the earliest first, until none is left."""
        clock = self._clock
        while True:
            due = sorted(
                (time, at, data)
                for at, now in enumerate(clock)
                for data, time in self._earliest(at)
                if time <= now
            )
            if not due:
                return
            for _, at, data in due:
                key = self._opened(data)
                timers = key._timers[at]
                if timers and timers[0].time <= clock[at]:
                    self._call("on_timer", key, timers.pop(0), _DOMAINS[at])

    def _earliest(self, at: int) -> Iterator[tuple[bytes, int]]:
        """Yield the keys with timers of a domain, and the time of the first one."""
        opened = self._open
        for data, entry in self._entries.items():
            if entry[1 + at] is not None and data not in opened:
                yield data, entry[1 + at]
        for data, key in opened.items():
            if key._timers[at]:
                yield data, key._timers[at][0].time

    def _opened(self, data: bytes) -> Key:
        key = self._open.get(data)
        if key is None:
            entry = self._entries.get(data)
            state: dict[str, Any] = {}
            timers: tuple[list[Timer], list[Timer]] = [], []
            if entry is not None:
                state, (event, processing) = decode(entry[0])
                timers = [Timer(*each) for each in event], [Timer(*each) for each in processing]
            self._open[data] = key = Key(
                decode(data),
                state,
                timers,
                self._clock,
                self._operator.outputs,
                self._out,
                self._shared,
                self._operator.domains,
            )
        return key

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self._operator, method)(*arguments)
        except Exception as error:
            raise operator_error(self._operator.name, error) from error

    def _finish(self) -> Done:
        try:
            return self._save()
        except UsageError as error:  # a value that cannot be stored
            raise operator_error(self._operator.name, error) from error

    def _save(self) -> Done:
        entries = self._entries
        for data, key in self._open.items():
            event, processing = key._timers
            if not key.state and not event and not processing:
                self._changed |= entries.pop(data, None) is not None
                continue
            body = encode([key.state, [list(map(list, event)), list(map(list, processing))]])
            before = entries.get(data)
            if before is None or before[0] != body:
                self._changed = True
                next_event = event[0].time if event else None
                entries[data] = (body, next_event, processing[0].time if processing else None)
        self._changed |= encode(self._shared) != self._shared_was
        due = {
            domain: min(
                (entry[1 + at] for entry in entries.values() if entry[1 + at] is not None),
                default=None,
            )
            for at, domain in enumerate(_DOMAINS)
        }
        return Done(self._bytes(), self._out, due)

    def _bytes(self) -> bytes | None:
        if not self._changed:
            return self._data
        if not self._entries and not self._shared:
            return None
        entries = [[key, *entry] for key, entry in self._entries.items()]
        return encode([FORMAT, self._shared, entries])
