"""How a flow learns what time it is: from its rows, from marks among them, or from arrival."""

from __future__ import annotations

from dataclasses import dataclass

from poundlock.stream.times import Duration, milliseconds


@dataclass(frozen=True)
class Watermark:
    """A promise about rows to come: none is older than the newest seen, less `delay` milliseconds."""

    delay: int
    mark: str | None = None  # an expression that gives the time of a mark; None: every row is one


@dataclass(frozen=True)
class Ingestion:
    """Event time is when the batch of a row began: it is the same when the batch is replayed."""


def bounded(delay: Duration) -> Watermark:
    """Rows come out of order by no more than `delay`. The same as `watermark=delay`."""
    return Watermark(milliseconds(delay, "watermark"))


def monotone() -> Watermark:
    """Times never go back, but within a batch."""
    return Watermark(0)


def punctuated(mark: str, *, delay: Duration = "0 seconds") -> Watermark:
    """Only certain rows move the watermark: those for which `mark`, in SQL, gives a time.

    `punctuated("CASE WHEN kind = 'heartbeat' THEN ts END")`
    """
    return Watermark(milliseconds(delay, "delay"), mark)


def ingestion() -> Ingestion:
    """For `time=`: rows have the time of the batch that brought them, and are never late."""
    return Ingestion()
