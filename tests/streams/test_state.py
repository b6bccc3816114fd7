"""State read from outside, processing-time timers, and checkpoints of another flow."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
from playing import source
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import poundlock as lock
from poundlock.errors import UsageError
from poundlock.sinks import Files
from program import call_program

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test


def run(flow: lock.Flow, directory: Path, **trigger):
    return (
        lock.pipeline(flow, name="p", checkpoint_location=str(directory / "c"))
        .to(Files(directory / "out", format="json"))
        .start(**(trigger or {"availableNow": True}))
    )


def show(*arguments: object) -> str:
    """Show the state in a process whose session has never had a query."""
    done = call_program("state", "show", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(*arguments: object) -> str:
    """Return the one line that a refused call ends with."""
    done = call_program("state", "show", *arguments)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False), done.stderr
    return done.stderr.splitlines()[-1]


def test_state_show_prints_the_state_of_a_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    rows = [[("a", 1, 10), ("a", 3, 5), ("b", 2, 7)], [("a", 40, 1)]]
    frame = source(spark, tmp_path / "in", rows)
    keyed = lock.flow(frame, time="ts", watermark="1 second").key_by("id")
    windows = keyed.window(lock.sessions("10 seconds"), late_output="late").aggregate("sum(v) AS v")
    run(windows, tmp_path).awaitTermination()
    told = json.loads(show(tmp_path / "c", "--json"))
    assert [each["kind"] for each in told["operators"]] == ["transformWithStateInPySparkExec"]
    [kept] = told["keys"]  # the sessions before have fired and are gone
    assert kept["key"] == ["a"] and list(kept["timers"]) == ["event"]
    before = json.loads(show(tmp_path / "c", "--json", "--batch", 0))
    assert sorted(each["key"][0] for each in before["keys"]) == ["a", "b"]
    assert "has no operator 7: it has 0" in refusal(tmp_path / "c", "--operator", 7)
    assert "there is no state in" in refusal(tmp_path / "nothing")


def test_state_show_says_in_one_line_why_a_task_cannot_read(
    spark: SparkSession, tmp_path: Path
) -> None:
    frame = source(spark, tmp_path / "in", [[("a", 1, 1)]])
    run(lock.flow(frame).key_by("id").sum("v"), tmp_path).awaitTermination()
    for part in (tmp_path / "c" / "state" / "0").glob("[0-9]*/*1.*"):
        part.unlink()
    assert f"the state in {tmp_path}/c cannot be read: " in refusal(tmp_path / "c")


def test_state_show_reads_sparks_own_operators(spark: SparkSession, tmp_path: Path) -> None:
    frame = source(spark, tmp_path / "in", [[("a", 1, 1), ("a", 2, 2)]]).groupBy("id").count()
    places = {"checkpointLocation": str(tmp_path / "c")}
    written = frame.writeStream.format("noop").outputMode("update").options(**places)
    written.trigger(availableNow=True).start().awaitTermination()
    told = json.loads(show(tmp_path / "c", "--json"))
    assert told["keys"] == [{"key": ["a"], "state": {"count": 2}, "timers": {}}]


def test_state_show_obeys_no_key(spark: SparkSession, tmp_path: Path) -> None:
    hostile = "a\x1b[2J\r\u202e[/x][red]"
    frame = source(spark, tmp_path / "in", [[(hostile, 1, 1)]])
    run(lock.flow(frame).key_by("id").sum("v"), tmp_path).awaitTermination()
    told = json.loads(show(tmp_path / "c", "--json"))
    assert [kept["key"] for kept in told["keys"]] == [[hostile]]
    shown = show(tmp_path / "c")
    assert "operator 0" in shown
    assert not [c for c in shown if c != "\n" and not c.isprintable()], shown
    together = "".join(re.findall(r"[^\s│]+", shown))
    assert "[2J" in together and "[red]" in together


def test_another_number_of_pages_is_rejected(spark: SparkSession, tmp_path: Path) -> None:
    rows = [[("a", 1, 1), ("b", 2, 2)], [("a", 3, 3), ("b", 4, 4)]]
    for pages, batches in ((2, rows[:1]), (1, rows)):
        keyed = lock.flow(source(spark, tmp_path / "in", batches)).key_by("id").with_pages(pages)
        query = run(keyed.sum("v"), tmp_path)
        if pages == 1:
            with pytest.raises(UsageError, match=r"state in 2 pages, but the flow sets 1"):
                query.awaitTermination()
        else:
            query.awaitTermination()


class Echo(lock.ProcessFunction):
    """Emits each row again from a processing-time timer."""

    schema = "id string, again boolean"
    timers = "processing"

    def process(self, row, ctx):
        ctx.set_processing_timer(ctx.now + 1)
        return row.id, False

    def on_timer(self, time, ctx):
        return ctx.key.id, True


def test_processing_time_timers_fire(spark: SparkSession, tmp_path: Path) -> None:
    rows = [[("a", 1, 1)], [("b", 2, 2)]]
    flow = lock.flow(source(spark, tmp_path / "in", rows)).key_by("id").process(Echo())
    run(flow, tmp_path).awaitTermination()  # it ends with its input, though timers lie ahead
    source(spark, tmp_path / "in", [*rows, [("c", 3, 3)]])  # after a start Spark waits for a row
    query = run(flow, tmp_path, processingTime="0 seconds")
    expected = {(key, again) for key in "abc" for again in (False, True)}
    deadline = time.monotonic() + 120
    while (found := said(spark, tmp_path)) != sorted(expected) and time.monotonic() < deadline:
        time.sleep(0.5)
    query.stop()
    assert found == sorted(expected)


def said(spark: SparkSession, directory: Path) -> list[tuple[str, bool]]:
    return sorted((row.id, row.again) for row in spark.read.json(str(directory / "out")).collect())
