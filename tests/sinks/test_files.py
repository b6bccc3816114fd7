"""Files: what plain Spark sees, and what the disk can do to us."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import poundlock as lock
import trial
from poundlock.compliance import empty, fill, small_disk
from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Transaction
from poundlock.core.participant import Column
from poundlock.core.protocol import BranchState, Step
from poundlock.core.site import LocalSite
from poundlock.errors import BadRow, NotAuthorised, Rejected, Unavailable, UsageError
from poundlock.sinks import Files
from poundlock.sinks.files import committed
from poundlock.sinks.files.types import LINE
from poundlock.sinks.files.writer import FilesWriter

OURS = Namespace.new("trial", 1_700_000_000, 1)
COLUMNS = {"number": Column("number", "bigint"), "day": Column("day", "string")}


def made(path: Path, **options: Any) -> Files:
    sink = Files(path, **({"partition_by": "day", "name": "out"} | options))
    sink.attach(LocalSite(str(path.parent / "rows")))
    sink.project(COLUMNS)
    sink.preflight()
    return sink


def rows(numbers: Sequence[int], days: Sequence[str | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"__by_day": pa.array(days, pa.string()), "number": pa.array(numbers, pa.int64())}
    )


def begin(sink: Files, batch: int, task: int = 0, *, tolerant: bool = False) -> FilesWriter:
    transaction = Transaction(OURS, 1, batch, 1)
    return sink.begin(Branch(transaction, sink.name, task, task, tolerant=tolerant))


def prepare(sink: Files, batch: int, written: pa.RecordBatch, task: int = 0) -> Receipt:
    writer = begin(sink, batch, task)
    writer.write(written)
    prepared = writer.prepare()
    assert prepared is not None
    return Receipt(sink.name, prepared.id, task, Fingerprint(len(written), 0), prepared.handle)


class TestPlainSpark:
    def test_reads_exactly_the_committed_rows_over_many_compactions(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        target = tmp_path / "a target"
        sink = made(target)
        days = ["2026-01-31", "ä b/c=d%", None, "x'y\"z", "7"]
        expected = []
        for batch in range(28):
            parts = [prepare(sink, batch, rows([batch * 10 + task], [days[(batch + task) % 5]]), task)
                     for task in range(2)]  # fmt: skip
            prepare(sink, batch, rows([-1], ["never"]), task=2)  # staged, and left so
            assert set(sink.commit(parts)) == {BranchState.COMMITTED}
            expected += [(batch * 10 + task, days[(batch + task) % 5]) for task in range(2)]
        names = {file.name for file in (target / "_spark_metadata").iterdir()}
        assert {"9.compact", "19.compact", "27"} <= names
        found = spark.read.parquet(str(target))
        assert found.schema.simpleString() == "struct<number:bigint,day:string>"
        assert sorted(map(tuple, found.collect()), key=str) == sorted(expected, key=str)

    def test_sees_nothing_before_the_first_commit(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        sink = made(tmp_path / "out")
        receipt = prepare(sink, 0, rows([1], ["a"]))
        reader = spark.read.schema("number bigint, day string")
        assert reader.parquet(str(tmp_path / "out")).count() == 0
        sink.commit([receipt])
        assert reader.parquet(str(tmp_path / "out")).count() == 1

    def test_old_records_are_dropped_and_nothing_is_missed(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        sink = made(tmp_path / "out")
        for batch in range(121):
            sink.commit([prepare(sink, batch, rows([batch], ["a"]))])
        records = sorted((tmp_path / "out" / "_spark_metadata").iterdir())
        assert len(records) == 121 - 19
        assert made(tmp_path / "out").newest_generation(OURS) == 1
        assert spark.read.parquet(str(tmp_path / "out")).count() == 121
        assert len(committed(tmp_path / "out")) == 121

    def test_our_manifest_is_spelled_as_its_own(self, spark: SparkSession, tmp_path: Path) -> None:
        frame = lock.from_collection(
            spark, [(1, "a b%")], "i int, s string", directory=tmp_path / "c"
        )
        (
            frame.writeStream.partitionBy("s").option("checkpointLocation", str(tmp_path / "ck"))
            .trigger(availableNow=True).start(str(tmp_path / "own")).awaitTermination()
        )  # fmt: skip
        trial.finish(
            lock.pipeline(frame, name="t", checkpoint_location=str(tmp_path / "ours-ck"))
            .to(Files(tmp_path / "ours", partition_by=["s"]))
        )  # fmt: skip
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
def test_types_come_back_whole(
    spark: SparkSession,
    tmp_path: Path,
    format: str,
    options: dict[str, Any],
    reader: dict[str, Any],
) -> None:
    empty = (
        "x" if format == "csv" else ""
    )  # from its own CSV too, Spark reads an empty text as null
    given = [VALUES, (None,) * len(VALUES), (2, empty, 0.0, False, *VALUES[4:])]
    source = lock.from_collection(spark, given, TYPES, directory=tmp_path / "c")
    trial.finish(
        lock.pipeline(source, name="t", checkpoint_location=str(tmp_path / "ck"))
        .to(Files(tmp_path / "out", format=format, **options))
    )  # fmt: skip
    found = spark.read.schema(TYPES).options(**reader).format(format).load(str(tmp_path / "out"))
    assert sorted(map(tuple, found.collect()), key=str) == sorted(given, key=str)
    again = lock.read_files(spark, tmp_path / "out", format=format, schema=TYPES, **reader)
    assert again.isStreaming


@pytest.mark.parametrize("types", ["n int, s string", "s string", "n int"])
def test_texts_in_csv(spark: SparkSession, tmp_path: Path, types: str) -> None:
    texts = ["plain", " blanks ", "two\nlines", "a,b", None, 'q"', "back\\", "#", "\t"]
    given = [(n if n != 3 else None, text) for n, text in enumerate(texts)]
    source = lock.from_collection(spark, given, "n int, s string", directory=tmp_path / "c")
    columns = [part.split()[0] for part in types.split(", ")]
    sink = Files(tmp_path / "out", format="csv")
    pipeline = lock.pipeline(source, name="t", checkpoint_location=str(tmp_path / "ck"))
    trial.finish(pipeline.to(sink, select=columns))
    found = spark.read.schema(types).csv(sink.place, multiLine=True).collect()
    expected = [tuple(value for name, value in zip("ns", row, strict=True) if name in columns)
                for row in given]  # fmt: skip
    assert sorted(map(tuple, found), key=str) == sorted(expected, key=str)


def test_nested_types_in_parquet_and_json(spark: SparkSession, tmp_path: Path) -> None:
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
def test_a_driver_that_dies_repeats_and_loses_nothing(
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
    # Arrow follows the list that the manifest gives.
    assert ds.dataset([uri[7:] for uri in committed(tmp_path / "out")]).count_rows() == 30


def test_a_stream_of_our_files_follows_the_manifest(spark: SparkSession, tmp_path: Path) -> None:
    sink = made(tmp_path / "first")
    sink.commit([prepare(sink, 0, rows([1, 2], ["a", "b"]))])
    prepare(sink, 1, rows([3], ["a"]))  # staged only

    def pipeline() -> lock.Pipeline:
        frame = lock.read_files(spark, tmp_path / "first")
        return lock.pipeline(frame, name="t", checkpoint_location=str(tmp_path / "ck")).to(
            Files(tmp_path / "second", name="second")
        )

    trial.finish(pipeline())
    sink.abort(sink.find(OURS))
    sink.commit([prepare(sink, 2, rows([4], ["c"]))])
    trial.finish(pipeline())
    found = spark.read.parquet(str(tmp_path / "second")).collect()
    assert sorted((row.number, row.day) for row in found) == [(1, "a"), (2, "b"), (4, "c")]


class TestTwoDrivers:
    """The moment between looking and publishing, which belongs to the other driver."""

    def meanwhile(self, sink: Files, action: Callable[[], object]) -> None:
        """Have `action` happen right before the sink publishes for the first time."""
        site, left = sink._site, [action]

        class Slow:
            def create(self, uri: str, data: bytes) -> bool:
                if left:
                    left.pop()()
                return site.create(uri, data)  # type: ignore[union-attr]

        sink._site = Slow()  # type: ignore[assignment]

    def test_a_sleeper_cannot_commit_what_was_buried(self, tmp_path: Path) -> None:
        sleeper, other = made(tmp_path / "out"), made(tmp_path / "out")
        receipt = prepare(sleeper, 0, rows([1], ["a"]))
        self.meanwhile(sleeper, lambda: other.abort(other.find(OURS)))
        assert sleeper.commit([receipt]) == [BranchState.ABORTED]
        assert committed(tmp_path / "out") == []

    def test_who_buries_sees_what_was_committed_meanwhile(self, tmp_path: Path) -> None:
        committing, burying = made(tmp_path / "out"), made(tmp_path / "out")
        receipt = prepare(committing, 0, rows([1], ["a"]))
        strays, states = burying.find(OURS), []
        site = committing._site
        assert site is not None

        class Racing:
            def create(self, uri: str, data: bytes) -> bool:
                # It has looked. Now comes the other's tombstone, then this record, then the other's.
                committing._site = site
                outer.meanwhile(burying, lambda: site.create(uri, data))
                states.extend(burying.abort(strays))
                return False

        outer = self
        committing._site = Racing()  # type: ignore[assignment]
        assert committing.commit([receipt]) == [BranchState.COMMITTED]
        assert states == [BranchState.COMMITTED]
        assert len(committed(tmp_path / "out")) == 1
        assert len(list((tmp_path / "out").rglob("*.parquet"))) == 1
        assert made(tmp_path / "out").commit([receipt]) == [BranchState.COMMITTED]

    def test_two_commit_the_same_batch(self, tmp_path: Path) -> None:
        sleeper, other = made(tmp_path / "out"), made(tmp_path / "out")
        receipt = prepare(sleeper, 0, rows([1], ["a"]))
        self.meanwhile(sleeper, lambda: other.commit([receipt]))
        assert sleeper.commit([receipt]) == [BranchState.COMMITTED]
        assert len(committed(tmp_path / "out")) == 1

    def test_two_pipelines_share_a_directory(self, tmp_path: Path) -> None:
        first, second = made(tmp_path / "out", name="a"), made(tmp_path / "out", name="b")
        receipts = [prepare(sink, 0, rows([n], ["x"])) for n, sink in enumerate((first, second))]
        self.meanwhile(first, lambda: second.commit(receipts[1:]))
        assert first.commit(receipts[:1]) == [BranchState.COMMITTED]
        assert len(committed(tmp_path / "out")) == 2

    def test_a_burial_that_was_cut_short_is_done_again(self, tmp_path: Path) -> None:
        sink = made(tmp_path / "out")
        receipt = prepare(sink, 0, rows([1], ["a"]))
        (tmp_path / "out" / "_poundlock" / f"{receipt.id}.aborted").touch()
        assert made(tmp_path / "out").commit([receipt]) == [BranchState.ABORTED]
        assert list((tmp_path / "out").rglob("*.parquet")) == []

    def test_a_zombie_task_finds_that_it_was_aborted(self, tmp_path: Path) -> None:
        sink = made(tmp_path / "out")
        writer = begin(sink, 0)
        writer.write(rows([1], ["a"]))
        assert sink.abort(sink.find(OURS)) == [BranchState.ABORTED]
        with pytest.raises(Rejected, match="were deleted"):
            writer.prepare()
        assert list((tmp_path / "out").rglob("*.parquet")) == []
        assert sink.find(OURS) == []

    def test_a_zombie_task_that_had_written_nothing_yet(self, tmp_path: Path) -> None:
        sink = made(tmp_path / "out")
        writer = begin(sink, 0)
        assert sink.abort(sink.find(OURS)) == [BranchState.ABORTED]
        writer.write(rows([1], ["a"]))
        with pytest.raises(Rejected, match="was aborted while it was written"):
            writer.prepare()
        assert list((tmp_path / "out").rglob("*.parquet")) == []
        assert sink.find(OURS) == []

    def test_files_that_were_lost_and_come_back_stay_lost(self, tmp_path: Path) -> None:
        sink = made(tmp_path / "out")
        receipt = prepare(sink, 0, rows([1], ["a"]))
        taken = [path for path in (tmp_path / "out").rglob(f"*{receipt.id}*") if path.is_file()]
        contents = {path: path.read_bytes() for path in taken}
        for path in taken:
            path.unlink()
        assert sink.commit([receipt]) == [BranchState.ABORTED]
        for path, content in contents.items():  # somebody restores a backup
            path.write_bytes(content)
        assert made(tmp_path / "out").commit([receipt]) == [BranchState.ABORTED]
        assert committed(tmp_path / "out") == []


class TestBadInput:
    def test_every_column_that_does_not_fit_is_named(self, tmp_path: Path) -> None:
        sink = Files(tmp_path / "out", format="csv", partition_by=["day", "tags"])
        columns = {"tags": Column("tags", "array<string>"), "raw": Column("raw", "binary")}
        with pytest.raises(UsageError) as raised:
            sink.project(columns)
        for text in ("no column 'day'", "'tags' has type array<string>", "'raw' has type binary"):
            assert text in str(raised.value)

    def test_names_of_fields_are_no_types(self, tmp_path: Path) -> None:
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

    def test_a_frame_of_partitions_alone(self, tmp_path: Path) -> None:
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
    def test_options_that_do_not_go_together(
        self, tmp_path: Path, options: dict[str, Any], problem: str
    ) -> None:
        with pytest.raises(UsageError, match=problem):
            Files(tmp_path / "out", **options)

    def test_a_directory_with_files_of_somebody_else(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "old.parquet").touch()
        with pytest.raises(UsageError, match=r"has files already, but no manifest.*new directory"):
            made(tmp_path / "out")

    def test_a_directory_of_sparks_own_sink(self, spark: SparkSession, tmp_path: Path) -> None:
        frame = lock.from_collection(spark, [(1,)], "i int", directory=tmp_path / "c")
        (
            frame.writeStream.option("checkpointLocation", str(tmp_path / "ck"))
            .trigger(availableNow=True).start(str(tmp_path / "own")).awaitTermination()
        )  # fmt: skip
        with pytest.raises(UsageError, match="Spark's own file sink"):
            made(tmp_path / "own")

    @pytest.mark.parametrize("committed", [True, False], ids=["committed", "staged"])
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"format": "json"}, "holds parquet partitioned by day, and not json by day"),
            ({"partition_by": ()}, "partitioned by day, and not parquet by nothing"),
            ({"partition_by": ["day", "number"]}, "and not parquet by day, number"),
        ],
    )
    def test_a_directory_of_another_layout(
        self, tmp_path: Path, options: dict[str, Any], problem: str, committed: bool
    ) -> None:
        sink = made(tmp_path / "out")
        receipt = prepare(sink, 0, rows([1], ["a"]))
        if committed:
            sink.commit([receipt])
        made(tmp_path / "out", compression="zstd", name="other")
        other = Files(tmp_path / "out", **({"partition_by": "day", "name": "b"} | options))
        with pytest.raises(UsageError, match=problem):
            other.preflight()

    @pytest.mark.parametrize("committed", [True, False], ids=["committed", "staged"])
    def test_two_layouts_that_begin_at_once(self, tmp_path: Path, committed: bool) -> None:
        first, second = made(tmp_path / "out"), made(tmp_path / "out", format="json", name="b")
        one = prepare(first, 0, rows([1], ["a"]))
        assert first.check([one]) == [None]
        if committed:
            first.commit([one])
        two = prepare(second, 0, pa.RecordBatch.from_pydict({"__by_day": ["a"], LINE: ["{}"]}))
        [refusal] = second.check([two])
        assert refusal and "holds parquet partitioned by day, and not json by day" in refusal

    def test_two_sinks_of_one_pipeline_in_one_directory(
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

    def test_a_host_that_is_not_named(self) -> None:
        with pytest.raises(UsageError, match="does not name its host"):
            Files("hdfs:///data/out")

    def test_a_partition_too_long_for_a_name_is_a_bad_row(self, tmp_path: Path) -> None:
        sink = made(tmp_path / "out")
        writer = begin(sink, 0, tolerant=True)
        with pytest.raises(BadRow) as raised:
            writer.write(rows([1, 2, 3], ["a", "x" * 300, "a"]))
        assert list(raised.value.rows) == [1]
        writer.write(rows([1, 3], ["a", "a"]))
        assert writer.prepare() is not None
        assert len(list((tmp_path / "out").rglob("*.parquet"))) == 1  # nothing of the first call

    @pytest.mark.parametrize(
        ("format", "row"),
        [
            ("parquet", {"number": 2, "text": "a"}),
            ("json", {"number": 2, "text": "a"}),
            ("csv", {"line": "2,a"}),
        ],
    )
    def test_a_letter_holds_the_row_as_the_frame_had_it(
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

    def test_dead_letters_in_json(self, spark: SparkSession, tmp_path: Path) -> None:
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
    def test_many_partitions_do_not_open_as_many_files(
        self, tmp_path: Path, partitions: int, files: int
    ) -> None:
        sink = made(tmp_path / "out")
        written = rows(range(partitions), [f"d{number}" for number in range(partitions)])
        writer = begin(sink, 0)
        for _ in range(2):
            writer.write(written)
        prepared = writer.prepare()
        assert prepared is not None
        assert prepared.handle == {"files": files}

    def test_a_file_uri_is_the_place_that_spark_reads(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        uri = f"file://{tmp_path}/a%20b"
        source = lock.from_collection(spark, [(1,)], "n int", directory=tmp_path / "c")
        trial.finish(
            lock.pipeline(source, name="t", checkpoint_location=str(tmp_path / "ck")).to(Files(uri))
        )
        assert spark.read.parquet(uri).count() == 1

    @pytest.mark.parametrize("mode", ["complete", "update"])
    def test_results_that_are_given_anew(
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


class TestTheDisk:
    """What is full when a task writes is in tests/compliance; here it is so before, or after."""

    FULL = r"the disk is full \(.*No space left.*\). Nothing is lost: make room there"

    @staticmethod
    def files(place: Path) -> list[str]:
        return sorted(path.name for path in place.rglob("*") if path.is_file())

    @pytest.mark.parametrize("options", [{}, {"format": "json", "compression": "gzip"}])
    def test_full_before_the_first_row(self, options: dict[str, Any]) -> None:
        written = rows([1], ["a"])
        if options:
            written = written.rename_columns(["__by_day", "__line"]).set_column(
                1, "__line", pa.array(['{"number":1}'])
            )
        with small_disk(1) as disk:
            sink = made(disk / "out", **options)
            fill(disk)
            writer = begin(sink, 0)

            def run() -> None:
                writer.write(written)
                writer.prepare()  # what is compressed may stay in memory until now

            with pytest.raises(Unavailable, match=self.FULL):
                run()
            writer.abort()
            assert self.files(disk / "out") == []
            empty(disk)
            assert sink.commit([prepare(sink, 0, written)]) == [BranchState.COMMITTED]

    def test_full_when_a_branch_is_prepared(self) -> None:
        with small_disk(1) as disk:
            sink = made(disk / "out")
            writer = begin(sink, 0)
            writer.write(rows([1], ["a"]))  # the end of the file has room in the same block
            fill(disk)
            with pytest.raises(Unavailable, match=self.FULL):
                writer.prepare()
            writer.abort()
            assert self.files(disk / "out") == []

    def test_full_when_a_batch_is_committed_or_aborted(self) -> None:
        with small_disk(1) as disk:
            sink = made(disk / "out")
            decided, dead = (
                prepare(sink, 0, rows([1], ["a"])),
                prepare(sink, 0, rows([2], ["a"]), 1),
            )
            fill(disk)
            for _ in range(2):
                with pytest.raises(Unavailable, match=self.FULL):
                    sink.commit([decided])
                with pytest.raises(Unavailable, match=self.FULL):
                    sink.abort([stray for stray in sink.find(OURS) if stray.id == dead.id])
            assert committed(disk / "out") == []
            empty(disk)
            assert sink.commit([decided]) == [BranchState.COMMITTED]
            assert sink.abort(sink.find(OURS)) == [BranchState.ABORTED]
            (uri,) = committed(disk / "out")
            assert decided.id in uri
            left = self.files(disk / "out")
            assert [name for name in left if not name.startswith("part-")] == [
                "0",
                "1",
                f"{dead.id}.aborted",
            ]
            assert len(left) == 4

    def test_what_cannot_be_deleted_now_is_left_to_the_sweep(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sink = made(tmp_path / "out")
        writer = begin(sink, 0)
        writer.write(rows([1], ["a"]))
        whole = writer._system

        class Away:
            def delete_file(self, path: str) -> None:
                if path.endswith(".parquet"):
                    raise OSError("not now")
                whole.delete_file(path)

        monkeypatch.setattr(writer, "_system", Away())
        writer.abort()
        monkeypatch.setattr(writer, "_system", whole)
        assert sink.abort(sink.find(OURS)) == [BranchState.ABORTED]
        assert list((tmp_path / "out").rglob("*.parquet")) == []

    def test_one_that_may_not_be_written(self) -> None:
        with tempfile.TemporaryDirectory() as directory:  # which others may enter, unlike pytest's
            os.chmod(directory, 0o755)
            sink = made(Path(directory, "out"))
            Path(directory, "out").mkdir(mode=0o555)
            user = os.geteuid()
            os.seteuid(user or 65534)  # root may write anywhere
            try:
                assert os.listdir(sink.place) == []
                with pytest.raises(
                    NotAuthorised, match=r"out: .*Permission denied.*read and write there"
                ):
                    begin(sink, 0)
            finally:
                os.seteuid(user)


class TestAtLeastOnce:
    def test_plain_files_without_a_manifest(self, spark: SparkSession, tmp_path: Path) -> None:
        sink = made(tmp_path / "out", semantic="at_least_once")
        writer = begin(sink, 0)
        writer.write(rows([1, 2], ["a", "b"]))
        assert list((tmp_path / "out").rglob("part-*")) == []
        assert writer.prepare() is None
        assert not (tmp_path / "out" / "_spark_metadata").exists()
        assert spark.read.parquet(str(tmp_path / "out")).count() == 2

    def test_not_beside_a_manifest(self, tmp_path: Path) -> None:
        sink = made(tmp_path / "out")
        sink.commit([prepare(sink, 0, rows([1], ["a"]))])
        with pytest.raises(UsageError, match="a directory of its own"):
            made(tmp_path / "out", semantic="none")
