"""The end of a query with `foreach_batch`: Spark's `stop()`, then the sweep and the close."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import oracle
import poundlock as lock
from poundlock import sinks
from poundlock.core.log import FileLog
from poundlock.core.model import Branch, Generation, Receipt, Transaction
from poundlock.core.participant import Column
from poundlock.core.protocol import BranchState
from poundlock.errors import Unavailable
from poundlock.servers import postgres


class Scene:
    def __init__(self, spark: SparkSession, server: postgres.Postgres, place: Path, table: str):
        self.server, self.place, self.table = server, place, table
        self.execute(f"CREATE TABLE {table} (n bigint)")
        self.sink = sinks.Postgres(table, dsn=server.address)
        self.frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()

    def execute(self, statement: str) -> list[Any]:
        with psycopg.connect(self.server.address, autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def start(self, function: Any) -> Any:
        writer = self.frame.selectExpr("value AS n").writeStream.foreachBatch(function)
        writer = writer.option("checkpointLocation", str(self.place))
        return writer.trigger(processingTime="200 milliseconds").start()

    def function(self) -> Any:
        return lock.foreach_batch(self.sink, name="sensors")

    def rows(self) -> list[int]:
        return sorted(n for (n,) in self.execute(f"SELECT n FROM {self.table}"))

    def connections(self) -> int:
        statement = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
        return self.execute(statement)[0][0] - 1

    def leave_stray(self) -> sinks.Postgres:
        """Leave an open branch as a losing attempt does. Return a sink that can find it."""
        other = pickle.loads(pickle.dumps(self.sink))
        other.project({"n": Column("n", "bigint")})
        generation = FileLog(self.place / "poundlock").load().generation
        assert generation is not None
        transaction = Transaction(generation.namespace, generation.number, 999, 1)
        writer = other.begin(Branch(transaction, other.name, 9, 99999))
        writer.write(pa.RecordBatch.from_pydict({"n": pa.array([-1], pa.int64())}))
        assert writer.prepare() is not None
        assert self.strays(other)
        return other

    def strays(self, other: sinks.Postgres) -> int:
        generation = FileLog(self.place / "poundlock").load().generation
        assert generation is not None
        return len(other.find(generation.namespace))


@pytest.fixture
def scene(spark: SparkSession, postgres_server: postgres.Postgres, tmp_path: Path) -> Scene:
    return Scene(spark, postgres_server, tmp_path / "c", f"t_{tmp_path.name.replace('-', '_')}")


def test_the_end_of_a_query_sweeps_and_closes(scene: Scene) -> None:
    query = scene.start(scene.function())
    oracle.eventually(lambda: len(scene.rows()) >= 10)
    assert scene.connections() > 0
    other = scene.leave_stray()
    query.stop()
    assert query.exception() is None
    oracle.eventually(lambda: scene.strays(other) == 0)
    other.close()
    oracle.eventually(lambda: scene.connections() == 0)
    rows = scene.rows()
    assert rows == list(range(len(rows)))


def test_a_stop_does_not_wait_for_an_unreachable_system_and_loses_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, called, commit = threading.Event(), threading.Event(), sinks.Postgres.commit

    def answer(self: sinks.Postgres, receipts: Sequence[Receipt]) -> list[BranchState]:
        if away.is_set():
            called.set()
            raise Unavailable("the cable is out")
        return commit(self, receipts)

    monkeypatch.setattr(sinks.Postgres, "commit", answer)
    function = scene.function()
    query = scene.start(function)
    oracle.eventually(lambda: len(scene.rows()) >= 10)
    away.set()
    assert called.wait(oracle.SECONDS)  # it is decided, and cannot be committed
    query.stop()  # it must not wait for the batch, which is stuck
    assert query.exception() is None
    before = len(scene.rows())
    away.clear()
    again = scene.start(function)  # the same function in the next run of its query
    oracle.eventually(lambda: len(scene.rows()) > before)
    again.stop()
    oracle.eventually(lambda: scene.connections() == 0)
    rows = scene.rows()
    assert rows == list(range(len(rows)))


def test_an_idle_query_stops_when_another_driver_has_taken_over(
    scene: Scene, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path_factory.mktemp("source")
    (source / "one.json").write_text('{"value": 1}')
    scene.frame = scene.frame.sparkSession.readStream.schema("value bigint").json(str(source))
    query = scene.start(scene.function())
    query.processAllAvailable()
    assert scene.rows() == [1]
    log = FileLog(scene.place / "poundlock")
    ours = log.load().generation
    assert ours is not None
    log.append(Generation(ours.number + 1, ours.namespace, ours.uri, ours.query, "there:1"))
    oracle.eventually(lambda: query.isActive, want=lambda active: not active)
    assert "driver there:1 took over the pipeline" in caplog.text
