"""A running pipeline: Spark's query, with a stop that lets the current batch finish."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from poundlock.errors import Fenced, PoundlockError
from poundlock.spark.failures import bare, debugging, operator_error
from poundlock.spark.internals import sleep_in_stream_thread, without_plan
from poundlock.spark.pipeline.lookout import Lookout

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from poundlock.spark.pipeline.batch import Batches

logger = logging.getLogger("poundlock")

_POLL_S = 0.02
_HOLD_MS = 24 * 3600 * 1000


class Query:
    """Spark's streaming query with its own `stop`. Other attributes are those of Spark's query."""

    def __init__(self, name: str, stopping: threading.Event | None = None):
        self._name = name
        self._stopping = stopping or threading.Event()  # ends a start that waits
        self._spark: StreamingQuery | None = None
        self._batches: Batches | None = None
        self._asked = threading.Event()  # no further batch begins
        self._now = threading.Event()  # the current batch stops waiting
        self._in_hand = threading.Event()
        self._held = threading.Event()  # a batch waits in `enter` until Spark stops the query
        self.error: BaseException | None = None
        self._lookout: Lookout | None = None

    def started(self, query: StreamingQuery, batches: Batches) -> None:
        """Set Spark's query after it has started."""
        self._spark, self._batches = query, batches
        self._lookout = Lookout(self._name, self._look, self._replaced)
        self._lookout.start()

    def _look(self) -> None:
        if self._batches is not None and self.spark_query.isActive:
            self._batches.look()

    def _replaced(self, fenced: Fenced) -> None:
        logger.error("%s: %s", self._name, fenced)
        self.error = fenced
        self._asked.set()
        self._now.set()
        self.spark_query.stop()
        self._close()

    @property
    def spark_query(self) -> StreamingQuery:
        """Spark's own query object."""
        assert self._spark is not None, "the query has not been started"
        return self._spark

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.spark_query, name)

    # The `Gate` of the batches.

    def enter(self, frame: DataFrame, batch: int) -> None:
        """Let a batch begin, unless a stop was requested."""
        if self._asked.is_set():
            self._held.set()
            # Sleep in the stream's JVM thread until Spark's stop() interrupts it. Spark recognises
            # that as a stop. If this method returned, Spark would treat the batch as done.
            sleep_in_stream_thread(frame.sparkSession, _HOLD_MS)
        self._in_hand.set()

    def leave(self, batch: int, error: BaseException | None) -> None:
        """Record that a batch has ended."""
        if error is not None and not self._held.is_set():
            self.error = error
        self._in_hand.clear()

    def must_stop(self) -> bool:
        """Return whether the current batch, or the start, must stop waiting."""
        return self._now.is_set() or (self._spark is None and self._stopping.is_set())

    # The API for users.

    def stop(self, timeout: float | None = None) -> None:
        """Stop after the current batch is committed and in Spark's commit log.

        After `timeout` seconds, stop at once. The next start finishes a decided batch.
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
        """Wait as Spark does, but raise the original Poundlock error that ended the query."""
        try:
            if timeout is None:
                self.spark_query.awaitTermination()
                ended: bool | None = True
            else:
                ended = self.spark_query.awaitTermination(timeout)  # pyright: ignore (takes floats)
        except StreamingQueryException as wrapped:
            self._close()
            self._fail(wrapped)
        if ended:
            self._close()
            self._raise_if_replaced()
        return ended

    def processAllAvailable(self) -> None:  # noqa: N802 (Spark's name)
        """Wait until all available input is processed. Raises the errors of `awaitTermination`."""
        try:
            self.spark_query.processAllAvailable()
        except StreamingQueryException as wrapped:
            self._fail(wrapped)
        self._raise_if_replaced()

    def _raise_if_replaced(self) -> None:
        """Raise the error that ended an idle query, which Spark takes for stopped."""
        if isinstance(self.error, Fenced):
            raise self.error

    def _fail(self, wrapped: StreamingQueryException) -> NoReturn:
        """Raise the reason alone. At DEBUG level, raise it from Spark's error with its plan."""
        reason = self._reason(wrapped)
        if debugging():
            raise reason from wrapped
        if reason is wrapped:
            cause = self.error if isinstance(self.error, Exception) else None
            raise without_plan(wrapped, cause) from cause
        raise bare(reason) from None

    def _reason(self, wrapped: StreamingQueryException) -> BaseException:
        """Return the Poundlock error that ended the query, or else Spark's."""
        if isinstance(self.error, PoundlockError):
            return self.error
        if failed := operator_error(
            wrapped
        ):  # an operator failed before the batch function was called
            return failed
        try:
            # Between two batches, Spark fails on a second driver's files before Poundlock sees them.
            if self._batches is not None:
                self._batches.ensure_owned()
        except Fenced as fenced:
            return fenced
        except PoundlockError:
            pass  # it is unknown whether this driver was replaced
        return wrapped

    def _close(self) -> None:
        self._now.set()  # no batch may wait any longer
        if self._lookout is not None:
            self._lookout.end()
        if self._batches is not None:
            self._batches.close(sweep=self.error is None)
