"""The public API of pipelines: a streaming DataFrame, its sinks, and one decision per batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession

from poundlock.core import guarantee
from poundlock.core.faults import Faults
from poundlock.core.model import checked_name, is_identity
from poundlock.core.participant import Participant
from poundlock.core.surroundings import Settings
from poundlock.errors import PoundlockError, UsageError
from poundlock.spark import internals
from poundlock.spark.failures import bare, debugging
from poundlock.spark.pipeline.checks import check_trigger
from poundlock.spark.pipeline.factory import LOG_DIRECTORY, Observer, build_batches, sinks_of
from poundlock.spark.pipeline.foreach import ForeachBatch
from poundlock.spark.pipeline.query import Query
from poundlock.spark.pipeline.routes import Route, dead_letter_sinks, routed
from poundlock.spark.plan import Plan, read_plan
from poundlock.spark.stream.flow import Flow
from poundlock.stream.operator import MAIN

_EMPTY_BATCHES = "spark.sql.streaming.noDataMicroBatches.enabled"


@dataclass(frozen=True)
class Pipeline:
    """A named streaming query with its sinks. Each `to` returns a new one; nothing starts yet."""

    source: DataFrame | Flow
    name: str
    checkpoint_location: str
    log_location: str
    output_mode: str = "append"
    prepare_timeout_s: float | None = None
    adopt_checkpoint: bool = False
    abandoned: frozenset[str] = frozenset()
    settings: Settings = field(default_factory=Settings)
    routes: tuple[Route, ...] = ()
    observers: tuple[Observer, ...] = ()

    @property
    def frame(self) -> DataFrame:
        """The frame that Spark runs: of a flow, that of all outputs if a route asks for another one."""
        if isinstance(self.source, DataFrame):
            return self.source
        return self.source.tagged if self._tagged else self.source.df

    @property
    def _tagged(self) -> bool:
        return any(route.output not in (None, MAIN) for route in self.routes)

    def to(
        self,
        sink: Participant,
        *,
        output: str | None = None,
        where: str | Column | None = None,
        select: str | Column | Sequence[str | Column] | None = None,
        on_bad_row: str | Participant = "fail",
    ) -> Pipeline:
        """Send rows to a sink: all rows, or those that match `where`, with the columns of `select`.

        `output` names an output of a flow, such as its late rows; the main one by default.

        `on_bad_row` decides about rows that the sink cannot take: "fail" aborts the batch, "skip"
        leaves them out and counts them, and a sink gets them with the error, in the same decision.
        """
        if not isinstance(sink, Participant):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"to() takes a sink, such as Postgres('readings', dsn=...), not {sink!r}"
            )
        self._check_output(output, sink)
        if not isinstance(on_bad_row, Participant) and on_bad_row not in ("fail", "skip"):
            raise UsageError(
                f"on_bad_row={on_bad_row!r}: give 'fail', 'skip' or a sink", sink=sink.name
            )
        for name, known in (*sinks_of(self.routes).items(), (sink.name, sink)):
            for other in (sink, on_bad_row):
                if isinstance(other, Participant) and other.name == name and other is not known:
                    raise UsageError(
                        f"two sinks are called {name!r}: give one of them another name=", sink=name
                    )
        if any(sink is route.sink for route in self.routes):
            raise UsageError(f"{sink.name!r} has been added already", sink=sink.name)
        if isinstance(select, str | Column):
            select = [select]
        chosen = None if select is None else tuple(select)
        route = Route(sink, where, chosen, on_bad_row, output)
        routes = (*self.routes, route)
        takes_rows = [other.sink for other in routes]
        if any(taker is other for taker in dead_letter_sinks(routes) for other in takes_rows):
            raise UsageError(
                "a sink takes either rows or bad rows, not both: use two", sink=sink.name
            )
        return replace(self, routes=routes)

    def _check_output(self, output: str | None, sink: Participant) -> None:
        names = () if isinstance(self.source, DataFrame) else self.source.outputs
        if output is not None and output not in names:
            has = f"it has {', '.join(names)}" if names else "a DataFrame has but one"
            raise UsageError(f"there is no output {output!r}: {has}", sink=sink.name)

    def observe(self, observer: Observer) -> Pipeline:
        """Have `observer(step, facts)` called at each step, in the batch's own thread.

        `step` is a `poundlock.Step`. docs/observe.md has the facts of each.
        """
        return replace(self, observers=(*self.observers, observer))

    def guarantee(self) -> guarantee.Statement:
        """Return what this pipeline guarantees for each sink, and why."""
        plan = read_plan(self.frame)
        return guarantee.state(
            plan.source_names,
            replayable=plan.replayable,
            sinks=list(sinks_of(self.routes).values()),
        )

    def explain(self) -> str:
        """Return the routes and Spark's plan, without options that could be secret."""
        plan = read_plan(self.frame)
        kind = "keeps state" if plan.stateful else "keeps no state"
        lines = [f"pipeline {self.name}: sources {plan.source_names}; the query {kind}"]
        if not isinstance(self.source, DataFrame):
            lines += [f"  {line}" for line in self.source.explain().splitlines()]
        lines += [f"  to {route.describe()}" for route in self.routes]
        tree = internals.analyzed_plan(self._routed()).treeString()
        return "\n".join([*lines, tree])

    def start(self, *, stopping: threading.Event | None = None, **trigger: Any) -> Query:
        """Check all parts, take over, finish decided batches, and start Spark's query.

        One error lists all that is wrong with the parts and with their systems.

        Takes Spark's own trigger arguments, such as `processingTime="2 seconds"` or
        `availableNow=True`. If a system goes away during the take-over, this waits. Setting `stopping`
        ends the wait with `InDoubt` or `Unavailable`, and so does Ctrl-C; nothing is lost.
        """
        try:
            return self._start(stopping, trigger)
        except PoundlockError as error:
            if debugging():
                raise
            raise bare(error) from None

    def _start(self, stopping: threading.Event | None, trigger: Mapping[str, Any]) -> Query:
        check_trigger(trigger)
        spark, faults = self.frame.sparkSession, Faults()
        plan = read_plan(self.frame)
        if any(query.name == self.name for query in spark.streams.active):
            raise UsageError(
                f"a query named {self.name!r} is running in this session: stop it first, because a "
                "second driver would take over its pipeline"
            )
        frame = (
            self.frame
        )  # takes the place of one that does not fit, whose faults are raised below
        with faults.gather():
            frame = self._routed()
        writer = (
            frame.writeStream.queryName(self.name)
            .outputMode(self.output_mode)
            .option("checkpointLocation", self.checkpoint_location)
        )
        if trigger:
            writer = writer.trigger(**trigger)  # Spark may reject it: nothing has changed yet
        query = Query(self.name, stopping)
        batches = build_batches(
            spark,
            plan,
            self.routes,
            name=self.name,
            mode=self.output_mode,
            checkpoint_location=self.checkpoint_location,
            log_location=self.log_location,
            settings=self.settings,
            gate=query,
            prepare_timeout_s=self.prepare_timeout_s,
            observers=self.observers,
            faults=faults,
        )
        if not debugging():
            internals.hide_failures(spark, self.name)
        try:
            batches.take_over(adopt=self.adopt_checkpoint, abandoned=self.abandoned)
            batches.pin(spark)
            with _no_empty_batches(spark, plan, trigger):
                query.started(writer.foreachBatch(batches).start(), batches)
        except BaseException:
            batches.close(sweep=False)
            raise
        return query

    def _routed(self) -> DataFrame:
        if not self.routes:
            raise UsageError(f"pipeline {self.name!r} has no sink: add one with .to(...)")
        tagged = self._tagged
        routes = [replace(r, output=(r.output or MAIN) if tagged else None) for r in self.routes]
        return routed(self.frame, routes)


def pipeline(
    frame: DataFrame | Flow,
    *,
    name: str,
    checkpoint_location: str,
    log_location: str | None = None,
    output_mode: str = "append",
    prepare_timeout: float | None = None,
    adopt_checkpoint: bool = False,
    abandon_log: str | Sequence[str] = (),
    settings: Settings | None = None,
) -> Pipeline:
    """Define a pipeline over a streaming DataFrame, or over a flow with all its outputs.

    Args:
        name: The permanent name of the pipeline in every system that it writes to.
        checkpoint_location: Spark's checkpoint. The log is in a directory below it.
        log_location: Another location for the log, if the checkpoint's file system is not safe for it.
        output_mode: Spark's own: append, update or complete.
        prepare_timeout: Seconds after which tasks that have not voted count as rejected.
        adopt_checkpoint: The query of the checkpoint has run without Poundlock until now.
        abandon_log: Identities of logs that are lost, from the error that asks for them. The pipeline
            starts anew in spite of the rows that it has committed with these logs.
    """
    location = checkpoint_location.rstrip("/")
    if not location:
        raise UsageError(
            "checkpoint_location is empty: set it to a directory that outlives the driver"
        )
    return Pipeline(
        source=frame,
        name=checked_name("pipeline name", name),
        checkpoint_location=location,
        log_location=(log_location or f"{location}/{LOG_DIRECTORY}").rstrip("/"),
        output_mode=output_mode,
        prepare_timeout_s=prepare_timeout,
        adopt_checkpoint=adopt_checkpoint,
        abandoned=_identities(abandon_log),
        settings=settings or Settings(),
    )


def _identities(logs: str | Sequence[str]) -> frozenset[str]:
    found: list[Any] = list(logs) if isinstance(logs, list | tuple) else [logs]
    for identity in found:
        if not is_identity(identity):
            raise UsageError(
                f"abandon_log={identity!r} is not the identity of a log: copy it from the error that "
                "asks for it"
            )
    return frozenset(found)


def foreach_batch(
    *sinks: Participant,
    name: str,
    log_location: str | None = None,
    adopt_checkpoint: bool = False,
    abandon_log: str | Sequence[str] = (),
    settings: Settings | None = None,
) -> Callable[[DataFrame, int], None]:
    """Return a function for `writeStream.foreachBatch`, for code that already has a query.

    Every sink gets all rows. The log is in the query's checkpoint location. The query's source is
    checked in the first batch, before a row is written.
    """
    checked_name("pipeline name", name)
    if not sinks:
        raise UsageError("foreach_batch needs at least one sink")
    guarantee.require(guarantee.state("any", replayable=True, sinks=sinks))
    return ForeachBatch(
        [Route(sink) for sink in sinks],
        name=name,
        log_location=log_location,
        adopt_checkpoint=adopt_checkpoint,
        abandoned=_identities(abandon_log),
        settings=settings or Settings(),
    )


@contextmanager
def _no_empty_batches(
    spark: SparkSession, plan: Plan, trigger: Mapping[str, Any]
) -> Generator[None]:
    """Turn empty batches off for a query with `availableNow` and timers of processing time.

    It would never end, because Spark runs empty batches for such timers. A query takes the session's
    settings when it starts.
    """
    if not (plan.polls and trigger.get("availableNow")):
        yield
        return
    before = spark.conf.get(_EMPTY_BATCHES, "true") or "true"
    spark.conf.set(_EMPTY_BATCHES, "false")
    try:
        yield
    finally:
        spark.conf.set(_EMPTY_BATCHES, before)
