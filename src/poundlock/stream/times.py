"""Times and durations: whole milliseconds since 1970, as Flink counts them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import NamedTuple

from poundlock.errors import UsageError

BEGINNING = -(2**63)  # a watermark before every row
END = 2**63 - 1

Duration = str | int | float | timedelta

_UNITS = {
    "ms": 1, "millisecond": 1, "s": 1000, "sec": 1000, "second": 1000, "min": 60_000, "minute": 60_000,
    "h": 3_600_000, "hour": 3_600_000, "d": 86_400_000, "day": 86_400_000, "week": 604_800_000,
}  # fmt: skip
_PART = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-z]+)\s*")


class Domain(Enum):
    """Which clock a timer goes by."""

    EVENT = "event"
    PROCESSING = "processing"


class Clock(NamedTuple):
    """The two times of a batch, which no row of it can change.

    `watermark`: no row with this time or an earlier one is expected any more (Flink's sense: one
    millisecond below Spark's). `now`: the batch's own time, the same when it is replayed.
    """

    watermark: int = BEGINNING
    now: int = 0

    def of(self, domain: Domain) -> int:
        return self.watermark if domain is Domain.EVENT else self.now


def milliseconds(duration: Duration, what: str, *, least: int = 0) -> int:
    """Return a duration in milliseconds: "1 minute 30 seconds", a timedelta, or seconds as a number.

    `what` names it in the error for one that cannot be read or is below `least`.
    """
    if isinstance(duration, timedelta):
        value = round(duration.total_seconds() * 1000)
    elif isinstance(duration, str):
        value = _parsed(duration, what)
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        value = round(duration * 1000)
    else:
        raise UsageError(f"{what}={duration!r}: give a text such as '10 seconds', or a timedelta")
    if value < least:
        raise UsageError(f"{what}={duration!r} is {'negative' if value < 0 else 'too short'}")
    return value


def _parsed(text: str, what: str) -> int:
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
    """Return a datetime as milliseconds since 1970. One without a zone counts as UTC."""
    if time.tzinfo is None:
        time = time.replace(tzinfo=timezone.utc)
    return (time - datetime.fromtimestamp(0, timezone.utc)) // timedelta(milliseconds=1)
