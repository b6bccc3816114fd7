"""The front door: a streaming frame, its sinks, and one decision over all of them per batch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession

from poundlock.core import guarantee
from poundlock.core.coordinator import Coordinator, Settings
from poundlock.core.model import checked_name
from poundlock.core.participant import Participant, Semantic
from poundlock.core.protocol import Step
from poundlock.errors import UsageError, error_context
from poundlock.sources.kafka import KafkaSource, source_of
from poundlock.spark import internals
from poundlock.spark.pipeline.batch import Batches
from poundlock.spark.pipeline.query import Query
from poundlock.spark.pipeline.routes import Route, dead_letter_routes, dead_letter_sinks, routed
from poundlock.spark.pipeline.site import SparkSite
from poundlock.spark.plan import SILENT, Plan, read_analyzed, read_plan
from poundlock.spark.storage import Checkpoint, open_log
from poundlock.spark.stream.flow import Flow
from poundlock.stream.operator import MAIN

logger = logging.getLogger("poundlock")

Observer = Callable[[Step, Mapping[str, object]], None]

_EMPTY_BATCHES = "spark.sql.streaming.noDataMicroBatches.enabled"

LOG_DIRECTORY = "poundlock"  # within the checkpoint location: the two belong together

_REFUSED_TRIGGERS = {
    "continuous": "continuous processing commits without batches, so there is nothing to decide on",
    "realTime": "real-time mode plans a batch's offsets after it has run, so a replay has others",
}


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
        """Send rows to a sink: all, or those that `where` keeps, as `select` shapes them.

        `output` names an output of a flow, such as its late rows; the main one by default.

        `on_bad_row` says what becomes of rows that the sink cannot take: "fail" (the batch is
        aborted), "skip" (they are left out and counted), or a sink that takes them, with the error,
        in the same decision.
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
        for name, known in (*self._sinks().items(), (sink.name, sink)):
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
        if any(dead_letter is other.sink for other in (*self.routes, route)
               for dead_letter in dead_letter_sinks((*self.routes, route))):  # fmt: skip
            raise UsageError(
                "a sink takes either rows or bad rows, not both: use two", sink=sink.name
            )
        return replace(self, routes=(*self.routes, route))

    def _check_output(self, output: str | None, sink: Participant) -> None:
        names = () if isinstance(self.source, DataFrame) else self.source.outputs
        if output is not None and output not in names:
            has = f"it has {', '.join(names)}" if names else "a DataFrame has but one"
            raise UsageError(f"there is no output {output!r}: {has}", sink=sink.name)

    def _sinks(self) -> dict[str, Participant]:
        """Return every sink by its name, those for bad rows last."""
        sinks = [route.sink for route in self.routes] + dead_letter_sinks(self.routes)
        return {sink.name: sink for sink in sinks}

    def observe(self, observer: Observer) -> Pipeline:
        """Have `observer(step, facts)` called at each step, in the batch's own thread."""
        return replace(self, observers=(*self.observers, observer))

    def guarantee(self) -> guarantee.Statement:
        """Say what this pipeline promises, sink by sink, and why."""
        plan = read_plan(self.frame)
        return guarantee.state(
            plan.source_names, replayable=plan.replayable, sinks=list(self._sinks().values())
        )

    def explain(self) -> str:
        """Return the routes and Spark's plan, without any option that could be a secret."""
        plan = read_plan(self.frame)
        kind = "keeps state" if plan.stateful else "keeps no state"
        lines = [f"pipeline {self.name}: sources {plan.source_names}; the query {kind}"]
        if not isinstance(self.source, DataFrame):
            lines += [f"  {line}" for line in self.source.explain().splitlines()]
        lines += [f"  to {route.describe()}" for route in self.routes]
        tree = internals.analyzed_plan(self._routed()).treeString()
        return "\n".join([*lines, tree])

    def start(self, **trigger: Any) -> Query:
        """Check everything, take over, finish what is decided, and start Spark's query.

        Takes Spark's own trigger arguments, such as `processingTime="2 seconds"` or
        `availableNow=True`.
        """
        _check_trigger(trigger)
        spark = self.frame.sparkSession
        plan = read_plan(self.frame)
        statement = self._check(spark, plan)
        writer = (
            self._routed()
            .writeStream.queryName(self.name)
            .outputMode(self.output_mode)
            .option("checkpointLocation", self.checkpoint_location)
        )
        if trigger:
            writer = writer.trigger(**trigger)  # which Spark may refuse: nothing is touched yet
        sources = [source_of(source.options) for source in plan.sources]
        for source in filter(None, sources):
            source.preflight()
        _preflight(spark, self._sinks().values(), self.log_location)
        logger.info("pipeline %s\n%s", self.name, statement)
        query = Query(self.name)
        batches = self._batches(spark, plan, sources, query)
        batches.take_over(adopt=self.adopt_checkpoint)
        with _ending(spark, plan, trigger):
            query.started(writer.foreachBatch(batches).start(), batches)
        return query

    def _routed(self) -> DataFrame:
        if not self.routes:
            raise UsageError(f"pipeline {self.name!r} has no sink: add one with .to(...)")
        tagged = self._tagged
        routes = [replace(r, output=(r.output or MAIN) if tagged else None) for r in self.routes]
        return routed(self.frame, routes)

    def _check(self, spark: SparkSession, plan: Plan) -> guarantee.Statement:
        """Refuse what cannot work, warn about what may not, before anything is touched."""
        if any(query.name == self.name for query in spark.streams.active):
            raise UsageError(
                f"a query by the name of {self.name!r} is running in this session: stop it first, for "
                "a second driver would take its pipeline over"
            )
        _check_mode(self.output_mode, [route.sink for route in self.routes])
        return _checked(spark, plan, list(self._sinks().values()), self.settings)

    def _batches(
        self,
        spark: SparkSession,
        plan: Plan,
        sources: Sequence[KafkaSource | None],
        query: Query,
    ) -> Batches:
        sinks = self._sinks()
        groups = {source.key: source for source in sources if source and source.transactional}
        for source in groups.values():
            if source.name in sinks:
                raise UsageError(
                    f"the offsets of consumer group {source.group!r} are a branch by the name of "
                    f"{source.name!r}, which another part of the pipeline has too: rename one of them"
                )
            sinks[source.name] = source.participant()

        at_most_once = guarantee.at_most_once(list(sinks.values()), replayable=plan.replayable)

        def observe(step: Step, facts: Mapping[str, object]) -> None:
            for observer in self.observers:
                observer(step, facts)

        coordinator = Coordinator(
            open_log(spark, self.log_location),
            sinks,
            settings=replace(self.settings, tries=1) if at_most_once else self.settings,
            observe=observe,
            stopping=query.must_stop,
        )
        return Batches(
            name=self.name,
            coordinator=coordinator,
            checkpoint=Checkpoint(spark, self.checkpoint_location),
            sinks=[route.sink for route in self.routes],
            dead_letters=dead_letter_routes(self.routes),
            sources=sources,
            stateful=plan.stateful,
            prepare_timeout_s=self.prepare_timeout_s,
            observe=observe,
            gate=query,
            at_most_once=at_most_once,
        )


def pipeline(
    frame: DataFrame | Flow,
    *,
    name: str,
    checkpoint_location: str,
    log_location: str | None = None,
    output_mode: str = "append",
    prepare_timeout: float | None = None,
    adopt_checkpoint: bool = False,
    settings: Settings | None = None,
) -> Pipeline:
    """Begin a pipeline over a streaming frame, or over a flow with all its outputs.

    Args:
        name: Names the pipeline in every system it writes to, for ever.
        checkpoint_location: Spark's checkpoint; our log stands beside it.
        log_location: Another place for the log, where the checkpoint's file system is not safe for it.
        output_mode: Spark's own: append, update or complete.
        prepare_timeout: Seconds after which a task that has not voted counts as a no.
        adopt_checkpoint: The checkpoint is that of a query which ran without Poundlock until now.
    """
    location = checkpoint_location.rstrip("/")
    if not location:
        raise UsageError("checkpoint_location is empty: name a directory that outlives the driver")
    return Pipeline(
        source=frame,
        name=checked_name("pipeline name", name),
        checkpoint_location=location,
        log_location=(log_location or f"{location}/{LOG_DIRECTORY}").rstrip("/"),
        output_mode=output_mode,
        prepare_timeout_s=prepare_timeout,
        adopt_checkpoint=adopt_checkpoint,
        settings=settings or Settings(),
    )


def foreach_batch(
    *sinks: Participant,
    name: str,
    log_location: str | None = None,
    adopt_checkpoint: bool = False,
    settings: Settings | None = None,
) -> Callable[[DataFrame, int], None]:
    """Make a function for `writeStream.foreachBatch`, for code that has a query already.

    Every sink takes all rows. The log stands in the query's own checkpoint location. What the query's
    source makes impossible is refused in its first batch, before a row is written.
    """
    checked_name("pipeline name", name)
    if not sinks:
        raise UsageError("foreach_batch needs at least one sink")
    # As far as it can be said now. The source is known with the first batch.
    guarantee.require(guarantee.state("any", replayable=True, sinks=sinks))
    running: tuple[str, str, Batches] | None = None  # Spark's ids of the query and of its run

    def run(frame: DataFrame, batch: int) -> None:
        nonlocal running
        spark = frame.sparkSession
        query, this_run = internals.batch_identity(spark)
        if running is not None and running[0] != query:
            # Its batches have the same numbers as the other's, whose log would call them finished.
            raise UsageError(
                f"one function of foreach_batch serves one query, and this one serves {running[0]}: "
                "call poundlock.foreach_batch once more for the other"
            )
        routed_frame = routed(frame, [Route(sink) for sink in sinks])  # sinks learn of its columns
        if running is None or running[1] != this_run:
            batches = _adopted(spark, name, sinks, log_location, settings or Settings())
            batches.take_over(adopt=adopt_checkpoint or batch == 0)
            running = (query, this_run, batches)
        running[2](routed_frame, batch)

    return run


def _adopted(
    spark: SparkSession,
    name: str,
    sinks: Sequence[Participant],
    log_location: str | None,
    settings: Settings,
) -> Batches:
    """Bind to the query that is calling us, found through Spark's own objects."""
    root, analyzed, mode = internals.running_query(spark, internals.batch_identity(spark)[0])
    if internals.TEMPORARY.search(root):
        raise UsageError(
            "the query has no checkpoint that outlives it: every start would write all rows again. "
            "Give it one with .option('checkpointLocation', ...)"
        )
    _check_mode(mode, sinks)
    plan = read_analyzed(analyzed)
    logger.info("pipeline %s\n%s", name, _checked(spark, plan, sinks, settings))
    location = log_location or f"{root}/{LOG_DIRECTORY}"
    _preflight(spark, sinks, location)
    by_name = {sink.name: sink for sink in sinks}
    log = open_log(spark, location)
    at_most_once = guarantee.at_most_once(sinks, replayable=plan.replayable)
    if at_most_once:
        settings = replace(settings, tries=1)
    return Batches(
        name=name,
        coordinator=Coordinator(log, by_name, settings=settings),
        checkpoint=Checkpoint(spark, root),
        sinks=sinks,
        dead_letters={},
        sources=[],
        stateful=plan.stateful,
        prepare_timeout_s=None,
        observe=lambda step, facts: None,
        gate=None,
        at_most_once=at_most_once,
    )


def _check_mode(mode: str, sinks: Iterable[Participant]) -> None:
    for sink in sinks:
        if sink.only_appends and mode.lower() != "append":
            raise UsageError(
                f"output mode {mode} gives results anew that were given before, and this sink would "
                "put them beside the old: use append with a watermark, or a sink that upserts",
                sink=sink.name,
            )


def _checked(
    spark: SparkSession, plan: Plan, sinks: Sequence[Participant], settings: Settings
) -> guarantee.Statement:
    """Refuse parts that do not go together, and return what they promise."""
    conf = spark.conf
    if conf.get("spark.sql.streaming.asyncProgressTrackingEnabled", "false") == "true":
        raise UsageError(
            "asynchronous progress tracking gives up exactly-once: unset asyncProgressTrackingEnabled"
        )
    statement = guarantee.state(plan.source_names, replayable=plan.replayable, sinks=sinks)
    guarantee.require(statement)
    for source in plan.sources:
        for option, (value, what) in SILENT.items():
            told = source.options.get(option, "")
            if told.lower() == value:
                logger.warning(
                    "%s=%s: %s are passed over in silence, and a replay may then differ from what was "
                    "decided", option, told, what,
                )  # fmt: skip
    if plan.volatile and any(sink.semantic is Semantic.EXACTLY_ONCE for sink in sinks):
        logger.warning(
            "the query uses %s: a replay gives other rows, so a branch that is lost after the "
            "decision cannot be repaired and would stop the pipeline",
            ", ".join(f"{name}()" for name in plan.volatile),
        )
    kept = int(conf.get("spark.sql.streaming.minBatchesToRetain", "100") or 100)
    if settings.keep_batches < kept:
        raise UsageError(
            f"keep_batches={settings.keep_batches} is less than the {kept} batches that Spark keeps "
            "(spark.sql.streaming.minBatchesToRetain)"
        )
    return statement


def _preflight(spark: SparkSession, sinks: Iterable[Participant], log_location: str) -> None:
    site = SparkSite(spark, log_location)
    sinks = list(sinks)
    for one, other in itertools.combinations(sinks, 2):
        one.check_conflict(other)
    for sink in sinks:
        sink.attach(site)
        with error_context(sink=sink.name):
            warnings = sink.preflight()
        for warning in warnings:
            logger.warning("sink %s: %s", sink.name, warning)


@contextmanager
def _ending(spark: SparkSession, plan: Plan, trigger: Mapping[str, Any]) -> Generator[None]:
    """Have a query end that is to end with its input: with timers of processing time Spark's would not.

    A query takes the session's settings when it starts.
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


def _check_trigger(trigger: Mapping[str, Any]) -> None:
    for name, reason in _REFUSED_TRIGGERS.items():
        if trigger.get(name) is not None:
            raise UsageError(
                f"trigger {name}= is refused: {reason}. Use processingTime or availableNow"
            )
