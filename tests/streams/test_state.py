"""State read from outside, processing-time timers, and checkpoints of another flow."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from playing import source
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import poundlock as lock
from poundlock.cli.state import state
from poundlock.errors import UsageError
from poundlock.sinks import Files

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test


def run(flow: lock.Flow, directory: Path, **trigger):
    return (
        lock.pipeline(flow, name="p", checkpoint_location=str(directory / "c"))
        .to(Files(directory / "out", format="json"))
        .start(**(trigger or {"availableNow": True}))
    )


def show(*arguments: object) -> str:
    done = CliRunner().invoke(state, ["show", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


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
    assert "operator 0" in show(tmp_path / "c")
    with pytest.raises(UsageError, match="has no operator 7: it has 0"):
        show(tmp_path / "c", "--operator", 7)
    with pytest.raises(UsageError, match="there is no state in"):
        show(tmp_path / "nothing")


def test_state_show_obeys_no_key(spark: SparkSession, tmp_path: Path) -> None:
    hostile = "a\x1b[2J\r\u202e[/x][red]"
    frame = source(spark, tmp_path / "in", [[(hostile, 1, 1)]])
    run(lock.flow(frame).key_by("id").sum("v"), tmp_path).awaitTermination()
    told = json.loads(show(tmp_path / "c", "--json"))
    assert [kept["key"] for kept in told["keys"]] == [[hostile]]
    shown = show(tmp_path / "c")
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
