"""Routes: the columns of a frame that a task receives."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from poundlock.sinks import WriteAhead
from poundlock.spark.columns import hash_column, read_rows
from poundlock.spark.pipeline.routes import Route, routed

# Names with a meaning for Spark, or similar to our own.
ODD = ("a.b", "c`d", "é ", "rows0", "rows1", "hash0", "_")

SEEN = pa.schema([("index", pa.int64()), ("row", pa.string()), ("hash", pa.int64())])


def test_unusual_names_work_with_every_kind_of_route(spark: SparkSession) -> None:
    frame = spark.range(4).toDF("a.b")
    for name in ODD[1:]:
        frame = frame.withColumn(name, frame["`a.b`"] * 2)
    sinks = [WriteAhead(print, name=f"out{number}") for number in range(3)]
    routes = [
        Route(sinks[0]),
        Route(sinks[1], where="`a.b` > 1"),
        Route(sinks[2], select=("`a.b` + 1 AS `a.b`", "'x' AS y")),
    ]

    def see(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for index in range(3):
                rows = [str(row) for row in read_rows(batch, index).to_pylist()]
                hashes = batch.column(hash_column(index)).to_pylist()
                columns = {"index": [index] * len(rows), "row": rows, "hash": hashes}
                yield pa.RecordBatch.from_pydict(columns, schema=SEEN)

    found = routed(frame, routes).mapInArrow(see, "index bigint, row string, hash bigint").collect()
    seen = {index: sorted(row.row for row in found if row["index"] == index) for index in range(3)}
    whole = [str({"a.b": n} | dict.fromkeys(ODD[1:], 2 * n)) for n in range(4)]
    assert seen[0] == sorted(whole)
    assert seen[1] == sorted(["None", "None", *whole[2:]])
    assert seen[2] == sorted(str({"a.b": n + 1, "y": "x"}) for n in range(4))
    # A row has the same hash whether it comes in a struct or by its fields.
    hashes = {(row["index"], row.row): row.hash for row in found}
    assert all(hashes[0, row] == hashes[1, row] for row in whole[2:])
    assert len({hashes[0, row] for row in whole}) == 4
