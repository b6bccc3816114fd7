"""The sink and the rows for the tests of the Files sink."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from poundlock.core.model import Branch, Fingerprint, Namespace, Receipt, Transaction
from poundlock.core.participant import Column
from poundlock.core.site import LocalSite
from poundlock.sinks import Files
from poundlock.sinks.files.writer import FilesWriter

OURS = Namespace.new("trial", 1_700_000_000, 1)
COLUMNS = {"number": Column("number", "bigint"), "day": Column("day", "string")}


def make_sink(path: Path, **options: Any) -> Files:
    sink = Files(path, **({"partition_by": "day", "name": "out"} | options))
    sink.attach(LocalSite(str(path.parent / "rows")))
    sink.project(COLUMNS)
    sink.preflight()
    return sink


def make_rows(numbers: Sequence[int], days: Sequence[str | None]) -> pa.RecordBatch:
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
