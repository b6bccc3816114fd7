"""The lowest temperature of each sensor, in three kinds of windows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from readings import readings

import poundlock as lock
from poundlock.sinks import Files

WINDOWS = {
    "tumbling": lock.tumbling("15 seconds"),
    "sliding": lock.sliding("15 seconds", "5 seconds"),
    "count": lock.count(5),  # at every fifth reading of a sensor
}
ROWS = [
    ("a", 1, 35.8),
    ("b", 2, 15.4),
    ("a", 4, 34.1),
    ("b", 6, 16.0),
    ("a", 8, 36.0),
    ("a", 12, 33.3),
    ("a", 14, 33.9),
    ("b", 17, 14.2),
    ("a", 21, 30.7),
    ("b", 40, 15.0),
    ("a", 45, 31.0),
    ("a", 90, 40.0),
]


def pipeline(spark, args):
    if len(args) != 2:
        sys.exit("usage: minimum.py DIRECTORY KIND, a kind of window: tumbling, sliding or count")
    directory, kind = args
    flow = lock.flow(readings(spark, ROWS, directory), time="ts", watermark="2 seconds")
    lowest = flow.key_by("id").window(WINDOWS[kind]).aggregate("min(temperature) AS lowest")
    print(lowest.explain())  # Spark's own windows where they do, keyed state where they do not
    return lock.pipeline(
        lowest, name=f"minimum-{kind}", checkpoint_location=f"{directory}/checkpoint-{kind}"
    ).to(Files(f"{directory}/{kind}", format="json"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="for input, results and checkpoint")
    parser.add_argument("kind", choices=WINDOWS)
    given = parser.parse_args()
    job = pipeline(lock.session(kafka=False), [given.directory, given.kind])
    job.start(availableNow=True).awaitTermination()
