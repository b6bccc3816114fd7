"""The child of `test_security`: a driver that logs as much as it can, but not the password.

It reads its configuration from stdin, because the test searches arguments, environment and files for
the password. It runs one pipeline with every kind of Kafka client: Spark's source, producers
in the tasks, the offsets' producer, and the driver's client for EndTxn and for listing.
"""

from __future__ import annotations

import gc
import json
import logging
import sys

from pyspark.sql import SparkSession

import poundlock as lock
from poundlock.core.coordinator import Coordinator
from poundlock.core.log import TransactionLog
from poundlock.sinks import Kafka
from poundlock.sinks.kafka.client import KafkaClient
from poundlock.sources.kafka import KafkaSource
from poundlock.spark.pipeline.batch import Batches
from poundlock.spark.plan import read_plan

OURS = (
    *(lock.Pipeline, lock.Query, Batches, Coordinator, TransactionLog),
    *(Kafka, KafkaSource, KafkaClient, lock.Participant),
)


def main() -> None:
    config = json.load(sys.stdin)
    logging.basicConfig(level=logging.DEBUG, format="%(name)s %(levelname)s %(message)s")
    spark = lock.session("local[2]", conf=config["conf"])
    pipeline = build(spark, config)
    print(pipeline.explain(), pipeline.guarantee(), read_plan(pipeline.frame))
    query = pipeline.observe(lambda step, facts: print(step, facts)).start(availableNow=True)
    try:
        query.awaitTermination()
    finally:
        print(query.lastProgress, query.status, query.exception())
        for thing in gc.get_objects():
            if isinstance(thing, OURS):
                print(repr(thing), str(thing))
    spark.stop()


def build(spark: SparkSession, config: dict) -> lock.Pipeline:
    servers = config["settings"]["bootstrap.servers"]
    frame = lock.read_kafka(
        *(spark, config["source"]),
        bootstrap_servers=servers,
        starting_offsets="earliest",
        group=config["group"],
        offsets="transactional",
        settings=config["settings"],
        maxOffsetsPerTrigger=10,
    )
    sink = Kafka(config["target"], bootstrap_servers=servers, settings=config["settings"])
    return lock.pipeline(
        frame.select("value"), name="secure", checkpoint_location=config["checkpoint"]
    ).to(sink)


if __name__ == "__main__":
    main()
