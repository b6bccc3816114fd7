"""Batches of many tasks in a Spark context that runs other jobs too, for `test_busy_context.py`.

Spark numbers the attempts of all tasks of a context together, so the numbers of ours are far apart. In
the first batch one task fails once. Prints how many tasks of other jobs ran meanwhile. Arguments:
servers, source, target, rows of a batch, directory.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

import poundlock as lock
from poundlock import sinks

TASKS = 100
OTHER_TASKS = 900  # of one other job
FAILS = 3  # the partition whose first task fails


def main(servers: str, source: str, target: str, rows: str, directory: str) -> None:
    conf = {
        "spark.ui.enabled": "false",
        "spark.scheduler.mode": "FAIR",
        "spark.excludeOnFailure.taskAndStage.enabled": "false",  # there is only one executor
    }
    spark = lock.session("local[4,4]", conf=conf)
    context = spark.sparkContext
    context.setLogLevel("ERROR")
    done, count = threading.Event(), 0
    failed = Path(directory) / "failed"

    def others() -> None:
        nonlocal count
        context.setLocalProperty("spark.scheduler.pool", "others")
        while not done.is_set():
            spark.range(0, OTHER_TASKS, 1, OTHER_TASKS).write.format("noop").mode("append").save()
            count += OTHER_TASKS

    def stumble(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        yield from batches
        if task.partitionId() == FAILS and not failed.exists():
            failed.touch()
            raise RuntimeError("the first task fails when it has written its rows")

    frame = lock.read_kafka(
        spark,
        source,
        bootstrap_servers=servers,
        starting_offsets="earliest",
        minPartitions=TASKS,
        maxOffsetsPerTrigger=rows,
    ).selectExpr("CAST(value AS STRING) AS value")
    frame = frame.mapInArrow(stumble, frame.schema)
    pipeline = lock.pipeline(frame, name="busy", checkpoint_location=f"{directory}/checkpoint").to(
        sinks.Kafka(target, bootstrap_servers=servers)
    )
    thread = threading.Thread(target=others)
    thread.start()
    try:
        pipeline.start(availableNow=True).awaitTermination()
    finally:
        done.set()
        thread.join()
    print(json.dumps({"others": count}))


if __name__ == "__main__":
    main(*sys.argv[1:])
