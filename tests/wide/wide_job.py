"""One driver of the wide run: a Kafka topic into Kafka and PostgreSQL, in as many tasks as asked for.

    python wide_job.py CONFIG.json

With `kill_at`, it kills itself and its JVM when it comes to that step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import poundlock as lock
from poundlock.core.protocol import Step
from poundlock.sinks import Kafka, Postgres


def main(file: str) -> None:
    config = json.loads(Path(file).read_text())
    # Its JVM is in the same group, and dies with it.
    os.setpgid(0, 0)
    spark = lock.session(
        config["master"],
        parallelism=2,
        conf={"spark.ui.enabled": "false", "spark.driver.memory": "1g"},
    )
    spark.sparkContext.setLogLevel("ERROR")
    began = time.monotonic()

    def observe(step: Step, facts: Mapping[str, object]) -> None:
        line = {"step": step.value, "seconds": round(time.monotonic() - began, 1)}
        if step is not Step.COMMITTED_ONE:
            print(
                json.dumps(line | {k: v for k, v in facts.items() if k == "branches"}), flush=True
            )
        if step.value == config.get("kill_at"):
            os.killpg(0, signal.SIGKILL)

    rows = lock.read_kafka(
        spark,
        config["source"],
        bootstrap_servers=config["servers"],
        starting_offsets="earliest",
        minPartitions=config["partitions"],
    )
    kafka = Kafka(
        config["target"],
        bootstrap_servers=config["servers"],
        transaction_timeout=3600,
        name="kafka",
    )
    postgres = Postgres("wide", dsn=config["dsn"], name="postgres", mode="prepared")
    (
        lock.pipeline(rows, name="wide", checkpoint_location=config["checkpoint"])
        .to(kafka, select=["value"])
        .to(postgres, select=["CAST(CAST(value AS STRING) AS INT) AS number"])
        .observe(observe)
        .start(availableNow=True)
        .awaitTermination()
    )
    print(json.dumps({"step": "ended", "seconds": round(time.monotonic() - began, 1)}), flush=True)


main(sys.argv[1])
