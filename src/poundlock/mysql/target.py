"""The target table as the server describes it, and the frame beside it, column by column."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from poundlock.core.participant import Column
from poundlock.core.sparksql import to_json
from poundlock.mysql.link import Link, run

_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
_TEXTS = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "json")
_BYTES = ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob")
_EXACT = (*_INTEGERS, "decimal", "double")

# Spark's type to the types of columns that hold its values unchanged, or refuse them aloud.
_HOLDS: Mapping[str, tuple[str, ...]] = {
    "boolean": (*_INTEGERS, "decimal"),
    "tinyint": _EXACT,
    "smallint": _EXACT,
    "int": _EXACT,
    "bigint": (*_INTEGERS, "decimal"),
    "float": ("float", "double"),
    "double": ("double",),
    "decimal": ("decimal",),
    "string": (*_TEXTS, "enum", "set", "uuid", "inet4", "inet6"),
    "binary": _BYTES,
    "date": ("date", "datetime"),
    "timestamp": ("datetime", "timestamp"),
    "timestamp_ntz": ("datetime",),
    "array": _TEXTS,
    "map": _TEXTS,
    "struct": _TEXTS,
}
_LITERAL = re.compile(r"'((?:[^'\\]|''|\\.)*)'", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "0": "\0", "t": "\t", "Z": "\x1a"}
_MADE_JSON = ("array", "map", "struct")


@dataclass(frozen=True)
class TargetColumn:
    """A column of the target, or one that only a staging table has."""

    name: str
    type: str  # information_schema's data_type
    full_type: str  # as in CREATE TABLE
    nullable: bool = True
    filled: bool = False  # the server has a value for it if we give none
    generated: bool = False
    serial: bool = False  # AUTO_INCREMENT: a new value each time
    length: int | None = None  # characters, or bytes of binary columns, where that is a limit
    scale: int | None = None
    fraction: int | None = None  # digits of a second
    charset: str | None = None
    collation: str | None = None
    members: tuple[str, ...] = ()  # of ENUM and SET

    def definition(self) -> str:
        """Return the column's type for a table that is to hold the same values."""
        text = f" CHARACTER SET {self.charset} COLLATE {self.collation}" if self.charset else ""
        return f"{self.full_type}{text} {'NULL' if self.nullable else 'NOT NULL'}"


@dataclass(frozen=True)
class Target:
    """A table."""

    database: str
    table: str
    engine: str
    columns: Mapping[str, TargetColumn]  # by name in lower case, in the table's order
    unique: tuple[frozenset[str], ...] = ()  # keys, as sets of column names in lower case
    strict: tuple[str, ...] = ()  # what else can refuse a row: foreign keys, triggers, checks

    def column(self, name: str) -> TargetColumn | None:
        return self.columns.get(name.lower())


def read(link: Link, database: str, table: str) -> Target | None:
    """Ask the server for a table; None if there is none, or no right to see it."""
    where = "WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
    found = run(
        link, f"SELECT ENGINE, TABLE_TYPE FROM information_schema.TABLES {where}", (database, table)
    )
    if not found:
        return None
    engine, kind = found[0]
    described = run(
        link,
        "SELECT COLUMN_NAME, DATA_TYPE, COLUMN_TYPE, IS_NULLABLE, COLUMN_DEFAULT, EXTRA, "
        "CHARACTER_MAXIMUM_LENGTH, NUMERIC_SCALE, DATETIME_PRECISION, CHARACTER_SET_NAME, "
        f"COLLATION_NAME FROM information_schema.COLUMNS {where} ORDER BY ORDINAL_POSITION",
        (database, table),
    )
    keys: dict[str, set[str]] = {}
    for key, column, part in run(
        link,
        "SELECT INDEX_NAME, COLUMN_NAME, SUB_PART FROM information_schema.STATISTICS "
        f"{where} AND NON_UNIQUE = 0",
        (database, table),
    ):
        # A key over a part of a column is another key than one over all of it.
        keys.setdefault(key, set()).add(column.lower() if part is None else f"{column}({part})")
    constraints = run(
        link,
        "SELECT DISTINCT CONSTRAINT_TYPE FROM information_schema.TABLE_CONSTRAINTS "
        f"{where} AND CONSTRAINT_TYPE IN ('FOREIGN KEY', 'CHECK')",
        (database, table),
    )
    triggers = run(
        link,
        "SELECT TRIGGER_NAME FROM information_schema.TRIGGERS WHERE EVENT_OBJECT_SCHEMA = %s "
        "AND EVENT_OBJECT_TABLE = %s",
        (database, table),
    )
    strict = [row[0].lower() for row in constraints] + (["trigger"] if triggers else [])
    columns = {row[0].lower(): _column(row) for row in described}
    return Target(
        database, table, (engine or kind or "").lower(), columns,
        tuple(frozenset(key) for key in keys.values()), tuple(strict),
    )  # fmt: skip


def _column(row: tuple) -> TargetColumn:  # pyright: ignore[reportMissingTypeArgument]
    name, kind, full, nullable, default, extra, length, scale, fraction, charset, collation = row
    extra = (extra or "").lower()
    generated = "generated" in extra and "default_generated" not in extra
    # Long texts are limited in bytes, and the server will say so.
    limited = kind in ("char", "varchar", "binary", "varbinary")
    return TargetColumn(
        name=name,
        type=kind.lower(),
        full_type=full,
        nullable=nullable == "YES",
        filled=default is not None or nullable == "YES" or "auto_increment" in extra or generated,
        generated=generated,
        serial="auto_increment" in extra,
        length=int(length) if limited and length is not None else None,
        scale=scale,
        fraction=fraction if kind in ("datetime", "timestamp") else None,
        charset=charset,
        collation=collation,
        members=_members(full) if kind.lower() in ("enum", "set") else (),
    )


def _members(full_type: str) -> tuple[str, ...]:
    """Read the members of an ENUM or SET off its type, where the server spells them as literals."""
    return tuple(
        re.sub(r"''|\\(.)", lambda found: _ESCAPED.get(found[1], found[1]) if found[1] else "'",
               spelled, flags=re.DOTALL)
        for spelled in _LITERAL.findall(full_type)
    )  # fmt: skip


def spark_kind(type_name: str) -> str:
    """Return the head of a Spark type: `decimal(10,2)` is a decimal."""
    return re.split(r"[(<\s]", type_name, maxsplit=1)[0]


def expression(column: Column) -> str | None:
    """Return how Spark is to hand a column over; None for a type that has no place in MySQL."""
    kind = spark_kind(column.type)
    if kind in _MADE_JSON:
        return to_json(column.sql)
    return column.sql if kind in _HOLDS else None


def differences(target: Target, frame: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Compare the frame's columns (name to Spark type) with the table's: errors and warnings."""
    problems, warnings = list[str](), list[str]()
    for name, type_name in frame.items():
        column = target.column(name)
        if column is None:
            problems.append(f"the table has no column {name!r}, which the frame has as {type_name}")
        elif column.generated:
            problems.append(f"column {name!r} is computed by the table and cannot be written")
        else:
            _compare(column, type_name, problems, warnings)
    given = {name.lower() for name in frame}
    problems += [
        f"column {column.name!r} ({column.full_type}) is NOT NULL without a default, but the frame "
        "has no such column"
        for key, column in target.columns.items()
        if key not in given and not column.filled
    ]
    return problems, warnings


def _compare(
    column: TargetColumn, type_name: str, problems: list[str], warnings: list[str]
) -> None:
    kind = spark_kind(type_name)
    if column.type not in _HOLDS.get(kind, ()):
        wanted = ", ".join(_HOLDS.get(kind, ("none",)))
        problems.append(
            f"column {column.name!r} is {column.full_type}, which does not hold {type_name} "
            f"unchanged: {wanted} would"
        )
        return
    if kind == "decimal":
        scale = int(type_name.partition(",")[2].strip(") ") or 0)
        if column.scale is not None and column.scale < scale:
            problems.append(
                f"column {column.name!r} is {column.full_type}, which would round {type_name}"
            )
    if column.type in ("float", "double") and column.scale is not None:
        problems.append(
            f"column {column.name!r} is {column.full_type}, which would round {type_name}: make it "
            f"{column.type.upper()}"
        )
    if column.type == "json":
        _compare_json(column, type_name, problems, warnings)
    if column.fraction is not None and column.fraction < 6 and kind.startswith("timestamp"):
        warnings.append(
            f"column {column.name!r} is {column.full_type} and would round microseconds: rows that "
            f"have them are refused. Make it {column.type}(6)"
        )
    if kind == "string" and column.charset not in (None, "utf8mb4", "binary"):
        warnings.append(
            f"column {column.name!r} has character set {column.charset}: rows with characters "
            "beyond it are refused. Make it utf8mb4"
        )


def _compare_json(
    column: TargetColumn, type_name: str, problems: list[str], warnings: list[str]
) -> None:
    """MySQL's own JSON has no numbers but 64 bits; MariaDB's is a text, and called so."""
    if spark_kind(type_name) == "string":
        warnings.append(
            f"column {column.name!r} is JSON, which MySQL spells anew, numbers of more than 17 digits "
            "rounded. Make it LONGTEXT to keep the text as it is"
        )
    elif "decimal" in type_name:
        problems.append(
            f"column {column.name!r} is JSON, where MySQL would round the decimals of {type_name}: "
            "make it LONGTEXT, or cast them to string"
        )
