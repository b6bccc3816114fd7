"""Evictors, as in Flink: they remove rows from a window before or after its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from poundlock.errors import UsageError
from poundlock.stream.rows import Row
from poundlock.stream.times import Duration, milliseconds
from poundlock.stream.windows import at_least_one

Timed = list[tuple[int, Row]]  # rows with their times, in order of arrival


class Evictor:
    """Removes rows from a window that fires. Subclass it to write your own.

    Removed rows are also removed from the window's state. `context` has the window and the times.
    """

    def evict_before(self, rows: Timed, context: Any) -> Timed:
        """Return the rows for the window's result."""
        return rows

    def evict_after(self, rows: Timed, context: Any) -> Timed:
        """Return the rows that stay in the window after its result."""
        return rows


class _Either(Evictor):
    """Removes the same rows either before or after the result."""

    after: bool

    def keep(self, rows: Timed) -> Timed:
        raise NotImplementedError

    def evict_before(self, rows: Timed, context: Any) -> Timed:
        return rows if self.after else self.keep(rows)

    def evict_after(self, rows: Timed, context: Any) -> Timed:
        return self.keep(rows) if self.after else rows


@dataclass(frozen=True)
class ByCount(_Either):
    size: int
    after: bool

    def keep(self, rows: Timed) -> Timed:
        return rows[-self.size :]


@dataclass(frozen=True)
class ByTime(_Either):
    size: int
    after: bool

    def keep(self, rows: Timed) -> Timed:
        bound = max((time for time, _ in rows), default=0) - self.size
        return [each for each in rows if each[0] > bound]


@dataclass(frozen=True)
class ByDelta(_Either):
    threshold: float
    function: Callable[[Row, Row], float]
    after: bool

    def keep(self, rows: Timed) -> Timed:
        return [each for each in rows if self.function(each[1], rows[-1][1]) < self.threshold]


def by_count(size: int, *, after: bool = False) -> Evictor:
    """Keep the last `size` rows."""
    return ByCount(at_least_one(size, "size"), after)


def by_time(size: Duration, *, after: bool = False) -> Evictor:
    """Keep the rows that are less than `size` older than the newest."""
    return ByTime(milliseconds(size, "size", least=1), after)


def by_delta(
    threshold: float, function: Callable[[Row, Row], float], *, after: bool = False
) -> Evictor:
    """Keep the rows for which `function(row, last)` is below `threshold`; `last` is the last row."""
    return ByDelta(threshold, delta_function(function), after)


def delta_function(function: Any) -> Callable[[Row, Row], float]:
    """Return the value if it is a function. Raises `UsageError` if not."""
    if callable(function):
        return cast("Callable[[Row, Row], float]", function)
    raise UsageError(f"function={function!r}: give a function of two rows that returns a number")
