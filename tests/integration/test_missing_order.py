"""A start says once that a sink keeps one row for each key without an order, however many batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

import poundlock as lock
from poundlock.servers.valkey import Valkey
from poundlock.sinks import Redis


def run_pipeline(frame: Any, sink: Redis, checkpoint: str) -> None:
    pipeline = lock.pipeline(frame, name="sensors", checkpoint_location=checkpoint).to(sink)
    pipeline.start(availableNow=True).awaitTermination()


def run_foreach_batch(frame: Any, sink: Redis, checkpoint: str) -> None:
    writer = frame.writeStream.foreachBatch(lock.foreach_batch(sink, name="sensors"))
    writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    writer.start().awaitTermination()


@pytest.mark.parametrize("run", [run_pipeline, run_foreach_batch])
def test_a_start_says_it_once(
    run: Callable[[Any, Redis, str], None],
    spark: SparkSession,
    valkey_server: Valkey,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [("a", 20.0), ("a", 21.0), ("a", 22.0)]
    frame = lock.from_collection(
        spark, rows, "id string, temperature double", batch_rows=1, directory=f"{tmp_path}/rows"
    )
    target = run.__name__
    sink = Redis(hash=target, field="id", value="temperature", url=valkey_server.address)
    run(frame, sink, f"{tmp_path}/checkpoint")
    client = redis.Redis.from_url(valkey_server.address, decode_responses=True)
    assert client.hgetall(target) == {"a": "22.0"}
    said = [record.getMessage() for record in caplog.records if "no order" in record.getMessage()]
    assert [line.partition(", but")[0] for line in said] == [
        f"sink {sink.name}: it keeps one row for each id"
    ]
