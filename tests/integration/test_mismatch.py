"""A log or checkpoint that was restored, deleted or never existed is refused with a remedy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import oracle
import poundlock as lock
import trial
from poundlock import sinks
from poundlock.errors import LogMismatch

FIRST = [f"first {number}" for number in range(20)]
SECOND = [f"second {number}" for number in range(20)]


@pytest.fixture
def scene(spark: Any, kafka: oracle.Kafka, topic: Any, tmp_path: Path) -> Any:
    """A pipeline that has run once, its source, its target and its checkpoint."""
    source, target = topic(partitions=2, name="source"), topic(partitions=2, name="target")
    checkpoint = tmp_path / "checkpoint"
    kafka.produce(source, FIRST)
    pipeline = trial.copying(spark, kafka, source, target, checkpoint)
    trial.finish(pipeline)
    return pipeline, source, target, checkpoint


def test_restoring_log_and_checkpoint_together_is_noticed(scene: Any, kafka: oracle.Kafka) -> None:
    pipeline, source, target, checkpoint = scene
    backup = shutil.copytree(checkpoint, checkpoint.with_name("backup"))
    kafka.produce(source, SECOND)
    trial.finish(pipeline)
    shutil.rmtree(checkpoint)
    shutil.copytree(backup, checkpoint)
    with pytest.raises(LogMismatch, match=r"seen generation 2 .* knows only 1: it was restored"):
        pipeline.start(availableNow=True)
    kafka.assert_exact(target, FIRST + SECOND)


def test_a_deleted_log_is_noticed(scene: Any, kafka: oracle.Kafka) -> None:
    pipeline, source, target, checkpoint = scene
    shutil.rmtree(checkpoint / "poundlock")
    kafka.produce(source, SECOND)
    with pytest.raises(LogMismatch, match=r"no log at .* the log was deleted"):
        pipeline.start(availableNow=True)
    kafka.assert_exact(target, FIRST)


def test_a_checkpoint_of_a_plain_query_can_be_adopted(
    spark: Any, kafka: oracle.Kafka, topic: Any, tmp_path: Path
) -> None:
    source, target = topic(partitions=2, name="source"), topic(partitions=2, name="target")
    checkpoint = tmp_path / "checkpoint"
    kafka.produce(source, FIRST)
    frame = trial.read(spark, kafka, source, ["CAST(value AS STRING) AS value"])
    plain = frame.writeStream.format("kafka").option("kafka.bootstrap.servers", kafka.servers)
    plain = plain.option("topic", target).option("checkpointLocation", str(checkpoint))
    plain.trigger(availableNow=True).start().awaitTermination()
    kafka.produce(source, SECOND)
    sink = sinks.Kafka(target, bootstrap_servers=kafka.servers)
    ours = lock.pipeline(frame, name="adopted", checkpoint_location=str(checkpoint)).to(sink)
    with pytest.raises(LogMismatch, match="adopt_checkpoint=True"):
        ours.start(availableNow=True)
    adopted = lock.pipeline(
        frame, name="adopted", checkpoint_location=str(checkpoint), adopt_checkpoint=True
    ).to(sink)
    trial.finish(adopted)
    kafka.assert_exact(target, FIRST + SECOND)
