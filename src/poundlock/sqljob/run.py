"""Starts pipelines together and waits for them. If one fails, the others are stopped."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from poundlock.core.guarantee import require
from poundlock.errors import InDoubt, Unavailable
from poundlock.spark.pipeline.pipeline import Pipeline
from poundlock.spark.pipeline.query import Query

logger = logging.getLogger("poundlock")

_POLL_S = 0.2
_FIRST_BATCH_S = 60.0


def start(
    pipelines: Sequence[Pipeline], trigger: str | None, stopping: threading.Event
) -> list[Query]:
    """Start pipelines, one after the other. If one cannot start, stop those that have."""
    for each in pipelines:
        require(each.guarantee())
    chosen: dict[str, Any] = {} if trigger is None else {"processingTime": trigger}
    running: list[Query] = []
    try:
        for each in pipelines:
            if running:
                _await_first_batch(running[-1], stopping)
            if stopping.is_set():
                break
            running += _started(each, stopping, **chosen)
    except BaseException:
        stop(running)
        raise
    return running


def _started(each: Pipeline, stopping: threading.Event, **trigger: Any) -> list[Query]:
    """Start a pipeline. Return no query if it was stopped while it waited for a system."""
    try:
        return [each.start(stopping=stopping, **trigger)]
    except (InDoubt, Unavailable) as error:
        if not stopping.is_set():
            raise
        logger.warning("%s was stopped before it began: %s", each.name, error)
        return []


def _await_first_batch(query: Query, stopping: threading.Event) -> None:
    """Wait for a query's first batch, for a minute at most.

    Spark gives a Python worker ten seconds to start. On a small machine, the first batches of many
    queries at once would start too many workers for that.
    """
    end = time.monotonic() + _FIRST_BATCH_S
    while query.isActive and not query.lastProgress and time.monotonic() < end:
        if stopping.wait(_POLL_S):
            return


def once(pipelines: Sequence[Pipeline], stopping: threading.Event) -> None:
    """Process the available data, one pipeline after the other. Each sees what earlier ones wrote."""
    for each in pipelines:
        require(each.guarantee())
    for each in pipelines:
        if stopping.is_set():
            return
        wait(_started(each, stopping, availableNow=True), stopping)


def wait(running: Sequence[Query], stopping: threading.Event) -> None:
    """Wait until all queries end. Once `stopping` is set, stop each after its current batch."""
    waiting = list(running)
    try:
        while waiting and not stopping.is_set():
            waiting = [query for query in waiting if not query.awaitTermination(_POLL_S)]
    finally:
        stop(waiting)


def stop(running: Sequence[Query]) -> None:
    """Stop all queries, each after its current batch."""
    for query in running:
        query.stop()


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets. A second signal interrupts.

    Enter this after the session is open: it replaces Spark's own handler, which would cancel the jobs
    of the current batch.
    """
    stopping = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
