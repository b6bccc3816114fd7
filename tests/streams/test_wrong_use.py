"""Wrong use is rejected with a clear error, before the query starts where possible."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from playing import source
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import poundlock as lock
from poundlock.errors import OperatorFailed, StateExpired, UsageError
from poundlock.sinks import Files

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

ROWS = [[("a", 1, 1), ("b", 2, 0)]]


@pytest.fixture
def frame(spark: SparkSession, tmp_path: Path):
    return source(spark, tmp_path / "in", ROWS)


@pytest.fixture
def flow(frame):
    return lock.flow(frame, time="ts", watermark="10 seconds")


class Silent(lock.ProcessFunction):
    schema = "id string"

    def process(self, row, ctx): ...


class Waits(lock.ProcessFunction):
    schema = "id string, ts timestamp"
    timers = "processing"

    def process(self, row, ctx): ...

    def on_timer(self, time, ctx): ...


REFUSED = {
    "no watermark": (lambda frame, flow: lock.flow(frame, time="ts"), "needs a watermark"),
    "no such time": (
        lambda frame, flow: lock.flow(frame, time="when"),
        "time='when' is not a column",
    ),
    "time is no time": (
        lambda frame, flow: lock.flow(frame, time="v", watermark="1 s"),
        "time='v' is of type bigint: make it a timestamp",
    ),
    "bad watermark": (
        lambda frame, flow: lock.flow(frame, time="ts", watermark="soon"),
        "watermark='soon' cannot be read",
    ),
    "two watermarks": (
        lambda frame, flow: lock.flow(flow.df, time="ts", watermark="1 s"),
        "has a watermark already",
    ),
    "watermark without time": (lambda frame, flow: lock.flow(frame, watermark="1 s"), "give time="),
    "no stream": (
        lambda frame, flow: lock.flow(frame.sparkSession.range(1)),
        "takes a streaming DataFrame",
    ),
    "no key": (lambda frame, flow: flow.key_by(), r"key_by\(\) needs a column"),
    "no such key": (lambda frame, flow: flow.key_by("who"), "operator 'key_by'.*`who`"),
    "windows without a key": (lambda frame, flow: flow.window, "no attribute 'window'"),
    "lateness in processing time": (
        lambda frame, flow: (
            lock.flow(frame)
            .key_by("id")
            .window(lock.tumbling("1 minute"), allowed_lateness="1 s", name="minutes")
        ),
        "operator 'minutes': allowed_lateness= and late_output= need event time",
    ),
    "no windows": (
        lambda frame, flow: flow.key_by("id").window("1 minute"),
        "'1 minute' is not a kind of window",
    ),
    "no such column": (
        lambda frame, flow: (
            flow.key_by("id")
            .window(lock.tumbling("1 minute"), late_output="late", name="minutes")
            .aggregate("sum(w)")
        ),
        "operator 'minutes'.*`w`",
    ),
    "no aggregate": (
        lambda frame, flow: (
            flow.key_by("id")
            .window(lock.tumbling("1 minute"), late_output="late")
            .aggregate("sum(v) / count(*) AS mean")
        ),
        "is not a single aggregate function",
    ),
    "unknown aggregate": (
        lambda frame, flow: (
            flow.key_by("id")
            .window(lock.tumbling("1 minute"), late_output="late")
            .aggregate("kurtosis(v)")
        ),
        "no aggregate function 'kurtosis'",
    ),
    "time left out": (
        lambda frame, flow: flow.select("id", "v").key_by("id").process(Silent()),
        "operator 'Silent' needs the time column 'ts', which an earlier step has left out",
    ),
    "a class, not an instance": (
        lambda frame, flow: flow.key_by("id").process(Silent),
        "instance of a subclass of ProcessFunction",
    ),
    "bad schema": (
        lambda frame, flow: flow.map(lambda row: row, "id strong"),
        "operator 'map': the schema 'id strong' cannot be read",
    ),
    "no function": (
        lambda frame, flow: flow.map(3, "id string"),
        "operator 'map' needs a function",
    ),
    "unknown output": (
        lambda frame, flow: flow.key_by("id").process(Silent()).side_output("late"),
        "there is no output 'late': this flow has main",
    ),
    "other keys": (
        lambda frame, flow: flow.key_by("id").connect(flow.key_by("v")),
        r"one key is \(string\) and the other \(bigint\)",
    ),
    "a key that hides a column": (
        lambda frame, flow: flow.key_by(F.upper("id").alias("id")),
        "there is a column 'id' already",
    ),
    "windows after a function in processing time": (
        lambda frame, flow: (
            flow.key_by("id").process(Waits()).key_by("id").window(lock.tumbling("1 minute"))
        ),
        "operator 'window' comes after 'Waits', which does not pass on event time",
    ),
    "the greatest of structs": (
        lambda frame, flow: (
            flow.key_by("id")
            .window(lock.tumbling("1 minute"), late_output="late")
            .aggregate("max(struct(v, at)) AS m")
        ),
        "max of a struct is not supported on keyed state",
    ),
    "no pages": (lambda frame, flow: flow.key_by("id").with_pages(0), "pages=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_use_is_rejected_before_the_query_starts(frame, flow, case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises((UsageError, AttributeError), match=message):
        build(frame, flow)


def test_a_route_to_a_missing_output_is_rejected(flow, frame, tmp_path: Path) -> None:
    made = flow.key_by("id").process(Silent())
    pipeline = lock.pipeline(made, name="p", checkpoint_location=str(tmp_path / "c"))
    with pytest.raises(UsageError, match="there is no output 'late': it has main"):
        pipeline.to(Files(tmp_path / "out"), output="late")
    plain = lock.pipeline(frame, name="p", checkpoint_location=str(tmp_path / "c"))
    with pytest.raises(UsageError, match="a DataFrame has but one"):
        plain.to(Files(tmp_path / "out"), output="late")


def test_only_sparks_own_operators_accept_other_state_backends(spark, flow) -> None:
    key = "spark.sql.streaming.stateStore.providerClass"
    before = spark.conf.get(key)
    spark.conf.set(
        key, "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
    )
    try:
        with pytest.raises(UsageError, match="operator 'Silent' needs the state backend 'rocksdb'"):
            flow.key_by("id").process(Silent())
        assert flow.key_by("id").window(lock.tumbling("1 minute")).aggregate("sum(v)")
    finally:
        spark.conf.set(key, before)


class Divides(lock.ProcessFunction):
    schema = "id string, v long"

    def process(self, row, ctx):
        return row.id, 1 // row.v


class Forgets(lock.ProcessFunction):
    schema = "id string"
    last = lock.ValueState(ttl="1 second", expired="error", time="event")

    def process(self, row, ctx):
        if self.last.value is None:
            self.last.value = row.v


class Mistypes(lock.ProcessFunction):
    schema = "id string, v long"

    def process(self, row, ctx):
        return row.id, "many"


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda flow: flow.key_by("id").process(Divides()),
            OperatorFailed,
            r"operator 'Divides'.*ZeroDivisionError",
        ),
        (
            lambda flow: flow.map(lambda row: (1 // row.v,), "v long"),
            OperatorFailed,
            r"operator 'map' failed: ZeroDivisionError",
        ),
        (
            lambda flow: flow.key_by("id").process(Mistypes()),
            OperatorFailed,
            "operator 'Mistypes' emitted a value for column 'v' of output 'main' that is not of "
            "type int64",
        ),
        (
            lambda flow: (
                flow.select("'k' AS id", "ts", "v")
                .filter("true")
                .flat_map(
                    lambda row: [
                        row,
                        row.replace(ts=row.ts + __import__("datetime").timedelta(seconds=9)),
                    ],
                    "id string, ts timestamp, v long",
                )
                .key_by("id")
                .process(Forgets())
            ),
            StateExpired,
            "last",
        ),
    ],
    ids=["a function that throws", "a lambda that throws", "another type", "state over its TTL"],
)
def test_an_error_in_the_rows_fails_the_batch(flow, tmp_path: Path, build, error, message) -> None:
    """The batch fails, nothing is written, and the error names the operator."""
    query = (
        lock.pipeline(build(flow), name="p", checkpoint_location=str(tmp_path / "c"))
        .to(Files(tmp_path / "out", format="json"))
        .start(availableNow=True)
    )
    with pytest.raises(error, match=message):
        query.awaitTermination()
    assert not list((tmp_path / "out").glob("*.json"))
