"""The Postgres sink, read by psycopg."""

from __future__ import annotations

import json
from typing import Any

import psycopg

from poundlock.compliance.fidelity import NUMBER, Column, Line, Shape
from poundlock.compliance.values import DAY, KINDS, has_nul, is_utf8
from poundlock.sinks import Postgres

from .shapes_sql import GONE, TableShape, as_json

_FIRST_DAY = -2_440_588  # 4713 BC
_NESTED = ("array", "times", "map", "numbers", "struct", "strict", "stricts", "deep")


def _no_text(value: Any) -> bool:
    return not is_utf8(value) or has_nul(value)


def _no_jsonb(value: Any) -> bool:
    return _no_text(value) or (isinstance(value, str) and "\\u0000" in value)


def _not_short(value: bytes) -> bool:
    return _no_text(value) or len(value.decode()) > 5


def _early(value: int) -> bool:
    return value < _FIRST_DAY


def _early_time(value: int) -> bool:
    return value < _FIRST_DAY * DAY


def _not_short_char(value: bytes) -> bool:
    return _no_text(value) or len(value.decode()) > 6


LINES = [
    Line("boolean", "bool", "exact", columns=(Column("boolean", "bool"),)),
    Line(
        "tinyint, smallint, int, bigint",
        "an integer at least as wide, or numeric with enough digits",
        "exact",
        columns=(
            Column("tinyint", "int2"),
            Column("smallint", "int2"),
            Column("smallint", "int8"),
            Column("int", "int4"),
            Column("int", "numeric(10)"),
            Column("bigint", "int8"),
            Column("bigint", "numeric"),
        ),
    ),
    Line(
        "float, double",
        "float4 (float only), float8",
        "exact; NaN, infinities and -0.0 too",
        columns=(Column("float", "float4"), Column("float", "float8"), Column("double", "float8")),
    ),
    Line(
        "decimal(p,s)",
        "numeric, if no value can be rounded",
        "exact",
        columns=(
            Column("decimal10", "numeric(10,2)"),
            Column("decimal38", "numeric"),
            Column("fraction38", "numeric(38,38)"),
        ),
    ),
    Line(
        "string",
        "text, varchar(n), char(n), citext, an enum",
        "exact; char(n) fills up with blanks",
        "not UTF-8; with a NUL; longer than n, blanks included",
        columns=(
            Column("string", "text", refuses=_no_text),
            Column("string", "varchar(5)", refuses=_not_short),
            Column("string", "char(6)", lambda it: _padded(it), refuses=_not_short_char),
        ),
    ),
    Line(
        "string",
        "uuid, jsonb, json, xml",
        "uuid in lower case; jsonb keeps the meaning, not the text; json and xml exact",
        "no such text",
        columns=(
            Column("uuid", "uuid", bytes.lower),
            Column("json", "jsonb", as_json()),
            Column("json", "json"),
            Column("xml", "xml"),
        ),
    ),
    Line("binary", "bytea", "exact", columns=(Column("binary", "bytea"),)),
    Line(
        "date", "date", "exact", "before 4713 BC", columns=(Column("date", "date", refuses=_early),)
    ),
    Line(
        "timestamp, timestamp_ntz",
        "timestamptz, timestamp",
        "exact",
        "before 4713 BC; a time that a type such as `timestamp(3)` would round",
        columns=(
            Column("timestamp", "timestamptz", refuses=_early_time),
            Column("timestamp_ntz", "timestamp", refuses=_early_time),
            Column(
                "timestamp", "timestamptz(3)", refuses=lambda it: _early_time(it) or bool(it % 1000)
            ),
        ),
    ),
    Line(
        "interval day to second, time",
        "interval (with all fields and six fractional digits), time",
        "exact",
        columns=(Column("daytime", "interval"),),
    ),
    Line(
        "array, map, struct, variant",
        "jsonb, json or text, as JSON",
        "exact; nulls and microseconds are kept",
        "texts that are not UTF-8; for jsonb, texts with a NUL",
        columns=(
            *(Column(kind, "jsonb", refuses=_no_jsonb) for kind in (*_NESTED, "variant")),
            *(Column(kind, "text", refuses=lambda it: not is_utf8(it)) for kind in _NESTED),
            Column("variant", "json"),
        ),
    ),
    Line("interval year to month, void", "none", "refused at start"),
]


def _padded(value: bytes) -> bytes:
    return value.decode().ljust(6).encode()


class PostgresShape(TableShape):
    def __init__(self, name: str, dsn: str, **options: Any):
        super().__init__(name, LINES, **options)
        self.dsn = dsn

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            done = connection.execute(statement)  # type: ignore[arg-type]
            return done.fetchall() if done.description else []

    def sink(self) -> Postgres:
        self.create()
        keyed = {} if self.key is None else {"key": self.key, "delete": GONE, "order_by": NUMBER}
        return Postgres(self.table, dsn=self.dsn, name=self.name, **keyed, **self.options)

    def shown(self, column: Column) -> str:
        name, type_ = column.name, KINDS[column.kind].type
        if type_.name == "date":
            return f"{name} - DATE '1970-01-01'"
        if type_.name in ("timestamp", "timestamp_ntz", "interval day to second"):
            return f"(extract(epoch FROM {name}) * 1000000)::bigint"
        if type_.parts or type_.name in ("variant", "string", "decimal"):
            return f"{name}::text"
        return name

    def value(self, column: Column, shown: Any) -> Any:
        if column.type == "jsonb" and column.kind == "json":
            return json.dumps(json.loads(shown), sort_keys=True).encode()
        if column.type.startswith("char"):
            return shown.ljust(6).encode()  # its text has no blanks at the end
        value = super().value(column, shown)
        return value.lower() if column.type == "uuid" else value


class PostgresKeys(PostgresShape):
    """A table whose key is a value, and not the number. The last row of a key wins."""

    def __init__(self, name: str, dsn: str, column: Column, **options: Any):
        super().__init__(name, dsn, key=column.name, **options)
        self.columns = [column]

    def create(self) -> None:
        (column,) = self.columns
        self.execute(f"DROP TABLE IF EXISTS {self.table}")
        self.execute(
            f"CREATE TABLE {self.table} ({column.name} {column.type} PRIMARY KEY, {NUMBER} bigint)"
        )

    def takes(self, row: dict[str, Any]) -> bool:
        return row.get(self.columns[0].kind) is not None

    def deletes(self, row: Any) -> bool:
        """Return whether the last row of the key is another one, or deletes it."""
        kind = self.columns[0].kind
        mine = KINDS[kind].type.normal(row[kind])
        same = [
            it[NUMBER]
            for it in self.rows
            if self.takes(it) and KINDS[kind].type.normal(it[kind]) == mine
        ]
        return row[NUMBER] != same[-1] or row[NUMBER] % 7 == 0

    def select(self) -> list[str]:
        return [*Shape.select(self), f"{NUMBER} % 7 = 0 AS {GONE}"]


def postgres(dsn: str) -> list[Shape]:
    """Return the shapes of the sink."""
    keys = (
        Column("string", "text", refuses=_no_text),
        Column("binary", "bytea"),
        Column("decimal38", "numeric"),
        Column("timestamp", "timestamptz", refuses=_early_time),
    )
    return [
        PostgresShape("pg-prepared", dsn),
        PostgresShape("pg-staged", dsn, mode="staged"),
        PostgresShape("pg-upsert", dsn, key=NUMBER),
        PostgresShape("pg-upsert-prepared", dsn, key=NUMBER, mode="prepared", key_partitioned=True),
        *(PostgresKeys(f"pg-key-{it.kind}", dsn, it) for it in keys),
    ]


PAGE = {"PostgreSQL": LINES}
