"""Compare Poundlock's PostgreSQL sink with Spark's own JDBC writer in one run.

Sensor rows are written from files to a table by three sides: `df.write.jdbc(mode="append")` in
`foreachBatch` with Spark's defaults, the same with the usual tuning, and our sink. The first two are at
least once, ours is exactly once. The sides alternate in one Spark session on one server, so that a slow
machine affects all of them. A first round warms the JITs and is not counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.rounds import alternate, commit

RESULTS = Path(__file__).parent / "results"
SIDES = ("poundlock", "spark_jdbc", "spark_jdbc_tuned")
SCHEMA = "id string, ts timestamp, temperature double, number bigint"
TABLE = "id text, ts timestamptz, temperature float8, number bigint"
TUNED = {"batchsize": "10000", "reWriteBatchedInserts": "true"}


def fill(directory: Path, rows: int, files: int) -> None:
    """Write sensor rows as Parquet files of equal size."""
    each = rows // files
    for file in range(files):
        numbers = np.arange(file * each, (file + 1) * each)
        table = pa.table(
            {
                "id": pa.array(np.char.add("s", (numbers % 1000).astype(str))),
                "ts": pa.array((1_700_000_000 + numbers) * 1_000_000).cast(
                    pa.timestamp("us", "UTC")
                ),
                "temperature": np.round(15 + (numbers % 300) / 10, 1),
                "number": numbers,
            }
        )
        pq.write_table(table, directory / f"part-{file:05}.parquet")


def start(
    spark: Any, side: str, dsn: str, source: Path, table: str, checkpoint: str, per: int
) -> Any:
    """Start the query of one side."""
    import poundlock as lock
    from poundlock.sinks import Postgres

    frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", per).parquet(str(source))
    if side == "poundlock":
        pipeline = lock.pipeline(frame, name="bench", checkpoint_location=checkpoint)
        return pipeline.to(Postgres(table, dsn=dsn)).start(availableNow=True)
    address = urlsplit(dsn)
    url = f"jdbc:postgresql://{address.hostname}:{address.port}{address.path}"
    properties = {
        "user": address.username,
        "password": address.password,
        "driver": "org.postgresql.Driver",
        **(TUNED if side == "spark_jdbc_tuned" else {}),
    }

    def write(batch: Any, _: int) -> None:
        batch.write.jdbc(url, table, mode="append", properties=properties)

    writing = frame.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    return writing.trigger(availableNow=True).start()


def run_once(spark: Any, side: str, dsn: str, source: Path, rows: int, per: int) -> dict[str, Any]:
    """Send all rows through one side. Return the wall time and the seconds of each batch."""
    table, checkpoint = f"out_{uuid.uuid4().hex[:12]}", tempfile.mkdtemp(prefix="poundlock-bench-")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {table} ({TABLE})")  # type: ignore[arg-type]
        connection.execute("CHECKPOINT")
        started = time.monotonic()
        running = start(spark, side, dsn, source, table, checkpoint, per)
        running.awaitTermination()
        seconds = time.monotonic() - started
        batches = [
            progress["durationMs"]["triggerExecution"] / 1000
            for progress in map(json.loads, (item.json for item in running.recentProgress))
            if progress["numInputRows"]
        ]
        # Counted and summed, so that no side gains by omitting or repeating rows.
        found = connection.execute(f"SELECT count(*), sum(number) FROM {table}")  # type: ignore[arg-type]
        expected = (rows, rows * (rows - 1) // 2)
        if (said := found.fetchone()) != expected:
            raise SystemExit(f"{side}: expected {expected} (rows, sum), found {said}")
        connection.execute(f"DROP TABLE {table}")  # type: ignore[arg-type]
    shutil.rmtree(checkpoint)
    return {"seconds": seconds, "rows_per_second": rows / seconds, "batch_seconds": batches}


def compare(dsn: str, source: Path, rows: int, per: int, rounds: int) -> dict[str, Any]:
    """Alternate the sides, each round in another order. The first round warms up."""
    import poundlock as lock
    from poundlock.jvm import jars

    driver = ",".join(map(str, jars.paths("postgres-jdbc")))
    conf = {"spark.ui.enabled": "false", "spark.jars": driver}
    spark = lock.session("local[2]", kafka=False, conf=conf)
    spark.sparkContext.setLogLevel("ERROR")
    found = alternate(SIDES, rounds, lambda side: run_once(spark, side, dsn, source, rows, per))
    spark.stop()
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=4_000_000)
    arguments.add_argument("--files", type=int, default=16)
    arguments.add_argument("--files-per-batch", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--results", type=Path, default=RESULTS / "postgres.json")
    options = arguments.parse_args()
    rows = options.rows - options.rows % options.files
    from poundlock.servers import postgres

    with postgres.running() as server, tempfile.TemporaryDirectory() as directory:
        print(f"writing {rows:,} sensor rows", flush=True)
        fill(Path(directory), rows, options.files)
        results = compare(
            server.dsn(), Path(directory), rows, options.files_per_batch, options.rounds
        )
    for side in ("spark_jdbc", "spark_jdbc_tuned"):
        print(f"ratio to {side}: {results[f'ratio_vs_{side}']:.2f}", flush=True)
    results |= {"rows": rows, "files_per_batch": options.files_per_batch, "commit": commit()}
    options.results.parent.mkdir(exist_ok=True)
    options.results.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.results}")


if __name__ == "__main__":
    main()
