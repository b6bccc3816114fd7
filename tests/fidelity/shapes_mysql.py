"""The MySQL sink on MariaDB, read by PyMySQL."""

from __future__ import annotations

import math
from typing import Any

import pymysql

from poundlock.compliance.fidelity import NUMBER, Column, Line, Shape
from poundlock.compliance.values import FIRST_DAY, FIRST_TIME, KINDS, LAST_DAY, LAST_TIME, is_utf8
from poundlock.servers import mariadb
from poundlock.sinks import MySQL

from .shapes_sql import GONE, TableShape

_NESTED = ("array", "times", "map", "numbers", "struct", "strict", "stricts", "deep")
_LAST_TIMESTAMP = (2**31 - 1) * 1_000_000 + 999_999


def _no_text(value: Any) -> bool:
    return not is_utf8(value)


def _not_short(value: bytes) -> bool:
    return _no_text(value) or len(value.decode()) > 5


def _not_char(value: bytes) -> bool:
    return _not_short(value) or value.endswith(b" ")


def _positive(value: float) -> float:
    return value + 0.0  # -0.0 becomes 0.0


def _no_date(value: int) -> bool:
    return not FIRST_DAY <= value <= LAST_DAY


def _no_time(value: int) -> bool:
    return not FIRST_TIME <= value <= LAST_TIME


def _no_timestamp(value: int) -> bool:
    return not 0 < value <= _LAST_TIMESTAMP


def _infinite(value: float) -> bool:
    return not math.isfinite(value)


LINES = [
    Line(
        "boolean",
        "any integer type, DECIMAL",
        "exact, as 0 and 1",
        columns=(Column("boolean", "tinyint"),),
    ),
    Line(
        "tinyint, smallint, int, bigint",
        "any integer type, DECIMAL; all but bigint also DOUBLE, which loses no digits",
        "exact",
        "a number that a smaller type cannot hold",
        columns=(
            Column("tinyint", "tinyint"),
            Column("smallint", "smallint"),
            Column("smallint", "tinyint", refuses=lambda it: not -128 <= it <= 127),
            Column("int", "int"),
            Column("int", "double"),
            Column("bigint", "bigint"),
            Column("bigint", "decimal(19)"),
        ),
    ),
    Line(
        "float, double",
        "FLOAT (float only), DOUBLE; not `FLOAT(m,d)` or `DOUBLE(m,d)`, which round",
        "exact; MariaDB makes 0.0 of -0.0",
        "NaN and infinities",
        columns=(
            Column("float", "float", _positive, refuses=_infinite),
            Column("float", "double", _positive, refuses=_infinite),
            Column("double", "double", _positive, refuses=_infinite),
        ),
    ),
    Line(
        "decimal(p,s)",
        "DECIMAL with at least as many digits after the point",
        "exact",
        columns=(
            Column("decimal10", "decimal(10,2)"),
            Column("decimal38", "decimal(38)"),
            Column("fraction38", "decimal(38,38)"),
        ),
    ),
    Line(
        "string",
        "CHAR(n), VARCHAR(n), TEXT, with `utf8mb4`",
        "exact",
        "not UTF-8; longer than n; for CHAR, with a blank at the end, which it removes",
        columns=(
            Column("string", "longtext", refuses=_no_text),
            Column("string", "varchar(5)", refuses=_not_short),
            Column("string", "char(5)", refuses=_not_char),
        ),
    ),
    Line(
        "string",
        "JSON, UUID, INET6, ENUM and SET by the names of their members",
        "UUID in lower case; JSON is exact in MariaDB, and in MySQL keeps the meaning, not the text; "
        "the members of a SET are put in order",
        "no such text",
        columns=(Column("uuid", "uuid", bytes.lower), Column("json", "json")),
    ),
    Line(
        "binary",
        "VARBINARY, BLOB, BINARY(n)",
        "exact",
        "too long; for BINARY(n), too short, because it would be padded",
        columns=(
            Column("binary", "longblob"),
            Column("binary", "varbinary(40)", refuses=lambda it: len(it) > 40),
            Column("binary", "binary(2)", refuses=lambda it: len(it) != 2),
        ),
    ),
    Line(
        "date",
        "DATE, DATETIME",
        "exact",
        "outside of the years 1 to 9999",
        columns=(Column("date", "date", refuses=_no_date),),
    ),
    Line(
        "timestamp, timestamp_ntz",
        "DATETIME(6), TIMESTAMP(6) (timestamp only); a timestamp is stored in UTC",
        "exact",
        "outside of the years 1 to 9999, for TIMESTAMP of 1970 to 2038; a time that a type with fewer "
        "digits would cut",
        columns=(
            Column("timestamp", "datetime(6)", refuses=_no_time),
            Column("timestamp_ntz", "datetime(6)", refuses=_no_time),
            Column("timestamp", "timestamp(6)", refuses=_no_timestamp),
            Column(
                "timestamp_ntz", "datetime(3)", refuses=lambda it: _no_time(it) or bool(it % 1000)
            ),
        ),
    ),
    Line(
        "array, map, struct",
        "JSON or a text type, as JSON; with decimals only a text type in MySQL, whose JSON rounds them",
        "exact; nulls and microseconds are kept",
        "texts that are not UTF-8",
        columns=(
            *(Column(kind, "json", refuses=_no_text) for kind in ("array", "struct", "deep")),
            *(Column(kind, "longtext", refuses=_no_text) for kind in _NESTED),
        ),
    ),
    Line("interval, variant, void", "none", "refused at start"),
]


class MySQLShape(TableShape):
    def __init__(self, name: str, server: mariadb.MariaDB, **options: Any):
        super().__init__(name, LINES, **options)
        self.server = server

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        arguments = self.server.connect_arguments()
        connection = pymysql.connect(
            **arguments, autocommit=True, init_command="SET time_zone='+00:00'"
        )
        with connection, connection.cursor() as cursor:
            cursor.execute(statement.replace("timestamp(6)", "timestamp(6) null"))
            return list(cursor.fetchall())

    def sink(self) -> MySQL:
        self.create()
        keyed = {} if self.key is None else {"key": self.key, "delete": GONE, "order_by": NUMBER}
        return MySQL(self.table, url=self.server.address, name=self.name, **keyed, **self.options)

    def shown(self, column: Column) -> str:
        name, kind = column.name, KINDS[column.kind].type.name
        if kind == "date":  # TO_DAYS counts from the year 0
            return f"TO_DAYS({name}) - TO_DAYS('1970-01-01')"
        if kind.startswith("timestamp"):
            return f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {name})"
        if (kind == "string" and column.type != "uuid") or KINDS[column.kind].type.parts:
            return f"CAST({name} AS BINARY)"
        if column.type == "float":  # of which the server shows six digits
            return f"CAST({name} AS DOUBLE)"
        return name


def mysql(server: mariadb.MariaDB) -> list[Shape]:
    """Return the shapes of the sink."""
    return [
        MySQLShape("my-xa", server, mode="xa"),
        MySQLShape("my-staged", server, mode="staged"),
        MySQLShape("my-upsert", server, key=NUMBER),
        MySQLShape("my-upsert-xa", server, key=NUMBER, mode="xa", key_partitioned=True),
    ]


PAGE = {"column": LINES}
