"""A Spark session that can run pipelines: the right jars, and the right Python for the workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from poundlock import jars


def configure(
    builder: SparkSession.Builder, *, kafka: bool = True, delta: bool = False
) -> SparkSession.Builder:
    """Add to a session's builder what pipelines need. Fetches the connectors' jars if they are missing.

    Workers must run the interpreter that runs us, or they start with another Python and fail.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    wanted = [*(["spark-kafka"] if kafka else []), *(["delta"] if delta else [])]
    if wanted:
        paths = ",".join(str(path) for name in wanted for path in jars.paths(name))
        builder = builder.config("spark.jars", paths)
    if delta:
        builder = builder.config(
            "spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension"
        ).config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
    return builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "50000").config(
        "spark.sql.streaming.stateStore.providerClass",
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    )


def session(
    master: str | None = None,
    *,
    parallelism: int | None = None,
    app_name: str = "poundlock",
    kafka: bool = True,
    delta: bool = False,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Open a Spark session for pipelines, or return the one that is open already.

    `master` defaults to what spark-submit gave, else `local[*]`; `parallelism` is the number of tasks
    after a shuffle. `delta` adds Delta Lake. `conf` comes last and wins.
    """
    builder = configure(SparkSession.Builder().appName(app_name), kafka=kafka, delta=delta)
    if master or "spark.master" not in _submitted():
        builder = builder.master(master or "local[*]")
    if (master or "local").startswith("local"):
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config(
            "spark.driver.host", "127.0.0.1"
        )
    if parallelism is not None:
        builder = builder.config("spark.sql.shuffle.partitions", str(parallelism))
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    for key, value in (conf or {}).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _submitted() -> str:
    """Return what spark-submit put in this process's environment, if it started us."""
    return os.environ.get("PYSPARK_SUBMIT_ARGS", "") + os.environ.get("SPARK_CONF_DIR", "")
