"""Staging tables, and how their rows are moved into the target.

A staging table has the columns that were written, with the target's NOT NULL and CHECK constraints,
so that a bad row is refused before the decision. If rows may be deletions, it also has the flag. A
deletion needs only its key, so NOT NULL then applies only to the other rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Cursor, sql

from poundlock.sinks.postgres.catalog import Table, TableColumn
from poundlock.sinks.postgres.errors import translate_error
from poundlock.sinks.postgres.link import Link
from poundlock.sinks.postgres.target import Target, staging_name
from poundlock.sinks.sql.naming import parse_id

logger = logging.getLogger("poundlock")

_DROPPED_AT_ONCE = 8
_LONG = 2000  # bytes that every index accepts
_READ = "100ms"  # how long to wait for a session that reads a staging table
FLAG = "poundlock_delete"  # marks a deletion in a staging table; no column of the target


def create_staging(
    link: Link, target: Target, table: Table, columns: Sequence[str], branch: str
) -> None:
    """Make a branch's staging table, inside the branch's transaction."""
    lines: list[sql.Composable] = []
    for name in columns:
        column = table.column(name)
        assert column is not None
        required = name in target.key or (column.required and target.delete is None)
        line = sql.SQL("{} {}{}").format(
            sql.Identifier(name),
            _raw(_staged_type(target, column) + column.collation),
            sql.SQL(" NOT NULL" if required else ""),
        )
        lines.append(line)
        if column.required and not required:
            lines.append(
                sql.SQL("CHECK ({} OR {} IS NOT NULL)").format(
                    sql.Identifier(FLAG), sql.Identifier(name)
                )
            )
    if target.delete is not None:
        lines.append(sql.SQL("{} boolean NOT NULL").format(sql.Identifier(FLAG)))
    else:
        lines += [
            sql.SQL("CONSTRAINT {} {}").format(sql.Identifier(check.name), _raw(check.definition))
            for check in table.checks
            if set(check.columns) <= set(columns)
        ]
    staging = target.staging(branch)
    link.execute(
        sql.SQL("CREATE TABLE {} ({}) WITH (autovacuum_enabled = off)").format(
            staging, sql.SQL(", ").join(lines)
        )
    )
    link.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(staging, sql.Literal(branch)))


def hurdles(target: Target, table: Table, columns: Sequence[str]) -> list[str]:
    """Name what may refuse a row in the target although its staging table accepted it."""
    found = list(table.hurdles)
    found += [
        f"unique index {index.name}" for index in table.indexes if not index.serves(target.key)
    ]
    found += [
        f"the default of column {column.name}"
        for column in table.columns
        if column.name not in columns and column.risky
    ]
    found += [
        f"domain {column.declared}"
        for column in table.columns
        if target.delete is not None and column.name in columns and column.base != column.declared
    ]
    found += [
        f"check {check.name}"
        for check in table.checks
        if target.delete is not None or not set(check.columns) <= set(columns)
    ]
    return found


def too_long(
    link: Link, target: Target, table: Table, branches: Sequence[str], columns: Sequence[str]
) -> bool:
    """Whether a row could be too long for an index of the target: the limit is some 2700 bytes."""
    sizes = [
        sql.SQL(" + ").join(
            sql.SQL("coalesce(pg_column_size({}), 0)").format(sql.Identifier(name))
            for name in names
            if name in columns
        )
        for names in table.long
        if set(names) & set(columns)
    ]
    if not sizes:
        return False
    query = sql.SQL("SELECT 1 FROM ({}) u WHERE greatest({}) > {} LIMIT 1").format(
        _union(target, branches), sql.SQL(", ").join(sizes), sql.Literal(_LONG)
    )
    return link.execute(query).fetchone() is not None


Columns = tuple[tuple[str, str], ...]  # the name of each, and its type as `\\d` shows it


def staged_branches(link: Link, target: Target) -> dict[str, Columns]:
    """Return the columns of each staged branch by its full id, which is the table's comment."""
    found = link.execute(
        "SELECT obj_description(c.oid, 'pg_class'), c.relname, "
        "ARRAY(SELECT ARRAY[a.attname::text, format_type(a.atttypid, a.atttypmod)] "
        "FROM pg_attribute a WHERE a.attrelid = c.oid "
        "AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum) "
        "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relkind = 'r' AND c.relname LIKE 'staged\\_%%'",
        [target.witness_schema],
    ).fetchall()
    return {
        branch: tuple((column, kind) for column, kind in columns)
        for branch, name, columns in found
        if parse_id(branch or "") is not None and staging_name(branch) == name
    }


def retyped(target: Target, table: Table, columns: Columns) -> list[str]:
    """Name the columns that have another type in the target than in staging."""
    problems: list[str] = []
    for name, kind in columns:
        column = table.column(name)
        if name == FLAG:
            continue
        if column is None:
            problems.append(f"{name} is {kind} in staging, but no longer in the table")
        elif _staged_type(target, column) != kind:
            problems.append(f"{name} is {kind} in staging, and {column.declared} in the table")
    return problems


def _staged_type(target: Target, column: TableColumn) -> str:
    """Return a column's type in staging. A deletion may be null where a domain refuses it."""
    return column.declared if target.delete is None else column.base


def has_duplicates(link: Link, target: Target, table: Table, branches: Sequence[str]) -> bool:
    """Whether two rows have the same key and `order_by` does not choose between them."""
    keys = _names(target.key)
    rows = _union(target, branches)
    doubled = sql.SQL("SELECT {0} FROM ({1}) u GROUP BY {0} HAVING count(*) > 1").format(keys, rows)
    if target.order_by is None:
        query = sql.SQL("{} LIMIT 1").format(doubled)
    else:
        order = sql.Identifier(target.order_by)
        query = sql.SQL(
            "SELECT 1 FROM (SELECT {keys}, rank() OVER (PARTITION BY {keys} ORDER BY {order} DESC "
            "NULLS LAST) AS place FROM ({rows}) t WHERE EXISTS (SELECT FROM ({doubled}) w "
            "WHERE {same})) b WHERE place = 1 GROUP BY {keys} HAVING count(*) > 1 LIMIT 1"
        ).format(keys=keys, order=order, rows=rows, doubled=doubled, same=_same(table, target.key))
    return link.execute(query).fetchone() is not None


def has_alike(link: Link, target: Target, table: Table, branches: Sequence[str]) -> bool:
    """Whether keys differ, but are equal to the table: as `citext`, or by a collation.

    Without an order they are duplicates like any other.
    """
    columns = {column.name: column for column in table.columns}
    loose = [it for it in target.key if columns[it].type == "citext" or columns[it].collation]
    if not loose or target.order_by is None:
        return False
    counts = sql.SQL(" OR ").join(
        sql.SQL('count(DISTINCT {}::text COLLATE "C") > 1').format(sql.Identifier(it))
        for it in loose
    )
    query = sql.SQL("SELECT 1 FROM ({}) u GROUP BY {} HAVING {} LIMIT 1").format(
        _union(target, branches), _names(target.key), counts
    )
    return link.execute(query).fetchone() is not None


def _same(table: Table, key: Sequence[str]) -> sql.Composed:
    """Return the condition that a row of `t` has the key of one of `w`, as the key's index sees it.

    It names each operator's schema, and the types of one that is not the server's own. Otherwise an
    operator that another user has made could match better.
    """
    serving = next((index for index in table.indexes if index.serves(key)), None)
    known = dict(zip(serving.columns, serving.equal, strict=False)) if serving else {}
    parts: list[sql.Composable] = []
    for name in key:
        schema, word, kind = known.get(name, ("pg_catalog", "=", ""))
        cast = "" if schema == "pg_catalog" else f"::{kind}"
        parts.append(
            sql.SQL("t.{name}{cast} OPERATOR({schema}.{word}) w.{name}{cast}").format(
                name=sql.Identifier(name),
                cast=_raw(cast),
                schema=sql.Identifier(schema),
                word=_raw(word),
            )
        )
    return sql.SQL(" AND ").join(parts)


def _change(link: Link, statement: sql.Composed) -> Cursor[Any]:
    """Change the target. Its triggers and checks run with the role's search path.

    So the statement must qualify every function and operator.
    """
    with link.users_path():
        return link.execute(statement)


@dataclass(frozen=True, slots=True)
class Moved:
    """What a move did."""

    rows: Mapping[str, int]  # of each staging table; for appends, those that were accepted
    left_out: int = 0  # upserted rows that the target did not accept


def move(
    link: Link, target: Target, table: Table, branches: Sequence[str], columns: Sequence[str]
) -> Moved:
    """Move the rows of these staging tables into the target, in the transaction that is open."""
    written = [name for name in columns if name != FLAG]
    always = any(column.identity == "a" for column in table.columns if column.name in written)
    into = sql.SQL("INSERT INTO {} AS t ({}){}").format(
        table.identifier, _names(written), sql.SQL(" OVERRIDING SYSTEM VALUE" if always else "")
    )
    if target.key:
        return _upsert(link, target, table, branches, written, into)
    return Moved(
        {
            branch: _change(
                link,
                sql.SQL("{} SELECT {} FROM {}").format(
                    into, _names(written), target.staging(branch)
                ),
            ).rowcount
            for branch in branches
        }
    )


def _upsert(
    link: Link,
    target: Target,
    table: Table,
    branches: Sequence[str],
    written: Sequence[str],
    into: sql.Composed,
) -> Moved:
    rows: sql.Composed = _union(target, branches)
    if target.order_by is not None:
        rows = sql.SQL(
            "SELECT DISTINCT ON ({keys}) * FROM ({rows}) u ORDER BY {keys}, {order} DESC NULLS LAST"
        ).format(keys=_names(target.key), rows=rows, order=sql.Identifier(target.order_by))
    stays: sql.Composable = sql.SQL("true")
    parts = {
        "w": sql.SQL("WITH w AS MATERIALIZED ({})").format(rows),
        "into": into,
        "names": _names(written),
        "keys": _names(target.key),
        "table": table.identifier,
        "same": _same(table, target.key),
        "flag": sql.Identifier(FLAG),
    }
    if target.delete is not None:
        # Deletions first: another row may need a unique value that one of them frees.
        _change(
            link,
            sql.SQL("{w} DELETE FROM {table} t USING w WHERE w.{flag} AND {same}").format(**parts),
        )
        stays = sql.SQL("NOT {flag}").format(**parts)
    parts["stays"] = stays
    changed = [name for name in written if name not in target.key]
    if changed:
        parts["changes"] = sql.SQL(", ").join(
            sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in changed
        )
        [(given, put)] = _change(
            link,
            sql.SQL(
                "{w}, put AS ({into} SELECT {names} FROM w WHERE {stays} ON CONFLICT ({keys}) "
                "DO UPDATE SET {changes} RETURNING 1) SELECT "
                "(SELECT pg_catalog.count(*) FROM w WHERE {stays}), "
                "(SELECT pg_catalog.count(*) FROM put)"
            ).format(**parts),
        )
        left_out = given - put
    else:
        _change(
            link,
            sql.SQL(
                "{w} {into} SELECT {names} FROM w WHERE {stays} ON CONFLICT ({keys}) DO NOTHING"
            ).format(**parts),
        )
        [(left_out,)] = link.execute(
            sql.SQL(
                "{w} SELECT count(*) FROM w WHERE {stays} "
                "AND NOT EXISTS (SELECT FROM {table} t WHERE {same})"
            ).format(**parts)
        )
    return Moved(_count(link, target, branches), left_out)


def lock_all(link: Link, target: Target, branches: Sequence[str]) -> None:
    """Take the locks that a move takes on the staging tables."""
    tables = sql.SQL(", ").join(target.staging(branch) for branch in branches)
    link.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(tables))


def _count(link: Link, target: Target, branches: Sequence[str]) -> dict[str, int]:
    """Count the rows of each staging table."""
    parts = [
        sql.SQL("SELECT {}::text, count(*) FROM {}").format(
            sql.Literal(branch), target.staging(branch)
        )
        for branch in branches
    ]
    found = link.execute(sql.SQL(" UNION ALL ").join(parts)).fetchall()
    return dict(found)


def drop(link: Link, target: Target, branches: Sequence[str]) -> None:
    tables = sql.SQL(", ").join(target.staging(branch) for branch in branches)
    link.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(tables))


def clear_away(link: Link, target: Target, branches: Sequence[str]) -> None:
    """Drop the staging tables of branches that have ended, unless a session reads them. Never raises.

    `find` drops what remains. A few are dropped at a time, because each takes several of the
    server's locks.
    """
    for start in range(0, len(branches), _DROPPED_AT_ONCE):
        try:
            with link.transaction():
                link.override_timeouts(_READ)
                drop(link, target, branches[start : start + _DROPPED_AT_ONCE])
        except psycopg.Error as error:
            read = isinstance(error, psycopg.errors.LockNotAvailable)
            logger.warning(
                "sink %s: %d staging tables are no longer needed but cannot be dropped yet: %s",
                *(target.sink, len(branches) - start),
                "a session reads them" if read else translate_error(error).args[0],
            )
            return


def _union(target: Target, branches: Sequence[str]) -> sql.Composed:
    return sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT * FROM {}").format(target.staging(branch)) for branch in branches
    )


def _names(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(name) for name in names)


def _raw(text: str) -> sql.SQL:
    """Return SQL text that came from the server itself."""
    return sql.SQL(text)  # pyright: ignore[reportArgumentType]
