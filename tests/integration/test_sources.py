"""The sources, and the guarantee table for real sources and real sinks."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, InputPartition, SimpleDataSourceStreamReader

import poundlock as lock
import trial
from poundlock import sinks
from poundlock.core.guarantee import Guarantee
from poundlock.core.participant import Participant
from poundlock.core.protocol import Step
from poundlock.errors import Rejected, UsageError


class Nowhere(sinks.Simple):
    def write(self, rows: pa.RecordBatch) -> None: ...


def ignore(rows: pa.RecordBatch, facts: object) -> None: ...


SERVERS = "127.0.0.1:1"  # no server is contacted before a pipeline starts

# Kind of sink: sinks of that kind, and what they give: source that cannot, that can be replayed.
KINDS: dict[str, tuple[list[Callable[[Path], Participant]], str, str]] = {
    "any": (
        [
            lambda path: Nowhere("out"),
            lambda path: sinks.Files(path, semantic="at_least_once"),
            lambda path: sinks.Kafka("t", bootstrap_servers=SERVERS, semantic="at_least_once"),
        ],
        "at_most_once",
        "at_least_once",
    ),
    "idempotent": (
        [lambda path: sinks.OpenSearch("i", url="http://127.0.0.1:1", id="value")],
        "at_most_once",
        "exactly_once",
    ),
    "logged": (
        [lambda path: sinks.WriteAhead(ignore, name="out"), lambda path: sinks.Console()],
        "at_most_once",
        "at_least_once",
    ),
    "transactional": (
        [
            lambda path: sinks.Kafka("t", bootstrap_servers=SERVERS),
            lambda path: sinks.Postgres("t", dsn="postgresql://127.0.0.1:1/x"),
            lambda path: sinks.MySQL("t", url="mysql://127.0.0.1:1/x"),
            lambda path: sinks.TwoPhase(psycopg.connect, "t", dsn="x", columns=["value"]),
        ],
        "at_most_once",
        "exactly_once",
    ),
    "staged": (
        [
            lambda path: sinks.Files(path),
            lambda path: sinks.Delta(path),
            lambda path: sinks.Redis(url="redis://127.0.0.1:1", list="l", value="value"),
            lambda path: sinks.Postgres("t", dsn="postgresql://127.0.0.1:1/x", key="value"),
            lambda path: sinks.MySQL("t", url="mysql://127.0.0.1:1/x", key="value"),
        ],
        "at_most_once",
        "exactly_once",
    ),
}


@pytest.fixture(scope="session")
def sources(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, list[DataFrame]]:
    """Real sources, by whether they can be replayed."""
    place = tmp_path_factory.mktemp("sources")
    spark.range(3).selectExpr("CAST(id AS STRING) AS value").write.json(str(place / "json"))
    rate = spark.readStream.format("rate")
    return {
        False: [
            lock.read_socket(spark, "127.0.0.1", 1),
            lock.custom(rate, replayable=False, name="once"),
        ],
        True: [
            lock.read_kafka(spark, "t", bootstrap_servers=SERVERS),
            lock.read_files(spark, place / "json", format="json"),
            lock.from_collection(spark, [("a",)], "value string", directory=place / "rows"),
            lock.custom(lock.read_socket(spark, "127.0.0.1", 1), replayable=True, name="kept"),
        ],
    }


def make_pipeline(frame: DataFrame, sink: Participant, tmp_path: Path) -> lock.Pipeline:
    return lock.pipeline(frame, name="t", checkpoint_location=str(tmp_path / "ck")).to(sink)


@pytest.mark.parametrize("replayable", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cell_of_the_guarantee_table_is_right(
    sources: dict[bool, list[DataFrame]], tmp_path: Path, kind: str, replayable: bool
) -> None:
    made, *given = KINDS[kind]
    for frame in sources[replayable]:
        for make in made:
            statement = make_pipeline(frame, make(tmp_path / "out"), tmp_path).guarantee()
            assert statement.replayable is replayable
            assert statement.routes[0].kind == kind, statement
            assert statement.guarantee.value == given[replayable], statement


@pytest.mark.parametrize("kind", ["idempotent", "transactional", "staged"])
def test_exactly_once_over_a_socket_is_refused_before_anything_starts(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.2)
        frame = lock.read_socket(spark, "127.0.0.1", server.getsockname()[1])
        for make in KINDS[kind][0]:
            with pytest.raises(UsageError, match="source socket, which cannot be replayed"):
                make_pipeline(frame, make(tmp_path / "out"), tmp_path).start()
        with pytest.raises(TimeoutError):
            server.accept()  # nobody connected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "sink",
    [
        lambda: Nowhere("out", semantic="exactly_once"),
        lambda: sinks.WriteAhead(ignore, name="out", semantic="exactly_once"),
        lambda: sinks.Console(semantic="exactly_once"),
    ],
)
def test_a_semantic_stronger_than_the_sink_gives_is_refused(
    sources: dict[bool, list[DataFrame]], tmp_path: Path, sink: Callable[[], Participant]
) -> None:
    with pytest.raises(UsageError, match=r"which gives at least once: .*again"):
        make_pipeline(sources[True][2], sink(), tmp_path).start()
    assert list(tmp_path.iterdir()) == []


class TestForeachBatch:
    """The same refusals for a plain Spark query."""

    def test_a_semantic_stronger_than_the_sink_gives_is_refused_at_once(self) -> None:
        with pytest.raises(UsageError, match="which gives at least once"):
            lock.foreach_batch(Nowhere("out", semantic="exactly_once"), name="t")

    def test_a_source_that_cannot_be_replayed_is_refused_in_the_first_batch(
        self, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        frame = lock.custom(
            lock.from_collection(spark, [(1,)], "n int", directory=tmp_path / "rows"),
            replayable=False,
            name="once",
        )

        def run(sink: Participant, checkpoint: str) -> None:
            function = lock.foreach_batch(sink, name="t")
            writer = frame.writeStream.option("checkpointLocation", str(tmp_path / checkpoint))
            writer.foreachBatch(function).trigger(availableNow=True).start().awaitTermination()

        with pytest.raises(StreamingQueryException, match="impossible with source once"):
            run(sinks.Files(tmp_path / "out"), "a")
        assert not (tmp_path / "out").exists()
        with caplog.at_level("INFO", "poundlock"):
            run(sinks.Files(tmp_path / "out", semantic="at_least_once"), "b")
        assert "sink out (any): at most once" in caplog.text


def test_the_guarantee_of_a_pipeline_is_that_of_its_weakest_part(
    sources: dict[bool, list[DataFrame]], tmp_path: Path
) -> None:
    both = sources[True][2].union(sources[False][0].select("value"))
    statement = make_pipeline(both, sinks.Files(tmp_path / "out"), tmp_path).guarantee()
    assert (statement.source, statement.guarantee) == ("parquet, socket", Guarantee.AT_MOST_ONCE)


class TestCustom:
    def test_a_declaration_applies_only_to_its_own_source(
        self, sources: Any, tmp_path: Path
    ) -> None:
        kept, plain = sources[True][3], sources[False][0]
        frame = (
            kept.select(F.upper("value").alias("v")).union(plain.select("value")).filter("v > ''")
        )
        statement = make_pipeline(frame, sinks.Files(tmp_path / "out"), tmp_path).guarantee()
        assert (statement.source, statement.replayable) == ("kept, socket", False)

    def test_the_innermost_declaration_counts(self, sources: Any, tmp_path: Path) -> None:
        frame = lock.custom(sources[False][1], replayable=True, name="outer")
        statement = make_pipeline(frame, sinks.Files(tmp_path / "out"), tmp_path).guarantee()
        assert (statement.source, statement.replayable) == ("once", False)

    def test_a_watermark_is_kept(self, spark: SparkSession, tmp_path: Path) -> None:
        frame = spark.readStream.format("rate").load().withWatermark("timestamp", "3 seconds")
        declared = lock.custom(frame, replayable=True, name="mine")
        assert "3000" in declared.schema.json()

    def test_wrong_calls_are_refused(self, spark: SparkSession) -> None:
        with pytest.raises(UsageError, match="not a streaming frame"):
            lock.custom(spark.range(3), replayable=True, name="mine")
        with pytest.raises(UsageError, match="say True or False"):
            lock.custom(spark.range(3), replayable="yes", name="mine")  # type: ignore[arg-type]

    def test_a_custom_data_source_can_be_declared_replayable(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        class Reader(SimpleDataSourceStreamReader):
            def initialOffset(self) -> dict[str, int]:
                return {"at": 0}

            def read(self, start: dict[str, int]) -> tuple[Any, dict[str, int]]:
                end = min(start["at"] + 5, 10)
                return iter([(n,) for n in range(start["at"], end)]), {"at": end}

            def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Any:
                return iter([(n,) for n in range(start["at"], end["at"])])

        class Numbers(DataSource):
            @classmethod
            def name(cls) -> str:
                return "numbers"

            def schema(self) -> str:
                return "number bigint"

            def simpleStreamReader(self, schema: object) -> Reader:
                return Reader()

        assert InputPartition  # a reader with its own partitions would use it
        spark.dataSource.register(Numbers)
        plain = spark.readStream.format("numbers").load()
        with pytest.raises(UsageError, match="cannot be replayed"):
            make_pipeline(plain, sinks.Files(tmp_path / "out"), tmp_path).start()
        frame = lock.custom(spark.readStream.format("numbers"), replayable=True, name="numbers")
        query = make_pipeline(frame, sinks.Files(tmp_path / "out"), tmp_path).start(
            processingTime="0 seconds"
        )
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        found = spark.read.parquet(str(tmp_path / "out")).collect()
        assert sorted(row.number for row in found) == list(range(10))


class TestCollection:
    ROWS = tuple((n, str(n)) for n in range(25))

    def make(self, spark: SparkSession, tmp_path: Path, **options: Any) -> DataFrame:
        options = {"directory": tmp_path / "rows", "batch_rows": 10} | options
        return lock.from_collection(spark, list(self.ROWS), "n int, s string", **options)

    def numbers(self, spark: SparkSession, tmp_path: Path) -> list[int]:
        return sorted(row.n for row in spark.read.parquet(str(tmp_path / "out")).collect())

    def test_a_collection_is_the_same_after_a_restart(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        def pipeline() -> lock.Pipeline:
            frame = self.make(spark, tmp_path)  # as a restarted program would
            return make_pipeline(frame, sinks.Files(tmp_path / "out"), tmp_path)

        trial.die(pipeline(), Step.DECIDED, times=2)
        for file in (tmp_path / "rows").rglob("*.parquet"):
            file.unlink()  # as if the machine lost its temporary files
        trial.finish(pipeline())
        assert self.numbers(spark, tmp_path) == list(range(25))
        trial.finish(pipeline())
        assert self.numbers(spark, tmp_path) == list(range(25))
        decided = [r for r in trial.records(tmp_path / "ck") if r["kind"] == "Decided"]
        assert [d["totals"]["out"]["rows"] for d in decided] == [10, 10, 5]

    def test_rows_arrive_in_their_order(self, spark: SparkSession, tmp_path: Path) -> None:
        seen: list[list[int]] = []
        query = (
            self.make(spark, tmp_path)
            .writeStream.trigger(availableNow=True)
            .option("checkpointLocation", str(tmp_path / "ck"))
            .foreachBatch(lambda frame, _: seen.append([row.n for row in frame.collect()]))
            .start()
        )
        query.awaitTermination()
        assert seen == [list(range(10)), list(range(10, 20)), list(range(20, 25))]

    def test_other_rows_under_one_name_are_refused(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        self.make(spark, tmp_path, name="mine")
        self.make(spark, tmp_path, name="mine")
        with pytest.raises(UsageError, match="was written with different rows"):
            lock.from_collection(
                spark, [(1, "x")], "n int, s string", name="mine", directory=tmp_path / "rows"
            )

    def test_other_batches_of_the_same_rows_are_refused(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        self.make(spark, tmp_path, batch_rows=10)
        with pytest.raises(UsageError, match="or different batches"):
            self.make(spark, tmp_path, batch_rows=5)

    def test_dictionaries_and_an_empty_list_are_accepted(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        rows = [{"a": 1, "b": None}]
        frame = lock.from_collection(spark, rows, "a int, b string", directory=tmp_path)
        assert frame.schema.simpleString() == "struct<a:int,b:string>"
        empty = lock.from_collection(spark, [], "a int", directory=tmp_path)
        assert empty.isStreaming
        with pytest.raises(UsageError, match="at least one row"):
            lock.from_collection(spark, [(1,)], "a int", batch_rows=0)

    TYPES = (
        "b boolean, i8 tinyint, i64 bigint, f float, d double, m decimal(38, 9), s string, y binary, "
        "day date, at timestamp, local timestamp_ntz, took interval day to second, "
        "list array<struct<x: int>>, map map<string, double>, inner struct<x: int, y: array<string>>"
    )

    def test_a_file_of_every_type_is_intact(self, spark: SparkSession, tmp_path: Path) -> None:
        now = datetime(2024, 2, 29, 23, 59, 59, 999999)
        values: tuple[Any, ...] = (
            True,
            -1,
            1 << 62,
            0.1,
            math.nan,
            Decimal("1e-9"),
            "\0ü",
            b"\xff",
        )
        values += (
            now.date(),
            now,
            now,
            timedelta(microseconds=-1),
            [(1,)],
            {"k": -0.0},
            (1, ["a"]),
        )
        rows = [values, (None,) * len(values)]
        for _ in range(2):
            frame = lock.from_collection(spark, rows, self.TYPES, directory=tmp_path)
        assert frame.isStreaming

    def test_a_changed_or_planted_file_is_refused(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        self.make(spark, tmp_path)
        first, second, _ = sorted((tmp_path / "rows").rglob("*.parquet"))
        genuine = first.read_bytes()
        for planted in (second.read_bytes(), b"PAR1", b""):
            first.write_bytes(planted)
            with pytest.raises(UsageError, match="does not have the rows that were written"):
                self.make(spark, tmp_path)
        first.write_bytes(genuine)
        self.make(spark, tmp_path)

    def test_the_default_directory_is_private(
        self, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        self.make(spark, tmp_path, directory=None)
        place = tmp_path / "state" / "poundlock" / "collections"
        assert list(place.rglob("*.parquet"))
        assert place.stat().st_mode & 0o777 == 0o700
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UsageError, match="collections is not a directory, or is a link"):
            self.make(spark, tmp_path, directory=None)


class TestFiles:
    def test_a_directory_without_files_needs_a_schema(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        (tmp_path / "empty").mkdir()
        for place in ("empty", "missing"):
            with pytest.raises(UsageError, match="Give schema="):
                lock.read_files(spark, tmp_path / place)

    def test_a_path_inside_a_directory_with_a_manifest_is_refused(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        rows = lock.from_collection(
            spark, [(1, "a")], "n int, p string", directory=tmp_path / "rows"
        )
        trial.finish(make_pipeline(rows, sinks.Files(tmp_path / "out", partition_by="p"), tmp_path))
        for place in ("out/p=a", "out/p=b", "out/p=*", "ou?", "{out,in}/p=a"):
            with pytest.raises(UsageError, match=r"out has a manifest .*filter with where\(\)"):
                lock.read_files(spark, tmp_path / place, schema="n int")
        assert lock.read_files(spark, tmp_path / "out").columns == ["n", "p"]
        (tmp_path / "plain").mkdir()
        lock.read_files(spark, tmp_path / "pl*", schema="n int")

    def test_old_files_are_read(self, spark: SparkSession, tmp_path: Path) -> None:
        place = tmp_path / "in"
        place.mkdir()

        def run() -> None:
            frame = lock.read_files(spark, place, format="json", schema="n int")
            trial.finish(make_pipeline(frame, sinks.Files(tmp_path / "out"), tmp_path))

        (place / "a.json").write_text('{"n": 1}')
        run()
        (place / "b.json").write_text('{"n": 2}')
        os.utime(place / "b.json", (1e9, 1e9))
        run()
        assert spark.read.parquet(str(tmp_path / "out")).count() == 2

    @pytest.mark.parametrize(
        ("option", "value", "what"),
        [
            ("ignoreMissingFiles", True, "files that were deleted"),
            ("ignoreCorruptFiles", True, "files that cannot be read"),
            ("mode", "DROPMALFORMED", "rows that cannot be parsed"),
        ],
    )
    def test_options_that_skip_data_silently_are_warned_of(
        self,
        spark: SparkSession,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        option: str,
        value: object,
        what: str,
    ) -> None:
        (tmp_path / "in").mkdir()
        for options in ({}, {option: value}):
            frame = lock.read_files(
                spark, tmp_path / "in", format="json", schema="n int", **options
            )
            caplog.clear()
            trial.finish(make_pipeline(frame, sinks.Files(tmp_path / "out"), tmp_path))
            assert (what in caplog.text) is bool(options)

    def test_text_files_need_no_schema(self, spark: SparkSession, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("one\ntwo\n")
        frame = lock.read_files(spark, tmp_path, format="text", maxFilesPerTrigger=1)
        assert frame.columns == ["value"]


@pytest.mark.parametrize("replayable", [False, True])
def test_an_at_most_once_batch_is_not_tried_again(
    spark: SparkSession, tmp_path: Path, replayable: bool
) -> None:
    class FailsOnce(sinks.Simple):
        """Its first task fails after it has written its rows."""

        def __init__(self, place: Path):
            super().__init__("out")
            self.place = place

        def write(self, rows: pa.RecordBatch) -> None:
            with open(self.place, "a") as file:
                file.writelines(f"{row['n']}\n" for row in rows.to_pylist())

        def close(self) -> None:
            failed = Path(f"{self.place}.failed")
            if not failed.exists():
                failed.touch()
                raise ConnectionError("away for a moment")

    rows = lock.from_collection(spark, [(1,)], "n int", directory=tmp_path / "rows")
    frame = lock.custom(rows, replayable=replayable, name="mine")
    pipeline = make_pipeline(frame, FailsOnce(tmp_path / "written"), tmp_path)
    if replayable:
        trial.finish(pipeline)
    else:
        with pytest.raises(Rejected, match="away for a moment"):
            trial.finish(pipeline)
    assert (tmp_path / "written").read_text() == ("1\n1\n" if replayable else "1\n")


def test_rows_are_written_at_most_once_when_spark_repeats_a_stage(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Shuffled rows vanish while they are written, and Spark computes and reads them again.

    It then runs the tasks again that have not ended, and counts their attempts from 0.
    """

    class Vanishing(sinks.Simple):
        """The first task that writes removes what has been shuffled, and lasts until the others end."""

        def __init__(self, place: Path):
            super().__init__("out")
            self.place = place

        def write(self, rows: pa.RecordBatch) -> None:
            with open(self.place, "a") as file:
                file.writelines(f"{row['n']}\n" for row in rows.to_pylist())
            try:
                (self.place.parent / "first").touch(exist_ok=False)
            except FileExistsError:
                self.wait(lambda: (self.place.parent / "vanished").exists())
                return
            for place in os.environ["SPARK_LOCAL_DIRS"].split(","):
                for file in Path(place).rglob("shuffle_*.data"):
                    file.unlink()
            (self.place.parent / "vanished").touch()
            self.wait(lambda: len(self.place.read_text().split()) >= 12)

        def wait(self, ended: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 60
            while not ended():
                assert time.monotonic() < deadline
                time.sleep(0.02)

    rows = [(n,) for n in range(12)]
    collection = lock.from_collection(spark, rows, "n int", directory=tmp_path / "rows")
    frame = lock.custom(collection.repartition(12, "n"), replayable=False, name="mine")
    trial.finish(make_pipeline(frame, Vanishing(tmp_path / "written"), tmp_path))
    written = (tmp_path / "written").read_text().split()
    assert sorted(map(int, written)) == [n for (n,) in rows]


def test_a_socket_is_read_at_most_once(spark: SparkSession, tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        frame = lock.read_socket(spark, "127.0.0.1", server.getsockname()[1])
        sink = sinks.Files(tmp_path / "out", semantic="at_least_once")
        query = make_pipeline(frame, sink, tmp_path).start(processingTime="0 seconds")
        try:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"one\ntwo\n")
                for _ in range(100):
                    query.processAllAvailable()
                    if list((tmp_path / "out").glob("part-*")):
                        break
                assert spark.read.parquet(str(tmp_path / "out")).count() in (1, 2)
        finally:
            query.stop()
