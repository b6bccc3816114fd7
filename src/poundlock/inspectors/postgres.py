"""PostgreSQL, as a person looks into it."""

from __future__ import annotations

from poundlock.core.inspector import Found, Inspector
from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.postgres.prepared import OPEN
from poundlock.postgres.session import Driver
from poundlock.postgres.target import read_id
from poundlock.sinks.postgres import Postgres


class PostgresInspector(Inspector):
    """A database, and every branch of ours that it holds prepared."""

    system = "PostgreSQL"

    def __init__(self, dsn: str):
        self._dsn = dsn

    def open(self, namespace: Namespace | None = None) -> list[Found]:
        driver = Driver(self._dsn, "any")
        try:
            with driver.use() as connection:
                listed = connection.execute(OPEN).fetchall()
        finally:
            driver.close()
        found: list[Found] = []
        for gid, began, owner, _ in listed:
            parsed = read_id(gid)
            if parsed is not None and namespace in (None, parsed[0].namespace):
                name = parsed[0]
                stray = Stray(name.sink, gid, name.generation, "prepared", {"owner": owner}, began)
                found.append(Found(name.namespace, stray))
        return found

    def participant(self, sink: str, receipt: Receipt | None = None) -> Postgres | None:
        # A staged branch is moved with the others of its batch, as its pipeline knows how.
        if receipt is not None and receipt.handle.get("mode") != "prepared":
            return None
        return Postgres("any", dsn=self._dsn, name=sink, mode="prepared")
