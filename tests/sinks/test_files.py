"""Files: what Spark reads from the directory."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from fix_files import OURS, begin, make_rows, make_sink, prepare
from pyspark.sql import SparkSession

import poundlock as lock
import trial
from poundlock.core.protocol import BranchState, Step
from poundlock.errors import UsageError
from poundlock.sinks import Files
from poundlock.sinks.files import committed


class TestPlainSpark:
    def test_spark_reads_exactly_the_committed_rows_over_many_compactions(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        target = tmp_path / "a target"
        sink = make_sink(target)
        days = ["2026-01-31", "ä b/c=d%", None, "x'y\"z", "7"]
        expected = []
        for batch in range(28):
            parts = [
                prepare(
                    sink, batch, make_rows([batch * 10 + task], [days[(batch + task) % 5]]), task
                )
                for task in range(2)
            ]
            prepare(sink, batch, make_rows([-1], ["never"]), task=2)  # stays staged
            assert set(sink.commit(parts)) == {BranchState.COMMITTED}
            expected += [(batch * 10 + task, days[(batch + task) % 5]) for task in range(2)]
        names = {file.name for file in (target / "_spark_metadata").iterdir()}
        assert {"9.compact", "19.compact", "27"} <= names
        found = spark.read.parquet(str(target))
        assert found.schema.simpleString() == "struct<number:bigint,day:string>"
        assert sorted(map(tuple, found.collect()), key=str) == sorted(expected, key=str)

    def test_spark_sees_nothing_before_the_first_commit(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        sink = make_sink(tmp_path / "out")
        receipt = prepare(sink, 0, make_rows([1], ["a"]))
        reader = spark.read.schema("number bigint, day string")
        assert reader.parquet(str(tmp_path / "out")).count() == 0
        sink.commit([receipt])
        assert reader.parquet(str(tmp_path / "out")).count() == 1

    def test_old_records_are_dropped_and_no_file_is_missed(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        sink = make_sink(tmp_path / "out")
        for batch in range(121):
            sink.commit([prepare(sink, batch, make_rows([batch], ["a"]))])
        records = sorted((tmp_path / "out" / "_spark_metadata").iterdir())
        assert len(records) == 121 - 19
        assert make_sink(tmp_path / "out").newest_generation(OURS) == 1
        assert spark.read.parquet(str(tmp_path / "out")).count() == 121
        assert len(committed(tmp_path / "out")) == 121

    def test_our_manifest_has_the_format_of_sparks_own(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        frame = lock.from_collection(
            spark, [(1, "a b%")], "i int, s string", directory=tmp_path / "c"
        )
        (
            frame.writeStream.partitionBy("s")
            .option("checkpointLocation", str(tmp_path / "ck"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "own"))
            .awaitTermination()
        )
        trial.finish(
            lock.pipeline(frame, name="t", checkpoint_location=str(tmp_path / "ours-ck")).to(
                Files(tmp_path / "ours", partition_by=["s"])
            )
        )
        own, ours = (
            (tmp_path / name / "_spark_metadata" / "0").read_text().split("\n")
            for name in ("own", "ours")
        )
        assert own[0] == ours[0]
        its, mine = json.loads(own[1]), json.loads(ours[1])
        assert list(its) == list(mine)
        assert {k: its[k] for k in ("isDir", "blockReplication", "blockSize", "action")} == {
            k: mine[k] for k in ("isDir", "blockReplication", "blockSize", "action")
        }
        assert (
            its["path"].replace("/own/", "/ours/").rpartition("/")[0]
            == (mine["path"].rpartition("/")[0])
        )


VALUES = (
    1,
    "text, \"with\" 'quotes'\\ and ä",
    2.5,
    True,
    datetime.date(2026, 1, 31),
    datetime.datetime(2026, 1, 31, 12, 30, 15, 123456),
    decimal.Decimal("12345.678"),
)
TYPES = "i bigint, s string, d double, b boolean, day date, ts timestamp, m decimal(10,3)"


@pytest.mark.parametrize(
    ("format", "options", "reader"),
    [
        ("parquet", {"compression": "zstd"}, {}),
        ("json", {"compression": "gzip"}, {}),
        ("csv", {"header": True}, {"header": True}),
        ("csv", {}, {}),
    ],
)
def test_values_of_every_type_are_read_back_unchanged(
    spark: SparkSession,
    tmp_path: Path,
    format: str,
    options: dict[str, Any],
    reader: dict[str, Any],
) -> None:
    empty = "x" if format == "csv" else ""  # Spark reads an empty text as null from its own CSV too
    given = [VALUES, (None,) * len(VALUES), (2, empty, 0.0, False, *VALUES[4:])]
    source = lock.from_collection(spark, given, TYPES, directory=tmp_path / "c")
    trial.finish(
        lock.pipeline(source, name="t", checkpoint_location=str(tmp_path / "ck")).to(
            Files(tmp_path / "out", format=format, **options)
        )
    )
    found = spark.read.schema(TYPES).options(**reader).format(format).load(str(tmp_path / "out"))
    assert sorted(map(tuple, found.collect()), key=str) == sorted(given, key=str)
    again = lock.read_files(spark, tmp_path / "out", format=format, schema=TYPES, **reader)
    assert again.isStreaming


@pytest.mark.parametrize("types", ["n int, s string", "s string", "n int"])
def test_texts_in_csv_are_read_back_unchanged(
    spark: SparkSession, tmp_path: Path, types: str
) -> None:
    texts = ["plain", " blanks ", "two\nlines", "a,b", None, 'q"', "back\\", "#", "\t"]
    given = [(n if n != 3 else None, text) for n, text in enumerate(texts)]
    source = lock.from_collection(spark, given, "n int, s string", directory=tmp_path / "c")
    columns = [part.split()[0] for part in types.split(", ")]
    sink = Files(tmp_path / "out", format="csv")
    pipeline = lock.pipeline(source, name="t", checkpoint_location=str(tmp_path / "ck"))
    trial.finish(pipeline.to(sink, select=columns))
    found = spark.read.schema(types).csv(sink.place, multiLine=True).collect()
    expected = [
        tuple(value for name, value in zip("ns", row, strict=True) if name in columns)
        for row in given
    ]
    assert sorted(map(tuple, found), key=str) == sorted(expected, key=str)


def test_nested_types_are_read_back_from_parquet_and_json(
    spark: SparkSession, tmp_path: Path
) -> None:
    types = "a array<int>, m map<string,int>, s struct<x:int,y:string>, n int"
    given = [([1, 2], {"k": 1}, (1, "y"), 1), (None, None, None, 2)]
    source = lock.from_collection(spark, given, types, directory=tmp_path / "c")
    outs = [Files(tmp_path / kind, format=kind) for kind in ("parquet", "json")]
    pipeline = lock.pipeline(source, name="t", checkpoint_location=str(tmp_path / "ck"))
    trial.finish(pipeline.to(outs[0]).to(outs[1]))
    for out in outs:
        found = spark.read.schema(types).format(out.format).load(out.place).orderBy("n").collect()
        assert [(r.a, r.m, r.s and tuple(r.s), r.n) for r in found] == given


@pytest.mark.parametrize("step", [Step.PREPARED, Step.DECIDED, Step.COMMITTED, Step.FINISHED])
def test_a_killed_driver_repeats_and_loses_nothing(
    spark: SparkSession, tmp_path: Path, step: Step
) -> None:
    numbers = [(number, f"d{number % 3}") for number in range(30)]
    source = lock.from_collection(
        spark, numbers, "number bigint, day string", batch_rows=10, directory=tmp_path / "c"
    )

    def pipeline() -> lock.Pipeline:
        sink = Files(tmp_path / "out", partition_by="day")
        checkpoint = str(tmp_path / "ck")
        return lock.pipeline(source, name="t", checkpoint_location=checkpoint).to(sink)

    trial.die(pipeline(), step, times=2)
    trial.finish(pipeline())
    found = spark.read.parquet(str(tmp_path / "out"))
    assert sorted(map(tuple, found.collect())) == numbers
    lying = {str(path) for path in (tmp_path / "out").rglob("*.parquet")}
    assert {f"file://{path}" for path in lying} == set(committed(tmp_path / "out"))
    # Arrow reads the files that the manifest lists.
    assert ds.dataset([uri[7:] for uri in committed(tmp_path / "out")]).count_rows() == 30


def test_a_stream_of_our_files_follows_the_manifest(spark: SparkSession, tmp_path: Path) -> None:
    sink = make_sink(tmp_path / "first")
    sink.commit([prepare(sink, 0, make_rows([1, 2], ["a", "b"]))])
    prepare(sink, 1, make_rows([3], ["a"]))  # staged only

    def pipeline() -> lock.Pipeline:
        frame = lock.read_files(spark, tmp_path / "first")
        return lock.pipeline(frame, name="t", checkpoint_location=str(tmp_path / "ck")).to(
            Files(tmp_path / "second", name="second")
        )

    trial.finish(pipeline())
    sink.abort(sink.find(OURS))
    sink.commit([prepare(sink, 2, make_rows([4], ["c"]))])
    trial.finish(pipeline())
    found = spark.read.parquet(str(tmp_path / "second")).collect()
    assert sorted((row.number, row.day) for row in found) == [(1, "a"), (2, "b"), (4, "c")]


class TestAtLeastOnce:
    def test_at_least_once_writes_plain_files_without_a_manifest(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        sink = make_sink(tmp_path / "out", semantic="at_least_once")
        writer = begin(sink, 0)
        writer.write(make_rows([1, 2], ["a", "b"]))
        assert list((tmp_path / "out").rglob("part-*")) == []
        assert writer.prepare() is None
        assert not (tmp_path / "out" / "_spark_metadata").exists()
        assert spark.read.parquet(str(tmp_path / "out")).count() == 2

    def test_at_least_once_is_refused_in_a_directory_with_a_manifest(self, tmp_path: Path) -> None:
        sink = make_sink(tmp_path / "out")
        sink.commit([prepare(sink, 0, make_rows([1], ["a"]))])
        with pytest.raises(UsageError, match="a directory of its own"):
            make_sink(tmp_path / "out", semantic="none")
