"""The consumer group that gets a pipeline's offsets: when, how exactly, and after which crashes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from pyspark.sql import SparkSession

import oracle
import poundlock as lock
import trial
from poundlock import sinks
from poundlock.core.log import FileLog
from poundlock.core.model import Decided
from poundlock.core.protocol import Step
from poundlock.errors import BadRow, UsageError
from poundlock.servers import kafka as servers
from poundlock.sinks.kafka import transactions
from poundlock.sinks.kafka.client import KafkaClient
from trial import Steps, copying, die, finish

ROWS = [f"row-{number}" for number in range(40)]
FORMAT_OF_PLANS = "spark.sql.streaming.offsetLog.formatVersion"


@pytest.fixture
def source(kafka: oracle.Kafka) -> str:
    topic = kafka.create(partitions=2)
    kafka.produce(topic, ROWS)
    return topic


@pytest.fixture
def target(kafka: oracle.Kafka) -> str:
    return kafka.create(partitions=2)


@pytest.mark.parametrize("mode", ["on_batch", "transactional"])
def test_the_group_follows_batch_by_batch(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path, mode: str
) -> None:
    """The group is never ahead of the committed rows, and reaches them after each batch."""
    group = f"g-{source}"
    steps = (Step.DECIDED, Step.FINISHED, Step.RETURNING)
    seen: list[tuple[Step, int]] = []

    def look(step: Step, facts: Mapping[str, object]) -> None:
        if step in steps:
            seen.append((step, sum(kafka.group(group, source).values())))

    pipeline = copying(
        *(spark, kafka, source, target, tmp_path),
        group=group,
        offsets=mode,
        maxOffsetsPerTrigger=20,
    )
    finish(pipeline.observe(look))
    finished = {"on_batch": (0, 20), "transactional": (20, 40)}[mode]
    assert seen == [
        *((Step.DECIDED, 0), (Step.FINISHED, finished[0]), (Step.RETURNING, 20)),
        *((Step.DECIDED, 20), (Step.FINISHED, finished[1]), (Step.RETURNING, 40)),
    ]
    assert kafka.group(group, source) == {0: 20, 1: 20}
    kafka.assert_exact(target, ROWS)
    kafka.assert_settled(target)


@pytest.mark.parametrize("mode", ["on_batch", "transactional"])
def test_a_kill_between_decision_and_commit_loses_no_offset(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path, mode: str
) -> None:
    """The group's offsets are exactly those of the last committed batch, then and at the end."""
    group = f"g-{source}"
    pipeline = copying(
        *(spark, kafka, source, target, tmp_path),
        group=group,
        offsets=mode,
        maxOffsetsPerTrigger=20,
    )
    die(pipeline, Step.DECIDED, times=2)
    assert kafka.group(group, source) == {0: 10, 1: 10}
    assert len(kafka.rows(target)) == 20
    finish(pipeline)
    assert kafka.group(group, source) == {0: 20, 1: 20}
    kafka.assert_exact(target, ROWS)
    kafka.assert_settled(target)


def test_a_crash_before_the_offsets_are_committed_loses_no_offset(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    """The batch is final, but the group has no offsets yet. The next start commits them."""
    group = f"g-{source}"
    pipeline = copying(spark, kafka, source, target, tmp_path, group=group)
    die(pipeline, Step.HANDING_BACK)
    assert kafka.group(group, source) == {}
    finish(pipeline)
    assert kafka.group(group, source) == {0: 20, 1: 20}
    kafka.assert_exact(target, ROWS)


def test_the_offsets_have_as_much_time_as_the_rows(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    """A driver may be away for minutes after the decision, and nothing is replayed."""
    pipeline = copying(spark, kafka, source, target, tmp_path, group="g", offsets="transactional")
    die(pipeline, Step.DECIDED)
    log = FileLog(tmp_path / "poundlock", create=False)
    (decided,) = [it.record for it in log.entries() if isinstance(it.record, Decided)]
    lives = {it.sink: (it.expires_at or 0.0) - it.began_at for it in decided.receipts}
    assert set(lives) == {target, "offsets-g"}
    assert {round(life) for life in lives.values()} == {900}
    with KafkaClient(kafka.settings) as client:
        opened = client.run(transactions.describe, [it.id for it in decided.receipts])
    assert {it.timeout_ms for it in opened.values() if it} == {900_000}
    finish(pipeline)
    kafka.assert_settled(target)


def test_an_aborted_batch_moves_nothing(
    spark: SparkSession, kafka: oracle.Kafka, target: str, tmp_path: Path
) -> None:
    """Offsets that are prepared beside a refused branch are aborted like all others."""
    source = kafka.create(partitions=2)
    kafka.produce(source, [*ROWS, "x" * 5000])
    group = f"g-{source}"
    small = {"settings": {"message.max.bytes": "4000"}}
    options: dict[str, Any] = {"group": group, "offsets": "transactional"}
    with pytest.raises(BadRow):
        finish(copying(spark, kafka, source, target, tmp_path, sink=small, **options))
    assert kafka.group(group, source) == {}
    kafka.assert_settled(target)
    finish(copying(spark, kafka, source, target, tmp_path, **options))
    assert kafka.group(group, source) == {0: 21, 1: 20}


@pytest.mark.parametrize("fate", ["committed", "aborted"])
def test_the_group_proves_the_outcome_of_forgotten_offsets(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path, fate: str
) -> None:
    """Only the group itself can prove the outcome of offsets whose id has been used again.

    The second batch moves one partition of two, so the other's offset proves nothing.
    """
    group = f"g-{source}"
    pipeline = copying(
        *(spark, kafka, source, target, tmp_path), group=group, offsets="transactional"
    )
    finish(pipeline)
    kafka.produce(source, ["late"], partition=0)
    die(pipeline, Step.FINISHING if fate == "committed" else Step.DECIDED)
    for id_ in trial.decided(tmp_path):
        kafka.fence(id_)  # this aborts open transactions and erases the record of the outcome
    assert kafka.group(group, source) == {0: 21 if fate == "committed" else 20, 1: 20}

    steps = Steps()
    finish(pipeline.observe(steps))
    assert len(steps.of(Step.REPAIRED)) == (fate == "aborted")
    assert kafka.group(group, source) == {0: 21, 1: 20}
    kafka.assert_exact(target, [*ROWS, "late"])
    kafka.assert_settled(target)


def test_the_group_proves_the_outcome_after_the_ids_expire(
    spark: SparkSession, tmp_path: Path
) -> None:
    """As above, but Kafka itself forgets the id, days after the end of a transaction."""
    swift = {
        "transactional.id.expiration.ms": "2000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
    }
    with servers.running(properties=swift) as cluster:
        kafka = oracle.Kafka(cluster.client_settings())
        source, target = kafka.create(partitions=2), kafka.create(partitions=2)
        kafka.produce(source, ROWS)
        pipeline = copying(
            *(spark, kafka, source, target, tmp_path), group="g", offsets="transactional"
        )
        die(pipeline, Step.FINISHING)
        ids = trial.decided(tmp_path)
        assert len(ids) == 3, "two tasks and the offsets"
        oracle.eventually(lambda: [kafka.knows(id_) for id_ in ids], want=lambda it: not any(it))
        steps = Steps()
        finish(pipeline.observe(steps))
        assert not steps.of(Step.REPAIRED)
        kafka.assert_exact(target, ROWS)
        kafka.assert_settled(target)
        assert kafka.group("g", source) == {0: 20, 1: 20}


def test_disabled_offsets_are_not_committed(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    group = f"g-{source}"
    finish(copying(spark, kafka, source, target, tmp_path, group=group, offsets="disabled"))
    kafka.assert_exact(target, ROWS)
    assert kafka.group(group, source) == {}


def test_kafka_periodic_is_refused(spark: SparkSession, kafka: oracle.Kafka) -> None:
    with pytest.raises(UsageError, match=r"'kafka_periodic' is refused.*Use 'on_batch'"):
        lock.read_kafka(
            spark, "any", bootstrap_servers=kafka.servers, group="g", offsets="kafka_periodic"
        )


def test_an_unknown_mode_is_refused(spark: SparkSession, kafka: oracle.Kafka) -> None:
    with pytest.raises(UsageError, match="offsets='sometimes'"):
        lock.read_kafka(
            spark, "any", bootstrap_servers=kafka.servers, group="g", offsets="sometimes"
        )


def test_offsets_that_are_not_handed_back_stop_no_finished_batch(
    spark: SparkSession,
    kafka: oracle.Kafka,
    source: str,
    target: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another consumer uses the group. A warning names it; the next batch hands the offsets back."""
    group = f"g-{source}"
    pipeline = copying(spark, kafka, source, target, tmp_path, group=group)
    member = Consumer(kafka.settings | {"group.id": group, "enable.auto.commit": "false"})
    member.subscribe([source])
    oracle.eventually(lambda: (member.poll(0.1), member.assignment())[1])
    finish(pipeline)
    assert kafka.group(group, source) == {}
    assert f"group {group}: the offsets of batch 0 were not handed back" in caplog.text
    assert "live members" in caplog.text
    member.close()
    kafka.produce(source, ["late"], partition=0)
    finish(pipeline)
    assert kafka.group(group, source) == {0: 21, 1: 20}
    kafka.assert_exact(target, [*ROWS, "late"])


@pytest.mark.parametrize("mode", ["on_batch", "transactional"])
def test_two_sources_can_share_a_group(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path, mode: str
) -> None:
    other = kafka.create()
    kafka.produce(other, ["a", "b"])
    group = f"g-{source}"
    value = ["CAST(value AS STRING) AS value"]
    both = trial.read(spark, kafka, source, value, group=group, offsets=mode).union(
        trial.read(spark, kafka, other, value, group=group, offsets=mode)
    )
    pipeline = lock.pipeline(both, name="both", checkpoint_location=str(tmp_path))
    finish(pipeline.to(sinks.Kafka(target, bootstrap_servers=kafka.servers)))
    kafka.assert_exact(target, [*ROWS, "a", "b"])
    assert kafka.group(group, source) == {0: 20, 1: 20}
    assert kafka.group(group, other) == {0: 2}
    kafka.assert_settled(target)


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_group_gets_its_offsets_beside_a_source_that_has_none(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path, version: str
) -> None:
    """Both formats of Spark's plan leave out what a source does not have, each in its own way."""
    (empty := tmp_path / "empty").mkdir()
    group = f"g-{source}"
    both = lock.read_files(spark, empty, format="text").union(
        trial.read(spark, kafka, source, ["CAST(value AS STRING) AS value"], group=group)
    )
    checkpoint = tmp_path / "checkpoint"
    pipeline = lock.pipeline(both, name="both", checkpoint_location=str(checkpoint))
    pipeline = pipeline.to(sinks.Kafka(target, bootstrap_servers=kafka.servers))
    spark.conf.set(FORMAT_OF_PLANS, version)
    try:
        finish(pipeline)
        (empty / "late.txt").write_text("late\n")
        finish(pipeline)
    finally:
        spark.conf.unset(FORMAT_OF_PLANS)
    plans = [(checkpoint / "offsets" / batch).read_text().splitlines() for batch in "01"]
    first = ["-"] if version == "1" else []  # what the plan has of the empty source
    assert [(plan[0], len(plan) - 2) for plan in plans] == [
        (f"v{version}", len(first) + 1),
        (f"v{version}", 2),
    ]
    assert kafka.group(group, source) == {0: 20, 1: 20}
    kafka.assert_exact(target, [*ROWS, "late"])
