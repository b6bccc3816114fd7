"""The target table and its options, as plain values that are sent to the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from psycopg import sql

from poundlock.core.model import Receipt
from poundlock.sinks.sql import staging
from poundlock.sinks.sql.staging import StagedRows
from poundlock.sinks.sql.witness import Witness


@dataclass(frozen=True)
class Target:
    """A table, and how rows are written to it."""

    sink: str
    dsn: str = field(repr=False)
    schema: str | None
    table: str
    key: tuple[str, ...]
    delete: str | None
    order_by: str | None
    witness_schema: str
    lock_timeout: float
    key_partitioned: bool

    @property
    def identifier(self) -> sql.Identifier:
        return (
            sql.Identifier(self.schema, self.table) if self.schema else sql.Identifier(self.table)
        )

    @property
    def witness(self) -> Witness:
        table = sql.Identifier(self.witness_schema, "witness").as_string()
        schema = sql.Identifier(self.witness_schema).as_string()
        create = (
            _LOCK,
            _CREATE_SCHEMA.format(schema=schema, name=sql.Literal(schema).as_string()),
            _CREATE_TABLE.format(table=table),
        )
        return Witness(self.sink, self.witness_schema, table, create, "witness_schema=")

    def staging(self, branch: str) -> sql.Identifier:
        return sql.Identifier(self.witness_schema, staging_name(branch))

    def staged_rows(self, schema: str, columns: Sequence[str]) -> StagedRows:
        return StagedRows(schema, self.table, self.key, self.order_by, self.delete, tuple(columns))

    def as_recorded(self, receipts: Sequence[Receipt]) -> Target:
        """Return the target as it was when these branches were written."""
        rows = StagedRows.of(receipts)
        return replace(
            self,
            schema=rows.schema,
            table=rows.table,
            key=rows.key,
            order_by=rows.order_by,
            delete=rows.delete,
        )

    @property
    def wait(self) -> str:
        return f"{int(self.lock_timeout * 1000)}ms"


def staging_name(branch: str) -> str:
    return staging.staging_name("staged_", branch)


_LOCK = "SELECT pg_advisory_xact_lock(8101823371654492003)"  # held while the schema is created
# Not by IF NOT EXISTS, which needs the permission to create even if the schema exists.
_CREATE_SCHEMA = """
DO $poundlock$ BEGIN
    IF to_regnamespace({name}) IS NULL THEN CREATE SCHEMA {schema}; END IF;
END $poundlock$
"""
_CREATE_TABLE = """
CREATE TABLE IF NOT EXISTS {table} (
    branch text PRIMARY KEY,
    pipeline text NOT NULL,
    identity text NOT NULL,
    generation bigint NOT NULL,
    sink text NOT NULL,
    batch bigint NOT NULL,
    state text NOT NULL CHECK (state IN ('committed', 'aborted')),
    at timestamptz NOT NULL DEFAULT now()
)"""
