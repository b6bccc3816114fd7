"""Write-ahead, console and simple sinks: how they call user code, and errors in that code."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import poundlock as lock
import trial
from compliance.subject_sqlite import EXAMPLES, example
from poundlock.compliance import fill, small_disk
from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Transaction
from poundlock.core.naming import parse_name
from poundlock.core.participant import Participant
from poundlock.core.protocol import BranchState, Step
from poundlock.core.site import LocalSite
from poundlock.errors import InDoubt, Unavailable, UsageError
from poundlock.sinks import Console, Simple, WriteAhead
from poundlock.sinks.rowstore import RowStore

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file


def numbers(spark: SparkSession, tmp_path: Path, count: int = 20, batch_rows: int = 10) -> Any:
    return lock.from_collection(
        spark,
        [(n, f"text {n}") for n in range(count)],
        "number bigint, text string",
        batch_rows=batch_rows,
        directory=tmp_path / "rows",
    )


def make_pipeline(spark: SparkSession, tmp_path: Path, sink: Participant) -> lock.Pipeline:
    frame = numbers(spark, tmp_path)
    return lock.pipeline(frame, name="t", checkpoint_location=str(tmp_path / "ck")).to(sink)


class Receiver:
    """A function that records its calls and raises the given error."""

    def __init__(self, place: Path, error: Exception | None = None):
        self.place, self.error = str(place), error

    def __call__(self, rows: pa.RecordBatch, facts: Any) -> None:
        if self.error is not None and not Path(f"{self.place}.failed").exists():
            Path(f"{self.place}.failed").touch()
            raise self.error
        with open(self.place, "a") as file:
            line = {"id": facts.id, "batch": facts.batch, "numbers": rows["number"].to_pylist()}
            file.write(json.dumps(line) + "\n")

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(self.place).read_text().splitlines()]


class TestWriteAhead:
    def test_rows_are_sent_after_the_decision(self, spark: SparkSession, tmp_path: Path) -> None:
        receiver = Receiver(tmp_path / "calls")
        trial.die(make_pipeline(spark, tmp_path, WriteAhead(receiver, name="out")), Step.PREPARED)
        assert not (tmp_path / "calls").exists()
        trial.die(make_pipeline(spark, tmp_path, WriteAhead(receiver, name="out")), Step.DECIDED)
        assert not (tmp_path / "calls").exists()
        trial.finish(make_pipeline(spark, tmp_path, WriteAhead(receiver, name="out")))
        got = Counter(number for call in receiver.calls() for number in call["numbers"])
        assert got == Counter(range(20))

    def test_a_repeat_has_the_same_id(self, spark: SparkSession, tmp_path: Path) -> None:
        receiver = Receiver(tmp_path / "calls")
        sink = WriteAhead(receiver, name="out")
        trial.finish(make_pipeline(spark, tmp_path, sink))
        before = receiver.calls()
        # As if the driver had died after the calls and before it wrote the witnesses.
        shelf = Path(sink.row_store.uri)
        for call in before:
            name = call["id"].rpartition("/")[0]
            (shelf / f"{name}.sent").unlink()
            with sink.row_store._open()[0].open_output_stream(str(shelf / f"{name}.arrow")) as out:
                table = pa.table({"number": call["numbers"]})
                with pa.ipc.new_file(out, table.schema) as stream:
                    stream.write_table(table)
            parsed = parse_name(name)
            assert parsed is not None
            sink.send(parsed, sink.row_store.read(name))
        assert receiver.calls()[len(before) :] == before

    def test_an_unavailable_system_is_called_again(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        receiver = Receiver(tmp_path / "calls", Unavailable("not now"))
        trial.finish(make_pipeline(spark, tmp_path, WriteAhead(receiver, name="out")))
        assert Counter(n for call in receiver.calls() for n in call["numbers"]) == Counter(
            range(20)
        )

    def test_a_broken_function_stops_and_is_called_again_by_the_next_start(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        receiver = Receiver(tmp_path / "calls", KeyError("typo"))
        query = make_pipeline(spark, tmp_path, WriteAhead(receiver, name="out")).start(
            availableNow=True
        )
        with pytest.raises(Exception):  # noqa: B017 (Spark's own, around ours)
            query.awaitTermination()
        assert isinstance(query.error, InDoubt)
        assert "KeyError: 'typo'" in str(query.error)
        trial.finish(make_pipeline(spark, tmp_path, WriteAhead(receiver, name="out")))
        assert Counter(n for call in receiver.calls() for n in call["numbers"]) == Counter(
            range(20)
        )

    def test_an_async_function_or_generator_is_refused(self) -> None:
        async def later(rows: pa.RecordBatch, facts: Any) -> None: ...

        def lazy(rows: pa.RecordBatch, facts: Any) -> Any:
            yield

        async def both(rows: pa.RecordBatch, facts: Any) -> Any:
            yield

        class Object:
            async def __call__(self, rows: pa.RecordBatch, facts: Any) -> None: ...

        for function in (later, lazy, both, Object(), Object().__call__, partial(later, facts=1)):
            with pytest.raises(UsageError, match="async or a generator"):
                WriteAhead(function, name="out")

        hidden = [lambda rows, facts, it=it: it(rows, facts) for it in (later, lazy, both)]
        name = parse_name("poundlock.t.018bcfe5680000000001.1.out.0.1.0")
        assert name is not None
        for function in hidden:
            sink = WriteAhead(function, name="out")
            with pytest.raises(InDoubt, match=r"which nobody runs.* correct the function"):
                sink.send(name, iter([pa.RecordBatch.from_pydict({"number": [7]})]))

    @pytest.mark.parametrize("refused", [False, True])
    def test_a_disk_that_is_full_after_the_decision_repeats_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
    ) -> None:
        """Some file systems then have no room even for an empty file, such as the witness."""

        def put(self: RowStore, system: object, path: str) -> None:
            raise Unavailable("the disk is full")

        space = Namespace.new("t", 1_700_000_000, 1)
        receiver = Receiver(tmp_path / "calls")
        sink = WriteAhead(receiver, name="out")
        with small_disk(1) as disk:
            sink.attach(LocalSite(str(disk)))
            writers = [
                sink.begin(Branch(Transaction(space, 1, 0, 1), "out", task, task))
                for task in range(2)
            ]
            receipts = []
            for writer in writers:
                writer.write(pa.RecordBatch.from_pydict({"number": [7]}))
                prepared = writer.prepare()
                assert prepared is not None
                receipts.append(Receipt("out", prepared.id, 0, Fingerprint(1), prepared.handle))
            fill(disk)
            if refused:
                monkeypatch.setattr(RowStore, "_put", put)
            for _ in range(2):
                assert sink.commit(receipts[:1]) == [BranchState.COMMITTED]
            assert len(receiver.calls()) == 1
            assert sink.abort(sink.find(space)) == [BranchState.ABORTED]
            assert sink.commit(receipts[1:]) == [BranchState.ABORTED]
            assert len(receiver.calls()) == 1
            sink.prune(space, 1)
            left = {file.suffix for file in (disk / "out").iterdir()}
            assert left == {".aborted", ".sent"}, "the newest mark, and the newest of a batch sent"


class TestConsole:
    def test_it_prints_each_batch_once_it_is_decided(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        out = io.StringIO()
        sink = Console(rows=3, truncate=6, stream=out)
        trial.finish(make_pipeline(spark, tmp_path, sink))
        assert out.getvalue() == (
            "-- t, batch 0: 10 rows --\n"
            "+------+------+\n"
            "|number|  text|\n"
            "+------+------+\n"
            "|     0|text 0|\n"
            "|     1|text 1|\n"
            "|     2|text 2|\n"
            "+------+------+\n"
            "only the first 3 of 10 rows\n"
            "-- t, batch 1: 10 rows --\n"
            "+------+------+\n"
            "|number|  text|\n"
            "+------+------+\n"
            "|    10|tex...|\n"
            "|    11|tex...|\n"
            "|    12|tex...|\n"
            "+------+------+\n"
            "only the first 3 of 10 rows\n"
        )

    def test_an_aborted_batch_is_not_printed(self, spark: SparkSession, tmp_path: Path) -> None:
        out = io.StringIO()
        trial.die(make_pipeline(spark, tmp_path, Console(stream=out)), Step.PREPARED)
        assert out.getvalue() == ""

    @staticmethod
    def print_column(sink: Console, column: pa.Array, tmp_path: Path) -> BranchState:
        sink.attach(LocalSite(str(tmp_path)))
        space = Namespace.new("t", 1_700_000_000, 1)
        writer = sink.begin(Branch(Transaction(space, 1, 0, 1), "console", 0, 0))
        writer.write(pa.RecordBatch.from_arrays([column], ["v"]))
        prepared = writer.prepare()
        assert prepared is not None
        (state,) = sink.commit([Receipt("console", prepared.id, 0, Fingerprint(len(column)))])
        return state

    @pytest.mark.parametrize(
        ("column", "shown"),
        [
            (pa.array([2_932_907], pa.date32()), "10000-01-11"),
            (pa.array([-62_135_683_200_000_000], pa.timestamp("us")), "0000-12-31 00:00"),
            (pa.array([0], pa.timestamp("us", tz="UTC")), "1970-01-01 00:00"),
        ],
    )
    def test_times_beyond_pythons_calendar_are_printed(
        self, tmp_path: Path, column: pa.Array, shown: str
    ) -> None:
        out = io.StringIO()
        assert self.print_column(Console(stream=out), column, tmp_path) is BranchState.COMMITTED
        assert shown in out.getvalue()

    def test_unencodable_characters_are_replaced(self, tmp_path: Path) -> None:
        out = io.BytesIO()
        stream = io.TextIOWrapper(out, encoding="ascii")
        state = self.print_column(Console(stream=stream), pa.array(["größe"]), tmp_path)
        assert state is BranchState.COMMITTED and b"|gr??e|" in out.getvalue()

    def test_unprintable_rows_are_skipped_and_reported_without_data(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        closed = io.StringIO()
        closed.close()
        nowhere = pa.array([0], pa.timestamp("us", tz="Etc/Nowhere"))
        deep = pa.array([[2_932_907]], pa.list_(pa.date32()))
        for number, (stream, column) in enumerate(
            [(io.StringIO(), nowhere), (io.StringIO(), deep), (closed, pa.array(["secret"]))]
        ):
            state = self.print_column(Console(stream=stream), column, tmp_path / str(number))
            assert state is BranchState.COMMITTED
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
        assert "secret" not in caplog.text

    def test_zero_rows_are_refused(self) -> None:
        with pytest.raises(UsageError, match="rows=0"):
            Console(rows=0)


class Failing(Simple):
    def write(self, rows: pa.RecordBatch) -> None:
        raise ZeroDivisionError("oops")


class TestSimple:
    def test_the_template_writes_every_row(self, spark: SparkSession, tmp_path: Path) -> None:
        got: Counter[int] = Counter()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(60)

            def serve() -> None:
                while True:
                    try:
                        connection, _ = server.accept()
                    except OSError:
                        return
                    with connection, connection.makefile() as lines:
                        got.update(json.loads(line)["number"] for line in lines)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            sink = example("simple_sink").Lines("127.0.0.1", server.getsockname()[1])
            spark.sparkContext.addPyFile(example("simple_sink").__file__)
            trial.finish(make_pipeline(spark, tmp_path, sink))
            server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert got == Counter(range(20))

    def test_an_error_in_the_sinks_code_is_a_no_vote_and_names_the_sink(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        settings = lock.Settings(tries=1)
        frame = numbers(spark, tmp_path)
        query = (
            lock.pipeline(
                frame, name="t", checkpoint_location=str(tmp_path / "ck"), settings=settings
            )
            .to(Failing("mine"))
            .start(availableNow=True)
        )
        with pytest.raises(Exception):  # noqa: B017 (Spark's own, around ours)
            query.awaitTermination()
        assert "sink mine] the sink's own code raised ZeroDivisionError: oops" in str(query.error)


def test_the_whole_template_runs_in_a_pipeline(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE numbers (number INTEGER, text TEXT)")
    module = example("sqlite_sink")
    spark.sparkContext.addPyFile(module.__file__)
    trial.die(make_pipeline(spark, tmp_path, module.SqliteTable(path, "numbers")), Step.COMMITTED)
    trial.finish(make_pipeline(spark, tmp_path, module.SqliteTable(path, "numbers")))
    with sqlite3.connect(path) as db:
        assert Counter(n for (n,) in db.execute("SELECT number FROM numbers")) == Counter(range(20))


def test_the_template_passes_the_suite_in_a_separate_project(tmp_path: Path) -> None:
    for name in ("sqlite_sink.py", "test_sqlite_sink.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:timeout"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 25, done.stdout
