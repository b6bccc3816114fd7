"""Limits that change while the pipeline runs: rules are broadcast to every key."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from readings import START, readings

import poundlock as lock
from poundlock.sinks import Files


class Above(lock.BroadcastProcessFunction):
    """Passes readings above the limit of their kind of sensor."""

    schema = "id string, temperature double, above double"
    limits = lock.BroadcastState()

    def process(self, row, ctx):
        limit = self.limits.get(row.id[0])
        if limit is not None and row.temperature > limit:
            yield row.id, row.temperature, limit

    def process_broadcast(self, row, ctx):
        self.limits[row.kind] = row.limit


ROWS = [
    ("a1", 1, 35.0),
    ("b1", 2, 35.0),
    ("a2", 3, 20.0),
    ("b2", 4, 50.0),
    ("a1", 11, 35.0),
    ("b1", 12, 35.0),
    ("a2", 13, 20.0),
    ("b2", 14, 50.0),
]
RULES = [("a", 30.0), ("b", 40.0), ("a", 15.0), ("b", 99.0)]


def pipeline(spark, args):
    [directory] = args or sys.exit("usage: rules.py DIRECTORY, for the checkpoint and results")
    rules = lock.from_collection(
        spark, RULES, "kind string, limit double", batch_rows=2, directory=f"{directory}/rules"
    ).selectExpr("*", f"timestamp_seconds({START}) AS ts")
    flow = lock.flow(readings(spark, ROWS, directory), time="ts", watermark="5 seconds")
    hot = (
        flow.key_by("id")
        .with_pages(16)  # each page of keys keeps the rules
        .broadcast(lock.flow(rules, time="ts", watermark="5 seconds"))
        .process(Above())
    )
    return lock.pipeline(hot, name="above", checkpoint_location=f"{directory}/checkpoint").to(
        Files(f"{directory}/hot", format="json")
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="for input, results and checkpoint")
    given = parser.parse_args()
    job = pipeline(lock.session(kafka=False), [given.directory])
    job.start(availableNow=True).awaitTermination()
