"""What the database allows the role that we are, and how many of us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection

from poundlock.sinks.postgres.catalog import Table


def missing_rights(
    connection: Connection[Any], table: Table, words: Sequence[str], columns: Sequence[str]
) -> list[str]:
    """Return which rights the role has neither to the table nor to each of `columns`."""
    asked = {"t": table.oid, "words": list(words), "names": list(columns)}
    return [word for word, may in connection.execute(_RIGHTS, asked).fetchall() if not may]


def closed_sequences(connection: Connection[Any], table: Table, given: Sequence[str]) -> list[str]:
    """Return the sequences that fill columns which are not `given`, and that the role may not use."""
    return [name for (name,) in connection.execute(_SEQUENCES, [table.oid, list(given)]).fetchall()]


def own_rules(connection: Connection[Any], table: Table) -> tuple[bool, list[str]]:
    """Return whether row level security binds the role, and the rules that rewrite its inserts."""
    secured, rules = connection.execute(_OWN_RULES, [table.oid]).fetchone() or (False, [])
    return secured, rules


def connection_limits(connection: Connection[Any]) -> dict[str, int]:
    """Return how many connections the role may have at most, by what says so."""
    return dict(connection.execute(_LIMITS).fetchall())


_RIGHTS = """
SELECT word, has_table_privilege(%(t)s::oid, word) OR CASE WHEN word <> 'DELETE' THEN coalesce(
    (SELECT bool_and(has_column_privilege(%(t)s::oid, name, word)) FROM unnest(%(names)s::text[]) name),
    false) ELSE false END
FROM unnest(%(words)s::text[]) word
"""
_OWN_RULES = """
SELECT row_security_active(oid), ARRAY(SELECT rulename::text FROM pg_rewrite
                                       WHERE ev_class = c.oid AND ev_type = '3' AND ev_enabled <> 'D')
FROM pg_class c WHERE oid = %s
"""
_LIMITS = """
SELECT 'the server''s max_connections', current_setting('max_connections')::int
       - current_setting('superuser_reserved_connections')::int
       - coalesce(current_setting('reserved_connections', true)::int, 0)
UNION ALL
SELECT 'the role''s CONNECTION LIMIT', rolconnlimit FROM pg_roles
WHERE rolname = current_user AND rolconnlimit >= 0 AND NOT rolsuper
UNION ALL
SELECT 'the database''s CONNECTION LIMIT', datconnlimit FROM pg_database, pg_roles
WHERE datname = current_database() AND datconnlimit >= 0 AND rolname = current_user AND NOT rolsuper
"""
_SEQUENCES = """
SELECT DISTINCT s.oid::regclass::text
FROM pg_attrdef d
JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
JOIN pg_depend p ON p.classid = 'pg_attrdef'::regclass AND p.objid = d.oid
                 AND p.refclassid = 'pg_class'::regclass
JOIN pg_class s ON s.oid = p.refobjid AND s.relkind = 'S'
WHERE d.adrelid = %s AND a.attname <> ALL (%s)
  AND CASE WHEN s.relkind = 'S' THEN NOT has_sequence_privilege(s.oid, 'USAGE, UPDATE') END
"""
