"""A start that waits for a system: it says so, and Ctrl-C or another thread ends it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

import oracle
import poundlock as lock
import trial
from poundlock import sinks
from poundlock.core.log import FileLog
from poundlock.core.protocol import Step
from poundlock.errors import InDoubt
from poundlock.servers import postgres
from poundlock.sqljob import run


class Away:
    """A pipeline that died after a decision, and whose database goes away in its next take-over."""

    def __init__(self, spark: SparkSession, server: postgres.Postgres, place: Path):
        self.spark, self.server, self.place = spark, server, place
        self.settings = lock.Settings(warn_first_s=0)
        self.execute("CREATE TABLE t (n bigint)")
        trial.die(self.pipeline(), Step.DECIDED)

    def execute(self, statement: str) -> list[Any]:
        with psycopg.connect(self.server.address, autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def frame(self) -> Any:
        stream = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5)
        return stream.load().selectExpr("value AS n")

    def pipeline(self) -> lock.Pipeline:
        sink = sinks.Postgres("t", dsn=self.server.address)
        made = lock.pipeline(
            self.frame(), name="p", checkpoint_location=str(self.place), settings=self.settings
        )
        return made.to(sink)

    def leaving(self) -> lock.Pipeline:
        def observe(step: Step, facts: Mapping[str, object]) -> None:
            if step is Step.TOOK_OVER:
                self.server.stop()

        return self.pipeline().observe(observe)

    def finish(self) -> None:
        """Let the database come back, and check that nothing was lost or repeated."""
        self.server.start()
        query = self.pipeline().start(processingTime="200 milliseconds")
        oracle.eventually(lambda: len(self.rows()) >= 10)
        query.stop()
        assert self.rows() == list(range(len(self.rows())))

    def rows(self) -> list[int]:
        return sorted(n for (n,) in self.execute("SELECT n FROM t"))


@pytest.fixture
def away(spark: SparkSession, tmp_path: Path) -> Iterator[Away]:
    with postgres.running(tmp_path / "server") as server:
        yield Away(spark, server, tmp_path / "checkpoint")


def when_told(caplog: pytest.LogCaptureFixture, act: Any) -> threading.Thread:
    """Act once the pipeline has said what it waits for."""

    def watch() -> None:
        oracle.eventually(lambda: "still wait to be committed; t cannot be reached" in caplog.text)
        act()

    caplog.set_level(logging.WARNING, "poundlock")
    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_ctrl_c_ends_a_start_that_waits(away: Away, caplog: pytest.LogCaptureFixture) -> None:
    watching = when_told(caplog, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        away.leaving().start(availableNow=True)
    watching.join()
    away.finish()


def test_another_thread_ends_a_start_that_waits(
    away: Away, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = threading.Event()
    watching = when_told(caplog, stopping.set)
    with pytest.raises(InDoubt, match="start the pipeline again when the system answers"):
        away.leaving().start(stopping=stopping, availableNow=True)
    watching.join()
    away.finish()


def test_a_job_that_waits_ends_without_an_error(
    away: Away, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = threading.Event()
    watching = when_told(caplog, stopping.set)
    run.once([away.leaving()], stopping)
    watching.join()
    assert "p was stopped before it began" in caplog.text
    away.finish()


def test_a_foreach_batch_that_takes_over_can_be_stopped(
    away: Away, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What follows the record of the new generation.
    monkeypatch.setattr(FileLog, "drop_unpublished", lambda log: away.server.stop())
    caplog.set_level(logging.WARNING, "poundlock")
    function = lock.foreach_batch(
        sinks.Postgres("t", dsn=away.server.address), name="p", settings=away.settings
    )
    writer = away.frame().writeStream.foreachBatch(function)
    query = writer.option("checkpointLocation", str(away.place)).start()
    oracle.eventually(lambda: "t cannot be reached" in caplog.text)
    query.stop()
    assert query.exception() is None
    monkeypatch.undo()
    away.finish()
