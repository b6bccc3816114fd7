"""Delta Lake: a Spark session that has it, and a reader of the table's log as plain JSON."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

import poundlock as lock
from poundlock.compliance import FaultCase, Subject, empty, fill, small_disk
from poundlock.core.model import Receipt
from poundlock.core.participant import Column, Participant
from poundlock.core.site import LocalSite
from poundlock.errors import BadRow, Unavailable, UsageError
from poundlock.sinks import Delta

_NO_KEYS = "A Delta table has no keys."
_FILES = "Tasks write files, as the process may."

NOT_APPLICABLE: Mapping[str, str] = {
    "duplicate_key": _NO_KEYS,
    "key_in_two_tasks": _NO_KEYS,
    "wrong_password": _FILES,
    "lost_connection": _FILES,
    "no_room": "Branches are files, as many as there is room for on the disk.",
}

FRAME = {"number": "bigint", "word": "string"}


def worded(numbers: Sequence[int | None], words: Sequence[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(numbers, pa.int64()), pa.array(words)], names=["number", "word"]
    )


class DeltaSubject(Subject):
    has_server = False

    def __init__(self, spark: Any, directory: Path):
        self._spark, self._directory = spark, directory
        self._numbers = itertools.count()

    def sink(self, name: str = "out") -> Participant:
        path = self._directory / f"table {next(self._numbers)}"
        self._spark.sql(
            f"CREATE TABLE delta.`{path}` (number BIGINT NOT NULL, word VARCHAR(20)) USING delta"
        )
        return self._make_sink(str(path), name)

    def again(self, sink: Participant) -> Participant:
        assert isinstance(sink, Delta)
        return self._make_sink(sink.path, sink.name)

    def _make_sink(
        self, path: str, name: str, frame: Mapping[str, str] = FRAME, rows: Path | None = None
    ) -> Participant:
        made = Delta(path, name=name)
        site = LocalSite(str(rows or f"{path} rows"))
        site.spark = self._spark
        made.attach(site)
        made.project({each: Column(f"`{each}`", kind) for each, kind in frame.items()})
        made.preflight()
        return made

    def rows(self, numbers: Sequence[int]) -> pa.RecordBatch:
        return worded(numbers, [f"number {number}" for number in numbers])

    def visible(self, sink: Participant) -> Counter[int]:
        assert isinstance(sink, Delta)
        files: set[str] = set()
        for version in sorted(Path(sink.path, "_delta_log").glob("*.json")):
            for line in map(json.loads, version.read_text().splitlines()):
                files |= {line["add"]["path"]} if "add" in line else set()
                files -= {line["remove"]["path"]} if "remove" in line else set()
        seen: Counter[int] = Counter()
        for file in files:
            table = pq.ParquetFile(Path(sink.path, unquote(file))).read()
            seen.update(table.column("number").to_pylist())
        return seen

    def open(self, sink: Participant) -> set[str]:
        assert isinstance(sink, Delta)
        stored = Path(sink.row_store.uri)
        return {str(file) for file in stored.rglob("*") if file.suffix in (".arrow", ".tmp")}

    @contextmanager
    def killed(self) -> Iterator[None]:
        yield

    def lose(self, sink: Participant, receipt: Receipt) -> None:
        assert isinstance(sink, Delta)
        Path(sink.row_store.uri, f"{receipt.id}.arrow").unlink()

    # Faults.

    def _refused(self, sink: Participant, frame: Mapping[str, str]) -> Participant:
        assert isinstance(sink, Delta)
        return self._make_sink(sink.path, sink.name, frame)

    @contextmanager
    def wrong_columns(self, sink: Participant) -> Iterator[FaultCase]:
        frame = {"nummer": "bigint", "word": "string"}
        says = "the table has no column 'nummer'.*the table requires 'number'"
        yield FaultCase(says, UsageError, make=lambda: self._refused(sink, frame))

    @contextmanager
    def wrong_type(self, sink: Participant) -> Iterator[FaultCase]:
        says = "column 'number' has type string, but bigint in the table"
        frame = FRAME | {"number": "string"}
        yield FaultCase(says, UsageError, make=lambda: self._refused(sink, frame))

    @contextmanager
    def null(self, sink: Participant) -> Iterator[FaultCase]:
        bad = worded([5, None], ["a", "b"])
        yield FaultCase("number is null", BadRow, tasks=[[self.rows(range(5)), bad]])

    @contextmanager
    def too_long(self, sink: Participant) -> Iterator[FaultCase]:
        bad = worded([5, 6], ["much too " * 5, "b"])
        says = "word is longer than 20"
        yield FaultCase(says, BadRow, tasks=[[self.rows(range(5)), bad]], hides="much too")

    @contextmanager
    def full_disk(self, sink: Participant) -> Iterator[FaultCase]:
        """The disk with the stored rows is full."""
        assert isinstance(sink, Delta)
        with small_disk(1) as disk:
            using = self._make_sink(sink.path, sink.name, rows=disk / "rows")
            many = [self.rows(range(20_000))] * 5
            yield FaultCase(
                "disk is full|No space left",
                Unavailable,
                sink=using,
                tasks=[many],
                during=lambda: fill(disk),
                over=lambda: empty(disk),
            )


@contextmanager
def started(directory: Path) -> Iterator[Subject]:
    from pyspark.sql import SparkSession

    assert SparkSession.getActiveSession() is None, "Delta needs a session of its own: run it alone"
    conf = {"spark.ui.enabled": "false", "spark.databricks.delta.snapshotPartitions": "1"}
    spark = lock.session("local[2]", delta=True, parallelism=1, conf=conf)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield DeltaSubject(spark, directory)
    finally:
        spark.stop()
