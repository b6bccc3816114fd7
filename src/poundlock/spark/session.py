"""A Spark session that can run pipelines: the right jars, and the right Python for the workers."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import pairwise

from pyspark.sql import SparkSession

from poundlock.errors import UsageError
from poundlock.jvm import jars
from poundlock.spark import internals

logger = logging.getLogger("poundlock")

_ROCKSDB = "RocksDBStateStoreProvider"
_STATE = "spark.sql.streaming.stateStore"

# State backends by Flink's names. Spark has one provider for "files" and "memory": it keeps state in
# the executors' memory and its changes in files of the checkpoint.
BACKENDS = {
    "rocksdb": _ROCKSDB,
    "files": "HDFSBackedStateStoreProvider",
    "memory": "HDFSBackedStateStoreProvider",
}

_LOOPBACK = "127.0.0.1"
_UI_ADDRESS = "SPARK_LOCAL_IP"  # no setting has this address, only the JVM's environment


def configure(
    builder: SparkSession.Builder,
    *,
    kafka: bool = True,
    delta: bool = False,
    state_backend: str = "rocksdb",
) -> SparkSession.Builder:
    """Configure a session's builder for pipelines. Fetches the connectors' jars if they are missing.

    Workers must run the driver's Python interpreter.
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
        raise UsageError(
            f"state_backend={state_backend!r} is unknown: use one of {', '.join(BACKENDS)}"
        )
    if "spark.excludeOnFailure" not in _submitted():
        # An executor that cannot reach a system fails its tasks at once, so that Spark would run them
        # there again and again. Now it runs a failed task elsewhere, and if there is no other
        # executor, the batch fails without the 120 s that Spark would wait for one.
        exclude = "excludeOnFailure"
        builder = builder.config(f"spark.{exclude}.taskAndStage.enabled", "true").config(
            f"spark.scheduler.{exclude}.unschedulableTaskSetTimeout", "1s"
        )
    provider = f"org.apache.spark.sql.execution.streaming.state.{BACKENDS[state_backend]}"
    return (
        builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "20000")
        .config(f"{_STATE}.providerClass", provider)
        .config(f"{_STATE}.rocksdb.changelogCheckpointing.enabled", "true")
        # By default Spark fails the query after 15 s, which is too short on a busy machine.
        .config("spark.python.authenticate.socketTimeout", "120s")
    )


def keeps_keyed_state(spark: SparkSession) -> bool:
    """Return whether the session's state backend supports keyed operators."""
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
    """Open a Spark session for pipelines, or return the open one.

    `master` defaults to the one of spark-submit, or else `local[*]`. `parallelism` is the number of
    tasks after a shuffle. It defaults to Spark's 200, but locally to the number of cores, because every
    task of a stateful query opens its own store. `delta` adds Delta Lake. The `state_backend` "rocksdb"
    writes only changes to checkpoints. "files" and "memory" keep state in the executors' memory and its
    changes in files, and support only Spark's own operators. `conf` overrides everything else.

    With a local master, Spark listens on the loopback interface only, and so does its UI. Set
    SPARK_LOCAL_IP in the environment to choose another address for the UI.
    """
    builder = configure(
        SparkSession.Builder().appName(app_name),
        kafka=kafka,
        delta=delta,
        state_backend=state_backend,
    )
    submitted, given = _submitted(), dict(conf or {})
    warn_of_wheels(submitted)
    chosen = given.get("spark.master") or master or submitted.get("spark.master") or "local[*]"
    builder = builder.master(chosen)
    local = chosen.startswith("local")
    if local:
        if "spark.sql.shuffle.partitions" not in submitted:
            parallelism = parallelism or os.cpu_count() or 1
        for name in ("spark.driver.bindAddress", "spark.driver.host"):
            builder = builder.config(name, _LOOPBACK)
        if _ui_is_open() and "spark.ui.enabled" not in submitted | given:
            logger.warning(
                "Spark's UI is off, because it would listen on every interface of this machine. To "
                f"have it, set {_UI_ADDRESS}={_LOOPBACK} in the environment of spark-submit"
            )
            builder = builder.config("spark.ui.enabled", "false")
    elif internals.jvm_environment(_UI_ADDRESS) == _LOOPBACK and _UI_ADDRESS not in os.environ:
        raise UsageError(
            f"the executors of {chosen} could not reach this program: its JVM was started for a local "
            "master, and listens on the loopback interface only. Use the cluster from another program, "
            f"or set {_UI_ADDRESS} to this machine's address before the first session"
        )
    if parallelism is not None:
        builder = builder.config("spark.sql.shuffle.partitions", str(parallelism))
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    for key, value in given.items():
        builder = builder.config(key, value)
    with _ui_on_loopback(local):
        return builder.getOrCreate()


def warn_of_wheels(submitted: Mapping[str, str]) -> None:
    """Warn of wheels among `--py-files`. Spark puts them on the path of the driver alone."""
    for file in submitted.get("spark.submit.pyFiles", "").split(","):
        if file.endswith(".whl"):
            name = file.rpartition("/")[2]
            logger.warning(
                f"Spark's workers do not import from {name}, because it is a wheel. Copy it to a name "
                "that ends in .zip, and give that to --py-files; or install it for the workers' Python"
            )


def _submitted() -> dict[str, str]:
    """Return the settings of spark-submit: of its JVM, or of the environment that pyspark passes it."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return internals.submitted_settings()
    found: dict[str, str] = {}
    words = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    for word, value in pairwise(words):
        if word == "--master":
            found["spark.master"] = value
        elif word in ("--conf", "-c"):
            key, _, found[key] = value.partition("=")
    return found


def _ui_is_open() -> bool:
    """Return whether a JVM runs already whose UI would listen on every interface."""
    return internals.jvm_runs() and not internals.jvm_environment(_UI_ADDRESS)


@contextmanager
def _ui_on_loopback(local: bool) -> Generator[None]:
    """Have a JVM that is started inside the block bind its UI to the loopback interface."""
    if not local or _UI_ADDRESS in os.environ:
        yield
        return
    os.environ[_UI_ADDRESS] = _LOOPBACK
    try:
        yield
    finally:
        del os.environ[_UI_ADDRESS]
