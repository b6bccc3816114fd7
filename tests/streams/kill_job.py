"""Runs every operator over one input, and kills itself: `kill_job.py DIRECTORY [STEP NUMBER]`.

One pipeline has windows with a late output, each in a sink of its own; the other all other operators,
united. With a step and a number, SIGKILL ends Python and JVM when that step is reached for that time.
The file `DIRECTORY/kill-worker` makes the worker of an operator kill itself once, between its rows.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

from playing import source
from pyspark.sql import functions as F

import poundlock as lock
from poundlock.sinks import Files

BATCHES = 4


def rows(batch: int) -> list[tuple]:
    """Sixty rows of six keys: most in order, some late, some very late."""
    made = []
    for number in range(60):
        behind = 0 if number % 7 else (12 if number % 2 else 60)
        made.append(
            (f"k{number % 6}", batch * 30 + number / 2 - behind, (number * 37 + batch) % 101)
        )
    return made


class Timers(lock.ProcessFunction):
    """Counts, keeps all kinds of state, sets a timer for each row, and deletes every third."""

    schema = "id string, what string, n long"
    seen = lock.ValueState(default=0)
    last = lock.ListState()
    sums = lock.MapState()

    def __init__(self, marker: str):
        self.marker = marker

    def process(self, row, ctx):
        if row.v == 50 and os.path.exists(self.marker):
            os.unlink(self.marker)
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.value += 1
        self.last.update([*list(self.last)[-2:], row.v])
        self.sums[row.v % 3] = self.sums.get(row.v % 3, 0) + row.v
        ctx.set_event_timer(ctx.timestamp + 7000)
        if self.seen.value % 3 == 0:
            ctx.delete_event_timer(ctx.timestamp + 7000)
        return row.id, "row", self.seen.value

    def on_timer(self, time, ctx):
        return ctx.key.id, f"timer {list(self.last)}", self.sums.get(0, 0)


class Both(lock.CoProcessFunction):
    schema = "id string, n long"
    other = lock.ValueState(default=0)

    def process_1(self, row, ctx):
        return row.id, self.other.value

    def process_2(self, row, ctx):
        self.other.value += row.v


class Rules(lock.BroadcastProcessFunction):
    schema = "id string, v long"
    limit = lock.BroadcastState()

    def process(self, row, ctx):
        return (row.id, row.v) if row.v > self.limit.get("v", 0) else None

    def process_broadcast(self, row, ctx):
        self.limit["v"] = row.v


VISIT = "id string, n long, ms long"


def visit(key, window, inside, ctx):
    yield key[0], len(inside), window.end - window.start


def everything(flow, keyed, marker: str) -> dict[str, lock.Flow]:
    """Return a flow of each kind of operator but the windows with a late output, by name."""
    right = flow.select("id AS other", "v AS w", "ts AS then").with_time("then").key_by("other")
    pattern = lock.begin("low").where("v < 30").followed_by("high").where("v > 80").within("9 s")
    rules = flow.filter("v > 98").select("v", "ts")
    return {
        "sessions": keyed.window(lock.sessions("2 seconds")).process(visit, VISIT),
        "count": keyed.window(lock.count(4)).reduce(lambda a, b: a if a.v > b.v else b),
        "timers": keyed.process(Timers(marker)),
        "pattern": keyed.match(
            pattern,
            lambda m, ctx: (ctx.key.id, m["low"][0].v, m["high"][0].v),
            "id string, low long, high long",
        ),
        "both": keyed.connect(keyed).process(Both()),
        "rules": keyed.broadcast(rules).process(Rules()),
        "join": keyed.interval_join(
            right,
            lower="0 seconds",
            upper="1 second",
            function=lambda a, b, ctx: (a.id, a.v, b.w),
            schema="id string, v long, w long",
        ),
        "rolling": keyed.max_by("v"),
        "native": keyed.window(lock.tumbling("20 seconds")).aggregate("sum(v) AS total"),
    }


def main(directory: Path, step: str | None = None, number: int = 0) -> None:
    spark = lock.session("local[2]", parallelism=2, kafka=False, conf={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    jvm = spark._jvm.java.lang.ProcessHandle.current().pid()  # pyright: ignore
    frame = source(spark, directory / "in", [rows(batch) for batch in range(BATCHES)])
    flow = lock.flow(frame, time="ts", watermark="10 seconds")
    keyed = flow.key_by("id").with_pages(4)
    windows = keyed.window(
        lock.sliding("20 seconds", "10 seconds"), allowed_lateness="5 seconds", late_output="late"
    ).aggregate("sum(v) AS total", "count(*) AS n")
    others = everything(flow, keyed, str(directory / "kill-worker"))
    united = None
    for name, made in others.items():
        each = made.df.select(F.lit(name).alias("operator"), F.to_json(F.struct("*")).alias("row"))
        united = each if united is None else united.unionByName(each)

    reached: Counter[str] = Counter()

    def observe(at, facts) -> None:
        reached[at.value] += 1
        if at.value == step and reached[step] == number:
            os.kill(jvm, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def pipeline(what, name):
        return lock.pipeline(what, name=name, checkpoint_location=str(directory / name)).observe(
            observe
        )

    late = (
        pipeline(windows, "windows")
        .to(Files(directory / "results", format="json"))
        .to(Files(directory / "late", format="json"), output="late")
    )
    all_others = pipeline(united, "others").to(Files(directory / "united", format="json"))
    queries = [late.start(availableNow=True), all_others.start(availableNow=True)]
    for query in queries:
        query.awaitTermination()
    (directory / "done").touch()


if __name__ == "__main__":
    arguments = sys.argv[2:]
    main(Path(sys.argv[1]), *([arguments[0], int(arguments[1])] if arguments else []))
