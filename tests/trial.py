"""A pipeline on trial in this process: it copies rows from one Kafka topic to another.

A driver that dies is played by an observer that raises at the step: nothing of the coordinator runs
after it, and the next start knows only what is in the log, in the checkpoint and in Kafka. Real
signals are in `chaos/`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import oracle
import poundlock as lock
from poundlock import sinks
from poundlock.core.protocol import Step

Observer = Callable[[Step, Mapping[str, object]], None]

TRIAL = "trial"


class Died(Exception):
    """The driver is no more."""


def read(
    spark: SparkSession, kafka: oracle.Kafka, source: str, select: Sequence[str], **options: Any
) -> Any:
    """Open a topic as a stream from its beginning."""
    options = {"bootstrap_servers": kafka.servers, "starting_offsets": "earliest"} | options
    return lock.read_kafka(spark, source, **options).selectExpr(*select)


def copying(
    spark: SparkSession,
    kafka: oracle.Kafka,
    source: str,
    target: str,
    checkpoint: Path,
    *,
    select: Sequence[str] = ("CAST(value AS STRING) AS value",),
    settings: lock.Settings | None = None,
    sink: Mapping[str, Any] | None = None,
    **options: Any,
) -> lock.Pipeline:
    """Return a pipeline from topic to topic; `options` are the source's."""
    frame = read(spark, kafka, source, select, **options)
    return lock.pipeline(
        frame, name=TRIAL, checkpoint_location=str(checkpoint), settings=settings
    ).to(sinks.Kafka(target, bootstrap_servers=kafka.servers, **(sink or {})))


def finish(pipeline: lock.Pipeline) -> None:
    """Run until the source has no more."""
    pipeline.start(availableNow=True).awaitTermination()


def die(pipeline: lock.Pipeline, step: Step, *, times: int = 1, after: Step | None = None) -> None:
    """Run until the driver dies at a `step`: the `times`-th, or the first `after` another step."""
    seen, armed = 0, after is None

    def observe(at: Step, facts: Mapping[str, object]) -> None:
        nonlocal seen, armed
        armed = armed or at is after
        seen += armed and at is step
        if armed and at is step and seen == times:
            raise Died

    try:
        query = pipeline.observe(observe).start(availableNow=True)
    except Died:
        return
    with pytest.raises(StreamingQueryException):
        query.awaitTermination()
    assert isinstance(query.error, Died), query.error


def records(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the records of a pipeline's log, oldest first, as they stand on the disk.

    Each receipt has its sink and its id.
    """
    return [record_on_disk(it) for it in sorted((checkpoint / "poundlock").glob("[0-9]*.json"))]


def record_on_disk(file: Path) -> dict[str, Any]:
    record = json.loads(file.read_text().splitlines()[0])["body"]["record"]
    if "receipts" in record:
        record["receipts"] = [
            {"sink": part["sink"], "id": part["prefix"] + id_}
            for part in record["receipts"]
            for id_ in part["ids"]
        ]
    return record


def decided(checkpoint: Path) -> list[str]:
    """Return the transactional ids that the last decision names."""
    last = [record for record in records(checkpoint) if record["kind"] == "Decided"][-1]
    return [receipt["id"] for receipt in last["receipts"]]


class Steps:
    """An observer that remembers the steps, and can hold the pipeline at one of them."""

    def __init__(self, hold_at: Step | None = None):
        self.seen: list[tuple[Step, dict[str, object]]] = []
        self.held = threading.Event()
        self._hold_at = hold_at
        self._go_on = threading.Event()

    def __call__(self, step: Step, facts: Mapping[str, object]) -> None:
        self.seen.append((step, dict(facts)))
        if step is self._hold_at and not self.held.is_set():
            self.held.set()
            assert self._go_on.wait(oracle.SECONDS * 3), "nobody let the pipeline go on"

    def let_go(self) -> None:
        self._go_on.set()

    def of(self, step: Step) -> list[dict[str, object]]:
        return [facts for at, facts in self.seen if at is step]
