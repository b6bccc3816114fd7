"""Three brokers, one of which dies between the decision and the commit.

Nobody intervenes: the pipeline must find the new coordinator, or wait for the partition, by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import oracle
import trial
from poundlock.core.protocol import Step
from poundlock.errors import InDoubt
from poundlock.servers import kafka as servers

ROWS = [f"row-{number}" for number in range(40)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[servers.Cluster]:
    unlimited = {"transaction.max.timeout.ms": "2147483647"}
    with servers.running(brokers=3, properties=unlimited) as running:
        yield running


@pytest.fixture
def kafka(cluster: servers.Cluster) -> Iterator[oracle.Kafka]:
    """Three brokers, which all run before and after the test."""
    judge = oracle.Kafka(cluster.client_settings())
    yield judge
    for broker in set(cluster.brokers) - set(cluster.running()):
        cluster.start(broker)


@pytest.fixture
def source(kafka: oracle.Kafka) -> str:
    topic = kafka.create(replicas=[[1, 2, 3], [2, 3, 1]])
    kafka.produce(topic, ROWS)
    return topic


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_the_pipeline_survives_the_loss_of_its_coordinator(
    spark: SparkSession,
    cluster: servers.Cluster,
    kafka: oracle.Kafka,
    source: str,
    tmp_path: Path,
    how: str,
) -> None:
    """The broker is killed, or paused. The pipeline must find the new coordinator."""
    target = kafka.create(replicas=[[1, 2, 3], [2, 3, 1], [3, 1, 2]])
    gone: list[int] = []

    def strike(step: Step, facts: Mapping[str, object]) -> None:
        if step is Step.DECIDED and not gone:
            broker = kafka.coordinator(trial.decided(tmp_path)[0])
            gone.append(broker)
            (cluster.kill if how == "kill" else cluster.pause)(broker)

    pipeline = trial.copying(spark, kafka, source, target, tmp_path, maxOffsetsPerTrigger=20)
    try:
        trial.finish(pipeline.observe(strike))
    finally:
        if how == "pause" and gone:
            cluster.resume(gone[0])
    assert len(gone) == 1
    kafka.assert_exact(target, ROWS)
    if how == "kill":
        cluster.start(gone[0])  # every broker must list its open transactions
    kafka.assert_settled(target)


@pytest.mark.parametrize("patient", [True, False], ids=["waits", "is-stopped"])
def test_a_commit_waits_for_a_partition_without_leader(
    spark: SparkSession,
    cluster: servers.Cluster,
    kafka: oracle.Kafka,
    source: str,
    tmp_path: Path,
    patient: bool,
) -> None:
    """Its marker cannot be written, so the commit waits, finishes nothing, and continues later.

    If the driver is stopped while it waits, the next driver continues.
    """
    target = kafka.create(replicas=[[1], [2], [3]])  # one broker each
    lost_broker = 2
    steps = trial.Steps()

    def strike(step: Step, facts: Mapping[str, object]) -> None:
        steps(step, facts)
        if step is Step.DECIDED:
            cluster.kill(lost_broker)

    pipeline = trial.copying(
        *(spark, kafka, source, target, tmp_path),
        # With a key, because rows without one may all go to another partition.
        select=("CAST(value AS STRING) AS key", "CAST(value AS STRING) AS value"),
        sink={"transaction_timeout": "never"},
    )
    query = pipeline.observe(strike).start(availableNow=True)
    # This step follows a round of commits, so every branch has been tried once.
    oracle.eventually(lambda: steps.of(Step.COMMITTED_ONE))
    states = {id_: kafka.transaction(id_) for id_ in trial.decided(tmp_path)}
    assert "PrepareCommit" in states.values(), states
    assert query.isActive

    if patient:
        cluster.start(lost_broker)
        query.awaitTermination()
        assert len(steps.of(Step.FINISHED)) == 1
    else:
        query.stop(timeout=0)
        assert isinstance(query.error, InDoubt)
        assert not steps.of(Step.COMMITTED) and not steps.of(Step.FINISHED)
        assert "Finished" not in [record["kind"] for record in trial.records(tmp_path)]
        cluster.start(lost_broker)
        trial.finish(pipeline)
    assert "Repaired" not in [record["kind"] for record in trial.records(tmp_path)]
    kafka.assert_exact(target, ROWS)
    kafka.assert_settled(target)
