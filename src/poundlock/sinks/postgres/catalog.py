"""A table as the database describes it: columns, unique indexes, and what can refuse a row."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql

from poundlock.errors import UsageError
from poundlock.sinks.postgres.link import Link

_RANDOM = ("nextval(", "gen_random_uuid(", "uuid_generate_v", "uuidv7(", "uuidv4(")

# Defaults that are constants, or expressions that cannot fail.
_SAFE = re.compile(
    r"(\(?-?[\d.]+\)?|'(?:[^']|'')*'|true|false|NULL"
    r"|nextval\('[^']*'::regclass\)|(now|clock_timestamp|statement_timestamp|uuidv[47])\(\)"
    r"|(\w+\.)?(uuid_generate_v[14]|gen_random_uuid)\(\)|timezone\('utc'::text, now\(\)\)"
    r"|\(now\(\) AT TIME ZONE 'utc'::text\)|ARRAY\[\]"
    r"|CURRENT_(DATE|TIME|TIMESTAMP|USER)(\(\d\))?|LOCALTIME(STAMP)?(\(\d\))?|SESSION_USER)"
    r"(::[\w .\"\[\](),]+)?"
)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column."""

    name: str
    type: str  # its name in pg_type; of a domain, that of its base; "enum" for any enum
    typmod: int
    declared: str  # as `\\d` shows it
    base: str  # the same; of a domain, that of its base
    collation: str  # the COLLATE clause, if it is not the type's own
    required: bool  # NOT NULL
    filled: bool  # has a default or is an identity
    default: str
    generated: bool
    identity: str  # 'a' always, 'd' by default, '' none

    @property
    def risky(self) -> bool:
        """Whether the default is computed by an expression that could fail."""
        return bool(self.default) and not _SAFE.fullmatch(self.default)

    @property
    def unlike_any(self) -> bool:
        """Whether the default makes a new value for each row."""
        return bool(self.identity) or any(word in self.default for word in _RANDOM)


@dataclass(frozen=True, slots=True)
class Index:
    """A unique index or an exclusion constraint: one task's row may wait there for another's."""

    name: str
    columns: tuple[str | None, ...]  # None: an expression
    plain: bool  # unique, immediate, over columns, for all rows: ON CONFLICT can name it
    equal: tuple[tuple[str, str, str], ...]  # by column: its operator's schema, name and type

    def serves(self, key: Sequence[str]) -> bool:
        """Whether ON CONFLICT over these columns uses it."""
        return self.plain and set(self.columns) == set(key)


@dataclass(frozen=True, slots=True)
class Check:
    """A CHECK constraint."""

    name: str
    definition: str
    columns: tuple[str, ...]  # "*": the whole row, as a value of the table's own type


@dataclass(frozen=True, slots=True)
class Table:
    """A table, and what matters to the rows that are written to it."""

    oid: int
    schema: str
    name: str
    columns: tuple[TableColumn, ...]
    indexes: tuple[Index, ...]
    checks: tuple[Check, ...]
    hurdles: tuple[str, ...]  # what a staging table cannot copy: foreign keys, triggers, ...
    long: tuple[tuple[str, ...], ...]  # columns of unlimited length, grouped by index
    shape: str  # a hash of what a staging table copies: it changes if that is altered

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    def column(self, name: str) -> TableColumn | None:
        return next((column for column in self.columns if column.name == name), None)


def _alike(link: Link, name: str) -> str:
    """Name tables that the user may have meant: in another schema, or with other capitals."""
    found = link.run(
        "SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE lower(c.relname) = lower(%s) "
        "AND c.relkind IN ('r', 'p') ORDER BY 1 LIMIT 3",
        [name],
    )
    return ", but there is " + ", ".join(row[0] for row in found) if found else ""


def _find(link: Link, name: str) -> int | None:
    """Return the oid of the table that the user means, by the role's own search path."""
    with link.transaction(), link.users_path():
        [(oid,)] = link.run(
            "SELECT pg_catalog.to_regclass(%s::pg_catalog.text)::pg_catalog.oid", [name]
        )
    return oid


def read_table(link: Link, schema: str | None, name: str, *, key: Sequence[str] = ()) -> Table:
    """Read a table from the catalog. Raises `UsageError` if it cannot be written to.

    `key` has the columns of the unique index that a new table needs.
    """
    wanted = sql.Identifier(schema, name) if schema else sql.Identifier(name)
    found = link.run(
        "SELECT c.oid, n.nspname, c.relname, c.relkind::text, c.relrowsecurity FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s",
        [_find(link, wanted.as_string(link))],
    )
    if not found:
        index = f" with a unique index on ({', '.join(key)})" if key else ""
        raise UsageError(
            f"there is no table {wanted.as_string(link)} in database "
            f"{link.info.dbname}{_alike(link, name)}. Create it{index}, or give schema= "
            "and the exact name"
        )
    [(oid, schema_name, table_name, kind, secured)] = found
    if kind not in ("r", "p"):
        raise UsageError(f"{schema_name}.{table_name} is not a table: name an ordinary one")
    hurdles = [row[0] for row in link.run(_HURDLES, {"table": oid})]
    if kind == "p":
        hurdles.append("its partitions")
    if secured:
        hurdles.append("row level security")
    return Table(
        oid,
        schema_name,
        table_name,
        tuple(TableColumn(*row) for row in link.run(_COLUMNS, [oid])),
        tuple(
            Index(index, tuple(columns), plain, tuple((s, name, of) for s, name, of in equal))
            for index, columns, plain, equal in link.run(_INDEXES, [oid])
        ),
        tuple(
            Check(
                check,
                definition.replace(" NOT VALID", "").replace(" NO INHERIT", ""),
                tuple(columns or ()),
            )
            for check, definition, columns in link.run(_CHECKS, [oid])
            if not definition.endswith("NOT ENFORCED")
        ),
        tuple(hurdles),
        tuple(tuple(names) for (names,) in link.run(_LONG, [oid]) if names),
        _shape(link, oid),
    )


def _shape(link: Link, oid: int) -> str:
    found = link.run(_SHAPE, {"table": oid})
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


_COLUMNS = """
SELECT a.attname,
       CASE WHEN b.typtype = 'e' THEN 'enum' ELSE b.typname::text END,
       b.typmod,
       format_type(a.atttypid, a.atttypmod),
       format_type(b.oid, b.typmod),
       coalesce(
           CASE WHEN a.attcollation <> t.typcollation
                THEN ' COLLATE ' || quote_ident(m.nspname) || '.' || quote_ident(l.collname) END, ''),
       a.attnotnull OR b.required,
       (a.atthasdef AND a.attgenerated = '') OR a.attidentity <> '' OR t.typdefault IS NOT NULL,
       CASE WHEN a.attgenerated = '' THEN coalesce(pg_get_expr(d.adbin, d.adrelid), '') ELSE '' END,
       a.attgenerated <> '',
       a.attidentity::text
FROM pg_attribute a
JOIN pg_type t ON t.oid = a.atttypid
JOIN LATERAL (
    WITH RECURSIVE up AS (  -- a domain can be based on another
        SELECT t.oid, t.typname, t.typtype, t.typbasetype, t.typtypmod, t.typnotnull,
               a.atttypmod AS typmod
        UNION ALL
        SELECT u.oid, u.typname, u.typtype, u.typbasetype, u.typtypmod, u.typnotnull, up.typtypmod
        FROM up JOIN pg_type u ON u.oid = up.typbasetype WHERE up.typtype = 'd'
    )
    SELECT *, (SELECT bool_or(typnotnull) FROM up) AS required FROM up WHERE typtype <> 'd'
) b ON true
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
LEFT JOIN pg_collation l ON l.oid = a.attcollation
LEFT JOIN pg_namespace m ON m.oid = l.collnamespace
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""

_INDEXES = """
SELECT c.relname::text,
       ARRAY(SELECT a.attname::text FROM unnest(i.indkey) WITH ORDINALITY AS k (number, place)
             LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
                                      AND k.number > 0
             WHERE k.place <= i.indnkeyatts ORDER BY k.place),
       i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
           AND i.indexprs IS NULL,
       ARRAY(SELECT ARRAY[n.nspname::text, o.oprname::text, format_type(p.opcintype, NULL)]
             FROM unnest(i.indclass) WITH ORDINALITY AS k (class, place)
             JOIN pg_opclass p ON p.oid = k.class
             JOIN pg_amop m ON m.amopfamily = p.opcfamily AND m.amoplefttype = p.opcintype
                            AND m.amoprighttype = p.opcintype AND m.amopstrategy = 3  -- equality
             JOIN pg_operator o ON o.oid = m.amopopr JOIN pg_namespace n ON n.oid = o.oprnamespace
             ORDER BY k.place)
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = %s AND (i.indisunique OR i.indisexclusion) AND i.indislive
ORDER BY 1
"""

_CHECKS = """
SELECT c.conname::text, pg_get_constraintdef(c.oid),
       ARRAY(SELECT a.attname::text FROM pg_attribute a
             WHERE a.attrelid = c.conrelid AND a.attnum = ANY (c.conkey))
           || CASE WHEN 0 = ANY (c.conkey) THEN ARRAY['*'] END  -- the row as one value
FROM pg_constraint c WHERE c.conrelid = %s AND c.contype = 'c' ORDER BY 1
"""

# As stored: the readable form depends on the session's settings.
_SHAPE = """
SELECT attname::text, concat_ws(' ', atttypid, atttypmod, attcollation, attnotnull, atthasdef,
                                attgenerated, attidentity)
FROM pg_attribute WHERE attrelid = %(table)s AND attnum > 0 AND NOT attisdropped
UNION ALL
SELECT conname::text, conbin::text FROM pg_constraint WHERE conrelid = %(table)s AND contype = 'c'
ORDER BY 1, 2
"""

_HURDLES = """
SELECT 'foreign key ' || conname FROM pg_constraint
WHERE contype = 'f' AND %(table)s IN (conrelid, confrelid)
UNION ALL
SELECT 'exclusion constraint ' || conname FROM pg_constraint
WHERE contype = 'x' AND conrelid = %(table)s
UNION ALL
SELECT 'trigger ' || tgname FROM pg_trigger WHERE tgrelid = %(table)s AND NOT tgisinternal
UNION ALL
SELECT 'rule ' || rulename FROM pg_rewrite WHERE ev_class = %(table)s
UNION ALL
SELECT 'generated column ' || attname FROM pg_attribute
WHERE attrelid = %(table)s AND attgenerated = 's' AND NOT attisdropped
UNION ALL
SELECT 'partial or computed index ' || c.relname FROM pg_index i
JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = %(table)s AND (i.indexprs IS NOT NULL OR i.indpred IS NOT NULL)
"""

# The columns of unlimited length in each index, which refuses an entry that is too long.
_LONG = """
SELECT DISTINCT ARRAY(SELECT a.attname::text FROM unnest(i.indkey) k (number)
                      JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
                      WHERE a.attlen = -1 AND a.attnum > 0 ORDER BY 1) AS names
FROM pg_index i WHERE i.indrelid = %s
"""
