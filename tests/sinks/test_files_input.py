"""Files: options, directories and rows that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fix_files import begin, make_rows, make_sink, prepare
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import poundlock as lock
import trial
from poundlock.core.participant import Column
from poundlock.core.site import LocalSite
from poundlock.errors import BadRow, UsageError
from poundlock.sinks import Files
from poundlock.sinks.files.types import LINE


class TestBadInput:
    def test_every_column_that_does_not_fit_is_named(self, tmp_path: Path) -> None:
        sink = Files(tmp_path / "out", format="csv", partition_by=["day", "tags"])
        columns = {"tags": Column("tags", "array<string>"), "raw": Column("raw", "binary")}
        with pytest.raises(UsageError) as raised:
            sink.project(columns)
        for text in ("no column 'day'", "'tags' has type array<string>", "'raw' has type binary"):
            assert text in str(raised.value)

    def test_field_names_are_not_mistaken_for_types(self, tmp_path: Path) -> None:
        fields = "struct<variant_id:string,void:array<struct<interval:int>>,`a:void`:int>"
        for kind in ("parquet", "json"):
            Files(tmp_path / "out", format=kind).project({"s": Column("s", fields)})
        for inside in (
            "struct<a:void>",
            "map<string,variant>",
            "array<void>",
            "struct<a:int,b:void>",
        ):
            with pytest.raises(UsageError, match="parquet cannot hold"):
                Files(tmp_path / "out").project({"s": Column("s", inside)})
        with pytest.raises(UsageError, match="csv cannot hold"):
            Files(tmp_path / "out", format="csv").project({"s": Column("s", "struct<a:int>")})

    def test_a_frame_with_only_partition_columns_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no column is left"):
            Files(tmp_path / "out", partition_by="day").project({"day": Column("day", "date")})

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"format": "xml"}, "format='xml'"),
            ({"format": "json", "compression": "snappy"}, "compression='snappy' with json"),
            ({"header": True}, "header= is for CSV"),
        ],
    )
    def test_contradictory_options_are_refused(
        self, tmp_path: Path, options: dict[str, Any], problem: str
    ) -> None:
        with pytest.raises(UsageError, match=problem):
            Files(tmp_path / "out", **options)

    def test_a_directory_with_foreign_files_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "old.parquet").touch()
        with pytest.raises(UsageError, match=r"has files already, but no manifest.*new directory"):
            make_sink(tmp_path / "out")

    def test_a_directory_of_sparks_own_sink_is_refused(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        frame = lock.from_collection(spark, [(1,)], "i int", directory=tmp_path / "c")
        (
            frame.writeStream.option("checkpointLocation", str(tmp_path / "ck"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "own"))
            .awaitTermination()
        )
        with pytest.raises(UsageError, match="Spark's own file sink"):
            make_sink(tmp_path / "own")

    @pytest.mark.parametrize("committed", [True, False], ids=["committed", "staged"])
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"format": "json"}, "holds parquet partitioned by day, and not json by day"),
            ({"partition_by": ()}, "partitioned by day, and not parquet by nothing"),
            ({"partition_by": ["day", "number"]}, "and not parquet by day, number"),
        ],
    )
    def test_a_directory_with_another_layout_is_refused(
        self, tmp_path: Path, options: dict[str, Any], problem: str, committed: bool
    ) -> None:
        sink = make_sink(tmp_path / "out")
        receipt = prepare(sink, 0, make_rows([1], ["a"]))
        if committed:
            sink.commit([receipt])
        make_sink(tmp_path / "out", compression="zstd", name="other")
        other = Files(tmp_path / "out", **({"partition_by": "day", "name": "b"} | options))
        with pytest.raises(UsageError, match=problem):
            other.preflight()

    @pytest.mark.parametrize("committed", [True, False], ids=["committed", "staged"])
    def test_the_second_of_two_concurrent_layouts_is_refused(
        self, tmp_path: Path, committed: bool
    ) -> None:
        first, second = (
            make_sink(tmp_path / "out"),
            make_sink(tmp_path / "out", format="json", name="b"),
        )
        one = prepare(first, 0, make_rows([1], ["a"]))
        assert first.check([one]) == [None]
        if committed:
            first.commit([one])
        two = prepare(second, 0, pa.RecordBatch.from_pydict({"__by_day": ["a"], LINE: ["{}"]}))
        [refusal] = second.check([two])
        assert refusal and "holds parquet partitioned by day, and not json by day" in refusal

    def test_two_sinks_with_different_layouts_need_two_directories(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        frame = lock.from_collection(
            spark, [(1, "a")], "number bigint, day string", directory=tmp_path / "c"
        )
        one = lock.pipeline(frame, name="t", checkpoint_location=str(tmp_path / "ck"))
        for problem in (
            one.to(Files(tmp_path / "out"), on_bad_row=Files(tmp_path / "out", name="dead")),
            one.to(Files(tmp_path / "out")).to(Files(tmp_path / "out", name="b", format="json")),
            one.to(Files(tmp_path / "out")).to(
                Files(tmp_path / "out", name="b", partition_by="day")
            ),
        ):
            with pytest.raises(UsageError, match="give each its own directory"):
                problem.start(availableNow=True)
        assert not (tmp_path / "out").exists()
        trial.finish(one.to(Files(tmp_path / "out")).to(Files(tmp_path / "out", name="b")))
        assert spark.read.parquet(str(tmp_path / "out")).count() == 2

    def test_a_uri_without_a_host_is_refused(self) -> None:
        with pytest.raises(UsageError, match="does not name its host"):
            Files("hdfs:///data/out")

    def test_a_partition_too_long_for_a_name_is_a_bad_row(self, tmp_path: Path) -> None:
        sink = make_sink(tmp_path / "out")
        writer = begin(sink, 0, tolerant=True)
        with pytest.raises(BadRow) as raised:
            writer.write(make_rows([1, 2, 3], ["a", "x" * 300, "a"]))
        assert list(raised.value.rows) == [1]
        writer.write(make_rows([1, 3], ["a", "a"]))
        assert writer.prepare() is not None
        assert len(list((tmp_path / "out").rglob("*.parquet"))) == 1  # the first call left nothing

    def test_a_partition_that_is_not_utf8_is_a_bad_row(self, tmp_path: Path) -> None:
        sink = make_sink(tmp_path / "out")
        writer = begin(sink, 0, tolerant=True)
        days = pa.array([b"a", b"\xff"], pa.binary())
        text = pa.Array.from_buffers(pa.string(), 2, days.buffers())
        written = make_rows([1, 2], ["a", "b"]).set_column(0, "__by_day", text)
        with pytest.raises(BadRow) as raised:
            writer.write(written)
        assert raised.value.rows == {1: "its day is not UTF-8"}

    def test_partitions_too_long_for_a_path_are_bad_rows(self, tmp_path: Path) -> None:
        names = [f"c{number}" for number in range(17)]
        sink = Files(tmp_path / "out", partition_by=names, name="out")
        sink.attach(LocalSite(str(tmp_path / "rows")))
        sink.project({"n": Column("n", "int")} | {it: Column(it, "string") for it in names})
        writer = begin(sink, 0, tolerant=True)
        longest = "x" * 250
        values: dict[str, Any] = {f"__by_{it}": ["a", longest] for it in names}
        with pytest.raises(BadRow) as raised:
            writer.write(pa.RecordBatch.from_pydict(values | {"n": [1, 2]}))
        assert "would have a path of more than" in raised.value.rows[1]
        assert list(raised.value.rows) == [1]
        room, kept = writer._room, list[str]()
        for it in names:  # as long as a path may be
            kept.append(longest[: min(250, max(room - len(it) - 2, 1))])
            room -= len(it) + 2 + len(kept[-1])
            room -= 2 * 17 if len(kept) == 1 else 0  # at least one letter for each of the others
        fitting = {f"__by_{it}": [value] for it, value in zip(names, kept, strict=True)}
        writer.write(pa.RecordBatch.from_pydict(fitting | {"n": [1]}))
        assert writer.prepare() is not None

    @pytest.mark.parametrize(
        ("format", "row"),
        [
            ("parquet", {"number": 2, "text": "a"}),
            ("json", {"number": 2, "text": "a"}),
            ("csv", {"line": "2,a"}),
        ],
    )
    def test_a_dead_letter_holds_the_row_of_the_frame(
        self, spark: SparkSession, tmp_path: Path, format: str, row: dict[str, Any]
    ) -> None:
        given = [(2, "x" * 300, "a")]
        source = lock.from_collection(
            spark, given, "number bigint, day string, text string", directory=tmp_path / "c"
        )
        trial.finish(
            lock.pipeline(source, name="t", checkpoint_location=str(tmp_path / "ck")).to(
                Files(tmp_path / "out", format=format, partition_by="day"),
                on_bad_row=Files(tmp_path / "bad"),
            )
        )
        (dead_letter,) = spark.read.parquet(str(tmp_path / "bad")).collect()
        assert json.loads(dead_letter["row"]) == row | {"day": "x" * 300}

    def test_dead_letters_can_be_written_as_json(self, spark: SparkSession, tmp_path: Path) -> None:
        source = lock.from_collection(
            spark, [(1, "a"), (2, "x" * 300)], "number bigint, day string", directory=tmp_path / "c"
        )
        trial.finish(
            lock.pipeline(source, name="t", checkpoint_location=str(tmp_path / "ck")).to(
                Files(tmp_path / "out", partition_by="day"),
                on_bad_row=Files(tmp_path / "bad", format="json", partition_by="sink"),
            )
        )
        (dead_letter,) = spark.read.json(str(tmp_path / "bad")).collect()
        assert json.loads(dead_letter["row"])["number"] == 2
        assert "more than 255 bytes" in dead_letter["error"]
        assert dead_letter["sink"] == "out"
        assert spark.read.parquet(str(tmp_path / "out")).count() == 1

    @pytest.mark.parametrize(("partitions", "files"), [(200, 200), (300, 600)])
    def test_many_partitions_do_not_keep_many_files_open(
        self, tmp_path: Path, partitions: int, files: int
    ) -> None:
        sink = make_sink(tmp_path / "out")
        written = make_rows(range(partitions), [f"d{number}" for number in range(partitions)])
        writer = begin(sink, 0)
        for _ in range(2):
            writer.write(written)
        prepared = writer.prepare()
        assert prepared is not None
        assert prepared.handle["files"] == files

    def test_spark_reads_from_the_same_file_uri(self, spark: SparkSession, tmp_path: Path) -> None:
        uri = f"file://{tmp_path}/a%20b"
        source = lock.from_collection(spark, [(1,)], "n int", directory=tmp_path / "c")
        trial.finish(
            lock.pipeline(source, name="t", checkpoint_location=str(tmp_path / "ck")).to(Files(uri))
        )
        assert spark.read.parquet(uri).count() == 1

    @pytest.mark.parametrize("mode", ["complete", "update"])
    def test_output_modes_that_repeat_results_are_refused(
        self, spark: SparkSession, tmp_path: Path, mode: str
    ) -> None:
        source = lock.from_collection(spark, [(1,)], "n int", directory=tmp_path / "c")
        counts, place = source.groupBy("n").count(), str(tmp_path / "ck")
        pipeline = lock.pipeline(counts, name="t", checkpoint_location=place, output_mode=mode)
        with pytest.raises(UsageError, match=f"output mode {mode}"):
            pipeline.to(Files(tmp_path / "out")).start()
        writer = counts.writeStream.outputMode(mode).option("checkpointLocation", place)
        function = lock.foreach_batch(Files(tmp_path / "out"), name="t")
        query = writer.foreachBatch(function).trigger(availableNow=True).start()
        with pytest.raises(StreamingQueryException, match="gives results anew"):
            query.awaitTermination()
        assert not (tmp_path / "out").exists()
