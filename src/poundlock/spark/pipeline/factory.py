"""Builds what runs the batches of a query, for `Pipeline.start` and `foreach_batch` alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pyspark.sql import SparkSession

from poundlock.core import guarantee
from poundlock.core.coordinator import Coordinator
from poundlock.core.faults import Faults
from poundlock.core.participant import Participant
from poundlock.core.protocol import Step
from poundlock.core.surroundings import Settings
from poundlock.errors import UsageError
from poundlock.sources.kafka import KafkaSource, source_of
from poundlock.spark.pipeline.batch import Batches, Gate
from poundlock.spark.pipeline.checks import (
    check_mode,
    check_parts,
    preflight,
    warn_of_missing_order,
)
from poundlock.spark.pipeline.routes import Route, dead_letter_routes, dead_letter_sinks
from poundlock.spark.pipeline.site import SparkSite
from poundlock.spark.plan import Plan
from poundlock.spark.storage import open_checkpoint, open_log, resolved

logger = logging.getLogger("poundlock")

LOG_DIRECTORY = "poundlock"  # within the checkpoint location: the two belong together

_LOOK_S = 0.2  # how often a sleep looks whether it must end

Observer = Callable[[Step, Mapping[str, object]], None]


def sinks_of(routes: Sequence[Route]) -> dict[str, Participant]:
    """Return every sink by its name, those for bad rows last."""
    sinks = [route.sink for route in routes] + dead_letter_sinks(routes)
    return {sink.name: sink for sink in sinks}


def build_batches(
    spark: SparkSession,
    plan: Plan,
    routes: Sequence[Route],
    *,
    name: str,
    mode: str,
    checkpoint_location: str,
    log_location: str,
    settings: Settings,
    gate: Gate,
    prepare_timeout_s: float | None = None,
    observers: Sequence[Observer] = (),
    starts_spark: bool = True,
    faults: Faults | None = None,
) -> Batches:
    """Check all parts, raise all `faults` in one error, and put the parts together. Writes nothing."""
    faults = faults or Faults()
    check_mode(mode, [route.sink for route in routes], faults)
    checkpoint_location = resolved(spark, checkpoint_location)
    log_location = resolved(spark, log_location)
    sinks = sinks_of(routes)
    statement = check_parts(spark, plan, list(sinks.values()), settings, faults)
    sources = [source_of(source.options) for source in plan.sources]
    preflight(spark, filter(None, sources), list(sinks.values()), log_location, faults)
    faults.raise_any()
    warn_of_missing_order(sinks.values(), mode, stateful=plan.stateful)
    logger.info("pipeline %s\n%s", name, statement)
    _add_offset_branches(sinks, sources)
    at_most_once = guarantee.at_most_once(list(sinks.values()), replayable=plan.replayable)

    def observe(step: Step, facts: Mapping[str, object]) -> None:
        for observer in observers:
            observer(step, facts)

    coordinator = Coordinator(
        open_log(spark, log_location),
        sinks,
        settings=replace(settings, tries=1) if at_most_once else settings,
        observe=observe,
        stopping=gate.must_stop,
        sleep=lambda seconds: _sleep(seconds, gate),
    )
    return Batches(
        name=name,
        coordinator=coordinator,
        checkpoint=open_checkpoint(spark, checkpoint_location),
        sinks=[route.sink for route in routes],
        dead_letters=dead_letter_routes(routes),
        sources=sources,
        stateful=plan.stateful,
        prepare_timeout_s=prepare_timeout_s,
        observe=observe,
        gate=gate,
        at_most_once=at_most_once,
        least_time_left_s=settings.least_time_left_s,
        speculation=SparkSite(spark, log_location).speculation,
        starts_spark=starts_spark,
    )


def _sleep(seconds: float, gate: Gate) -> None:
    """Sleep until the time is over or the query is asked to stop."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not gate.must_stop():
        time.sleep(min(left, _LOOK_S))


def _add_offset_branches(
    sinks: dict[str, Participant], sources: Sequence[KafkaSource | None]
) -> None:
    """Add a participant for each consumer group whose offsets are part of the decision."""
    groups = {source.key: source for source in sources if source and source.transactional}
    for source in groups.values():
        if source.name in sinks:
            raise UsageError(
                f"the offsets of consumer group {source.group!r} are a branch with the name "
                f"{source.name!r}, which another part of the pipeline has too: rename one of them"
            )
        sinks[source.name] = source.participant()
