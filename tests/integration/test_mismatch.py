"""A log or checkpoint that was restored, deleted or never existed is refused with a remedy."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from psycopg import sql

import oracle
import poundlock as lock
import trial
from poundlock import sinks
from poundlock.core.protocol import Step
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


SINKS = ("kafka", "postgres", "staged", "mariadb", "valkey", "files")


@pytest.fixture
def sink(request: pytest.FixtureRequest, kafka: oracle.Kafka, topic: Any, tmp_path: Path) -> Any:
    """A sink with an empty target in the system of this name."""
    match request.param:
        case "kafka":
            return sinks.Kafka(topic(partitions=2), bootstrap_servers=kafka.servers)
        case "postgres" | "staged" as mode:
            server = request.getfixturevalue("postgres_server")
            with psycopg.connect(server.dsn(), autocommit=True) as connection:
                create = sql.SQL("CREATE TABLE IF NOT EXISTS {} (value text)")
                connection.execute(create.format(sql.Identifier(f"restored_{mode}")))
            commit = "staged" if mode == "staged" else "prepared"
            return sinks.Postgres(f"restored_{mode}", dsn=server.dsn(), mode=commit)
        case "mariadb":
            server = request.getfixturevalue("mariadb_server")
            with pymysql.connect(**server.connect_arguments()) as connection:
                connection.cursor().execute("CREATE TABLE IF NOT EXISTS restored (value text)")
            return sinks.MySQL("restored", url=server.address)
        case "valkey":
            server = request.getfixturevalue("valkey_server")
            return sinks.Redis(list="restored", value="value", url=server.address)
        case _:
            return sinks.Files(str(tmp_path / "files"))


@pytest.mark.parametrize("sink", SINKS, indirect=True)
def test_restoring_both_within_one_generation_is_noticed(
    spark: Any, kafka: oracle.Kafka, topic: Any, tmp_path: Path, sink: Any
) -> None:
    source, checkpoint, backup = topic(partitions=2), tmp_path / "checkpoint", tmp_path / "backup"
    kafka.produce(source, FIRST)
    select = ["CAST(value AS STRING) AS value"]
    frame = trial.read(spark, kafka, source, select, maxOffsetsPerTrigger=10)

    def copy(step: Step, facts: Mapping[str, object]) -> None:
        if step is Step.ENTERED and facts["batch"] == 1:
            shutil.copytree(checkpoint, backup)

    pipeline = lock.pipeline(frame, name="restored", checkpoint_location=str(checkpoint)).to(sink)
    trial.finish(pipeline.observe(copy))
    shutil.rmtree(checkpoint)
    shutil.copytree(backup, checkpoint)
    with pytest.raises(LogMismatch, match=r"committed .* does not know it: it was restored"):
        pipeline.start(availableNow=True)


@pytest.mark.parametrize("sink", SINKS, indirect=True)
def test_deleting_log_and_checkpoint_is_noticed(
    spark: Any, kafka: oracle.Kafka, topic: Any, tmp_path: Path, sink: Any
) -> None:
    """Another pipeline may start, though its name begins in the same way."""
    source, checkpoint, name = (
        topic(partitions=2),
        tmp_path / "checkpoint",
        f"gone-{sink.name}"[:60],
    )
    kafka.produce(source, FIRST)
    frame = trial.read(spark, kafka, source, ["CAST(value AS STRING) AS value"])

    def made(name: str, **options: Any) -> Any:
        location = str(checkpoint)
        return lock.pipeline(frame, name=name, checkpoint_location=location, **options).to(sink)

    trial.finish(made(name))
    shutil.rmtree(checkpoint)
    says = (
        rf"is new, but pipeline '{name}' has already committed rows to {sink.name} with another log"
    )
    with pytest.raises(LogMismatch, match=says) as caught:
        made(name).start(availableNow=True)
    assert not list((checkpoint / "poundlock").glob("*.json")), "a refused driver writes nothing"
    shutil.rmtree(checkpoint)
    trial.finish(made(f"{name}-2"))

    (abandoned,) = re.findall(r"abandon_log=\['(\w+)'\]", str(caught.value))
    shutil.rmtree(checkpoint)
    trial.finish(made(name, abandon_log=abandoned))
    trial.finish(made(name))
    shutil.rmtree(checkpoint)
    with pytest.raises(LogMismatch, match=r"abandon_log=\['\w+', '\w+'\]"):
        made(name, abandon_log=abandoned).start(availableNow=True)


def test_a_deleted_log_is_noticed(scene: Any, kafka: oracle.Kafka) -> None:
    pipeline, source, target, checkpoint = scene
    shutil.rmtree(checkpoint / "poundlock")
    kafka.produce(source, SECOND)
    with pytest.raises(LogMismatch, match=r"no log at .* the log was deleted"):
        pipeline.start(availableNow=True)
    kafka.assert_exact(target, FIRST)


def test_a_checkpoint_of_a_plain_query_can_be_adopted_once(
    spark: Any, kafka: oracle.Kafka, topic: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
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
    trial.finish(adopted)
    assert "adopt_checkpoint=True has no effect any more" in caplog.text
    shutil.rmtree(checkpoint / "poundlock")
    with pytest.raises(LogMismatch, match="is new, but pipeline 'adopted' has already committed"):
        adopted.start(availableNow=True)
    kafka.assert_exact(target, FIRST + SECOND)
