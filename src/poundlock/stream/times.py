"""Times and durations: whole milliseconds since 1970, as Flink counts them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import NamedTuple

from poundlock.errors import UsageError

BEGINNING = -(2**63)  # the watermark before the first row
END = 2**63 - 1

Duration = str | int | float | timedelta

_SECOND, _MINUTE, _HOUR, _DAY = 1000, 60_000, 3_600_000, 86_400_000
_UNITS = {"ms": 1, "millisecond": 1, "week": 7 * _DAY, "d": _DAY, "day": _DAY}
_UNITS |= {"h": _HOUR, "hour": _HOUR, "min": _MINUTE, "minute": _MINUTE}
_UNITS |= {"s": _SECOND, "sec": _SECOND, "second": _SECOND}
_PART = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-z]+)\s*")


class Domain(Enum):
    """The clock of a timer."""

    EVENT = "event"
    PROCESSING = "processing"


class Clock(NamedTuple):
    """The two times of a batch. They are fixed before its first row.

    `watermark`: no row with this time or an earlier one is expected. That is Flink's definition, one
    millisecond below Spark's. `now`: the batch's processing time, which a replay keeps.
    """

    watermark: int = BEGINNING
    now: int = 0

    def of(self, domain: Domain) -> int:
        return self.watermark if domain is Domain.EVENT else self.now


def milliseconds(duration: Duration, what: str, *, least: int = 0) -> int:
    """Return a duration in milliseconds: "1 minute 30 seconds", a timedelta, or seconds as a number.

    `what` names it in the error, if it is invalid or below `least`.
    """
    if isinstance(duration, timedelta):
        value = round(duration.total_seconds() * 1000)
    elif isinstance(duration, str):
        value = _parse(duration, what)
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        value = round(duration * 1000)
    else:
        raise UsageError(f"{what}={duration!r}: give a text such as '10 seconds', or a timedelta")
    if value < least:
        problem = "negative" if value < 0 else "too short"
        raise UsageError(f"{what}={duration!r} is {problem}: give at least {least} ms")
    return value


def _parse(text: str, what: str) -> int:
    rest = text.lower().strip().removeprefix("interval ")
    total, at = 0.0, 0
    while at < len(rest):
        part = _PART.match(rest, at)
        unit = part and (_UNITS.get(part[2]) or _UNITS.get(part[2].removesuffix("s")))
        if not part or not unit:
            break
        total, at = total + float(part[1]) * unit, part.end()
    if at < len(rest) or not rest:
        raise UsageError(
            f"{what}={text!r} cannot be read: write it as '10 seconds', '1 minute 30 seconds', '2 h'"
        )
    return round(total)


def to_datetime(time: int) -> datetime:
    """Return milliseconds since 1970 as a datetime in UTC."""
    return datetime.fromtimestamp(0, timezone.utc) + timedelta(milliseconds=time)


def from_datetime(time: datetime) -> int:
    """Return a datetime as milliseconds since 1970. Without a time zone it is UTC."""
    if time.tzinfo is None:
        time = time.replace(tzinfo=timezone.utc)
    return (time - datetime.fromtimestamp(0, timezone.utc)) // timedelta(milliseconds=1)
