"""The Delta sink. The table's own log is read as JSON, and its files by pyarrow."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from poundlock.compliance.fidelity import NUMBER, Column, Line, Shape
from poundlock.compliance.values import DAY, FIRST_TIME, KINDS
from poundlock.sinks import Delta

from .shapes_files import PARQUET, no_directory, read, read_again
from .shapes_sql import columns_of


def _as_arrow_reads(micros: int) -> int:
    """Return what Arrow makes of the day and the time of an INT96, which it takes for unsigned."""
    day, time = divmod(abs(micros + 2_440_588 * DAY), DAY)
    if micros < -2_440_588 * DAY:  # before the first Julian day
        day, time = -day % 2**32, -time * 1000 % 2**64 // 1000
    found = ((day - 2_440_588) * DAY + time) % 2**64
    return found if found < 2**63 else found - 2**64


_TIMES = Line(
    "timestamp, timestamp_ntz",
    "INT96 (timestamp, unless `spark.sql.parquet.outputTimestampType` says otherwise), TIMESTAMP in "
    "microseconds (timestamp_ntz)",
    "exact, of any year; but Arrow misreads an INT96 before 4713 BC",
    columns=(Column("timestamp", "", _as_arrow_reads), Column("timestamp_ntz")),
)
LINES = [_TIMES if line.spark == _TIMES.spark else line for line in PARQUET]


def _no_path(value: bytes) -> bool:
    return no_directory(value) or b"\0" in value


_PLAIN = ("boolean", "int", "bigint", "float", "double", "decimal38", "fraction38", "date")
PARTITIONS = [
    Line(
        "boolean, integers, float, double, decimal, date",
        "text",
        "exact",
        columns=tuple(Column(it) for it in _PLAIN),
    ),
    Line(
        "timestamp, timestamp_ntz",
        "text; a timestamp is in UTC",
        "exact",
        "a timestamp before the year 1, whose sign Delta loses; the second of the two hours that a "
        "clock shows twice",
        columns=(Column("timestamp", refuses=lambda it: it < FIRST_TIME), Column("timestamp_ntz")),
    ),
    Line(
        "string",
        "text",
        "exact",
        "not UTF-8; with a NUL; empty, or `__HIVE_DEFAULT_PARTITION__`, which mean null; too long for "
        "a name",
        columns=(Column("string", refuses=_no_path),),
    ),
]


class DeltaShape(Shape):
    def __init__(self, place: Path):
        self.name, self.place, self.columns = "delta", place / "delta", columns_of(LINES)
        self.by: Column | None = None

    def sink(self) -> Delta:
        by = () if self.by is None else self.by.name
        return Delta(str(self.place), partition_by=by, name=self.name)

    def _added(self) -> list[Mapping[str, Any]]:
        """Return the files that the table's log names."""
        logs = sorted((self.place / "_delta_log").glob("*.json"))
        entries = [json.loads(line) for log in logs for line in log.read_text().split("\n") if line]
        return [it["add"] for it in entries if "add" in it]

    def read(self) -> Mapping[int, Mapping[str, Any]]:
        found: dict[int, Mapping[str, Any]] = {}
        for added in self._added():
            file = self.place / urllib.parse.unquote(added["path"])
            # Arrow would make nanoseconds of INT96, which reach only to the year 2262.
            rows = pq.read_table(file, partitioning=None, coerce_int96_timestamp_unit="us")
            numbers = rows.column(NUMBER).to_pylist()
            columns = [self._values(it, rows, added["partitionValues"]) for it in self.columns]
            names = [it.name for it in self.columns]
            for number, *values in zip(numbers, *columns, strict=True):
                found[number] = dict(zip(names, values, strict=True))
        return found

    def _values(self, column: Column, rows: Any, partition: Mapping[str, Any]) -> list[Any]:
        if column is not self.by:
            return KINDS[column.kind].read(rows.column(column.name))
        text = partition[column.name]
        return [read(KINDS[column.kind].type.of_text, text)] * len(rows)


class DeltaPartitions(DeltaShape):
    def __init__(self, place: Path, column: Column):
        super().__init__(place)
        self.name, self.columns, self.by = f"delta-by-{column.name}", [column], column
        self.place = place / self.name

    def refuses(self, row: Mapping[str, Any]) -> list[Column]:
        (column,) = self.columns
        value = row.get(column.kind)
        is_lost = column.kind == "timestamp" and read_again(value or 0, self.zone) != (value or 0)
        return [column] if is_lost else super().refuses(row)


def delta(place: Path) -> list[Shape]:
    """Return the shapes of the sink."""
    partitions = [DeltaPartitions(place, it) for it in columns_of(PARTITIONS)]
    return [DeltaShape(place), *partitions]


PAGE = {"Parquet in Delta": LINES, "Partition": PARTITIONS}
