"""Every operator inside Spark: its results, how it runs, and what it rejects.

The operators themselves are tested in tests/unit/stream without Spark. These tests check that Spark's
rows, state, timers and watermark reach them, and that their outputs come back.
"""

from __future__ import annotations

import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from playing import play, source, together
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

import poundlock as lock
from poundlock.errors import OperatorFailed
from poundlock.sinks import Files
from poundlock.spark.internals import analyzed_plan
from poundlock.spark.stream.keyed import Outputs, content_hash, read_packets, to_bytes

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

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


WINDOWS = [
    ("a", 0.0, 15.0, 5, 2),
    ("a", 15.0, 30.0, 1, 1),
    ("a", 30.0, 45.0, 3, 1),
    ("b", 0.0, 15.0, 1, 2),
    ("b", 15.0, 30.0, 2, 1),
]


def plan(flow: lock.Flow) -> str:
    return analyzed_plan(flow.df).treeString()


def test_plain_windows_use_sparks_own_operator(keyed, tmp_path):
    flow = keyed.window(lock.tumbling("15 seconds")).aggregate(
        F.min("v").alias("low"), F.count("*").alias("n")
    )
    assert flow.explain().endswith("window: Spark's own window operator")
    assert "TransformWithState" not in plan(flow)
    assert together(play(flow, tmp_path / "c")) == WINDOWS


def test_windows_with_lateness_use_keyed_state_and_emit_late_rows(keyed, tmp_path):
    flow = keyed.window(
        lock.tumbling("15 seconds"), allowed_lateness="5 seconds", late_output="late"
    ).aggregate(F.min("v").alias("low"), "count(*) as n", "sum(v * 2) filter (where v > 4) as s")
    assert "on keyed state" in flow.explain() and "late rows are still taken" in flow.explain()
    assert "TransformWithState" in plan(flow)
    main = play(flow, tmp_path / "c")
    assert [row[:5] for row in together(main)] == WINDOWS
    assert [row[5] for row in together(main)] == [30, None, None, 14, None]
    late = play(flow, tmp_path / "d", "late")
    assert together(late) == [("a", 3.0, 99, 3.0)]


def test_a_row_can_set_the_gap_of_its_session(keyed, tmp_path):
    """The gap function sees all columns of a row, including those that no aggregate uses."""
    windows = keyed.window(lock.sessions(lambda row: row.v)).aggregate("count(*) AS n")
    rows = together(play(windows, tmp_path / "c"))
    assert [row for row in rows if row[0] == "a"][:2] == [("a", 1.0, 11.0, 2), ("a", 21.0, 22.0, 1)]


def test_windows_can_be_computed_over_windows(keyed, tmp_path):
    """The results of one operator are the rows of the next, and are not late there."""
    small = keyed.window(lock.tumbling("5 seconds"), late_output="late").aggregate("sum(v) as v")
    whole = small.key_by("id").window(lock.tumbling("15 seconds"), late_output="late")
    native = small.key_by("id").window(lock.tumbling("15 seconds"))
    expected = [
        ("a", 0.0, 15.0, 15),
        ("a", 15.0, 30.0, 1),
        ("a", 30.0, 45.0, 3),
        ("b", 0.0, 15.0, 8),
        ("b", 15.0, 30.0, 2),
    ]
    assert together(play(whole.aggregate("sum(v) as v"), tmp_path / "c")) == expected
    assert together(play(native.aggregate("sum(v) as v"), tmp_path / "d")) == expected


class Rise(lock.ProcessFunction):
    """Reports each value of ten or more, and reports again five seconds later."""

    outputs = {"main": "id string, message string, at double", "high": "id string, v long"}  # noqa: RUF012
    seen = lock.ValueState(default=0)

    def process(self, row, ctx):
        self.seen.value += 1
        if row.v >= 10:
            ctx.emit((row.id, row.v), "high")
            ctx.set_event_timer(ctx.timestamp + 5000)
        return row.id, f"row {self.seen.value}", ctx.timestamp / 1000

    def on_timer(self, time, ctx):
        yield ctx.key.id, f"timer after {self.seen.value}", time / 1000


def test_process_functions_have_state_timers_and_outputs(keyed, tmp_path):
    flow = keyed.process(Rise())
    assert flow.outputs == ("main", "high")
    told = [(row[0], row[1]) for row in together(play(flow, tmp_path / "c"))]
    assert told == [
        ("a", "row 1"),
        ("a", "row 2"),
        ("a", "row 3"),
        ("a", "row 4"),
        ("a", "row 5"),
        ("a", "timer after 3"),
        ("a", "timer after 5"),
        ("b", "row 1"),
        ("b", "row 2"),
        ("b", "row 3"),
        ("b", "row 4"),
        ("c", "row 1"),
    ]
    assert together(play(flow, tmp_path / "d", "high")) == [("a", 10), ("a", 99)]


def test_count_windows_follow_the_order_of_arrival(spark, tmp_path):
    rows = [[("a", 0, 3), ("a", 0, 1), ("b", 0, 9), ("a", 0, 2)], [("a", 0, 7), ("b", 0, 1)]]
    keyed = lock.flow(source(spark, tmp_path / "in", rows)).key_by("id")
    flow = keyed.window(lock.count(2)).aggregate(F.collect_list("v").alias("vs"))
    assert play(flow, tmp_path / "c") == [[("a", [3, 1])], [("a", [2, 7]), ("b", [9, 1])]]


def test_patterns_take_conditions_in_sql_and_python(keyed, tmp_path):
    pattern = (
        lock.begin("low")
        .where("v < 6")
        .followed_by("high")
        .where(lambda row, earlier: row.v > earlier["low"][0].v)
        .within("25 seconds")
    )
    flow = keyed.match(
        pattern, lambda match, ctx: (match["low"][0].v, match["high"][0].v), "low long, high long"
    )
    assert together(play(flow, tmp_path / "c")) == [(1, 2), (1, 3)]
    whole = keyed.match(pattern)
    assert whole.df.columns == ["id", "match_start", "match_end", "low", "high"]
    assert whole.df.schema["low"].dataType.simpleString() == (
        "array<struct<id:string,at:double,v:bigint,ts:timestamp>>"
    )


class Switch(lock.CoProcessFunction):
    """Passes rows while the other input has switched their key on."""

    schema = "id string, v long"
    on = lock.ValueState(default=False)

    def process_1(self, row, ctx):
        return (row.id, row.v) if self.on.value else None

    def process_2(self, row, ctx):
        self.on.value = row.on


def test_two_inputs_share_a_keys_state(keyed, spark, tmp_path):
    switches = source(
        spark,
        tmp_path / "on",
        [[("a", 2, True)], [("b", 20, True)]],
        "id string, at double, on boolean",
    )
    other = lock.flow(switches, time="ts", watermark="10 seconds").key_by("id")
    flow = keyed.connect(other).process(Switch())
    assert together(play(flow, tmp_path / "c")) == [
        ("a", 1),
        ("a", 3),
        ("a", 5),
        ("a", 99),
        ("b", 1),
        ("b", 2),
        ("b", 4),
    ]


class Limits(lock.BroadcastProcessFunction):
    """Keeps rows above a limit that can change."""

    schema = "id string, v long, limit long"
    limits = lock.BroadcastState()

    def process(self, row, ctx):
        limit = ctx.broadcast["limits"].get("v", 0)
        return (row.id, row.v, limit) if row.v > limit else None

    def process_broadcast(self, row, ctx):
        ctx.broadcast["limits"]["v"] = row.v


def test_rules_reach_every_key(keyed, spark, tmp_path):
    rules = source(spark, tmp_path / "rules", [[("x", 0, 4)], [("x", 30, 1)]])
    flow = keyed.with_pages(8).broadcast(lock.flow(rules, time="ts", watermark="1 second"))
    assert together(play(flow.process(Limits()), tmp_path / "c")) == [
        ("a", 10, 4),
        ("a", 3, 1),
        ("a", 5, 4),
        ("a", 99, 1),
        ("b", 2, 1),
        ("b", 4, 1),
        ("b", 7, 4),
    ]


def test_interval_joins_give_equal_results_natively_and_on_keyed_state(keyed, spark, tmp_path):
    other = source(spark, tmp_path / "other", [[("a", 3, 100)], [("b", 21, 200)], [("z", 60, 0)]])
    other = other.select("id", F.col("v").alias("w"), F.col("ts").alias("then"))
    right = lock.flow(other, time="then", watermark="10 seconds").key_by("id")
    native = keyed.interval_join(right, lower="-2 seconds", upper="2 seconds")
    assert "Spark's own join" in native.explain()
    expected = [
        ("a", 1.0, 10, 1.0, 100, 3.0),
        ("a", 4.0, 5, 4.0, 100, 3.0),
        ("b", 22.0, 2, 22.0, 200, 21.0),
    ]
    assert together(play(native, tmp_path / "c")) == expected
    ours = keyed.interval_join(
        right, lower="-2 seconds", upper="2 seconds", left_late_output="late"
    )
    assert "on keyed state" in ours.explain()
    assert together(play(ours, tmp_path / "d")) == expected


def test_a_rolling_aggregate_emits_for_every_row(keyed, tmp_path):
    flow = keyed.max_by("v")
    assert [row[2] for row in together(play(flow, tmp_path / "c")) if row[0] == "b"] == [7, 7, 7, 7]


async def double(row):
    return row.id, row.v * 2


def test_stateless_steps_can_be_chained(readings, tmp_path):
    flow = lock.flow(readings, time="ts", watermark="10 seconds")
    doubled = (
        flow.filter("v > 3")
        .filter(lambda row: row.id != "b")
        .flat_map(lambda row: [(row.id, row.v), (row.id, -row.v)], "id string, v long")
        .map(lambda row: {"v": row.v + 1, "id": row.id}, "id string, v long")
        .enrich(double, "id string, v long", concurrency=4)
    )
    values = sorted(row[1] for row in together(play(doubled, tmp_path / "c")))
    assert values == [-196, -18, -8, 12, 22, 200]


def test_keys_are_equal_if_spark_considers_them_equal():
    """Values that Spark groups as one key are one key here, whatever their representation."""
    zero, nan = pa.array([0.0, -0.0, float("nan"), np.float64("nan")]), pa.array(range(4))
    table = pa.table({"k": zero, "n": nan, "__time": nan, "__hash": nan})
    events, _, _ = read_packets([(0, to_bytes(table))], [["k"]])
    assert [[event.row.n for event in each] for each in events.values()] == [[0, 1], [2, 3]]
    nested = pa.array([{"a": 1, "b": [1, None]}, {"a": 1, "b": [1, None]}])
    table = pa.table({"k": nested, "__time": pa.array([1, 2]), "__hash": pa.array([1, 2])})
    events, _, _ = read_packets([(0, to_bytes(table))], [["k"]])
    assert list(events) == [((1, (1, None)),)]


def test_rows_are_sorted_by_time_place_and_content():
    columns = {
        "n": [1, 2, 3, 4, 5],
        "__time": [-1_500, 5_000, 5_000, 5_000, 1_000],
        "__place0": [0, 2, 1, 1, 0],
        "__hash": [0, 0, 9, 3, 0],
    }
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    parts = [(0, to_bytes(table.slice(at, 1))) for at in (3, 1, 0, 4, 2)]
    events, _, _ = read_packets(parts, [["n"]])
    assert [each[0].row.n for each in events.values()] == [1, 5, 4, 3, 2]
    assert events[(1,)][0].time == -2  # before 1970 milliseconds are rounded down, too


def test_emitted_values_are_converted_to_their_columns():
    kinds = "a decimal(38,18), b timestamp, c map<string,int>, d string not null"
    outputs = Outputs({"main": StructType.fromDDL(kinds)})
    big = Decimal("12345678901234567890.1234567890123456789")
    row = (big, 1_700_000_000_123, {"x": 1}, "y")
    table = outputs.table("op", "main", [row])
    assert table["a"].to_pylist() == [Decimal("12345678901234567890.123456789012345679")]
    assert table["b"].to_pylist()[0].timestamp() == 1_700_000_000.123
    assert table["c"].to_pylist() == [[("x", 1)]]
    for column, wrong in (("a", "1,5"), ("b", "noon"), ("d", None)):
        values = dict(zip("abcd", row, strict=True)) | {column: wrong}
        with pytest.raises(OperatorFailed, match=f"'op' emitted a value for column '{column}'"):
            outputs.table("op", "main", [tuple(values.values())])


def test_results_of_sparks_own_operators_are_not_late(readings, tmp_path):
    native = readings.withWatermark("ts", "10 seconds")
    native = native.groupBy(F.window("ts", "5 seconds"), "id").agg(F.sum("v").alias("v"))
    native = native.select("id", "v", F.window_time("window").alias("t"))
    flow = lock.flow(native, time="t").key_by("id")
    windows = flow.window(lock.tumbling("15 seconds"), late_output="late").aggregate("sum(v) AS v")
    expected = [
        ("a", 0.0, 15.0, 15),
        ("a", 15.0, 30.0, 1),
        ("a", 30.0, 45.0, 3),
        ("b", 0.0, 15.0, 8),
        ("b", 15.0, 30.0, 2),
    ]
    assert together(play(windows, tmp_path / "c")) == expected


def test_rows_without_a_time_fail_natively_and_on_keyed_state(spark, tmp_path):
    rows = [[("a", 1, 1), ("a", None, 2)]]
    keyed = lock.flow(source(spark, tmp_path / "in", rows), time="ts", watermark="1 second").key_by(
        "id"
    )
    for name, late in (("native", None), ("ours", "late")):
        flow = keyed.window(lock.tumbling("1 minute"), late_output=late).aggregate("sum(v) AS v")
        query = (
            lock.pipeline(flow, name=name, checkpoint_location=str(tmp_path / name))
            .to(Files(tmp_path / f"{name}-out"))
            .start(availableNow=True)
        )
        with pytest.raises(OperatorFailed, match="a row has no event time"):
            query.awaitTermination()


def test_hashes_distinguish_nulls_and_maps(spark):
    """Different rows have different hashes at every level, and hashes are equal in every run."""
    frame = spark.sql(
        """SELECT * FROM VALUES
        (array(1, null), named_struct('a', 1, 'b', null), map(X'01', 1)),
        (array(null, 1), named_struct('a', 1, 'b', null), map(X'01', 1)),
        (array(1, null), named_struct('a', null, 'b', 1), map(X'01', 1)),
        (array(1, null), named_struct('a', 1, 'b', null), map(X'02', 1)),
        (array(), named_struct('a', 1, 'b', null), map(X'01', 1)),
        (null, null, null) AS t(x, y, z)"""
    )
    hashes = [row[0] for row in frame.select(content_hash(frame, frame.columns)).collect()]
    assert len(set(hashes)) == 6
    assert hashes == [row[0] for row in frame.select(content_hash(frame, frame.columns)).collect()]
