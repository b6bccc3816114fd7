"""The function that Spark calls for each batch: it runs the batch and commits the offsets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession

from poundlock.core.checkpoint import Checkpoint, Plan
from poundlock.core.coordinator import Coordinator
from poundlock.core.owner import has_ended, this_process
from poundlock.core.participant import Participant
from poundlock.core.protocol import Step
from poundlock.errors import LogMismatch, PoundlockError, Unavailable
from poundlock.sources.kafka import KafkaSource, OffsetMode
from poundlock.spark import internals
from poundlock.spark.failures import bare, debugging
from poundlock.spark.pipeline.cut import Pin, Settings
from poundlock.spark.pipeline.job import SparkJob
from poundlock.spark.pipeline.origin import describe_offsets
from poundlock.spark.storage import source_offsets

logger = logging.getLogger("poundlock")

_LAST_BATCH_S = 30.0  # that a close waits for a batch which was interrupted


class Gate(Protocol):
    """Stops the batches when the query has been asked to stop."""

    def enter(self, frame: DataFrame, batch: int) -> None:
        """Begin a batch, or raise an error that Spark recognises as a stop."""
        ...

    def leave(self, batch: int, error: BaseException | None) -> None:
        """End a batch."""
        ...

    def must_stop(self) -> bool:
        """Return whether the batch should fail instead of waiting for a system."""
        ...


@dataclass
class Batches:
    """The function given to `foreachBatch`. Runs on the driver, one batch at a time."""

    name: str
    coordinator: Coordinator
    checkpoint: Checkpoint
    sinks: Sequence[Participant]
    dead_letters: Mapping[str, Participant | None]  # see `dead_letter_routes`
    sources: Sequence[KafkaSource | None]  # in the plan's order; None for any other source
    stateful: bool
    prepare_timeout_s: float | None
    observe: Callable[[Step, Mapping[str, object]], None]
    gate: Gate
    at_most_once: bool = False  # no task may run a second time
    least_time_left_s: float = 0  # that a branch must have left at the decision
    speculation: bool = False  # Spark may start copies of slow tasks
    starts_spark: bool = True  # Spark reads the checkpoint only after `take_over`
    _session: SparkSession | None = field(default=None, init=False)  # that made the query's frame
    _settings: Settings | None = field(default=None, init=False)
    _pin: Pin | None = field(default=None, init=False)
    _bound: bool = field(default=False, init=False)
    _query: internals.RunningQuery | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)
    # The log is not thread-safe: nobody looks into it while a batch runs, or after the close began.
    _busy: threading.Lock = field(default_factory=threading.Lock, init=False)
    _looking: threading.Lock = field(default_factory=threading.Lock, init=False)

    def take_over(
        self, *, adopt: bool = False, first: bool = False, abandoned: Set[str] = frozenset()
    ) -> None:
        """Become the pipeline's owner and finish decided batches.

        `adopt` means that the checkpoint's query has run without Poundlock until now, and `first` that
        it has finished no batch. Otherwise, a checkpoint without a log means that the log was deleted.
        A new log may follow those with the identities `abandoned`.
        """
        known = self.coordinator.log.load().generation is not None
        if known and adopt:
            logger.warning(
                "%s: adopt_checkpoint=True has no effect any more: remove it. If the log is deleted "
                "and a sink cannot prove it, the pipeline would start anew without an error",
                self.name,
            )
        if not (known or adopt or first) and self.checkpoint.query() is not None:
            raise LogMismatch(
                f"there is a checkpoint, but no log at {self.coordinator.log.uri}: the log was "
                "deleted, and it is unknown which batch was committed. Restore it, or start with a "
                "new checkpoint location. If the checkpoint's query never ran with Poundlock, set "
                "adopt_checkpoint=True: its last batch may be written again"
            )
        self.coordinator.take_over(
            self.name,
            query=self.checkpoint.query,
            owner=this_process(),
            abandoned=abandoned,
            has_ended=has_ended,
        )
        if self.starts_spark:
            self.checkpoint.mend(self.coordinator.log)

    def look(self) -> None:
        """Raise `Fenced` if another driver has taken over. A batch that runs finds out by itself.

        Sweep at intervals: a task of the driver before may have ended only now.
        """
        if not self._busy.acquire(blocking=False):
            return
        try:
            with self._looking:
                if not self._closed:
                    self.coordinator.idle()
        finally:
            self._busy.release()

    def ensure_owned(self) -> None:
        """Raise `Fenced` if another driver has taken over. No batch may be running."""
        with self._looking:
            self.coordinator.log.ensure_owned()

    def pin(self, session: SparkSession) -> None:
        """Set what cut the rows of a decided batch that is not finished. Spark plans it first.

        `session` is the one that made the query's frame. The first batch restores it.
        """
        self._session = session
        if cut := self.coordinator.cut_to_repeat():
            self._pin = Pin(cut)
            self._pin.set(session)

    def unpin(self) -> None:
        """Restore the session that made the query's frame."""
        if self._pin is not None and self._session is not None:
            self._pin.restore(self._session)

    def close(self, *, sweep: bool) -> None:
        """Abort the branches of failed attempts, and close the driver's connections.

        Kafka's readers see nothing after an open branch, and the next start may be a long time away.
        """
        with self._looking:
            if self._closed:
                return
            self._closed = True
        self.unpin()
        # Spark's thread may have ended before the batch in Python has, which then aborts its branches.
        idle = self._busy.acquire(timeout=_LAST_BATCH_S)
        try:
            if (
                sweep and not idle
            ):  # it may still decide: nothing that it has prepared may be aborted
                logger.warning("%s: a batch still runs, so the next start sweeps", self.name)
            elif sweep:
                self.coordinator.end(copies=self.speculation)
        except PoundlockError as error:
            logger.warning(
                "%s: the last sweep failed, the next start repeats it: %s", self.name, error
            )
        finally:
            if idle:
                self._busy.release()
        self.coordinator.close()
        for source in self.sources:
            if source is not None:
                source.close()

    def __call__(self, frame: DataFrame, batch: int) -> None:
        error: BaseException | None = None
        query, pin = frame.sparkSession, self._pin
        self.unpin()  # the batch is planned
        try:
            self.gate.enter(frame, batch)
            with self._busy:
                self._run(frame, batch, pin.cut if pin else self._cut(query))
            if pin is not None:
                pin.restore(query)
                self._pin = None
        except PoundlockError as problem:
            error = problem
            if debugging():
                raise
            raise bare(problem) from None  # Spark's error quotes what Python would print
        except BaseException as problem:
            error = problem
            raise
        finally:
            self.gate.leave(batch, error)

    def _cut(self, query: SparkSession) -> Mapping[str, str]:
        if self._settings is None:
            self._settings = Settings.of(self._session or query, query)
        return self._settings.cut(query.sparkContext.defaultParallelism)

    def _run(self, frame: DataFrame, batch: int, cut: Mapping[str, str]) -> None:
        plan = self.checkpoint.plan(batch)
        if self._query is None:
            session = frame.sparkSession
            self._query = internals.running_query(session, internals.batch_identity(session)[0])
        plan.check_runs(batch, self._query.planned_offsets())
        if not self._bound:
            self.coordinator.bind(self.checkpoint.running_query())
            self._bound = True
        ends = self._ends(plan.text)
        job = SparkJob(
            frame,
            self.sinks,
            dead_letters=self.dead_letters,
            stateful=self.stateful,
            prepare_timeout_s=self.prepare_timeout_s,
            driver_branches=[
                source.branch(offsets) for source, offsets in ends if source.transactional
            ],
            at_most_once=self.at_most_once,
            least_time_left_s=self.least_time_left_s,
            cut=cut,
            after_bad_row=lambda: self._after_bad_row(plan),
        )
        self.coordinator.run(batch, plan, job)
        self._return_offsets(batch, ends)
        self.observe(Step.RETURNING, {"batch": batch})

    def _after_bad_row(self, plan: Plan) -> str:
        kafka = [source is not None for source in self.sources]
        offsets = describe_offsets(plan.text, plan.before, kafka, self.checkpoint.first_offsets)
        said = [f"The batch has {offsets}"] if offsets else []
        if self.starts_spark:  # a pipeline, whose sinks have this option
            said.append(
                "To leave such rows out, use .to(sink, on_bad_row='skip'); to keep them, name "
                "another sink there"
            )
        return ". ".join(said)

    def _ends(self, plan: bytes) -> Sequence[tuple[KafkaSource, Mapping[tuple[str, int], int]]]:
        """Pair each group's source with the end offsets in Spark's plan."""
        if not any(self.sources):
            return []
        ends = dict[object, tuple[KafkaSource, dict[tuple[str, int], int]]]()
        found = source_offsets(plan, len(self.sources))
        for source, offsets in zip(self.sources, found, strict=True):
            if source is not None and offsets is not None:
                _, joined = ends.setdefault(source.key, (source, {}))
                for at, offset in source.positions(offsets).items():
                    joined[at] = min(offset, joined.get(at, offset))  # the lower one if read twice
        return list(ends.values())

    def _return_offsets(
        self, batch: int, ends: Sequence[tuple[KafkaSource, Mapping[tuple[str, int], int]]]
    ) -> None:
        """Commit the offsets of a finished batch to the consumer groups.

        Only `Fenced` is raised: no other error may stop a batch that is finished everywhere.
        """
        for source, offsets in ends:
            source.pend(batch, offsets)
            self.observe(Step.HANDING_BACK, {"batch": batch, "group": source.group})
            if source.mode is OffsetMode.ON_BATCH:
                try:
                    # A driver that was replaced meanwhile must not set the group back.
                    self.coordinator.log.ensure_owned()
                except Unavailable as error:
                    source.not_handed_back(batch, error)
                    continue
            source.completed(batch)
            self.observe(Step.HANDED_BACK, {"batch": batch, "group": source.group})
