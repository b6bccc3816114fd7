"""Batches of a query that Spark's own code started: the function behind `poundlock.foreach_batch`.

The function sees only batches, so it reads two things from Spark's query object.

- `isActive` is false as soon as `query.stop()` is called. A batch that still runs then stops waiting:
  an undecided batch is aborted, and the next start finishes a decided one.
- `awaitTermination` returns when the query's thread has ended. A daemon thread then sweeps and closes
  the connections. A `StreamingQueryListener` may lose events, and reports no stop during a batch.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession

from poundlock.core.surroundings import Settings
from poundlock.errors import Fenced, InDoubt, Rejected, Unavailable, UsageError
from poundlock.spark import internals
from poundlock.spark.internals import RunningQuery, StoppedBySpark
from poundlock.spark.pipeline.batch import Batches
from poundlock.spark.pipeline.factory import LOG_DIRECTORY, build_batches
from poundlock.spark.pipeline.routes import Route, routed
from poundlock.spark.plan import read_analyzed

logger = logging.getLogger("poundlock")

_POLL_MS = 1000  # the longest time of one call; it returns as soon as the query ends


class QueryRun:
    """One run of a query, from its first batch to its end. The `Gate` of its batches."""

    def __init__(self, run_id: str, query: RunningQuery):
        self.run_id = run_id
        self.query = query
        self._batches: Batches | None = None
        self._error: BaseException | None = None
        self._closing = threading.Lock()

    @property
    def batches(self) -> Batches:
        assert self._batches is not None, "begin comes first"
        return self._batches

    def begin(self, batches: Batches, *, adopt: bool, first: bool, abandoned: Set[str]) -> None:
        """Take over, and close the batches when the query ends."""
        self._batches = batches
        try:
            batches.take_over(adopt=adopt, first=first, abandoned=abandoned)
        except BaseException as error:
            batches.close(sweep=False)
            if self._stopped(error):
                logger.warning("the start of %s was stopped: %s", batches.name, error)
                raise StoppedBySpark from None
            raise
        name = f"poundlock-{batches.name}-end"
        threading.Thread(target=self._close_at_end, name=name, daemon=True).start()
        # The program may end while the thread is still closing.
        atexit.register(self._close_at_exit)

    def enter(self, frame: DataFrame, batch: int) -> None:
        if self.must_stop():
            raise StoppedBySpark

    def leave(self, batch: int, error: BaseException | None) -> None:
        if self._stopped(error):
            logger.warning("batch %d was stopped: %s", batch, error)
            raise StoppedBySpark from None
        if not isinstance(error, StoppedBySpark):
            self._error = error

    def _stopped(self, error: BaseException | None) -> bool:
        """Return whether an error only says that a wait was ended by a stop."""
        return isinstance(error, Rejected | Unavailable | InDoubt) and self.must_stop()

    def must_stop(self) -> bool:
        return not self.query.is_active()

    def close(self, *, sweep: bool) -> None:
        """Sweep, unless a batch failed, and close all connections. Only the first call does it."""
        with self._closing:
            try:
                self.batches.close(sweep=sweep and self._error is None)
            except Exception:  # the query is over, and its result must not change
                logger.exception("%s: connections could not be closed", self.batches.name)
        atexit.unregister(self._close_at_exit)

    def _close_at_end(self) -> None:
        while not self.query.wait(_POLL_MS):
            fenced = self._look()
            if fenced is not None:
                logger.error("%s: %s", self.batches.name, fenced)
                self._error = fenced
                self.query.stop()
        self.close(sweep=True)

    def _look(self) -> Fenced | None:
        try:
            self.batches.look()
        except Fenced as fenced:
            return fenced
        except Exception:  # noqa: BLE001 (a sink of the user's own may raise any)
            pass  # it is unknown: the next look may tell
        return None

    def _close_at_exit(self) -> None:
        if self.query.wait(1):  # a batch that still runs would lose its branches to the sweep
            self.close(sweep=True)


@dataclass
class ForeachBatch:
    """The function that the user passes to `writeStream.foreachBatch`."""

    routes: Sequence[Route]
    name: str
    log_location: str | None
    adopt_checkpoint: bool
    abandoned: Set[str]
    settings: Settings
    _query_id: str | None = field(default=None, init=False)
    _run: QueryRun | None = field(default=None, init=False)

    def __call__(self, frame: DataFrame, batch: int) -> None:
        query_id, run_id = internals.batch_identity(frame.sparkSession)
        if self._query_id not in (None, query_id):
            # The log would take its batches for those of the other query with the same numbers.
            raise UsageError(
                f"this foreach_batch function already belongs to query {self._query_id}: call "
                "poundlock.foreach_batch again for the other query"
            )
        routed_frame = routed(frame, self.routes)  # checks the columns before anything else
        if self._run is None or self._run.run_id != run_id:
            if self._run is not None:
                self._run.close(sweep=False)  # the take-over sweeps
            query = internals.running_query(frame.sparkSession, query_id)
            run = QueryRun(run_id, query)
            run.begin(
                self._build(frame.sparkSession, query, run),
                adopt=self.adopt_checkpoint,
                first=batch == 0,
                abandoned=self.abandoned,
            )
            self._query_id, self._run = query_id, run
        self._run.batches(routed_frame, batch)

    def _build(self, spark: SparkSession, query: RunningQuery, run: QueryRun) -> Batches:
        root = query.checkpoint_location
        if internals.TEMPORARY.search(root):
            raise UsageError(
                "the query has no permanent checkpoint: every start would write all rows again. "
                "Set one with .option('checkpointLocation', ...)"
            )
        return build_batches(
            spark,
            read_analyzed(query.analyzed_plan),
            self.routes,
            name=self.name,
            mode=query.output_mode,
            checkpoint_location=root,
            log_location=self.log_location or f"{root}/{LOG_DIRECTORY}",
            settings=self.settings,
            gate=run,
            starts_spark=False,
        )
