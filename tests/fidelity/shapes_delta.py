"""The Delta sink. The table's own log is read as JSON, and its files by pyarrow."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from poundlock.compliance.fidelity import NUMBER, Column, Line, Shape
from poundlock.compliance.values import KINDS, is_utf8
from poundlock.sinks import Delta

from .shapes_files import PARQUET, read
from .shapes_sql import columns_of

LINES = [line for line in PARQUET if line.columns] + [
    Line("interval, variant", "none", "refused at start")
]


def _no_directory(value: bytes) -> bool:
    return not is_utf8(value) or b"\0" in value or len(value) > 200


PARTITIONS = [
    Line("boolean, integers, date", "text", "exact", columns=(Column("int"), Column("date"))),
    Line(
        "string",
        "text",
        "exact; but an empty one becomes null, as in every Delta table",
        "not UTF-8; with a NUL; too long for a name",
        columns=(Column("string", "", lambda it: it or None, _no_directory),),
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
            rows = pq.read_table(file, partitioning=None)
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


def delta(place: Path) -> list[Shape]:
    """Return the shapes of the sink."""
    partitions = [DeltaPartitions(place, it) for it in columns_of(PARTITIONS)]
    return [DeltaShape(place), *partitions]


PAGE = {"Parquet in Delta": LINES, "Partition": PARTITIONS}
