"""Compare Poundlock's Kafka sink with Spark's own in one run: `make bench`.

Sensor lines are read from one topic, converted to JSON, and written to another: by Spark's own sink,
which is at least once, and by ours, which is exactly once. The two alternate in one Spark session on
one broker, so that a slow machine affects both. A first round warms the JITs and is not counted. A
second part measures the memory of each process for one batch of a million rows and one of ten million.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.rounds import alternate, commit

RESULTS = Path(__file__).parent / "results"
PARTITIONS = 4


def fill(servers: str, topic: str, rows: int) -> None:
    """Write sensor lines `id,timestamp,temperature`, about 24 bytes each."""
    from poundlock.sinks.kafka.producer import ArrowProducer

    with ArrowProducer({"bootstrap.servers": servers}, transactional_id=None) as producer:
        for start in range(0, rows, 200_000):
            numbers = np.arange(start, min(start + 200_000, rows))
            ids = pa.array(numbers % 1000).cast(pa.string())
            times = pa.array(1_700_000_000 + numbers).cast(pa.string())
            degrees = pa.array(np.round(15 + (numbers % 300) / 10, 1)).cast(pa.string())
            names = pc.binary_join_element_wise("s", ids, "")
            lines = pc.binary_join_element_wise(names, times, degrees, ",")
            producer.write(
                topic,
                keys=None,
                values=lines.cast(pa.binary()),
                partitions=pa.array((numbers % PARTITIONS).astype("i4")),
            )
        producer.flush(600)


def create_topic(servers: str, topic: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result()


def delete_topic(servers: str, topic: str) -> None:
    from confluent_kafka.admin import AdminClient

    # The client must live until the answer.
    admin = AdminClient({"bootstrap.servers": servers})
    admin.delete_topics([topic])[topic].result()


def readings(spark: Any, servers: str, source: str, per_batch: int) -> Any:
    import poundlock as lock

    lines = lock.read_kafka(
        spark,
        source,
        bootstrap_servers=servers,
        starting_offsets="earliest",
        maxOffsetsPerTrigger=per_batch,
    )
    return lines.selectExpr("split(CAST(value AS STRING), ',') AS part").selectExpr(
        "part[0] AS id", "CAST(part[1] AS BIGINT) AS ts", "CAST(part[2] AS DOUBLE) AS temperature"
    )


def run_once(
    spark: Any,
    servers: str,
    source: str,
    side: str,
    rows: int,
    per_batch: int,
    watch: AbstractContextManager[Any] | None = None,
) -> dict[str, Any]:
    """Send `rows` rows through one side. Return the wall time and the seconds of each batch.

    `watch` is entered while the query runs, and left before its output is counted.
    """
    topic, checkpoint = f"out-{uuid.uuid4().hex[:12]}", tempfile.mkdtemp(prefix="poundlock-bench-")
    create_topic(servers, topic)
    frame = readings(spark, servers, source, per_batch)
    with watch or nullcontext():
        started = time.monotonic()
        running = start(frame, servers, side, topic, checkpoint)
        running.awaitTermination()
        seconds = time.monotonic() - started
    batches = [
        progress["durationMs"]["triggerExecution"] / 1000
        for progress in map(json.loads, (item.json for item in running.recentProgress))
        if progress["numInputRows"]
    ]
    written = count_rows(servers, topic)
    if written != rows:
        raise SystemExit(f"{side}: {rows} rows went in, {written} came out")
    delete_topic(servers, topic)
    shutil.rmtree(checkpoint)
    return {"seconds": seconds, "rows_per_second": rows / seconds, "batch_seconds": batches}


def start(frame: Any, servers: str, side: str, topic: str, checkpoint: str) -> Any:
    """Start the query of one side."""
    import poundlock as lock
    from poundlock.sinks import Kafka

    if side == "poundlock":
        sink = Kafka(topic, bootstrap_servers=servers, key="id", value="json")
        pipeline = lock.pipeline(frame, name="bench", checkpoint_location=checkpoint)
        return pipeline.to(sink).start(availableNow=True)
    return (
        frame.selectExpr("id AS key", "to_json(struct(*)) AS value")
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("topic", topic)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )


def count_rows(servers: str, topic: str) -> int:
    """Count the rows that a read_committed reader gets, so that no side gains by omitting rows."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "count",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            # Small rows fill a queue of the default length at once, and a full one waits for a second.
            "queued.min.messages": 2_000_000,
            "queued.max.messages.kbytes": 262_144,
            "fetch.queue.backoff.ms": 2,
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    count, ended = 0, set[int]()
    while len(ended) < PARTITIONS:
        for message in consumer.consume(100_000, 1.0):
            if message.error():
                ended.add(message.partition())
            else:
                count += 1
    consumer.close()
    return count


def session() -> Any:
    import poundlock as lock

    spark = lock.session("local[2]", conf={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def compare(servers: str, source: str, rows: int, per_batch: int, rounds: int) -> dict[str, Any]:
    """Alternate the two sides; the first round warms up."""
    spark = session()
    return alternate(
        ("poundlock", "spark_sink"),
        rounds,
        lambda side: run_once(spark, servers, source, side, rows, per_batch),
    )


def child(side: str, servers: str, source: str, rows: int) -> None:
    """Run one batch in this process, and print the peak memory of each of our processes."""
    from benchmarks.memory import Watch

    spark = session()
    watch = Watch(os.getpid())
    run_once(spark, servers, source, side, rows, rows, watch)
    print(json.dumps(watch.peaks_mb))


def memory(servers: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """Measure one small and one large batch, each in a new driver, with a topic of that size."""
    peaks: dict[str, Any] = {"poundlock": {}, "spark_sink": {}}
    for rows in sizes:
        source = f"lines-{rows}"
        create_topic(servers, source)
        fill(servers, source, rows)
        for side in peaks:
            command = [
                sys.executable,
                "-m",
                "benchmarks.kafka",
                "--child",
                side,
                "--source",
                source,
            ]
            command += ["--servers", servers, "--rows", str(rows)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            peaks[side][str(rows)] = json.loads(done.stdout.splitlines()[-1])
            print(f"memory {side} {rows:,} rows: {peaks[side][str(rows)]}", flush=True)
    return peaks


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=16_000_000)
    arguments.add_argument("--per-batch", type=int, default=4_000_000)
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--memory-rows", type=int, nargs=2, default=(1_000_000, 10_000_000))
    arguments.add_argument("--no-memory", action="store_true")
    arguments.add_argument("--only-memory", action="store_true", help="keep the speeds on record")
    arguments.add_argument("--child", choices=("poundlock", "spark_sink"))
    arguments.add_argument("--servers")
    arguments.add_argument("--source", default="lines")
    options = arguments.parse_args()
    if options.child:
        child(options.child, options.servers, options.source, options.rows)
        return
    from benchmarks import plot
    from poundlock.servers import kafka

    path = RESULTS / "kafka.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with kafka.running() as broker:
        servers = broker.bootstrap_servers
        if not options.only_memory:
            create_topic(servers, options.source)
            print(f"writing {options.rows:,} sensor lines", flush=True)
            fill(servers, options.source, options.rows)
            results |= compare(
                servers, options.source, options.rows, options.per_batch, options.rounds
            )
            print(f"ratio to Spark's own sink: {results['ratio_vs_spark_sink']:.2f}", flush=True)
            results |= {"rows": options.rows, "per_batch": options.per_batch, "commit": commit()}
        if not options.no_memory:
            results["memory"] = memory(servers, tuple(options.memory_rows))
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    plot.kafka(results, RESULTS / "kafka.svg")
    print(f"written to {path} and kafka.svg beside it")


if __name__ == "__main__":
    main()
