"""Spark SQL that several sinks spell alike."""

from __future__ import annotations

# Spark writes timestamps as text in milliseconds, unless told, and has microseconds. It leaves out
# fields that are null, unless told, and a reader could not tell them from fields that never were.
TO_JSON_OPTIONS = (
    "map('ignoreNullFields', 'false', "
    r"'timestampFormat', 'yyyy-MM-dd\'T\'HH:mm:ss.SSSSSSXXX', "
    r"'timestampNTZFormat', 'yyyy-MM-dd\'T\'HH:mm:ss.SSSSSS')"
)


def to_json(sql: str) -> str:
    """Return the expression of a value as JSON text, whole."""
    return f"to_json({sql}, {TO_JSON_OPTIONS})"
