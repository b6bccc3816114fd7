"""The target table as the server describes it, and its comparison with the frame."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poundlock.core.participant import Column
from poundlock.core.sparksql import holds, to_json
from poundlock.errors import UsageError
from poundlock.sinks.mysql.link import Link

_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
_TEXTS = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "json")
_BYTES = ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob")
_EXACT = (*_INTEGERS, "decimal", "double")

# Spark's type to the types of columns that keep its values unchanged, or refuse them with an error.
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
# A line of SHOW GRANTS: the rights, and what they apply to.
_GRANT = re.compile(r"GRANT (.+?) ON (?:TABLE )?(\S+) TO ")
# MariaDB spells defaults as SQL. These are constants.
_PLAIN = re.compile(r"b?'(?:[^']|'')*'|NULL|[-+]?[\d.]+(?:e[-+]?\d+)?|0x[0-9a-f]*", re.IGNORECASE)
_LITERAL = re.compile(r"'((?:[^'\\]|''|\\.)*)'", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "0": "\0", "t": "\t", "Z": "\x1a"}
_MADE_JSON = ("array", "map", "struct")


def quoted(*parts: str) -> str:
    """Quote an identifier, or one of several parts."""
    for part in parts:
        if not part or "\0" in part or len(part) > 64 or part.endswith(" "):
            raise UsageError(
                f"{part!r} cannot be a name in MySQL: use 1 to 64 characters, none of them NUL, "
                "and no blank at the end"
            )
    return ".".join("`" + part.replace("`", "``") + "`" for part in parts)


def columns(names: list[str] | tuple[str, ...], of: str = "") -> str:
    """Quote a list of columns, each of the table alias `of`."""
    before = f"{of}." if of else ""
    return ", ".join(before + quoted(name) for name in names)


@dataclass(frozen=True)
class TargetColumn:
    """A column of the target, or one that only a staging table has."""

    name: str
    type: str  # information_schema's data_type
    full_type: str  # as in CREATE TABLE
    nullable: bool = True
    filled: bool = False  # the server has a value for it if none is given
    generated: bool = False
    computed: bool = False  # by the table if no value is given, which can fail
    serial: bool = False  # AUTO_INCREMENT: a new value each time
    length: int | None = None  # limit in characters, or in bytes of a binary column
    scale: int | None = None
    fraction: int | None = None  # digits of a second
    charset: str | None = None
    collation: str | None = None
    members: tuple[str, ...] = ()  # of ENUM and SET

    def definition(self) -> str:
        """Return the column's type for a table that must hold the same values."""
        text = f" CHARACTER SET {self.charset} COLLATE {self.collation}" if self.charset else ""
        null = "NULL" if self.nullable else "NOT NULL"
        if self.type == "timestamp" and not self.nullable:
            null += " DEFAULT '2000-01-01'"  # else some servers choose one that they then refuse
        return f"{self.full_type}{text} {null}"


@dataclass(frozen=True)
class Target:
    """A table."""

    database: str
    table: str
    engine: str
    columns: Mapping[str, TargetColumn]  # by name in lower case, in the table's order
    unique: tuple[frozenset[str], ...] = ()  # keys, as sets of column names in lower case
    strict: tuple[str, ...] = ()  # what else can refuse a row: foreign keys, triggers, checks
    partitioned: bool = False
    referenced: bool = False  # by foreign keys of other tables, or it is unknown
    hides_triggers: bool = False  # it may have some that the account cannot see

    def column(self, name: str) -> TargetColumn | None:
        return self.columns.get(name.lower())

    def may_refuse(self, written: Sequence[str], key: Sequence[str]) -> bool:
        """Whether rows that fit their columns could still be refused."""
        given = {name.lower() for name in written}
        return bool(
            self.strict
            or self.partitioned
            or self.hides_triggers
            or any(unique != frozenset(name.lower() for name in key) for unique in self.unique)
            or any(it.computed for name, it in self.columns.items() if name not in given)
            or (key and self.referenced)
        )


def read(link: Link, database: str, table: str) -> Target | None:
    """Read a table from the server; None if it does not exist or the account cannot see it."""
    where = "WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
    found = link.run(
        f"SELECT ENGINE, TABLE_TYPE, CREATE_OPTIONS FROM information_schema.TABLES {where}",
        (database, table),
    )
    if not found:
        return None
    engine, kind, options = found[0]
    keys: dict[str, set[str]] = {}
    for key, column, part in link.run(
        "SELECT INDEX_NAME, COLUMN_NAME, SUB_PART FROM information_schema.STATISTICS "
        f"{where} AND NON_UNIQUE = 0",
        (database, table),
    ):
        # A key over a part of a column, or over an expression, differs from one over the whole.
        other = f"{column or key}({part or 'computed'})"
        keys.setdefault(key, set()).add(column.lower() if column and part is None else other)
    constraints = link.run(
        "SELECT DISTINCT CONSTRAINT_TYPE FROM information_schema.TABLE_CONSTRAINTS "
        f"{where} AND CONSTRAINT_TYPE IN ('FOREIGN KEY', 'CHECK')",
        (database, table),
    )
    triggers = link.run(
        "SELECT TRIGGER_NAME FROM information_schema.TRIGGERS WHERE EVENT_OBJECT_SCHEMA = %s "
        "AND EVENT_OBJECT_TABLE = %s",
        (database, table),
    )
    strict = [row[0].lower() for row in constraints] + (["trigger"] if triggers else [])
    rights = _rights(link, database, table)
    # Only of the same database: to list those of others, MariaDB would open every table.
    referenced = link.run(
        "SELECT 1 FROM information_schema.REFERENTIAL_CONSTRAINTS WHERE CONSTRAINT_SCHEMA = %s "
        "AND UNIQUE_CONSTRAINT_SCHEMA = %s AND REFERENCED_TABLE_NAME = %s LIMIT 1",
        (database, database, table),
    )
    return Target(
        database,
        table,
        (engine or kind or "").lower(),
        describe(link, database, table),
        tuple(frozenset(key) for key in keys.values()),
        tuple(strict),
        partitioned="partitioned" in (options or ""),
        # The server shows only those of tables that the account may use.
        referenced=bool(referenced) or not rights.beyond,
        hides_triggers=not (link.is_mariadb or rights.triggers),  # MariaDB shows them to all
    )


@dataclass(frozen=True)
class _Rights:
    triggers: bool  # may see those of the table
    beyond: bool  # may see its database's other tables


def _rights(link: Link, database: str, table: str) -> _Rights:
    """Read the account's rights. An uncertain right, such as one through a role, does not count."""
    triggers = beyond = False
    for (grant,) in link.run("SHOW GRANTS"):
        found = _GRANT.match(grant)
        if found is None:
            if grant.startswith("REVOKE"):  # a part of what was granted
                return _Rights(triggers=False, beyond=False)
            continue
        given = {right.strip() for right in found[1].split(",")}
        where = found[2].replace("\\", "")  # a pattern; a name without its escapes matches itself
        wide = where in ("*.*", f"{quoted(database)}.*")
        beyond |= wide and bool(given & {"ALL PRIVILEGES", "SELECT"})
        if wide or where == quoted(database, table):
            triggers |= bool(given & {"ALL PRIVILEGES", "TRIGGER"})
    return _Rights(triggers, beyond)


def describe(link: Link, database: str, table: str) -> dict[str, TargetColumn]:
    """Read a table's columns from the server, by their names in lower case, in the table's order."""
    described = link.run(
        "SELECT COLUMN_NAME, DATA_TYPE, COLUMN_TYPE, IS_NULLABLE, COLUMN_DEFAULT, EXTRA, "
        "CHARACTER_MAXIMUM_LENGTH, NUMERIC_SCALE, DATETIME_PRECISION, CHARACTER_SET_NAME, "
        "COLLATION_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s "
        "ORDER BY ORDINAL_POSITION",
        (database, table),
    )
    return {row[0].lower(): _column(row, literals=link.is_mariadb) for row in described}


def layout(columns: Mapping[str, TargetColumn], names: Sequence[str]) -> str:
    """Return a hash of the types of some columns."""
    held = [columns.get(name.lower()) for name in names]
    spelled = "\n".join(f"{it.name} {it.full_type} {it.charset}" if it else "" for it in held)
    return hashlib.sha256(spelled.encode()).hexdigest()[:16]


def changes(
    before: Mapping[str, TargetColumn], now: Mapping[str, TargetColumn], names: Sequence[str]
) -> str | None:
    """Return which columns could now change values that were checked before; None if none."""
    found: list[str] = []
    for name in names:
        old, new = before.get(name.lower()), now.get(name.lower())
        if old is None or new is None:
            found.append(f"{name} is gone")
        elif not _keeps(old, new):
            found.append(f"{name} is {new.full_type} and was {old.full_type}")
    return ", ".join(found) or None


def lacking(now: Mapping[str, TargetColumn], names: Sequence[str]) -> str | None:
    """Return which columns lack a value if only these are written: MySQL would load zeros."""
    given = {name.lower() for name in names}
    found = [column.name for key, column in now.items() if key not in given and not column.filled]
    return f"{', '.join(found)} is NOT NULL without a default, and not written" if found else None


def _keeps(old: TargetColumn, new: TargetColumn) -> bool:
    """Whether a column keeps the values of another unchanged, or refuses them with an error."""
    if (old.full_type, old.charset) == (new.full_type, new.charset):
        return True
    if old.type in _INTEGERS:
        return new.type in (*_INTEGERS, "decimal")
    if old.type == "decimal":
        return new.type == "decimal" and (new.scale or 0) >= (old.scale or 0)
    if old.type in ("datetime", "timestamp"):
        return new.type == old.type and (new.fraction or 0) >= (old.fraction or 0)
    for family, cuts in ((_TEXTS, ("char", "json")), (_BYTES, ("binary",))):
        if old.type in family:
            return new.type in family and new.type not in cuts
    return False


def _column(row: tuple[Any, ...], *, literals: bool) -> TargetColumn:
    """Return the column that a row describes; `literals`: its default is written as SQL."""
    name, kind, full, nullable, default, extra, length, scale, fraction, charset, collation = row
    extra = (extra or "").lower()
    generated = "generated" in extra and "default_generated" not in extra
    expressed = "default_generated" in extra
    if literals and default is not None:
        expressed = not _PLAIN.fullmatch(default)
    now = (default or "").lower().startswith("current_timestamp")
    # Long texts are limited in bytes, which the server checks.
    limited = kind in ("char", "varchar", "binary", "varbinary")
    return TargetColumn(
        name=name,
        type=kind.lower(),
        full_type=full,
        nullable=nullable == "YES",
        filled=default is not None or nullable == "YES" or "auto_increment" in extra or generated,
        generated=generated,
        computed=generated or (expressed and not now),
        serial="auto_increment" in extra,
        length=int(length) if limited and length is not None else None,
        scale=scale,
        fraction=fraction if kind in ("datetime", "timestamp") else None,
        charset=charset,
        collation=collation,
        members=_members(full) if kind.lower() in ("enum", "set") else (),
    )


def _members(full_type: str) -> tuple[str, ...]:
    """Return the members of an ENUM or SET from its type, which lists them as literals."""
    return tuple(
        re.sub(
            r"''|\\(.)",
            lambda found: _ESCAPED.get(found[1], found[1]) if found[1] else "'",
            spelled,
            flags=re.DOTALL,
        )
        for spelled in _LITERAL.findall(full_type)
    )


def spark_kind(type_name: str) -> str:
    """Return a Spark type without its parameters: `decimal` for `decimal(10,2)`."""
    return re.split(r"[(<\s]", type_name, maxsplit=1)[0]


def expression(name: str, column: Column) -> str | None:
    """Return the Spark expression for a column; None if no type of MySQL holds it."""
    kind = spark_kind(column.type)
    if kind in _MADE_JSON:
        return to_json(name, column)
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
            f"column {column.name!r} is {column.full_type}, which cannot store {type_name} "
            f"unchanged: use {wanted}"
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
            "outside it are refused. Make it utf8mb4"
        )


def _compare_json(
    column: TargetColumn, type_name: str, problems: list[str], warnings: list[str]
) -> None:
    """MySQL's JSON has only 64-bit numbers. MariaDB's is text, and is described as text."""
    if spark_kind(type_name) == "string":
        warnings.append(
            f"column {column.name!r} is JSON, which MySQL rewrites: it rounds numbers of more than 17 "
            "digits. Make it LONGTEXT to keep the text unchanged"
        )
    elif holds(type_name, "decimal"):
        problems.append(
            f"column {column.name!r} is JSON, where MySQL would round the decimals of {type_name}: "
            "make it LONGTEXT, or cast them to string"
        )
