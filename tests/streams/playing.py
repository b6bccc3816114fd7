"""Runs batches of rows through a flow inside Spark, and returns the results."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from poundlock.spark.stream.flow import Flow

START = 1_767_225_600  # 2026-01-01, in seconds: times in these tests are seconds after it
SCHEMA = "id string, at double, v long"

Row = tuple[Any, ...]


def source(
    spark: SparkSession, directory: Path, batches: Sequence[Sequence[Row]], schema: str = SCHEMA
) -> DataFrame:
    """Return a streaming frame whose batches are these. `at` becomes the column `ts`."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [part.split()[0] for part in schema.split(", ")]
    for number, rows in enumerate(batches):
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
        path = directory / f"{number:04}.json"
        path.write_text("\n".join(lines))
        os.utime(path, (START + number, START + number))
    frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(directory))
    return frame.withColumn(
        "ts", F.timestamp_millis((F.col("at") * 1000 + START * 1000).cast("long"))
    )


def play(flow: Flow | DataFrame, checkpoint: Path, output: str | None = None) -> list[list[Row]]:
    """Run a flow to its end, and return each batch's rows with times as seconds, sorted."""
    frame = flow if isinstance(flow, DataFrame) else flow.side_output(output or "main")
    seen: list[list[Row]] = []

    def take(batch: DataFrame, number: int) -> None:
        rows = [tuple(plain(value) for value in row) for row in batch.collect()]
        seen.append(sorted(rows, key=repr))

    query = (
        frame.writeStream.option("checkpointLocation", str(checkpoint))
        .foreachBatch(take)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return seen


def plain(value: Any) -> Any:
    if hasattr(value, "timestamp"):
        return round(value.timestamp() - START, 3)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def together(batches: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows of all batches, sorted."""
    return sorted((row for batch in batches for row in batch), key=repr)
