"""Which Spark types fit which PostgreSQL types, and why the others do not.

Rule of this file: no conversion may change a value. A number fits a wider type. Anything else must be
cast in the query, where the cast is visible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from poundlock.sinks.postgres.catalog import Table, TableColumn

JSON_FAMILY = ("array<", "map<", "struct<", "variant")
_INTEGERS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}  # with their decimal digits
_TEXTS = frozenset({"text", "varchar", "bpchar", "citext", "enum", "json", "jsonb", "uuid", "xml"})

_ACCEPTED: dict[str, frozenset[str]] = {
    "boolean": frozenset({"bool"}),
    "tinyint": frozenset({"int2", "int4", "int8", "numeric"}),
    "smallint": frozenset({"int2", "int4", "int8", "numeric"}),
    "int": frozenset({"int4", "int8", "numeric"}),
    "bigint": frozenset({"int8", "numeric"}),
    "float": frozenset({"float4", "float8"}),
    "double": frozenset({"float8"}),
    "decimal": frozenset({"numeric"}),
    "string": _TEXTS,
    "binary": frozenset({"bytea"}),
    "date": frozenset({"date"}),
    "timestamp": frozenset({"timestamptz"}),
    "timestamp_ntz": frozenset({"timestamp"}),
    "interval": frozenset({"interval"}),
    "time": frozenset({"time"}),
    "json": frozenset({"jsonb", "json", "text", "varchar"}),
}
_WHOLE_INTERVALS = (-1, 0x7FFF_FFFF, 0x7FFF_0006)  # all fields, with microseconds
_CURES = {
    ("timestamp", "timestamp"): "use timestamptz, or CAST(... AS TIMESTAMP_NTZ)",
    ("timestamp_ntz", "timestamptz"): "CAST(... AS TIMESTAMP)",
}


def family(spark: str) -> str | None:
    """Return the family of a Spark type, by its `simpleString`; None if no table can hold it."""
    kind = spark.lower()
    if kind.startswith(JSON_FAMILY):
        return "json"
    if kind.startswith(("string", "varchar", "char")):
        return "string"
    if kind.startswith("interval") and "month" not in kind and "year" not in kind:
        return "interval"
    head = kind.partition("(")[0]
    return head if head in _ACCEPTED else None


def misfit(spark: str, column: TableColumn) -> str | None:
    """Say why a Spark type does not fit a column; None if it does."""
    kind = family(spark)
    if kind is None:
        return f"type {spark} cannot be written to PostgreSQL"
    if column.generated:
        return "the table computes this column by itself: leave it out of the frame"
    if column.type not in _ACCEPTED[kind]:
        cure = _CURES.get((kind, column.type), "cast it in the query, or change the table")
        return f"{spark} does not fit {column.declared}: {cure}"
    if column.type == "numeric":
        return _too_narrow(spark, kind, column)
    if column.type == "interval" and column.typmod not in _WHOLE_INTERVALS:
        return f"{spark} does not fit {column.declared}, which would round it: use interval"
    return None


def misfits(types: Mapping[str, str], table: Table) -> list[str]:
    """Name every difference between a frame's columns and a table's, column by column."""
    problems = list[str]()
    for name, spark in types.items():
        column = table.column(name)
        reason = "the table has no such column" if column is None else misfit(spark, column)
        if reason is not None:
            problems.append(f"{name}: {reason}")
    if types:
        problems += [
            f"{column.name}: the table requires it, and the frame has no such column"
            for column in table.columns
            if column.name not in types
            and column.required
            and not (column.filled or column.generated)
        ]
    return problems


def numeric_limits(typmod: int) -> tuple[int, int] | None:
    """Return precision and scale of a `numeric`; None if it has none."""
    if typmod < 4:
        return None
    precision, scale = (typmod - 4) >> 16 & 0xFFFF, (typmod - 4) & 0x7FF
    return precision, scale - 0x800 if scale & 0x400 else scale


def _too_narrow(spark: str, kind: str, column: TableColumn) -> str | None:
    limits = numeric_limits(column.typmod)
    if limits is None:
        return None
    if kind == "decimal":
        match = re.fullmatch(r"decimal\((\d+),\s*(-?\d+)\)", spark.lower())
        precision, scale = (int(match[1]), int(match[2])) if match else (10, 0)
    else:
        precision, scale = _INTEGERS[kind], 0
    if scale > limits[1] or precision - scale > limits[0] - limits[1]:
        return (
            f"{spark} does not fit {column.declared}, which would round or refuse it: "
            f"CAST(... AS DECIMAL({limits[0]},{limits[1]})), or change the table"
        )
    return None
