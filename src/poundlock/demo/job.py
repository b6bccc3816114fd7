"""The job that is killed. It reads sensor lines from Kafka and writes them to Kafka as readings.

A side runs it as `python -m poundlock.demo.job SIDE ...`. On standard output it reports each step, as
one JSON object per line. Everything else that it prints goes to standard error. It ends when all input
is read, or when the demo ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import poundlock as lock
from poundlock.core.protocol import Step
from poundlock.demo.history import What
from poundlock.demo.topics import READINGS, SENSOR, SPARK_READINGS
from poundlock.sinks import Kafka

# The driver runs for seconds, so it does without optimizing compilers and the web page.
_CONF = {
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData",
    "spark.ui.enabled": "false",
    "spark.log.level": "WARN",
}


class Job:
    """One run of the job. It may stop at a given step, to be killed there."""

    def __init__(self, arguments: argparse.Namespace, output: int):
        self.servers: str = arguments.servers
        self.checkpoint: str = arguments.checkpoint
        self.rows_per_batch: int = arguments.rows_per_batch
        self.hold: str | None = arguments.hold
        self._output = output

    def run(self, side: str) -> None:
        spark = lock.session("local[2]", app_name=f"demo-{side}", conf=_CONF)
        self.report(What.OPENED)
        start = self.start_poundlock if side == "poundlock" else self.start_spark_sink
        query = start(self.readings(spark))
        self.report(What.RUNNING)
        query.awaitTermination()

    def readings(self, spark: Any) -> Any:
        """Open the stream of readings, which is the same for both sides."""
        lines = lock.read_kafka(
            spark,
            SENSOR,
            bootstrap_servers=self.servers,
            starting_offsets="earliest",
            maxOffsetsPerTrigger=self.rows_per_batch,
        )
        return lines.selectExpr("split(CAST(value AS STRING), ',') AS field").selectExpr(
            "field[0] AS id",
            "CAST(field[1] AS BIGINT) AS timestamp",
            "CAST(field[2] AS DOUBLE) AS temperature",
        )

    def start_poundlock(self, readings: Any) -> Any:
        pipeline = lock.pipeline(
            readings,
            name="demo",
            checkpoint_location=self.checkpoint,
            settings=lock.Settings(commits_at_once=1),  # so that a kill can hit between two commits
        )
        sink = Kafka(READINGS, bootstrap_servers=self.servers, key="id", value="json")
        return pipeline.to(sink).observe(self.observe).start(availableNow=True)

    def start_spark_sink(self, readings: Any) -> Any:
        rows = readings.selectExpr("id AS key", "to_json(struct(*)) AS value")
        writer = rows.writeStream.format("kafka").option("topic", SPARK_READINGS)
        writer = writer.option("kafka.bootstrap.servers", self.servers)
        writer = writer.option("checkpointLocation", self.checkpoint)
        return writer.trigger(availableNow=True).start()

    def observe(self, step: Step, facts: Mapping[str, Any]) -> None:
        """Report a step. At the step of the next kill, wait for it."""
        batch, totals = facts.get("batch"), facts.get("totals")
        rows = totals[READINGS].rows if totals else None
        self.report(What.STEP, batch=batch, step=step.value, rows=rows, count=facts.get("count"))
        if self.hold == f"{batch}:{step.value}":
            threading.Event().wait()

    def report(self, what: What, **facts: object) -> None:
        known = {name: fact for name, fact in facts.items() if fact is not None}
        line = json.dumps({"what": what.value, **known})
        # One unbuffered write, because the job may be killed at any moment.
        os.write(self._output, line.encode() + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["poundlock", "spark_sink"])
    parser.add_argument("--servers", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--rows-per-batch", type=int, required=True)
    parser.add_argument("--hold", help="BATCH:STEP")
    arguments = parser.parse_args()
    threading.Thread(target=_end_with_the_demo, daemon=True).start()
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # separates Spark's output from ours
    Job(arguments, output).run(arguments.side)


def _end_with_the_demo() -> None:
    """End when standard input does. The demo never writes to it, so the demo has ended."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main()
