"""Warns of a sensor whose temperature does not fall for ten seconds: state and a timer per key."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from readings import readings

import poundlock as lock
from poundlock.sinks import Files


class TemperatureRise(lock.ProcessFunction):
    """A timer is set at the first rise, and deleted when the temperature falls before it is due."""

    outputs = {"main": "id string, warning string", "cold": "id string, temperature double"}  # noqa: RUF012
    last = lock.ValueState()
    timer = lock.ValueState()

    def process(self, row, ctx):
        if row.temperature < 0:
            ctx.emit((row.id, row.temperature), "cold")
        last, timer = self.last.value, self.timer.value
        self.last.value = row.temperature
        if last is None or row.temperature < last:
            if timer is not None:
                ctx.delete_event_timer(timer)
                self.timer.clear()
        elif row.temperature > last and timer is None:
            self.timer.value = ctx.timestamp + 10_000
            ctx.set_event_timer(self.timer.value)

    def on_timer(self, time, ctx):
        self.timer.clear()
        yield ctx.key.id, "the temperature has been rising for 10 seconds"


ROWS = [
    ("a", 1, 35.0),
    ("b", 1, 15.0),
    ("a", 3, 36.0),
    ("b", 4, 16.0),
    ("a", 6, 37.0),
    ("b", 7, 14.0),
    ("a", 9, 38.0),
    ("c", 10, -1.0),
    ("a", 20, 39.0),
    ("b", 21, 15.0),
    ("c", 30, 1.0),
    ("c", 60, 0.5),
]


def pipeline(spark, args):
    [directory] = args or sys.exit(
        "usage: temperature_rise.py DIRECTORY, for the checkpoint and results"
    )
    flow = lock.flow(readings(spark, ROWS, directory), time="ts", watermark="1 second")
    rises = flow.key_by("id").process(TemperatureRise())
    return (
        lock.pipeline(rises, name="rises", checkpoint_location=f"{directory}/checkpoint")
        .to(Files(f"{directory}/warnings", format="json"))
        .to(Files(f"{directory}/cold", format="json"), output="cold")
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="for input, results and checkpoint")
    given = parser.parse_args()
    job = pipeline(lock.session(kafka=False), [given.directory])
    job.start(availableNow=True).awaitTermination()
