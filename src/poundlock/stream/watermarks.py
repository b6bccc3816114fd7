"""Watermark strategies of a flow: bounded delay, monotone, punctuated, or ingestion time."""

from __future__ import annotations

from dataclasses import dataclass

from poundlock.stream.times import Duration, milliseconds


@dataclass(frozen=True)
class Watermark:
    """Later rows are expected to be at most `delay` milliseconds older than the newest row."""

    delay: int
    mark: str | None = None  # SQL for the time of a row that advances the watermark; None: all rows


@dataclass(frozen=True)
class Ingestion:
    """Event time is the start of a row's batch. A replay keeps it."""


def bounded(delay: Duration) -> Watermark:
    """Rows are out of order by at most `delay`. The same as `watermark=delay`."""
    return Watermark(milliseconds(delay, "watermark"))


def monotone() -> Watermark:
    """Times never decrease, except within a batch."""
    return Watermark(0)


def punctuated(mark: str, *, delay: Duration = "0 seconds") -> Watermark:
    """Only rows for which `mark`, an SQL expression, gives a time advance the watermark.

    `punctuated("CASE WHEN kind = 'heartbeat' THEN ts END")`
    """
    return Watermark(milliseconds(delay, "delay"), mark)


def ingestion() -> Ingestion:
    """For `time=`: the time of a row is the start of its batch, so no row is late."""
    return Ingestion()
