"""The child of the chaos tests: a real Spark driver with one or several pipelines in it.

`harness` runs it as `python job.py CONFIG.json`. Each pipeline has its own thread. The exit status is 0
when all pipelines have finished. It is 1, with the error on stderr, when one fails or ends before
it reaches its points.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faults import (
    Faults,
    FaultyDisk,
    Watched,
    WatchedKafka,
    WatchedMySQL,
    WatchedOpenSearch,
    WatchedPostgres,
    WatchedRedis,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import poundlock as lock
from poundlock.core.log import FileLog
from poundlock.core.protocol import Step
from poundlock.sinks.kafka.offsets import GroupOffsetsBranch
from poundlock.spark.pipeline import factory


def main(path: str) -> None:
    config = json.loads(Path(path).read_text())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for noisy in ("py4j", "kafka"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    spark = lock.session(config["master"], parallelism=2, conf=config["conf"])
    spark.sparkContext.setLogLevel("WARN")
    faults = {
        query["name"]: Faults(
            query["name"], query["faults"], config["reports"], config["killers"], os.getpid()
        )
        for query in config["queries"]
    }
    watch(config["queries"], faults)
    threads = [
        threading.Thread(target=guarded, args=(spark, config, query, faults[query["name"]]))
        for query in config["queries"]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spark.stop()
    sys.exit(1 if failed else 0)


failed: list[str] = []  # pipelines that ended with an error


def guarded(spark: SparkSession, config: Any, query: Any, faults: Faults) -> None:
    try:
        run(spark, config, query, faults)
        missed = [
            fault["name"]
            for fault in query["faults"]
            if not Path(config["reports"], f"{query['name']}@{fault['name']}").exists()
        ]
        assert not missed, f"pipeline {query['name']} never came to {missed}"
    except BaseException as error:  # noqa: BLE001 (whatever the error is, this pipeline has ended)
        traceback.print_exc()
        print(f"pipeline {query['name']} ended with {type(error).__name__}", file=sys.stderr)
        sys.stderr.flush()
        if config["killers"]:
            os._exit(1)  # otherwise the others wait at their points, and nothing kills them
        failed.append(query["name"])


def run(spark: SparkSession, config: Any, query: Any, faults: Faults) -> None:
    def observe(step: Step, facts: Mapping[str, object]) -> None:
        if step is Step.ENTERED:
            faults.phase = "batch"
        faults.reached(step.value, **facts)

    def sink(topic: str | None, **arguments: Any) -> WatchedKafka:
        return WatchedKafka(
            topic, bootstrap_servers=config["bootstrap_servers"], **arguments, **query["sink"]
        )

    frame, routes, mode = KINDS[query["kind"]](rows(spark, config, query), query, sink)
    settings = lock.Settings(**query["settings"])
    line = lock.pipeline(
        frame,
        name=name_of(query),
        checkpoint_location=query["checkpoint"],
        output_mode=mode,
        settings=settings,
    )
    for made, route in routes:
        assert isinstance(made, Watched)
        made.faults = faults
        line = line.to(made, **route)
    line.observe(observe).start(**query["trigger"]).awaitTermination()


def name_of(query: Any) -> str:
    """Return a name that is new to the servers: they remember the pipelines of other tests."""
    return query["topic"].removesuffix("-in")


def rows(spark: SparkSession, config: Any, query: Any) -> DataFrame:
    """Open the input: the rows of `harness.make_rows`."""
    options: dict[str, Any] = {"maxOffsetsPerTrigger": query["rows_per_batch"]} | query["source"]
    lines = lock.read_kafka(
        spark,
        query["topic"],
        bootstrap_servers=config["bootstrap_servers"],
        starting_offsets="earliest",
        **options,
    )
    return lines.selectExpr("split(CAST(value AS STRING), ',') AS f").selectExpr(
        "CAST(f[0] AS INT) AS i",
        "f[1] AS sensor",
        "timestamp_seconds(CAST(f[2] AS BIGINT)) AS ts",
        "CAST(f[3] AS INT) AS temperature",
    )


# The kinds of query. `harness.expected` has the same in plain Python.


def stateless(frame: DataFrame, query: Any, sink: Any) -> Any:
    """Write each row to one topic."""
    shaped = frame.selectExpr("i", "sensor", "temperature * 2 AS doubled")
    return shaped, [(sink(query["outputs"][0], key="sensor", value="json"), {})], "append"


def outputs(frame: DataFrame, query: Any, sink: Any) -> Any:
    """Write all rows, the hot ones in another format, and each row to the topic that it names."""
    every, hot, even, odd = query["outputs"]
    shaped = frame.selectExpr(
        "i", "sensor", "temperature", f"IF(i % 2 = 0, '{even}', '{odd}') AS topic"
    )
    routes = [
        (sink(every, name="every", value="json"), {"select": ["i", "sensor"]}),
        (
            sink(hot, name="hot", key="sensor", value="json"),
            {"where": "temperature > 30", "select": ["sensor", "i", "temperature"]},
        ),
        (sink(None, name="by-topic", value="value"), {"select": ["topic", "string(i) AS value"]}),
    ]
    return shaped, routes, "append"


def stateful(frame: DataFrame, query: Any, sink: Any) -> Any:
    """Write counts and sums by window and sensor each time they change."""
    counted = (
        frame.withWatermark("ts", "1 hour")
        .selectExpr("sensor", "window(ts, '60 seconds') AS w", "temperature")
        .groupBy("sensor", "w")
        .agg(F.count("*").alias("n"), F.sum("temperature").alias("total"))
        .selectExpr("sensor", "unix_timestamp(w.start) AS start", "n", "total")
    )
    return counted, [(sink(query["outputs"][0], key="sensor", value="json"), {})], "update"


def five(frame: DataFrame, query: Any, sink: Any) -> Any:
    """Write each row to five systems in one decision, to some of them in two ways."""
    at, name = query["systems"], "t_" + query["outputs"][0].replace("-", "_")
    shaped = frame.selectExpr("i", "sensor", "temperature")
    routes = [
        sink(query["outputs"][0], name="kafka", key="sensor", value="json"),
        WatchedPostgres(name, dsn=at["postgres"], name="postgres"),
        WatchedPostgres(f"{name}_by_key", dsn=at["postgres"], key="i", name="postgres-by-key"),
        WatchedMySQL(name, url=at["mariadb"], name="mariadb"),
        WatchedMySQL(f"{name}_by_key", url=at["mariadb"], key="i", name="mariadb-by-key"),
        WatchedRedis(hash=name, field="i", value="temperature", url=at["valkey"], name="valkey"),
        WatchedRedis(
            hash=f"{name}_sums",
            field="sensor",
            value="temperature",
            operation="increment",
            url=at["valkey"],
            name="valkey-sums",
        ),
        WatchedOpenSearch(name, url=at["opensearch"], id="i", name="opensearch"),
    ]
    return shaped, [(made, {}) for made in routes], "append"


KINDS = {"stateless": stateless, "outputs": outputs, "stateful": stateful, "five": five}


def watch(queries: Any, faults: Mapping[str, Faults]) -> None:
    """Add points where the product has no hook: the log, the offsets, the vote."""
    by_place = {query["checkpoint"]: faults[query["name"]] for query in queries}
    by_pipeline = {name_of(query): faults[query["name"]] for query in queries}

    def open_log(spark: SparkSession, location: str) -> FileLog:
        return FileLog(location, disk=FaultyDisk(by_place[os.path.dirname(location)]))

    factory.open_log = open_log

    prepare = GroupOffsetsBranch.prepare

    def prepare_offsets(self: GroupOffsetsBranch, branch: Any) -> Any:
        receipt = prepare(self, branch)
        pipeline = branch.transaction.namespace.pipeline
        by_pipeline[pipeline].reached("offsets:prepared", batch=branch.transaction.batch)
        return receipt

    GroupOffsetsBranch.prepare = prepare_offsets


if __name__ == "__main__":
    main(sys.argv[1])
