"""The TwoPhase sink on PostgreSQL with psycopg, whose values are Python objects."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

import psycopg

from poundlock.compliance.fidelity import Column, Line, Shape
from poundlock.compliance.values import DAY, FIRST_DAY, FIRST_TIME, LAST_DAY, LAST_TIME, is_utf8
from poundlock.sinks import TwoPhase

from .shapes_postgres import LINES as POSTGRES
from .shapes_postgres import PostgresShape
from .shapes_sql import columns_of


def _no_date(value: int) -> bool:
    return not FIRST_DAY <= value <= LAST_DAY


def _no_time(value: int) -> bool:
    return not FIRST_TIME <= value <= LAST_TIME


def _in_zone(value: int, zone: str) -> int:
    """Return the local time, which Python must be able to hold too."""
    inside = min(max(value, FIRST_TIME + DAY), LAST_TIME - DAY)
    moment = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(0, 0, inside)
    offset = moment.astimezone(ZoneInfo(zone)).utcoffset() or dt.timedelta()
    return value + offset // dt.timedelta(0, 0, 1)


def _cut(value: bytes) -> bytes:
    text = value.decode()
    return (text[:5] + text[5:].rstrip(" ")).encode()


def _not_short(value: bytes) -> bool:
    return not is_utf8(value) or b"\0" in value or len(_cut(value).decode()) > 5


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
        "outside of the years 1 to 9999, also in the session's time zone",
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
_CUT = f"{_KEPT}; PostgreSQL cuts blanks that are too much for varchar(n)"


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
            columns = tuple(_column(it) for it in line.columns if it.kind != "variant")
            kept = _CUT if line.spark == "string" else _KEPT
            found[line.spark] = Line(line.spark, _NAMES[line.spark], kept, refused, columns)
    return list(found.values())


def _column(column: Column) -> Column:
    """Return a column of PostgreSQL, whose INSERT cuts blanks."""
    if column.type != "varchar(5)":
        return column
    return replace(column, arrives=_cut, refuses=_not_short)


LINES = _lines()


class TwoPhaseShape(PostgresShape):
    def __init__(self, name: str, dsn: str):
        super().__init__(name, dsn)
        self.columns = columns_of(LINES)
        self.names_column = False  # the database does not report the column of every error

    def refuses(self, row: Mapping[str, Any]) -> list[Column]:
        local = {it: row.get(it) for it in ("timestamp",) if row.get(it) is not None}
        moved = {name: _in_zone(value, self.zone) for name, value in local.items()}  # type: ignore[arg-type]
        return super().refuses({**row, **moved}) or super().refuses(row)

    def sink(self) -> Any:
        self.create()
        return TwoPhase(psycopg.connect, self.table, dsn=self.dsn, name=self.name)


def twophase(dsn: str) -> list[Shape]:
    """Return the shapes of the sink."""
    return [TwoPhaseShape("two-phase", dsn)]


PAGE = {"Python": LINES}
