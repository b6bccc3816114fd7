"""The TwoPhase sink on PostgreSQL with psycopg, whose values are Python objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psycopg

from poundlock.compliance.fidelity import Column, Line, Shape
from poundlock.compliance.values import DAY, FIRST_DAY, FIRST_TIME, LAST_DAY, LAST_TIME
from poundlock.sinks import TwoPhase

from .shapes_postgres import LINES as POSTGRES
from .shapes_postgres import PostgresShape
from .shapes_sql import columns_of


def _no_date(value: int) -> bool:
    return not FIRST_DAY <= value <= LAST_DAY


def _no_time(value: int) -> bool:
    return not FIRST_TIME <= value <= LAST_TIME


def _long(value: int) -> bool:
    return abs(value) >= 10**9 * DAY


_PYTHON = {
    "date": Line(
        "date",
        "datetime.date",
        "exact",
        "outside of the years 1 to 9999",
        columns=(Column("date", "date", refuses=_no_date),),
    ),
    "timestamp, timestamp_ntz": Line(
        "timestamp, timestamp_ntz",
        "datetime.datetime, with and without a time zone",
        "exact, if the type keeps microseconds",
        "outside of the years 1 to 9999",
        columns=(
            Column("timestamp", "timestamptz", refuses=_no_time),
            Column("timestamp_ntz", "timestamp", refuses=_no_time),
        ),
    ),
    "interval day to second, time": Line(
        "interval day to second",
        "datetime.timedelta",
        "exact",
        columns=(Column("daytime", "interval", refuses=_long),),
    ),
}
_NAMES = {
    "boolean": "bool",
    "tinyint, smallint, int, bigint": "int",
    "float, double": "float",
    "decimal(p,s)": "decimal.Decimal",
    "string": "str",
    "binary": "bytes",
    "array, map, struct, variant": "str, as JSON",
}
_KEPT = "exact, if the column's type keeps it"


def _lines() -> list[Line]:
    found: dict[str, Line] = {}
    for line in POSTGRES:
        if line.spark in _PYTHON:
            found[line.spark] = _PYTHON[line.spark]
        elif line.spark in found:
            more = found[line.spark].columns + line.columns
            found[line.spark] = replace(found[line.spark], columns=more)
        elif line.spark in _NAMES:
            refused = (
                "what the database refuses" if line.spark != "string" else "not UTF-8, or refused"
            )
            columns = tuple(it for it in line.columns if it.kind != "variant")
            found[line.spark] = Line(line.spark, _NAMES[line.spark], _KEPT, refused, columns)
    return list(found.values())


LINES = _lines()


class TwoPhaseShape(PostgresShape):
    def __init__(self, name: str, dsn: str):
        super().__init__(name, dsn)
        self.columns = columns_of(LINES)
        self.names_column = False  # the database does not report the column of every error

    def sink(self) -> Any:
        self.create()
        return TwoPhase(psycopg.connect, self.table, dsn=self.dsn, name=self.name)


def twophase(dsn: str) -> list[Shape]:
    """Return the shapes of the sink."""
    return [TwoPhaseShape("two-phase", dsn)]


PAGE = {"Python": LINES}
