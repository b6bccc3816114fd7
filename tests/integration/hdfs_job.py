"""A driver with its checkpoint and log on a small HDFS inside its own JVM.

`test_hadoop.py` runs it, because the JVM of the other tests has no HDFS. It prints one JSON object.
"""

# Calls into the JVM have no types.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalCall=false, reportOptionalMemberAccess=false

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import poundlock as lock
from poundlock import sinks
from poundlock.core.model import Bound, Generation, Namespace
from poundlock.core.protocol import Step
from poundlock.errors import Fenced, LogMismatch
from poundlock.jvm import jars
from poundlock.spark.storage import HadoopFiles, HadoopLog, open_log
from poundlock.txn.audit import Trail
from poundlock.txn.replan import open_checkpoint


class Died(Exception):
    """The driver was killed."""


def main(servers: str, source: str, target: str, other: str, directory: str) -> None:
    (minicluster,) = jars.paths("hdfs")
    spark = lock.session(
        "local[2]",
        conf={"spark.ui.enabled": "false", "spark.driver.extraClassPath": str(minicluster)},
    )
    spark.sparkContext.setLogLevel("ERROR")
    jvm: Any = spark._jvm
    hadoop = jvm.org.apache.hadoop
    conf = hadoop.conf.Configuration()
    conf.set("hdfs.minidfs.basedir", directory)
    cluster = hadoop.hdfs.MiniDFSCluster.Builder(conf).numDataNodes(1).build()
    root = cluster.getFileSystem().getUri().toString()
    try:
        report = {
            "log": _log(spark, root),
            "pipeline": _pipeline(spark, root, servers, source, target),
            "default": _by_default(spark, root, servers, source, other, f"{directory}-path"),
        }
    finally:
        cluster.shutdown()
    print(json.dumps(report))


def _log(spark, root: str) -> dict[str, object]:
    namespace = Namespace("p", "0011223344556677")
    first = open_log(spark, f"{root}/log")
    first.load()
    first.append(Generation(1, namespace, first.uri, None, "first"))
    first.append(Bound("query"))
    second = HadoopLog(HadoopFiles(spark, f"{root}/log"))
    found = second.load()
    second.append(Generation(2, namespace, second.uri, None, "second"))
    try:
        first.append(Generation(3, namespace, first.uri, None, "zombie"))
        fenced = False
    except Fenced:
        fenced = True
    with Trail(second).act("look", "x") as act:
        act.outcome = "seen"
    HadoopFiles(spark, f"{root}/log").probe(rounds=5)
    return {
        "kind": type(first).__name__,
        "query": found.query,
        "fenced": fenced,
        "generation": second.load().generation.number,  # pyright: ignore
        "audits": [Trail(second).read().problems, Trail(second).read().acts()[0]["outcome"]],
    }


def _pipeline(spark, root: str, servers: str, source: str, target: str) -> dict[str, object]:
    checkpoint = f"{root}/checkpoint"
    died = _die_and_finish(spark, servers, source, target, checkpoint)
    files = HadoopFiles(spark, root)
    files.call(lambda: files.system.rename(files.at("checkpoint"), files.at("moved")))
    try:
        _copying(spark, servers, source, target, f"{root}/moved").start(availableNow=True)
        moved = "accepted"
    except LogMismatch as error:
        moved = str(error)
    return {"died": died, "moved": moved}


def _by_default(
    spark, root: str, servers: str, source: str, target: str, path: str
) -> dict[str, object]:
    """Run with a path that has no scheme, where HDFS is Hadoop's default file system."""
    spark.conf.set("fs.defaultFS", root)
    died = _die_and_finish(spark, servers, source, target, path)
    found = HadoopFiles(spark, f"{root}{path}/poundlock").names()
    log = open_log(spark, f"{root}{path}/poundlock")
    return {
        "operator": [open_checkpoint(log, at).uri == f"{root}{path}" for at in (None, path)],
        "died": died,
        "records": any(name.endswith(".json") for name in found),
        "local": os.path.exists(path),
    }


def _die_and_finish(spark, servers: str, source: str, target: str, checkpoint: str) -> bool:
    """Run until the second decision, then again to the end. Return whether the first run died."""
    steps: list[str] = []

    def observe(step: Step, facts: Mapping[str, object]) -> None:
        steps.append(step.value)
        if step is Step.DECIDED and steps.count("decided") == 2:
            raise Died("after its second decision")

    pipeline = _copying(spark, servers, source, target, checkpoint)
    query = pipeline.observe(observe).start(availableNow=True)
    try:
        query.spark_query.awaitTermination()
        died = False
    except Exception:  # noqa: BLE001 (whatever Spark makes of it)
        died = True
    pipeline.start(availableNow=True).awaitTermination()
    return died


def _copying(spark, servers: str, source: str, target: str, checkpoint: str) -> lock.Pipeline:
    frame = lock.read_kafka(
        spark,
        source,
        bootstrap_servers=servers,
        starting_offsets="earliest",
        maxOffsetsPerTrigger=40,
    ).selectExpr("value")
    sink = sinks.Kafka(target, bootstrap_servers=servers)
    return lock.pipeline(frame, name="hdfs", checkpoint_location=checkpoint).to(sink)


if __name__ == "__main__":
    main(*sys.argv[1:])
