"""Window assigners, as in Flink: they say which windows a row belongs to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from poundlock.errors import UsageError
from poundlock.stream.rows import Row
from poundlock.stream.times import BEGINNING, END, Duration, milliseconds


class Window(NamedTuple):
    """The times from `start` to just before `end`, in milliseconds."""

    start: int
    end: int

    @property
    def max_time(self) -> int:
        """The last time in the window."""
        return self.end - 1


@dataclass(frozen=True)
class GlobalWindow:
    """The one window for all rows of a key. It has no end."""

    start: ClassVar[int] = BEGINNING
    end: ClassVar[int] = END
    max_time: ClassVar[int] = END


GLOBAL = GlobalWindow()
Gap = Duration | Callable[[Row], Duration]


class Assigner(ABC):
    """Assigns rows to windows. A window's mark is plain data that identifies it in the state."""

    timed: ClassVar[bool] = True  # its windows have an end
    merges: ClassVar[bool] = False  # windows that touch are merged; their marks are (start, end)

    @abstractmethod
    def marks(self, time: int, row: Row) -> Sequence[Any]:
        """Return the marks of a row's windows."""

    @abstractmethod
    def window(self, mark: Any) -> Window | GlobalWindow:
        """Return the window with this mark."""


@dataclass(frozen=True)
class TimeWindows(Assigner):
    """Windows of one size. One starts at every slide. A window's mark is its start."""

    size: int
    slide: int
    offset: int = 0

    def marks(self, time: int, row: Row) -> Sequence[int]:
        return self.starts(time)

    def starts(self, time: int) -> range:
        """Return the starts of the windows that contain a time, the latest first."""
        return range(time - (time - self.offset) % self.slide, time - self.size, -self.slide)

    def window(self, mark: int) -> Window:
        return Window(mark, mark + self.size)


@dataclass(frozen=True)
class SessionWindows(Assigner):
    """Windows that end after a gap without rows. A window's mark is (start, end)."""

    merges: ClassVar[bool] = True

    gap: int | Callable[[Row], Duration]

    def marks(self, time: int, row: Row) -> Sequence[tuple[int, int]]:
        return (self.span(time, row),)

    def span(self, time: int, row: Row) -> tuple[int, int]:
        """Return the window of one row, before it is merged with those that it touches."""
        gap = self.gap
        if not isinstance(gap, int):
            gap = milliseconds(gap(row), "gap", least=1)
        return time, time + gap

    def window(self, mark: tuple[int, int]) -> Window:
        return Window(*mark)


@dataclass(frozen=True)
class GlobalWindows(Assigner):
    """One window for all rows of a key."""

    timed: ClassVar[bool] = False

    def marks(self, time: int, row: Row) -> Sequence[int]:
        return (0,)

    def window(self, mark: int) -> GlobalWindow:
        return GLOBAL


@dataclass(frozen=True)
class CountWindows(GlobalWindows):
    """A window over the last `size` rows of a key, after every `slide` rows."""

    size: int
    slide: int


def tumbling(size: Duration, *, offset: Duration = "0 seconds") -> TimeWindows:
    """Windows that follow each other. A row is in one window.

    They start at multiples of the size since 1970 in UTC, shifted by `offset`. For days in a time zone
    eight hours ahead of UTC, use `tumbling("1 day", offset="-8 hours")`.
    """
    whole = milliseconds(size, "size", least=1)
    return TimeWindows(whole, whole, _offset(offset, whole, "size"))


def sliding(size: Duration, slide: Duration, *, offset: Duration = "0 seconds") -> TimeWindows:
    """Windows that overlap. One starts at every slide, and a row is in all that contain its time.

    If the slide is longer than the size, rows between two windows are dropped.
    """
    step = milliseconds(slide, "slide", least=1)
    return TimeWindows(milliseconds(size, "size", least=1), step, _offset(offset, step, "slide"))


def sessions(gap: Gap) -> SessionWindows:
    """Windows of activity. A window ends after a gap without rows.

    `gap` is a duration, or a function that returns one for each row.
    """
    return SessionWindows(gap if callable(gap) else milliseconds(gap, "gap", least=1))


def count(size: int, slide: int | None = None) -> CountWindows:
    """Windows by number of rows.

    `count(5)` is a window for every five rows of a key. `count(10, 2)` is a window over the last ten
    rows, or fewer at first, after every second row.
    """
    for what, value in (("size", size), ("slide", slide)):
        at_least_one(value if value is not None else 1, what)
    return CountWindows(size, size if slide is None else slide)


def global_windows() -> GlobalWindows:
    """One window for all rows of a key. It needs a trigger."""
    return GlobalWindows()


def at_least_one(value: Any, what: str) -> int:
    """Return the value if it is a number of rows. Raises `UsageError` if not."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{what}={value!r}: give a whole number of rows, 1 or more")
    return value


def _offset(offset: Duration, step: int, what: str) -> int:
    value = milliseconds(offset, "offset", least=BEGINNING)
    if abs(value) >= step:
        raise UsageError(
            f"offset={offset!r} must be shorter than the {what}, whether positive or negative"
        )
    return value
