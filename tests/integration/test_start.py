"""What a start says: all that is wrong, at once."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import oracle
import poundlock as lock
import trial
from poundlock import sinks
from poundlock.core.protocol import Step
from poundlock.errors import PoundlockError, Unavailable, UsageError
from poundlock.servers.postgres import Postgres
from poundlock.sinks.kafka.client import KafkaClient
from poundlock.spark.internals import analyzed_plan


@pytest.fixture
def closed() -> str:
    """An address that refuses connections."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def pipeline(frame: Any, place: Path) -> lock.Pipeline:
    return lock.pipeline(frame, name="all", checkpoint_location=str(place / "checkpoint"))


def test_every_fault_is_told_in_one_start(
    spark: SparkSession, kafka: oracle.Kafka, postgres_server: Postgres, closed: str, tmp_path: Path
) -> None:
    frame = lock.read_kafka(spark, "no-source", bootstrap_servers=kafka.servers)
    frame = frame.selectExpr("CAST(value AS STRING) AS id", "timestamp AS ts")
    made = (
        pipeline(frame, tmp_path)
        .to(sinks.Kafka("no-target", bootstrap_servers=kafka.servers, key="id", value="json"))
        .to(sinks.Kafka("keyless", bootstrap_servers=kafka.servers, key="absent", value="json"))
        .to(sinks.Postgres("no_table", dsn=postgres_server.address, key=["id", "ts"]))
        .to(sinks.Redis(hash="h", field="id", value="gone", url=f"redis://{closed}"))
        .to(sinks.Files(tmp_path / "files", partition_by="nowhere"))
    )
    with pytest.raises(UsageError) as caught:
        made.start()
    text = str(caught.value)
    for told in (
        "source's topics no-source do not exist",
        "[sink no-target] topic 'no-target' does not exist",
        "[sink keyless] the DataFrame does not fit: there is no column 'absent'",
        "[sink keyless] topic 'keyless' does not exist",
        "[sink no_table] there is no table",
        "with a unique index on (id, ts)",
        "there is no column 'gone'",
        f"[sink h] {closed} refuses connections",
        "'nowhere'",
    ):
        assert told in text, text
    assert text.startswith("8 things are wrong"), text
    assert not (tmp_path / "checkpoint").exists()


def test_spark_gets_the_servers_that_a_variable_names(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKERS", "one:1,two:2")
    source = analyzed_plan(lock.read_kafka(spark, "t", bootstrap_servers="env:BROKERS"))
    assert source.extraOptions().get("kafka.bootstrap.servers") == "one:1,two:2"


def test_one_fault_keeps_its_own_error(
    spark: SparkSession, kafka: oracle.Kafka, topic: Callable[..., str], tmp_path: Path
) -> None:
    frame = lock.read_kafka(spark, topic(), bootstrap_servers=kafka.servers).select("value")
    made = pipeline(frame, tmp_path).to(sinks.Kafka("gone", bootstrap_servers=kafka.servers))
    with pytest.raises(UsageError, match=r"^\[sink gone\] topic 'gone' does not exist"):
        made.start()


def test_refused_addresses_are_told_before_any_client_is_opened(
    spark: SparkSession, closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[KafkaClient]()
    monkeypatch.setattr(KafkaClient, "_run", lambda client, *_: asked.append(client))
    frame = lock.read_kafka(spark, "t", bootstrap_servers=f"{closed},{closed}").select("value")
    made = pipeline(frame, tmp_path).to(sinks.Kafka("out", bootstrap_servers=closed))
    with pytest.raises(Unavailable) as caught:
        made.start()
    assert str(caught.value).count(f"{closed} refuses connections") == 2
    assert not asked


def test_a_start_with_a_decided_batch_still_waits_for_its_client(
    spark: SparkSession,
    kafka: oracle.Kafka,
    topic: Callable[..., str],
    closed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = topic(), topic()
    kafka.produce(source, ["one"])
    trial.die(trial.copying(spark, kafka, source, target, tmp_path), Step.DECIDED)
    asked = list[KafkaClient]()

    def give_up(client: KafkaClient, *_: Any) -> None:
        asked.append(client)
        raise Unavailable("the client has waited as long as it does")

    monkeypatch.setattr(KafkaClient, "_run", give_up)
    frame = trial.read(spark, kafka, source, ["CAST(value AS STRING) AS value"])
    again = lock.pipeline(frame, name=trial.TRIAL, checkpoint_location=str(tmp_path))
    with pytest.raises(PoundlockError, match="has waited"):
        again.to(sinks.Kafka(target, bootstrap_servers=closed)).start(availableNow=True)
    assert len(asked) == 2  # the source's, and the sink's in spite of the refusal
    monkeypatch.undo()
    trial.finish(trial.copying(spark, kafka, source, target, tmp_path))  # leaves nothing open
    kafka.assert_exact(target, ["one"])
