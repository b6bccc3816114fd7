"""A running pipeline: Spark's own query, and a stop that lets the batch in hand finish."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from poundlock.errors import Fenced, PoundlockError
from poundlock.spark.failures import operator_error
from poundlock.spark.internals import sleep_in_stream_thread

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from poundlock.spark.pipeline.batch import Batches

_POLL_S = 0.02
_HOLD_MS = 24 * 3600 * 1000


class Query:
    """Spark's streaming query, and more. Whatever is not here is Spark's own."""

    def __init__(self, name: str):
        self._name = name
        self._spark: StreamingQuery | None = None
        self._batches: Batches | None = None
        self._asked = threading.Event()  # no further batch begins
        self._now = threading.Event()  # the batch in hand gives up what it can only wait for
        self._in_hand = threading.Event()
        self._held = threading.Event()  # a batch waits at the gate for Spark to be stopped
        self.error: BaseException | None = None

    def started(self, query: StreamingQuery, batches: Batches) -> None:
        """Take hold of Spark's query, once it runs."""
        self._spark, self._batches = query, batches

    @property
    def spark_query(self) -> StreamingQuery:
        """Spark's own query object."""
        assert self._spark is not None, "the query has not been started"
        return self._spark

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.spark_query, name)

    # What the batch asks of us.

    def enter(self, frame: DataFrame, batch: int) -> None:
        """Let a batch begin, unless we have been asked to stop."""
        if self._asked.is_set():
            self._held.set()
            # Sleep in the stream's own JVM thread. Spark's stop() interrupts it there, and Spark knows
            # that interruption for a stop; had we returned, it would take the batch for done.
            sleep_in_stream_thread(frame.sparkSession, _HOLD_MS)
        self._in_hand.set()

    def leave(self, batch: int, error: BaseException | None) -> None:
        """Take note that a batch is over."""
        if error is not None and not self._held.is_set():
            self.error = error
        self._in_hand.clear()

    def must_stop(self) -> bool:
        """Say whether waiting any longer is unwanted."""
        return self._now.is_set()

    # What the user asks of us.

    def stop(self, timeout: float | None = None) -> None:
        """Stop after the batch in hand is through both gates and in Spark's own commit log.

        After `timeout` seconds stop at once: what is decided is finished at the next start.
        """
        query = self.spark_query
        self._asked.set()
        deadline = None if timeout is None else time.monotonic() + timeout
        while query.isActive and not self._held.is_set():
            idle = not self._in_hand.is_set() and not query.status["isTriggerActive"]
            if idle or (deadline is not None and time.monotonic() > deadline):
                break
            time.sleep(_POLL_S)
        self._now.set()
        query.stop()
        self._close()

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802 (Spark's name)
        """Wait as Spark does, but raise the very error of ours that ended the query."""
        try:
            if timeout is None:
                self.spark_query.awaitTermination()
                ended: bool | None = True
            else:
                ended = self.spark_query.awaitTermination(timeout)  # pyright: ignore (takes floats)
        except StreamingQueryException as wrapped:
            self._close()
            raise self._reason(wrapped) from wrapped
        if ended:
            self._close()
        return ended

    def processAllAvailable(self) -> None:  # noqa: N802 (Spark's name)
        """Wait until all that the sources have now is through. Raises as `awaitTermination` does."""
        try:
            self.spark_query.processAllAvailable()
        except StreamingQueryException as wrapped:
            raise self._reason(wrapped) from wrapped

    def _reason(self, wrapped: StreamingQueryException) -> BaseException:
        """Return the error of ours that ended the query, or Spark's where there is none."""
        if isinstance(self.error, PoundlockError):
            return self.error
        if failed := operator_error(wrapped):  # before our batch began, as when a task opens it
            return failed
        try:
            # Between two batches Spark stumbles over a second driver's files before we do.
            if self._batches is not None:
                self._batches.coordinator.log.ensure_owned()
        except Fenced as fenced:
            return fenced
        except PoundlockError:
            pass  # whether we were replaced cannot be seen now
        return wrapped

    def _close(self) -> None:
        self._now.set()  # nothing is waited for any more
        if self._batches is not None:
            self._batches.close(sweep=self.error is None)
