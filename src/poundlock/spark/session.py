"""A Spark session that can run pipelines: the right jars, and the right Python for the workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from poundlock.errors import UsageError
from poundlock.jvm import jars

_ROCKSDB = "RocksDBStateStoreProvider"
_STATE = "spark.sql.streaming.stateStore"

# Where queries keep their state, by Flink's names. Spark has one provider for two of them: state in the
# executors' memory, and what changes of it in files of the checkpoint.
BACKENDS = {
    "rocksdb": _ROCKSDB,
    "files": "HDFSBackedStateStoreProvider",
    "memory": "HDFSBackedStateStoreProvider",
}


def configure(
    builder: SparkSession.Builder,
    *,
    kafka: bool = True,
    delta: bool = False,
    state_backend: str = "rocksdb",
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
    if state_backend not in BACKENDS:
        raise UsageError(f"state_backend={state_backend!r} is not one of {', '.join(BACKENDS)}")
    provider = f"org.apache.spark.sql.execution.streaming.state.{BACKENDS[state_backend]}"
    return (
        builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "20000")
        .config(f"{_STATE}.providerClass", provider)
        .config(f"{_STATE}.rocksdb.changelogCheckpointing.enabled", "true")
        # Spark gives a Python worker 15 s to call back, and fails the query: too few on a busy machine.
        .config("spark.python.authenticate.socketTimeout", "120s")
    )


def keeps_keyed_state(spark: SparkSession) -> bool:
    """Say whether the session's state backend can hold keyed operators of ours."""
    return _ROCKSDB in (spark.conf.get(f"{_STATE}.providerClass", "") or "")


def session(
    master: str | None = None,
    *,
    parallelism: int | None = None,
    app_name: str = "poundlock",
    kafka: bool = True,
    delta: bool = False,
    state_backend: str = "rocksdb",
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Open a Spark session for pipelines, or return the one that is open already.

    `master` defaults to what spark-submit gave, else `local[*]`; `parallelism` is the number of tasks
    after a shuffle: Spark's own default (200), but on one machine its number of cores, for every task
    of a query with state opens a store of its own. `delta` adds Delta Lake. `state_backend` is
    "rocksdb", whose checkpoints hold what has changed; "files" or "memory" keep state in the executors'
    memory and its changes in files, for Spark's own operators only. `conf` comes last and wins.
    """
    builder = configure(
        SparkSession.Builder().appName(app_name),
        kafka=kafka,
        delta=delta,
        state_backend=state_backend,
    )
    if master or "spark.master" not in _submitted():
        builder = builder.master(master or "local[*]")
    if (master or "local").startswith("local"):
        if "spark.sql.shuffle.partitions" not in _submitted():
            parallelism = parallelism or os.cpu_count() or 1
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
