"""Every operator inside Spark: its results, the road it takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from playing import play, source, together
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import poundlock as lock
from poundlock.errors import UsageError

# The watermark is ten seconds behind the newest row of the batches before.
READINGS = [
    [("a", 1, 10), ("a", 4, 5), ("b", 2, 7)],
    [("a", 21, 1), ("b", 22, 2)],
    [("a", 41, 3), ("b", 14, 1)],  # watermark 12: in time for the window from 0 to 15
    [("c", 50, 1)],  # watermark 31: the windows to 15 and 30 fire
    [("a", 3, 99), ("b", 61, 4)],  # 3 is late
]


@pytest.fixture
def readings(spark: SparkSession, tmp_path: Path):
    return source(spark, tmp_path / "in", READINGS)


@pytest.fixture
def keyed(readings):
    return lock.flow(readings, time="ts", watermark="10 seconds").key_by("id")


NATIVE = [
    ("a", 0.0, 15.0, 5, 2), ("a", 15.0, 30.0, 1, 1), ("a", 30.0, 45.0, 3, 1),
    ("b", 0.0, 15.0, 1, 2), ("b", 15.0, 30.0, 2, 1),
]  # fmt: skip


def test_plain_windows_take_sparks_own_road(keyed, tmp_path):
    flow = keyed.window(lock.tumbling("15 seconds")).aggregate(
        F.min("v").alias("low"), F.count("*").alias("n")
    )
    assert flow.explain().endswith("window: Spark's own window operator")
    assert "TransformWithState" not in lock_plan(flow)
    assert together(play(flow, tmp_path / "c")) == NATIVE


def test_lateness_takes_the_other_road_and_late_rows_have_their_output(keyed, tmp_path):
    flow = keyed.window(
        lock.tumbling("15 seconds"), allowed_lateness="5 seconds", late_output="late"
    ).aggregate(F.min("v").alias("low"), "count(*) as n")
    assert "on keyed state" in flow.explain() and "late rows are still taken" in flow.explain()
    assert "TransformWithState" in lock_plan(flow)
    assert together(play(flow, tmp_path / "c")) == NATIVE
    late = play(flow, tmp_path / "d", "late")
    assert together(late) == [("a", 3.0, 99, 3.0)]


def lock_plan(flow) -> str:
    return flow.df._jdf.queryExecution().analyzed().treeString()
