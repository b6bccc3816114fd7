"""Compare Poundlock's MySQL sink with Spark's own JDBC writer in one run.

The same files of sensor readings are written to a table of MariaDB by three sides: `df.write.jdbc` in a
`foreachBatch` with Spark's defaults, the same with the usual tuning, and our sink. The first two are at
least once, ours is exactly once (append, XA). The sides alternate in one Spark session on one server,
so that a slow machine affects all of them. A first round warms the JITs and is not counted.

    python -m benchmarks.mysql
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.rounds import alternate, commit

RESULTS = Path(__file__).parent / "results"
TASKS = 2
SCHEMA = "id string, ts timestamp, temperature double, number bigint"
SIDES = ("poundlock", "spark_jdbc", "spark_jdbc_tuned")
TUNED = {"batchsize": "10000", "useBulkStmts": "true"}
TABLE = "(id VARCHAR(20), ts DATETIME(6), temperature DOUBLE, number BIGINT)"


def fill(directory: Path, rows: int, per_batch: int) -> None:
    """Write readings as files, as many for each batch as there are tasks."""
    each = per_batch // TASKS
    for index, start in enumerate(range(0, rows, each)):
        numbers = np.arange(start, min(start + each, rows))
        table = pa.table(
            {
                "id": pa.array([f"s{number % 1000}" for number in numbers]),
                "ts": pa.array(1_700_000_000_000_000 + numbers * 1000, pa.timestamp("us", "UTC")),
                "temperature": pa.array(np.round(15 + (numbers % 300) / 10, 1)),
                "number": pa.array(numbers),
            }
        )
        pq.write_table(table, directory / f"part-{index:05d}.parquet")


def ask(server: Any, statement: str) -> Any:
    import pymysql

    client = pymysql.connect(**server.connect_arguments(), autocommit=True)
    with closing(client), client.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall()


def run_once(spark: Any, server: Any, source: Path, side: str, rows: int) -> dict[str, Any]:
    """Send all rows through one side. Return seconds and rows per second."""
    import poundlock as lock
    from poundlock.sinks import MySQL

    table, checkpoint = f"out_{uuid.uuid4().hex[:12]}", tempfile.mkdtemp(prefix="poundlock-bench-")
    ask(server, f"CREATE TABLE {table} {TABLE}")
    frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", TASKS).parquet(str(source))
    started = time.monotonic()
    if side == "poundlock":
        sink = MySQL(table, url=server.address)
        pipeline = lock.pipeline(frame, name="bench", checkpoint_location=checkpoint).to(sink)
        running = pipeline.start(availableNow=True)
    else:
        running = (
            frame.writeStream.foreachBatch(_jdbc(server, table, side))
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
    running.awaitTermination()
    seconds = time.monotonic() - started
    written = ask(server, f"SELECT COUNT(*), COUNT(DISTINCT number) FROM {table}")[0]
    if written != (rows, rows):
        raise SystemExit(f"{side}: {rows} rows went in, {written} came out")
    ask(server, f"DROP TABLE {table}")
    shutil.rmtree(checkpoint)
    return {"seconds": seconds, "rows_per_second": rows / seconds}


def _jdbc(server: Any, table: str, side: str) -> Any:
    to = server.connect_arguments()
    # Spark chooses its dialect by this scheme. With jdbc:mariadb it quotes names in a wrong way.
    url = f"jdbc:mysql://{to['host']}:{to['port']}/{to['database']}?permitMysqlScheme"
    properties = {
        "user": to["user"],
        "password": to["password"],
        "driver": "org.mariadb.jdbc.Driver",
        **(TUNED if side == "spark_jdbc_tuned" else {}),
    }

    def write(frame: Any, batch: int) -> None:
        frame.write.jdbc(url, table, mode="append", properties=properties)

    return write


def compare(server: Any, source: Path, rows: int, rounds: int) -> dict[str, Any]:
    """Alternate the sides; the first round warms up."""
    import poundlock as lock
    from poundlock.jvm import jars

    (driver,) = jars.paths("mysql-jdbc")
    spark = lock.session(
        f"local[{TASKS}]",
        kafka=False,
        conf={"spark.jars": str(driver), "spark.ui.enabled": "false"},
    )
    spark.sparkContext.setLogLevel("ERROR")
    return alternate(SIDES, rounds, lambda side: run_once(spark, server, source, side, rows))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=4_000_000)
    arguments.add_argument("--per-batch", type=int, default=1_000_000)
    # The sides are similarly fast, and on a shared machine rounds differ by a third.
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--out", type=Path, default=RESULTS / "mysql.json")
    options = arguments.parse_args()
    from poundlock.servers import mariadb

    with mariadb.running() as server, tempfile.TemporaryDirectory() as directory:
        print(f"writing {options.rows:,} readings", flush=True)
        fill(Path(directory), options.rows, options.per_batch)
        results = compare(server, Path(directory), options.rows, options.rounds)
    for side in SIDES[1:]:
        print(f"ratio to {side}: {results[f'ratio_vs_{side}']:.2f}", flush=True)
    results |= {"rows": options.rows, "per_batch": options.per_batch, "commit": commit()}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
