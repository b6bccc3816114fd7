"""What the database allows the role: rights and connection limits."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from poundlock.sinks.postgres.catalog import Table
from poundlock.sinks.postgres.link import Link
from poundlock.sinks.postgres.target import Target


def missing_rights(
    link: Link, table: Table, words: Sequence[str], columns: Sequence[str]
) -> list[str]:
    """Return the rights that the role has neither on the table nor on all of `columns`."""
    values = {"t": table.oid, "words": list(words), "names": list(columns)}
    return [word for word, may in link.run(_RIGHTS, values) if not may]


def closed_sequences(link: Link, table: Table, given: Sequence[str]) -> list[str]:
    """Return the sequences that the role may not use and that fill columns other than `given`."""
    return [name for (name,) in link.run(_SEQUENCES, [table.oid, list(given)])]


def own_rules(link: Link, table: Table) -> tuple[bool, list[str]]:
    """Return whether row level security binds the role, and the rules that rewrite its inserts."""
    [(secured, rules)] = link.run(_OWN_RULES, [table.oid])
    return secured, rules


def connection_limits(link: Link) -> dict[str, int]:
    """Return the limits on the role's connections, by the name of the setting."""
    return dict(link.run(_LIMITS))


def missing_grant(link: Link, target: Target, *, staging: bool = False) -> str | None:
    """Return the GRANT that is missing for the witness, and for `staging`; None if none is."""
    schema = sql.Identifier(target.witness_schema).as_string()
    # has_schema_privilege fails for a schema that does not exist: the right to the database decides.
    [(role, has_schema, may_use, may_create)] = link.run(_SCHEMA_RIGHTS, [schema])
    if not may_use:
        return f"GRANT CREATE, USAGE ON SCHEMA {schema} TO {role}"
    if not may_create and not has_schema:
        database = sql.Identifier(link.info.dbname).as_string()
        return f"GRANT CREATE ON DATABASE {database} TO {role}"
    # to_regclass fails for a schema that the role may not use.
    [(has_table,)] = link.run("SELECT to_regclass(%s) IS NOT NULL", [target.witness.table])
    if not may_create and (staging or not has_table):
        return f"GRANT CREATE, USAGE ON SCHEMA {schema} TO {role}"
    if has_table:
        [(allowed,)] = link.run(
            "SELECT bool_and(has_table_privilege(%s, word)) "
            "FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) word",
            [target.witness.table],
        )
        if not allowed:
            return f"GRANT SELECT, INSERT, UPDATE, DELETE ON {target.witness.table} TO {role}"
    return None


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
_SCHEMA_RIGHTS = """
SELECT quote_ident(current_user), oid IS NOT NULL,
       oid IS NULL OR has_schema_privilege(oid, 'USAGE'),
       CASE WHEN oid IS NULL THEN has_database_privilege(current_database(), 'CREATE')
            ELSE has_schema_privilege(oid, 'CREATE') END
FROM (SELECT to_regnamespace(%s)::oid) AS s (oid)
"""
