"""PostgreSQL, as an operator inspects it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from poundlock.core.inspector import Ended, Inspector, OpenBranch
from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.sinks.postgres.link import Connections, Link, database_of, system_of
from poundlock.sinks.postgres.prepared import prepared_strays
from poundlock.sinks.postgres.sink import Postgres
from poundlock.sinks.postgres.target import staging_name
from poundlock.sinks.sql.naming import parse_id, read_id
from poundlock.sinks.sql.receipts import STAGED, witness_of
from poundlock.sinks.sql.witness import ended_by

# In every schema, because the witness_schema= of the sinks is not known here.
_STAGED = (
    "SELECT n.nspname, c.relname, obj_description(c.oid, 'pg_class') "
    "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relkind = 'r' AND c.relname LIKE 'staged\\_%'"
)
_DEFAULT_SCHEMA = "poundlock"


class PostgresInspector(Inspector):
    """A database, and every prepared or staged branch in it."""

    system = "PostgreSQL"

    def __init__(self, dsn: str):
        self._dsn = dsn
        self._connections = Connections(dsn, "")
        self._sinks: list[Postgres] = []

    def open(self, namespace: Namespace | None = None) -> list[OpenBranch]:
        with self._connections.lend() as link:
            strays = [stray for _, stray in prepared_strays(link)]
            strays += _staged_strays(link, self._dsn)
        found = [OpenBranch(read_id(stray.id).name.namespace, stray) for stray in strays]
        return [it for it in found if namespace in (None, it.namespace)]

    def holds(self, receipt: Receipt) -> bool:
        with self._connections.lend() as link:
            here = {"system": system_of(link), "database": database_of(link)}
        there = {word: receipt.handle.get(word) for word in here}
        return all(None in (there[word], here[word]) or there[word] == here[word] for word in here)

    def ended(self, receipts: Sequence[Receipt]) -> dict[str, Ended]:
        found: dict[str, Ended] = {}
        with self._connections.lend() as link:
            for schema in {witness_of(it)[0] or _DEFAULT_SCHEMA for it in receipts}:
                mine = [it for it in receipts if (witness_of(it)[0] or _DEFAULT_SCHEMA) == schema]
                witness = Postgres("any", dsn=self._dsn, witness_schema=schema).target.witness
                found |= ended_by(witness, link, mine)
        return found

    def participant(self, branch: Receipt | Stray) -> Postgres:
        if isinstance(branch, Receipt):
            schema = witness_of(branch)[0] or _DEFAULT_SCHEMA
        else:
            schema = str(branch.handle.get("schema", _DEFAULT_SCHEMA))
        made = Postgres(
            "any", dsn=self._dsn, name=branch.sink, mode="prepared", witness_schema=schema
        )
        self._sinks.append(made)
        return made

    def close(self) -> None:
        for each in (self._connections, *self._sinks):
            each.close()


def _staged_strays(link: Link, dsn: str) -> Iterator[Stray]:
    """List the staged branches that have not ended. A table that is being read can outlive its move."""
    found: dict[str, list[str]] = {}
    for schema, table, branch in link.run(_STAGED):
        if parse_id(branch or "") is not None and table == staging_name(branch):
            found.setdefault(schema, []).append(branch)
    for schema, branches in found.items():
        witness = Postgres("any", dsn=dsn, witness_schema=schema).target.witness
        over = witness.states(link, branches)
        for branch in branches:
            if branch not in over:
                name = read_id(branch).name
                yield Stray(name.sink, branch, name.generation, STAGED, {"schema": schema})
