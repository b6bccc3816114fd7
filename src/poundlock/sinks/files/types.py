"""What a row becomes in a file, and which columns that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poundlock.core.participant import Column
from poundlock.core.sparksql import TIMES, holds, row_json, row_struct

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
    line = f"to_csv({row_struct(columns)}, map({TIMES}, {_BLANKS}))"
    if len(columns) == 1:  # Spark fails on an empty line; its own files have this one
        (only,) = columns.values()
        line = f"CASE WHEN {only.sql} IS NULL THEN '\"\"' ELSE {line} END"
    return {LINE: line}
