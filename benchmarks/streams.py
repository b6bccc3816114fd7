"""Compare our windows with Spark's own, and with the same logic written by hand, in one run.

`native`: a tumbling sum by `flow.window(...)` and by `groupBy(window(...))`.
`stateful`: the sum on keyed state (late rows are still taken), and the same logic written by hand with
`transformWithStateInPandas`, for several numbers of keys. The sides alternate in one session. The
results of each side are only counted and summed. A first round warms the JITs and is not counted.

`profile`: the time of each step of our keyed operator, measured in one process without Spark.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import poundlock as lock
from benchmarks.memory import Watch
from benchmarks.rounds import alternate, commit
from poundlock.spark.stream import keyed
from poundlock.stream.aggregates import Aggregates
from poundlock.stream.operator import Page
from poundlock.stream.times import Clock, Domain
from poundlock.stream.windowing import WindowOperator

RESULTS = Path(__file__).parent / "results"
SCHEMA = "id long, ts timestamp, v long"
WINDOW_S, BATCHES = 10, 4
START = 1_767_225_600


def fill(directory: Path, rows: int, keys: int) -> None:
    """Write one file for each batch, each some windows later, and one that ends all windows."""
    each = rows // BATCHES
    for file in range(BATCHES):
        numbers = np.arange(each)
        seconds = START + file * 4 * WINDOW_S + numbers % (4 * WINDOW_S)
        write(directory, file, numbers % keys, seconds, numbers)
    write(directory, BATCHES, np.array([0]), np.array([START + 10**6]), np.array([0]))


def write(directory: Path, file: int, ids: Any, seconds: Any, values: Any) -> None:
    table = pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "ts": pa.array(seconds * 1_000_000).cast(pa.timestamp("us", "UTC")),
            "v": pa.array(values, pa.int64()),
        }
    )
    path = directory / f"{file:04}.parquet"
    pq.write_table(table, path)
    os.utime(path, (START + file, START + file))


class ByHand(StatefulProcessor):
    """A sum for each key and window, as a user of Spark would write it."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.sums = handle.getMapState("sums", "start long", "total long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: N802, N803
        for frame in rows:
            starts = frame["at"] // (WINDOW_S * 1000) * (WINDOW_S * 1000)
            for start, total in frame["v"].groupby(starts).sum().items():
                before = self.sums.getValue((int(start),))
                if before is None:
                    self.handle.registerTimer(int(start) + WINDOW_S * 1000)
                self.sums.updateValue((int(start),), (int(total) + (before[0] if before else 0),))
        yield pd.DataFrame()

    def handleExpiredTimer(  # noqa: N802
        self,
        key: Any,
        timerValues: Any,  # noqa: N803
        expiredTimerInfo: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        start = expiredTimerInfo.getExpiryTimeInMs() - WINDOW_S * 1000
        total = self.sums.getValue((start,))
        self.sums.removeKey((start,))
        yield pd.DataFrame({"id": [key[0]], "start": [start], "total": [total[0]]})

    def close(self) -> None: ...


def native(frame: DataFrame) -> DataFrame:
    flow = lock.flow(frame, time="ts", watermark="5 seconds").key_by("id")
    return flow.window(lock.tumbling(f"{WINDOW_S} seconds")).aggregate("sum(v) AS total").df


def spark_native(frame: DataFrame) -> DataFrame:
    windows = F.window("ts", f"{WINDOW_S} seconds")
    return (
        frame.withWatermark("ts", "5 seconds").groupBy(windows, "id").agg(F.sum("v").alias("total"))
    )


def stateful(frame: DataFrame) -> DataFrame:
    flow = lock.flow(frame, time="ts", watermark="5 seconds").key_by("id")
    windows = flow.window(lock.tumbling(f"{WINDOW_S} seconds"), allowed_lateness="1 ms")
    return windows.aggregate("sum(v) AS total").df


def by_hand(frame: DataFrame) -> DataFrame:
    rows = frame.withWatermark("ts", "5 seconds").select("id", "v", F.unix_millis("ts").alias("at"))
    return rows.groupBy("id").transformWithStateInPandas(
        ByHand(), "id long, start long, total long", "append", "eventTime"
    )


SIDES: dict[str, Callable[[DataFrame], DataFrame]] = {
    "native": native,
    "spark_native": spark_native,
    "stateful": stateful,
    "by_hand": by_hand,
}


def run_once(spark: SparkSession, side: str, source: Path, rows: int) -> dict[str, Any]:
    """Send all rows through one side. Return seconds, and the peak memory of each kind of process."""
    checkpoint = tempfile.mkdtemp(prefix="poundlock-bench-")
    frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(source))
    totals: list[tuple[int, int]] = []

    def take(batch: DataFrame, _: int) -> None:
        row = batch.agg(F.count("*"), F.coalesce(F.sum("total"), F.lit(0))).first()
        assert row is not None
        totals.append((row[0], row[1]))

    started = time.monotonic()
    with Watch(os.getpid()) as watch:
        query = SIDES[side](frame).writeStream.foreachBatch(take)
        query = query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
    seconds = time.monotonic() - started
    shutil.rmtree(checkpoint)
    each = rows // BATCHES
    expected, found = BATCHES * (each * (each - 1) // 2), sum(total for _, total in totals)
    if found != expected:
        raise SystemExit(f"{side}: the sums are {found}, and should be {expected}")
    return {"seconds": seconds, "rows_per_second": rows / seconds, "memory_mb": watch.peaks_mb}


def profile(rows: int, keys: int) -> dict[str, float]:
    """Return the seconds of each step of our operator in one process, without Spark's overhead."""
    numbers = np.arange(rows)
    times = (START + numbers % (4 * WINDOW_S)) * 1_000_000
    pages = numbers % keys % keyed.PAGES
    batch = pa.RecordBatch.from_pydict(
        {
            "id": pa.array(numbers % keys),
            "v": pa.array(numbers),
            "__time": pa.array(times),
            "__hash": pa.array(numbers),
            "__page": pa.array(pages, pa.int32()),
        }
    )
    operator = WindowOperator(
        "window",
        lock.tumbling(f"{WINDOW_S} seconds"),
        domain=Domain.EVENT,
        columns=("id", "v"),
        keys=("id",),
        fields=("total",),
        aggregate=Aggregates([("sum", "v")]),
        allowed_lateness=1,
    )
    spent = dict.fromkeys(("pack", "to_python", "operator_and_state", "fire", "to_arrow"), 0.0)
    clock = time.perf_counter()

    def lap(step: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        spent[step] += now - clock
        clock = now

    packed = list(keyed._Pack(0, False, "")(iter([batch])))
    lap("pack")
    end = Clock((START + 10**6) * 1000, 0)
    for part in packed:
        for data in part["rows"].to_pylist():
            events, _, _ = keyed.read_packets([(0, data)], [["id"]])
            lap("to_python")
            done = Page(operator, None, Clock()).run(events)
            lap("operator_and_state")
            fired = Page(operator, done.data, end).run({})
            lap("fire")
            made = fired.outputs["main"]
            pa.table({str(at): list(column) for at, column in enumerate(zip(*made, strict=True))})
            lap("to_arrow")
    return {step: round(seconds, 3) for step, seconds in spent.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--native-rows", type=int, default=8_000_000)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--keys", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    arguments.add_argument(
        "--alone", type=int, nargs="*", default=[1_000_000], help="keys, ours only"
    )
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--results", type=Path, default=RESULTS / "streams.json")
    options = arguments.parse_args()
    spark = lock.session("local[2]", kafka=False, conf={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("ERROR")

    def compare(sides: tuple[str, ...], rows: int, keys: int, rounds: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            fill(Path(directory), rows, keys)
            print(f"{' and '.join(sides)}: {rows:,} rows, {keys:,} keys", flush=True)
            found = alternate(
                sides, rounds, lambda side: run_once(spark, side, Path(directory), rows)
            )
        return {"rows": rows, "keys": keys, **found}

    results: dict[str, Any] = {
        "native": compare(("native", "spark_native"), options.native_rows, 1_000, options.rounds),
        "stateful": [
            compare(
                ("stateful", "by_hand"), options.rows, keys, options.rounds if keys < 50_000 else 1
            )
            for keys in options.keys
        ],
        "alone": [compare(("stateful",), options.rows, keys, 1) for keys in options.alone],
        "profile": {str(keys): profile(options.rows, keys) for keys in (1_000, 100_000)},
        "commit": commit(),
    }
    print(f"native road to Spark's own: {results['native']['ratio_vs_spark_native']:.2f}")
    for each in results["stateful"]:
        print(f"keyed road to by hand, {each['keys']:,} keys: {each['ratio_vs_by_hand']:.2f}")
    options.results.parent.mkdir(exist_ok=True)
    options.results.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.results}")


if __name__ == "__main__":
    main()
