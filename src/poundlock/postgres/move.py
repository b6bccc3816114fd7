"""Staging tables, and the one statement that moves their rows into the target.

A staging table has the columns that were written, with the target's NOT NULL and CHECK constraints,
so that a bad row is refused before the decision. Where rows may be deletions, it has the flag too; a
deletion needs its key alone, so there NOT NULL binds the other rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from psycopg import Connection, sql

from poundlock.postgres.catalog import Table
from poundlock.postgres.target import Target, staging_name

if TYPE_CHECKING:
    from typing_extensions import LiteralString

FLAG = (
    "poundlock_delete"  # the staging table's name for it: the target may have a column of any name
)


def create_staging(
    connection: Connection[Any], target: Target, table: Table, columns: Sequence[str], branch: str
) -> None:
    """Make a branch's staging table, inside the branch's transaction."""
    lines: list[sql.Composable] = []
    for name in columns:
        column = table.column(name)
        assert column is not None
        required = name in target.key or (column.required and target.delete is None)
        line = sql.SQL("{} {}{}").format(
            sql.Identifier(name),
            _raw(column.declared),
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
    connection.execute(
        sql.SQL("CREATE TABLE {} ({}) WITH (autovacuum_enabled = off)").format(
            staging, sql.SQL(", ").join(lines)
        )
    )
    connection.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(staging, sql.Literal(branch)))


def hurdles(target: Target, table: Table, columns: Sequence[str]) -> list[str]:
    """Name what may refuse a row in the target though staging has taken it."""
    found = list(table.hurdles)
    found += [
        f"unique index {index.name}"
        for index in table.indexes
        if not (index.plain and set(index.columns) == set(target.key))
    ]
    found += [
        f"check {check.name}"
        for check in table.checks
        if target.delete is not None or not set(check.columns) <= set(columns)
    ]
    return found


def staged_branches(connection: Connection[Any], target: Target) -> dict[str, tuple[str, ...]]:
    """Return each staged branch by its whole name, with its columns. Reads the comments."""
    found = connection.execute(
        "SELECT obj_description(c.oid, 'pg_class'), c.relname, "
        "ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = c.oid "
        "AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum) "
        "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relkind = 'r' AND c.relname LIKE 'staged\\_%%'",
        [target.witness_schema],
    ).fetchall()
    return {
        branch: tuple(columns)
        for branch, name, columns in found
        if branch is not None and staging_name(branch) == name
    }


def count(connection: Connection[Any], target: Target, branches: Sequence[str]) -> dict[str, int]:
    """Count the rows of each staging table."""
    parts = [
        sql.SQL("SELECT {}::text, count(*) FROM {}").format(
            sql.Literal(branch), target.staging(branch)
        )
        for branch in branches
    ]
    found = connection.execute(sql.SQL(" UNION ALL ").join(parts)).fetchall()
    return dict(found)


def has_duplicates(connection: Connection[Any], target: Target, branches: Sequence[str]) -> bool:
    """Whether two rows with one key remain, between which `order_by` does not choose."""
    keys = _names(target.key)
    rows = _union(target, branches)
    doubled = sql.SQL("SELECT {0} FROM ({1}) u GROUP BY {0} HAVING count(*) > 1").format(keys, rows)
    if target.order_by is None:
        asked = sql.SQL("{} LIMIT 1").format(doubled)
    else:
        order = sql.Identifier(target.order_by)
        asked = sql.SQL(
            "SELECT 1 FROM (SELECT {keys}, rank() OVER (PARTITION BY {keys} ORDER BY {order} DESC "
            "NULLS LAST) AS place FROM ({rows}) a WHERE ({keys}) IN ({doubled})) b "
            "WHERE place = 1 GROUP BY {keys} HAVING count(*) > 1 LIMIT 1"
        ).format(keys=keys, order=order, rows=rows, doubled=doubled)
    return connection.execute(asked).fetchone() is not None


def move(
    connection: Connection[Any],
    target: Target,
    table: Table,
    branches: Sequence[str],
    columns: Sequence[str],
) -> dict[str, int]:
    """Move the rows of these staging tables into the target, in the transaction that is open.

    Return how many each had; of appended rows, how many the target took.
    """
    written = [name for name in columns if name != FLAG]
    always = any(column.identity == "a" for column in table.columns if column.name in written)
    into = sql.SQL("INSERT INTO {} AS t ({}){}").format(
        table.identifier,
        _names(written),
        sql.SQL(" OVERRIDING SYSTEM VALUE" if always else ""),
    )
    if not target.key:
        return {
            branch: connection.execute(
                sql.SQL("{} SELECT {} FROM {}").format(
                    into, _names(written), target.staging(branch)
                )
            ).rowcount
            for branch in branches
        }
    rows = count(connection, target, branches)
    connection.execute(_upsert(target, table, branches, written, into, FLAG in columns))
    return rows


def _upsert(
    target: Target,
    table: Table,
    branches: Sequence[str],
    written: Sequence[str],
    into: sql.Composed,
    flagged: bool,
) -> sql.Composed:
    rows: sql.Composed = _union(target, branches)
    if target.order_by is not None:
        rows = sql.SQL(
            "SELECT DISTINCT ON ({keys}) * FROM ({rows}) u ORDER BY {keys}, {order} DESC NULLS LAST"
        ).format(keys=_names(target.key), rows=rows, order=sql.Identifier(target.order_by))
    with_ = sql.SQL("WITH w AS MATERIALIZED ({})").format(rows)
    if flagged:
        same = sql.SQL(" AND ").join(
            sql.SQL("t.{0} = w.{0}").format(sql.Identifier(name)) for name in target.key
        )
        with_ = sql.SQL("{}, gone AS (DELETE FROM {} t USING w WHERE w.{} AND {})").format(
            with_, table.identifier, sql.Identifier(FLAG), same
        )
    changed = [name for name in written if name not in target.key]
    then: sql.Composable = sql.SQL("DO NOTHING")
    if changed:
        then = sql.SQL("DO UPDATE SET {}").format(
            sql.SQL(", ").join(
                sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in changed
            )
        )
    return sql.SQL(
        "{with_} {into} SELECT {names} FROM w{where} ON CONFLICT ({keys}) {then}"
    ).format(
        with_=with_,
        into=into,
        names=_names(written),
        where=sql.SQL(" WHERE NOT {}").format(sql.Identifier(FLAG)) if flagged else sql.SQL(""),
        keys=_names(target.key),
        then=then,
    )


def drop(connection: Connection[Any], target: Target, branches: Sequence[str]) -> None:
    if branches:
        tables = sql.SQL(", ").join(target.staging(branch) for branch in branches)
        connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(tables))


def _union(target: Target, branches: Sequence[str]) -> sql.Composed:
    return sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT * FROM {}").format(target.staging(branch)) for branch in branches
    )


def _names(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(name) for name in names)


def _raw(text: str) -> sql.SQL:
    """SQL that the server itself has spelled."""
    return sql.SQL(cast("LiteralString", text))
