"""Spark SQL that several parts spell alike."""

from __future__ import annotations

import re
from collections.abc import Mapping

from poundlock.core.participant import Column

# Options for text. Spark writes timestamps in milliseconds, unless told, and has microseconds.
TIMES = (
    r"'timestampFormat', 'yyyy-MM-dd\'T\'HH:mm:ss.SSSSSSXXX', "
    r"'timestampNTZFormat', 'yyyy-MM-dd\'T\'HH:mm:ss.SSSSSS'"
)


def to_json(sql: str, *, nulls: bool = True) -> str:
    """Return the expression of a value as JSON text, with times whole.

    Spark leaves out fields that are null, unless told, and a reader cannot tell them from fields that
    never were. `nulls=False` has them left out all the same, as Spark's users know it.
    """
    options = TIMES + (", 'ignoreNullFields', 'false'" if nulls else "")
    return f"to_json({sql}, map({options}))"


def literal(text: str) -> str:
    """Return a text as a literal of SQL, whatever is in it."""
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
    """Return a column's name as SQL takes it, whatever is in it."""
    return "`" + name.replace("`", "``") + "`"


def holds(type: str, kinds: str) -> bool:
    """Say whether a type is, or has inside, one of `kinds`, a regular expression of how they begin.

    `type` is a `Column`'s. What stands before a colon is the name of a field, and may be anything.
    """
    unquoted = re.sub(r"`(?:[^`]|``)*`", "x", type)
    return re.search(rf"(^|[<,:])(?![^<>,:]*:)({kinds})", unquoted) is not None
