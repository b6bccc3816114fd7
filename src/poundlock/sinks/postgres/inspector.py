"""PostgreSQL, as a person looks into it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from psycopg import Connection

from poundlock.core.inspector import Inspector, OpenBranch
from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.sinks.postgres import witness
from poundlock.sinks.postgres.prepared import OPEN
from poundlock.sinks.postgres.session import Driver, database_of, system_of
from poundlock.sinks.postgres.sink import Postgres
from poundlock.sinks.postgres.target import read_id, staging_name

# In every schema: which ones the sinks have as witness_schema= is not known here.
_STAGED = (
    "SELECT n.nspname, c.relname, obj_description(c.oid, 'pg_class') "
    "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relkind = 'r' AND c.relname LIKE 'staged\\_%'"
)
_USUAL = "poundlock"  # where witnesses are unless a sink says otherwise
_SCHEMA = (
    "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.oid::text = %s"
)


class PostgresInspector(Inspector):
    """A database, and every branch of ours that it holds prepared or staged."""

    system = "PostgreSQL"

    def __init__(self, dsn: str):
        self._dsn = dsn
        self._driver = Driver(dsn, "")
        self._made: list[Postgres] = []

    def open(self, namespace: Namespace | None = None) -> list[OpenBranch]:
        with self._driver.use() as connection:
            strays = [*_prepared(connection), *_staged(connection, self._dsn)]
        found: list[OpenBranch] = []
        for stray in strays:
            parsed = read_id(stray.id)
            assert parsed is not None, "no other is listed"
            if namespace in (None, parsed[0].namespace):
                found.append(OpenBranch(parsed[0].namespace, stray))
        return found

    def holds(self, receipt: Receipt) -> bool:
        with self._driver.use() as connection:
            here = {"system": system_of(connection), "database": database_of(connection)}
        told = {word: receipt.handle.get(word) for word in here}
        return all(None in (told[word], here[word]) or told[word] == here[word] for word in here)

    def participant(self, branch: Receipt | Stray) -> Postgres:
        schema = str(branch.handle.get("schema", _USUAL))
        if isinstance(branch, Receipt):
            with self._driver.use() as connection:
                oid = str(branch.handle.get("witness")).partition(":")[0]
                found = connection.execute(_SCHEMA, [oid]).fetchone()
            schema = found[0] if found else _USUAL  # a witness that was dropped is missing anywhere
        made = Postgres(
            "any", dsn=self._dsn, name=branch.sink, mode="prepared", witness_schema=schema
        )
        self._made.append(made)
        return made

    def close(self) -> None:
        for each in (self._driver, *self._made):
            each.close()


def _prepared(connection: Connection[Any]) -> Iterator[Stray]:
    for gid, began, owner, _ in connection.execute(OPEN).fetchall():
        parsed = read_id(gid)
        if parsed is not None:
            name = parsed[0]
            yield Stray(name.sink, gid, name.generation, "prepared", {"owner": owner}, began)


def _staged(connection: Connection[Any], dsn: str) -> Iterator[Stray]:
    """Those that are not over: a table may outlive its move, while somebody reads it."""
    found: dict[str, list[str]] = {}
    for schema, table, branch in connection.execute(_STAGED).fetchall():
        if read_id(branch or "") is not None and table == staging_name(branch):
            found.setdefault(schema, []).append(branch)
    for schema, branches in found.items():
        target = Postgres("any", dsn=dsn, witness_schema=schema).target
        over = witness.states(connection, target, branches)
        for branch in branches:
            parsed = read_id(branch)
            if branch not in over and parsed is not None:
                name = parsed[0]
                yield Stray(name.sink, branch, name.generation, "staged", {"schema": schema})
