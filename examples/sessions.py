"""Visits to a site: pages that follow each other within thirty seconds are one visit."""

from __future__ import annotations

import argparse
import sys

import poundlock as lock
from poundlock.sinks import Files

CLICKS = [
    ("ann", 0, "/"),
    ("bob", 5, "/"),
    ("ann", 10, "/shoes"),
    ("ann", 35, "/cart"),
    ("bob", 50, "/help"),
    ("ann", 120, "/"),
    ("ann", 125, "/shoes"),
    ("bob", 300, "/"),
]


def visit(key, window, clicks, ctx):
    """Make a row of all the clicks of one visit."""
    pages = [click.page for click in clicks]
    yield *key, (window.end - window.start) / 1000 - 30, len(pages), pages[-1]


def pipeline(spark, args):
    [directory] = args or sys.exit("usage: sessions.py DIRECTORY, for the checkpoint and results")
    clicks = lock.from_collection(
        spark,
        CLICKS,
        "who string, second long, page string",
        batch_rows=3,
        directory=f"{directory}/rows",
    ).selectExpr("who", "page", "timestamp_seconds(second) AS ts")
    visits = (
        lock.flow(clicks, time="ts", watermark="20 seconds")
        .key_by("who")
        .window(lock.sessions("30 seconds"))
        .process(visit, "who string, seconds double, pages long, last string")
    )
    return lock.pipeline(visits, name="visits", checkpoint_location=f"{directory}/checkpoint").to(
        Files(f"{directory}/visits", format="json")
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="for input, results and checkpoint")
    given = parser.parse_args()
    job = pipeline(lock.session(kafka=False), [given.directory])
    job.start(availableNow=True).awaitTermination()
