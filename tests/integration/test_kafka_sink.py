"""The Kafka sink in a pipeline: bad input, semantics, columns, starting and stopping.

After every refusal the cause is removed. Then every row must arrive exactly once: a refused batch
loses nothing and leaves nothing open.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import oracle
import poundlock as lock
from poundlock import sinks
from poundlock.core.participant import Column
from poundlock.core.protocol import Step
from poundlock.errors import BadRow, UsageError
from trial import Steps, copying, die, finish, read

ROWS = [f"row-{number}" for number in range(40)]


@pytest.fixture
def source(kafka: oracle.Kafka) -> str:
    """A topic of two partitions with all rows."""
    topic = kafka.create(partitions=2)
    kafka.produce(topic, ROWS)
    return topic


@pytest.fixture
def target(kafka: oracle.Kafka) -> str:
    return kafka.create(partitions=2)


# Refused before anything starts.


def test_a_missing_topic_is_refused(
    spark: SparkSession, kafka: oracle.Kafka, source: str, tmp_path: Path
) -> None:
    target = f"{source}-later"
    pipeline = copying(spark, kafka, source, target, tmp_path / "c")
    with pytest.raises(UsageError, match=f"topic '{target}' does not exist") as refused:
        pipeline.start(availableNow=True)
    assert "Create it" in str(refused.value)
    assert not (tmp_path / "c").exists(), "nothing may be touched"

    kafka.create(target)
    finish(pipeline)
    kafka.assert_exact(target, ROWS)
    kafka.assert_settled(target)


@pytest.mark.parametrize(
    ("select", "sink", "complaint"),
    [
        (["1.5D AS value"], {}, "column 'value' has type double, but the value needs string"),
        (["key"], {}, "there is no column 'value' for the value"),
        (["value"], {"key": "id"}, "there is no column 'id' for the key"),
        (["value", "array(1) AS id"], {"key": "id"}, "column 'id' has type array<int>"),
        (["value", "'x' AS p"], {"partition": "p"}, "column 'p' has type string, but the partit"),
        (["value", "map('a', 'b') AS h"], {"headers": "h"}, "the headers needs array<struct<key"),
        (["value", "true AS at"], {"timestamp": "at"}, "the timestamp needs timestamp, or bigint"),
    ],
)
def test_a_dataframe_that_does_not_fit_is_refused(
    spark: SparkSession,
    kafka: oracle.Kafka,
    source: str,
    target: str,
    tmp_path: Path,
    select: list[str],
    sink: dict[str, Any],
    complaint: str,
) -> None:
    pipeline = copying(spark, kafka, source, target, tmp_path / "c", select=select, sink=sink)
    with pytest.raises(UsageError) as refused:
        pipeline.start(availableNow=True)
    assert complaint in str(refused.value)
    assert f"sink {target}" in str(refused.value)
    assert not (tmp_path / "c").exists(), "nothing may be touched"


def test_a_timeout_above_the_brokers_limit_is_refused(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    sink = {"transaction_timeout": 24 * 3600}
    pipeline = copying(spark, kafka, source, target, tmp_path / "c", sink=sink)
    with pytest.raises(
        UsageError, match=r"86400000 ms, but the brokers allow 900000 ms"
    ) as refused:
        pipeline.start(availableNow=True)
    assert "transaction.max.timeout.ms" in str(refused.value)
    assert not (tmp_path / "c").exists(), "nothing may be touched"


@pytest.mark.parametrize(
    "trigger", [{"processingTime": "2 secz"}, {"once": True, "availableNow": True}]
)
def test_a_trigger_that_spark_refuses_touches_nothing(
    spark: SparkSession,
    kafka: oracle.Kafka,
    source: str,
    target: str,
    tmp_path: Path,
    trigger: dict[str, Any],
) -> None:
    with pytest.raises(Exception, match=r"2 secz|single trigger"):
        copying(spark, kafka, source, target, tmp_path / "c").start(**trigger)
    assert not (tmp_path / "c").exists()


def test_an_object_that_is_not_a_sink_is_refused(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    pipeline = copying(spark, kafka, source, target, tmp_path / "c")
    with pytest.raises(UsageError, match="takes a sink, such as"):
        pipeline.to("out")  # type: ignore[arg-type]


@pytest.mark.parametrize("trigger", [{"continuous": "1 second"}, {"realTime": "1 second"}])
def test_unsupported_triggers_are_refused(
    spark: SparkSession,
    kafka: oracle.Kafka,
    source: str,
    target: str,
    tmp_path: Path,
    trigger: dict[str, str],
) -> None:
    with pytest.raises(UsageError, match="is refused"):
        copying(spark, kafka, source, target, tmp_path / "c").start(**trigger)


def test_a_source_topic_that_does_not_exist_is_refused(
    spark: SparkSession, kafka: oracle.Kafka, target: str, tmp_path: Path
) -> None:
    pipeline = copying(spark, kafka, f"{target}-none", target, tmp_path / "c")
    with pytest.raises(UsageError, match=f"topics {target}-none do not exist"):
        pipeline.start(availableNow=True)
    assert not (tmp_path / "c").exists(), "nothing may be touched"


# Batches that are refused: aborted as a whole, and written after the cause is removed.


def test_a_row_too_large_for_the_topic_aborts_the_batch(
    spark: SparkSession, kafka: oracle.Kafka, tmp_path: Path
) -> None:
    """One row in one partition is too large: no row of the batch may appear, in either sink."""
    rows = [*ROWS, "x" * 5000]
    source, other = kafka.create(partitions=2), kafka.create()
    kafka.produce(source, rows)
    # The topic's limit is that of a batch of rows, so keep batches of small rows below it.
    target = kafka.create(partitions=2, config={"max.message.bytes": "4000"})
    pipeline = copying(
        *(spark, kafka, source, target, tmp_path),
        sink={"settings": {"batch.size": "1000", "compression.type": "none"}},
    ).to(sinks.Kafka(other, bootstrap_servers=kafka.servers))
    with pytest.raises(BadRow, match="MSG_SIZE_TOO_LARGE") as refused:
        finish(pipeline)
    assert "max.message.bytes" in str(refused.value)
    for topic in (target, other):
        assert kafka.values(topic) == Counter()
    kafka.assert_settled(target, other)

    kafka.configure(target, "max.message.bytes", "1000000")
    finish(pipeline)
    for topic in (target, other):
        kafka.assert_exact(topic, rows)
    kafka.assert_settled(target, other)


def test_a_row_too_large_for_the_producer_aborts_the_batch(
    spark: SparkSession, kafka: oracle.Kafka, target: str, tmp_path: Path
) -> None:
    rows = [*ROWS, "x" * 5000]
    source = kafka.create(partitions=2)
    kafka.produce(source, rows)
    sink = {"settings": {"message.max.bytes": "4000"}}
    with pytest.raises(BadRow, match=r"5000 bytes, .* exceeds message.max.bytes=4000"):
        finish(copying(spark, kafka, source, target, tmp_path, sink=sink))
    assert kafka.values(target) == Counter()
    kafka.assert_settled(target)

    finish(copying(spark, kafka, source, target, tmp_path))
    kafka.assert_exact(target, rows)


def test_rows_without_a_topic_abort_the_batch(
    spark: SparkSession, kafka: oracle.Kafka, tmp_path: Path
) -> None:
    even, odd = kafka.create(), kafka.create()
    source = kafka.create(partitions=2)
    kafka.produce(source, [*(f"{n},{(even, odd)[n % 2]}" for n in range(20)), "lost,"])
    select = [
        "split(CAST(value AS STRING), ',')[0] AS value",
        "nullif(split(CAST(value AS STRING), ',')[1], '') AS topic",
    ]

    def pipeline(**route: Any) -> lock.Pipeline:
        frame = read(spark, kafka, source, select)
        return lock.pipeline(frame, name=f"by-topic-{even}", checkpoint_location=str(tmp_path)).to(
            sinks.Kafka(bootstrap_servers=kafka.servers, name="out"), **route
        )

    with pytest.raises(BadRow, match="1 rows have no topic") as refused:
        finish(pipeline())
    assert "where=" in str(refused.value)
    for topic in (even, odd):
        assert kafka.values(topic) == Counter()
    kafka.assert_settled(even, odd)

    finish(pipeline(where="topic IS NOT NULL"))
    kafka.assert_exact(even, [str(number) for number in range(0, 20, 2)])
    kafka.assert_exact(odd, [str(number) for number in range(1, 20, 2)])
    kafka.assert_settled(even, odd)


def test_a_topic_that_is_not_utf8_is_a_bad_row(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    named = f"IF(CAST(value AS STRING) = '{ROWS[7]}', string(X'61ff'), '{target}') AS topic"
    frame = read(spark, kafka, source, ["value", named])
    made = lock.pipeline(frame, name=f"by-topic-{target}", checkpoint_location=str(tmp_path / "c"))
    out = sinks.Kafka(bootstrap_servers=kafka.servers, name="out")
    finish(made.to(out, on_bad_row=sinks.Files(tmp_path / "bad", format="json")))
    kafka.assert_exact(target, [row for row in ROWS if row != ROWS[7]])
    kafka.assert_settled(target)
    (dead_letter,) = spark.read.json(str(tmp_path / "bad")).collect()
    assert json.loads(dead_letter["row"])["topic"] == "base64:Yf8="


@pytest.mark.parametrize("name", ["misspelled", "no topic!"])
def test_a_row_that_names_a_missing_topic_aborts_the_batch(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path, name: str
) -> None:
    def pipeline(topic: str) -> lock.Pipeline:
        named = f"IF(CAST(value AS STRING) = '{ROWS[7]}', '{topic}', '{target}') AS topic"
        frame = read(spark, kafka, source, ["value", named])
        return lock.pipeline(
            frame, name=f"by-topic-{target}", checkpoint_location=str(tmp_path)
        ).to(sinks.Kafka(bootstrap_servers=kafka.servers, name="out"))

    with pytest.raises(UsageError, match=f"topic '{name}'"):
        finish(pipeline(name))
    assert kafka.values(target) == Counter()
    kafka.assert_settled(target)

    finish(pipeline(kafka.create(f"{target}-2")))
    kafka.assert_exact(f"{target}-2", [ROWS[7]])
    kafka.assert_exact(target, [row for row in ROWS if row != ROWS[7]])
    kafka.assert_settled(target, f"{target}-2")


# Semantics below exactly-once write without a transaction.


@pytest.mark.parametrize(
    ("semantic", "promise"),
    [("at_least_once", lock.Guarantee.AT_LEAST_ONCE), ("none", lock.Guarantee.NONE)],
)
def test_weaker_semantics_write_without_transactions(
    spark: SparkSession,
    kafka: oracle.Kafka,
    source: str,
    target: str,
    tmp_path: Path,
    semantic: str,
    promise: lock.Guarantee,
) -> None:
    pipeline = copying(spark, kafka, source, target, tmp_path, sink={"semantic": semantic})
    assert pipeline.guarantee().guarantee is promise
    die(pipeline, Step.PREPARED)
    assert kafka.values(target, committed=False) == Counter(ROWS), "visible before the decision"
    finish(pipeline)
    twice = Counter(dict.fromkeys(ROWS, 2))
    assert kafka.values(target) == twice, "the batch that died is written again"


def test_a_weaker_sink_can_stand_beside_an_exactly_once_sink(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    loose = kafka.create()
    pipeline = copying(spark, kafka, source, target, tmp_path).to(
        sinks.Kafka(loose, bootstrap_servers=kafka.servers, semantic="at_least_once")
    )
    die(pipeline, Step.DECIDED)
    finish(pipeline)
    kafka.assert_exact(target, ROWS)
    kafka.assert_exact(loose, ROWS)  # decided before the crash, so not written again
    kafka.assert_settled(target, loose)


# Columns.


def test_the_columns_of_a_row_are_written(
    spark: SparkSession, kafka: oracle.Kafka, source: str, tmp_path: Path
) -> None:
    """Key, value, headers, partition and timestamp, under Spark's own names for them."""
    target = kafka.create(partitions=3)
    number = "CAST(substring(CAST(value AS STRING), 5) AS INT)"
    select = [
        f"CAST({number} AS STRING) AS key",
        f"IF({number} % 5 = 0, NULL, value) AS value",
        f"{number} % 3 AS partition",
        f"timestamp_millis(1700000000000 + {number}) AS timestamp",
        f"IF({number} % 2 = 0, array(named_struct('key', 'from', 'value', CAST('\u00e4' AS BINARY)), "
        "named_struct('key', 'none', 'value', CAST(NULL AS BINARY))), NULL) AS headers",
    ]
    finish(copying(spark, kafka, source, target, tmp_path, select=select))
    rows = kafka.rows(target)
    assert len(rows) == len(ROWS)
    for row in rows:
        number = int(row.key or b"")
        assert row.value == (None if number % 5 == 0 else ROWS[number].encode())
        assert row.partition == number % 3
        assert row.timestamp_ms == 1700000000000 + number
        here = (("from", "\u00e4".encode()), ("none", None))
        assert row.headers == (here if number % 2 == 0 else ())
    assert len({row.key for row in rows}) == len(ROWS)
    kafka.assert_settled(target)


def test_a_partition_that_the_topic_lacks_aborts_the_batch(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    select = ["value", f"IF(CAST(value AS STRING) = '{ROWS[3]}', 7, 0) AS partition"]
    with pytest.raises(BadRow, match="partition"):
        finish(copying(spark, kafka, source, target, tmp_path, select=select))
    assert kafka.values(target) == Counter()
    kafka.assert_settled(target)

    finish(copying(spark, kafka, source, target, tmp_path))
    kafka.assert_exact(target, ROWS)


# Starting and stopping.


def test_a_stop_lets_the_running_batch_finish(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    steps = Steps(hold_at=Step.DECIDED)
    pipeline = copying(spark, kafka, source, target, tmp_path, maxOffsetsPerTrigger=10)
    query = pipeline.observe(steps).start(processingTime="0 seconds")
    assert steps.held.wait(oracle.SECONDS)
    stopping = threading.Thread(target=query.stop)
    stopping.start()
    oracle.eventually(lambda: query._asked.is_set())
    steps.let_go()
    stopping.join(oracle.SECONDS)
    assert not query.isActive
    assert query.exception() is None
    commits = {file.name for file in (tmp_path / "commits").iterdir() if file.name.isdigit()}
    assert commits == {"0"}, "the running batch, and none after it"
    assert len(kafka.rows(target)) == 10
    kafka.assert_settled(target)

    finish(pipeline)
    kafka.assert_exact(target, ROWS)
    kafka.assert_settled(target)


def test_a_stop_without_a_running_batch_ends_at_once(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    query = copying(spark, kafka, source, target, tmp_path).start(processingTime="0 seconds")
    query.processAllAvailable()
    query.stop()
    assert not query.isActive
    assert query.exception() is None
    kafka.assert_exact(target, ROWS)


def test_later_rows_are_written_too(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    query = copying(spark, kafka, source, target, tmp_path).start(processingTime="100 milliseconds")
    query.processAllAvailable()
    kafka.assert_exact(target, ROWS)
    more = [f"more-{number}" for number in range(10)]
    kafka.produce(source, more)
    query.processAllAvailable()
    query.stop()
    kafka.assert_exact(target, [*ROWS, *more])
    kafka.assert_settled(target)


def test_a_second_start_is_refused(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    """The second start must not stop the query that runs."""
    pipeline = copying(spark, kafka, source, target, tmp_path)
    query = pipeline.start(processingTime="0 seconds")
    query.processAllAvailable()
    with pytest.raises(UsageError, match="is running in this session"):
        pipeline.start(processingTime="0 seconds")
    kafka.produce(source, ["more"])
    query.processAllAvailable()
    query.stop()
    kafka.assert_exact(target, [*ROWS, "more"])


def test_a_task_that_does_not_vote_in_time_is_rejected(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    """Tasks that have not voted count as rejected: the attempt is aborted, and the batch runs again."""
    awake = tmp_path / "awake"

    def slow(rows: Iterator[Any]) -> Iterator[Any]:
        for batch in rows:
            while not awake.exists():
                time.sleep(0.05)
            yield batch

    def wake(step: Step, facts: Mapping[str, object]) -> None:
        if step is Step.ABORTED:
            reasons.append(str(facts["reason"]))
            awake.touch()

    reasons: list[str] = []
    frame = read(spark, kafka, source, ["value"]).mapInArrow(slow, "value binary")
    pipeline = lock.pipeline(
        frame,
        name="slow",
        checkpoint_location=str(tmp_path / "c"),
        prepare_timeout=12,  # a new Python worker must start within it, on a busy machine too
        settings=lock.Settings(tries=5),
    ).to(sinks.Kafka(target, bootstrap_servers=kafka.servers))
    finish(pipeline.observe(wake))
    assert "not every task had voted after 12 s" in reasons[0]
    kafka.assert_exact(target, ROWS)
    kafka.assert_settled(target)


def test_foreach_batch_writes_every_row_once(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    """Code with its own `writeStream` has the same guarantee, also across restarts."""
    frame = read(spark, kafka, source, ["value"], maxOffsetsPerTrigger=15)

    def query(function: Any, checkpoint: Path) -> Any:
        writer = frame.writeStream.foreachBatch(function).trigger(availableNow=True)
        return writer.option("checkpointLocation", str(checkpoint)).start()

    def function() -> Any:
        sink = sinks.Kafka(target, bootstrap_servers=kafka.servers)
        return lock.foreach_batch(sink, name="sensors")

    first = function()
    query(first, tmp_path / "a").awaitTermination()
    kafka.assert_exact(target, ROWS)
    # Spark runs the last batch again if it could not write that the batch was finished.
    last = max((tmp_path / "a" / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink()
    query(function(), tmp_path / "a").awaitTermination()
    kafka.assert_exact(target, ROWS)
    kafka.produce(source, ["more"])
    query(first, tmp_path / "a").awaitTermination()  # one function, one query, run again
    kafka.assert_exact(target, [*ROWS, "more"])
    kafka.assert_settled(target)


def test_foreach_batch_is_for_one_query(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str, tmp_path: Path
) -> None:
    """A second query must not find its batches in the log of the first, and skip them."""
    function = lock.foreach_batch(
        sinks.Kafka(target, bootstrap_servers=kafka.servers), name="sensors"
    )
    frame = read(spark, kafka, source, ["value"])

    def run(checkpoint: Path) -> None:
        writer = frame.writeStream.foreachBatch(function).trigger(availableNow=True)
        writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()

    run(tmp_path / "a")
    kafka.assert_exact(target, ROWS)
    with pytest.raises(StreamingQueryException, match="foreach_batch"):
        run(tmp_path / "b")
    kafka.assert_exact(target, ROWS)


def test_foreach_batch_needs_a_permanent_checkpoint(
    spark: SparkSession, kafka: oracle.Kafka, source: str, target: str
) -> None:
    sink = sinks.Kafka(target, bootstrap_servers=kafka.servers)
    writer = read(spark, kafka, source, ["value"]).writeStream
    query = writer.foreachBatch(lock.foreach_batch(sink, name="sensors"))
    with pytest.raises(StreamingQueryException, match="'checkpointLocation'"):
        query.trigger(availableNow=True).start().awaitTermination()
    kafka.assert_exact(target, [])


def test_a_row_as_json_has_its_microseconds_and_no_nulls(spark: SparkSession) -> None:
    row = spark.sql("SELECT timestamp_ntz'2024-01-01 00:00:00.123456' AS t, CAST(NULL AS INT) AS n")
    columns = {
        field.name: Column(field.name, field.dataType.simpleString()) for field in row.schema
    }
    sink = sinks.Kafka("any", bootstrap_servers="127.0.0.1:9", value="json")
    made = row.selectExpr(f"CAST({sink.project(columns)['value']} AS STRING) AS text").first()
    assert made is not None
    assert made.text == '{"t":"2024-01-01T00:00:00.123456"}'
