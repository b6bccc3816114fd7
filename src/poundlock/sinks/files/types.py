"""What a row becomes in a file: which columns that takes, its partition as in Hive, and its format.

Spark itself makes the lines of text formats (`to_json`, `to_csv`), so a file reads back as Spark's own
would. Rules of this file: one Python call per partition of a batch of rows, none per row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from poundlock.core.participant import Column
from poundlock.core.sparksql import (
    TIMES,
    checked_text,
    holds,
    legible_struct,
    literal,
    marked,
    moment_text,
    row_json,
    row_struct,
)
from poundlock.sinks.partitions import directory_of

LINE = "__line"  # the column of a text format

_NESTED = "array<|map<|struct<"
_UNFIT = {
    "parquet": "void|interval|variant",
    "json": "void|variant",
    "csv": f"void|interval|variant|binary|{_NESTED}",
}
_UNFIT_PARTITION = f"void|interval|variant|binary|{_NESTED}"
# Otherwise Spark removes the blanks around a text.
_BLANKS = "'ignoreLeadingWhiteSpace', 'false', 'ignoreTrailingWhiteSpace', 'false'"

PARTITION = "__by_"  # prefix of the columns by which rows are split, as text

COMPRESSIONS: Mapping[str, Mapping[str, str]] = {
    "parquet": {"snappy": ".snappy", "zstd": ".zstd", "gzip": ".gz", "lz4": ".lz4raw", "none": ""},
    "json": {"none": "", "gzip": ".gz", "bz2": ".bz2"},
    "csv": {"none": "", "gzip": ".gz", "bz2": ".bz2"},
}


def column_problems(
    columns: Mapping[str, Column], format: str, partition_by: Sequence[str]
) -> list[str]:
    """Say what is wrong with a DataFrame's columns for files of a format."""
    problems = [
        f"there is no column {name!r} to partition by"
        for name in partition_by
        if name not in columns
    ]
    if not columns.keys() - set(partition_by):
        problems.append("no column is left for the files besides those to partition by")
    for name, column in columns.items():
        partitions = name in partition_by
        if holds(column.type, _UNFIT_PARTITION if partitions else _UNFIT[format]):
            use = "a directory's name" if partitions else format
            problems.append(f"column {name!r} has type {column.type}, which {use} cannot hold")
    return problems


def expressions(columns: Mapping[str, Column], format: str) -> dict[str, str]:
    """Return the writer's columns in Spark SQL. Those of a text format are one line."""
    if format == "parquet":
        return {name: column.sql for name, column in columns.items()}
    if format == "json":
        return {LINE: row_json(columns)}
    line, legible = (
        f"to_csv({struct}, map({TIMES}, {_BLANKS}))"
        for struct in (row_struct(columns), legible_struct(columns))
    )
    if len(columns) == 1:  # Spark fails on an empty line; its own files have this one
        (only,) = columns.values()
        line = f"CASE WHEN {only.sql} IS NULL THEN '\"\"' ELSE {line} END"
    return {LINE: checked_text(columns, line, legible, "CSV")}


def partition_text(name: str, column: Column) -> str:
    """Return the text of a value in a directory's name: what Spark's readers take for the value.

    They read a timestamp in the session's zone, where an hour that is shown twice has one text.
    """
    text = f"CAST({column.sql} AS STRING)"
    if column.type != "timestamp":
        return text
    shown = literal(
        f" show its {name} for another instant too, and a directory's name has no zone: partition by a "
        "date or a text, or set spark.sql.session.timeZone to UTC"
    )
    reason = f"concat('the clocks of ', current_timezone(), {shown})"
    lost = f"CAST({text} AS TIMESTAMP) <> {column.sql}"
    return marked(lost, reason, text, moment_text(column.sql, column.type))


def split(
    rows: pa.RecordBatch, columns: Sequence[str]
) -> Iterator[tuple[str, pa.RecordBatch, np.ndarray]]:
    """Yield each partition's directory, its rows without the partition columns, and their places."""
    data = rows.drop_columns([PARTITION + column for column in columns])
    if not columns:
        yield "", data, np.arange(len(rows))
        return
    encoded = [rows.column(PARTITION + column).dictionary_encode() for column in columns]
    codes = np.zeros(len(rows), dtype=np.int64)
    for part in encoded:
        index = pc.fill_null(part.indices, len(part.dictionary)).to_numpy(zero_copy_only=False)
        codes = codes * (len(part.dictionary) + 1) + index
    _, firsts, groups = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(groups, kind="stable")
    places = np.split(order, np.cumsum(np.bincount(groups))[:-1])
    for first, mine in zip(firsts, places, strict=True):
        values = [part[int(first)].as_py() for part in encoded]
        yield directory_of(columns, values), data.take(pa.array(mine)), mine


def suffix(format: str, compression: str) -> str:
    mark = COMPRESSIONS[format][compression]
    return f"{mark}.parquet" if format == "parquet" else f".{format}{mark}"


def format_of(name: str) -> str | None:
    """Return the format of a file, from the name that `suffix` completed."""
    parts = name.split(".")[1:]  # the last one counts: a pipeline or a sink may be named json
    return next((part for part in reversed(parts) if part in COMPRESSIONS), None)


class ParquetFile:
    """One open Parquet file."""

    def __init__(self, stream: Any, compression: str, schema: pa.Schema):
        self._stream = stream
        self._schema = schema = pa.schema([_nullable(field) for field in schema])
        # Timestamps in microseconds and names of list elements are as Spark has them.
        self._writer = pq.ParquetWriter(
            stream, schema, compression=compression, coerce_timestamps="us", store_schema=False
        )

    def write(self, rows: pa.RecordBatch) -> None:
        self._writer.write_batch(rows if rows.schema == self._schema else rows.cast(self._schema))

    def close(self) -> None:
        try:
            self._writer.close()
        finally:  # the space of an open file is not freed, so a full disk would stay full
            self._stream.close()


def _nullable(field: pa.Field) -> pa.Field:
    """Return a field with all fields inside of it nullable: those of a null struct are null.

    Arrow refuses such a struct otherwise. The keys of a map are never null.
    """
    kind = field.type
    if isinstance(kind, pa.StructType):
        kind = pa.struct([_nullable(it).with_nullable(True) for it in kind])
    elif isinstance(kind, pa.MapType):
        item = _nullable(kind.item_field).with_nullable(True)
        kind = pa.map_(_nullable(kind.key_field), item)
    elif isinstance(kind, pa.ListType):
        kind = pa.list_(_nullable(kind.value_field).with_nullable(True))
    return field.with_type(kind)


class TextFile:
    """One open file of lines."""

    def __init__(self, stream: Any, compression: str, header: str | None):
        self._stream = stream
        packed = compression != "none"
        self._out = pa.CompressedOutputStream(stream, compression) if packed else stream
        if header is not None:
            self._out.write(header.encode() + b"\n")

    def write(self, rows: pa.RecordBatch) -> None:
        lines = rows.column(LINE).cast(pa.large_string())
        nothing, end = pa.scalar("", pa.large_string()), pa.scalar("\n", pa.large_string())
        ended = pc.call_function("binary_join_element_wise", [lines, nothing, end])
        # A text array has its texts one after the other in memory: that is the file.
        self._out.write(ended.buffers()[2])

    def close(self) -> None:
        try:
            self._out.close()
        finally:
            self._stream.close()


def text_line(format: str, row: Mapping[str, Any]) -> str:
    """Return a row of plain values as a line, as Spark would write it."""
    if format == "json":
        return json.dumps(row)
    return ",".join(csv_text(str(value)) for value in row.values())


def csv_text(name: str) -> str:
    """Return one value of CSV, quoted if necessary."""
    special = any(char in name for char in ',"\n\r\\')
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"' if special else name
