"""Late rows: some correct a window that has fired, later ones go to their own output.

Both outputs are committed by one decision, so each row counts in exactly one of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from readings import readings

import poundlock as lock
from poundlock.sinks import Files

ROWS = [
    ("a", 1, 35.0),
    ("a", 8, 34.0),
    ("a", 16, 33.0),
    ("a", 29, 32.0),  # the window to 15 fires when the watermark has passed it
    ("a", 9, 20.0),
    ("a", 30, 31.0),  # 9 is late, but allowed: the window fires again
    ("a", 60, 30.0),
    ("a", 61, 30.0),
    ("a", 3, 10.0),
    ("a", 62, 30.0),  # 3 is too late: its window is gone
]


def pipeline(spark, args):
    [directory] = args or sys.exit("usage: late_data.py DIRECTORY, for the checkpoint and results")
    flow = lock.flow(readings(spark, ROWS, directory, 2), time="ts", watermark="2 seconds")
    lowest = (
        flow.key_by("id")
        .window(lock.tumbling("15 seconds"), allowed_lateness="30 seconds", late_output="late")
        .aggregate("min(temperature) AS lowest", "count(*) AS n")
    )
    return (
        lock.pipeline(lowest, name="lowest", checkpoint_location=f"{directory}/checkpoint")
        .to(Files(f"{directory}/lowest", format="json"))
        .to(Files(f"{directory}/late", format="json"), output="late")
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="for input, results and checkpoint")
    given = parser.parse_args()
    job = pipeline(lock.session(kafka=False), [given.directory])
    job.start(availableNow=True).awaitTermination()
