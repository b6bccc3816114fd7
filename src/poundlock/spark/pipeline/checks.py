"""Checks before the first batch: what cannot work is refused, and what may not work is warned about."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import SparkSession

from poundlock.core import guarantee
from poundlock.core.faults import Faults
from poundlock.core.participant import Participant, Semantic
from poundlock.core.reach import Address, require_open
from poundlock.core.surroundings import Settings
from poundlock.errors import Unavailable, UsageError
from poundlock.sources.kafka import KafkaSource
from poundlock.spark.pipeline.site import SparkSite
from poundlock.spark.plan import SILENT, Plan
from poundlock.spark.storage import has_decided

logger = logging.getLogger("poundlock")

_UNSUPPORTED_TRIGGERS = {
    "continuous": "continuous processing commits without batches, so there is nothing to decide on",
    "realTime": "real-time mode plans the offsets of a batch after it has run, so a replay would "
    "have other offsets",
}


def check_trigger(trigger: Mapping[str, Any]) -> None:
    for name, reason in _UNSUPPORTED_TRIGGERS.items():
        if trigger.get(name) is not None:
            raise UsageError(
                f"trigger {name}= is refused: {reason}. Use processingTime or availableNow"
            )


def check_mode(mode: str, sinks: Iterable[Participant], faults: Faults) -> None:
    for sink in sinks:
        if sink.only_appends and mode.lower() != "append":
            with faults.gather(sink=sink.name):
                raise UsageError(
                    f"output mode {mode} gives results anew when they change, and this sink would "
                    "only append them: use append with a watermark, or a sink that upserts"
                )


def check_parts(
    spark: SparkSession,
    plan: Plan,
    sinks: Sequence[Participant],
    settings: Settings,
    faults: Faults,
) -> guarantee.Statement:
    """Gather parts that do not go together. Return what they guarantee. Touches nothing."""
    conf = spark.conf
    with faults.gather():
        if conf.get("spark.sql.streaming.asyncProgressTrackingEnabled", "false") == "true":
            raise UsageError(
                "exactly-once does not work with asynchronous progress tracking: unset "
                "asyncProgressTrackingEnabled"
            )
    statement = guarantee.state(plan.source_names, replayable=plan.replayable, sinks=sinks)
    for route in statement.routes:
        with faults.gather():
            guarantee.require(replace(statement, routes=(route,)))
    _warn_of_changing_replays(plan, sinks)
    kept = int(conf.get("spark.sql.streaming.minBatchesToRetain", "100") or 100)
    with faults.gather():
        if settings.keep_batches < kept:
            raise UsageError(
                f"keep_batches={settings.keep_batches} is less than the {kept} batches that Spark "
                "keeps (spark.sql.streaming.minBatchesToRetain)"
            )
    return statement


def _warn_of_changing_replays(plan: Plan, sinks: Sequence[Participant]) -> None:
    for source in plan.sources:
        for option, (value, what) in SILENT.items():
            given = source.options.get(option, "")
            if given.lower() == value:
                logger.warning(
                    "%s=%s: %s are skipped without an error, and a replay may then differ from the "
                    "decision",
                    *(option, given, what),
                )
    if plan.volatile and any(sink.semantic is Semantic.EXACTLY_ONCE for sink in sinks):
        logger.warning(
            "the query uses %s: a replay gives different rows, so a branch that is lost after the "
            "decision cannot be repaired and would stop the pipeline",
            ", ".join(f"{name}()" for name in plan.volatile),
        )


def warn_of_missing_order(sinks: Iterable[Participant], mode: str, *, stateful: bool) -> None:
    """Say which sinks keep one row for each key without an order, and what to set.

    Not for results that are given anew: a batch has one row of each key then.
    """
    if stateful and mode.lower() != "append":
        return
    for sink in sinks:
        missing = sink.missing_order()
        if missing is not None:
            logger.warning("sink %s: %s", sink.name, missing)


def preflight(
    spark: SparkSession,
    sources: Iterable[KafkaSource],
    sinks: Sequence[Participant],
    log_location: str,
    faults: Faults,
) -> None:
    """Have each source and each sink check its system. Log their warnings, gather their errors.

    An address that refuses connections is told at once. But a decided batch waits for its systems:
    then the clients try again, as long as they do.
    """
    for source in sources:
        with faults.gather():
            _require_open(spark, source.addresses(), log_location, of="the source: ")
            source.preflight()
    for one, other in itertools.combinations(sinks, 2):
        with faults.gather():
            one.check_conflict(other)
    site, unfit = SparkSite(spark, log_location), faults.sinks
    for sink in sinks:
        try:
            with faults.gather(sink=sink.name):
                sink.attach(site)
                _require_open(spark, sink.addresses(), log_location)
                for warning in sink.preflight():
                    logger.warning("sink %s: %s", sink.name, warning)
        except Exception:
            if (
                sink.name not in unfit
            ):  # otherwise it may lack what it learns from a frame that fits
                raise


def _require_open(
    spark: SparkSession, addresses: Sequence[Address], log_location: str, *, of: str = ""
) -> None:
    try:
        require_open(addresses)
    except Unavailable as error:
        if not has_decided(spark, log_location):
            raise Unavailable(f"{of}{error.args[0]}") from None
