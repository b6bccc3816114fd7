"""Spark SQL expressions that several parts share."""

from __future__ import annotations

import re
from collections.abc import Mapping

from poundlock.core.participant import Column

# Options for text. By default, Spark writes timestamps in milliseconds and loses the microseconds.
TIMES = (
    r"'timestampFormat', 'yyyy-MM-dd\'T\'HH:mm:ss.SSSSSSXXX', "
    r"'timestampNTZFormat', 'yyyy-MM-dd\'T\'HH:mm:ss.SSSSSS'"
)


def to_json(sql: str, *, nulls: bool = True) -> str:
    """Return the expression of a value as JSON text, with microseconds.

    Fields that are null are written as null. `nulls=False` leaves them out, as Spark does by default.
    """
    options = TIMES + (", 'ignoreNullFields', 'false'" if nulls else "")
    return f"to_json({sql}, map({options}))"


def literal(text: str) -> str:
    """Return a text as a SQL literal, with any special characters escaped."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def row_struct(columns: Mapping[str, Column]) -> str:
    """Return the expression of a struct that has these columns as its fields."""
    fields = ", ".join(f"{literal(name)}, {column.sql}" for name, column in columns.items())
    return f"named_struct({fields})"


def row_json(columns: Mapping[str, Column]) -> str:
    """Return the expression of a row as one JSON object. Fields that are null are left out."""
    return to_json(row_struct(columns), nulls=False)


def quoted(name: str) -> str:
    """Return a column's name in backquotes."""
    return "`" + name.replace("`", "``") + "`"


def holds(type: str, kinds: str) -> bool:
    """Return whether a type is, or contains, a type whose name begins with `kinds`.

    `type` is a `Column`'s, and `kinds` a regular expression. The names of fields, each before a colon,
    are not matched.
    """
    unquoted = re.sub(r"`(?:[^`]|``)*`", "x", type)
    return re.search(rf"(^|[<,:])(?![^<>,:]*:)({kinds})", unquoted) is not None
