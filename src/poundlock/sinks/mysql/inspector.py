"""MySQL and MariaDB, as an operator inspects them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

from poundlock.core.inspector import Ended, Inspector, OpenBranch
from poundlock.core.model import Namespace, Receipt, Stray
from poundlock.sinks.mysql.errors import MYSQL
from poundlock.sinks.mysql.link import Link, connect, drop
from poundlock.sinks.mysql.prepared import prepared_branches
from poundlock.sinks.mysql.sink import MySQL
from poundlock.sinks.mysql.witness import STAGE_PREFIX, Witnesses, witness_for, witness_in
from poundlock.sinks.sql.naming import parse_id, read_id
from poundlock.sinks.sql.receipts import PREPARED, STAGED, witness_of
from poundlock.sinks.sql.staging import staging_name
from poundlock.sinks.sql.witness import ended_by


class MySQLInspector(Inspector):
    """A server, and every branch on it that is prepared by XA or staged."""

    system = "MySQL"

    def __init__(self, url: str):
        self._url = url
        self._sinks: list[MySQL] = []

    def open(self, namespace: Namespace | None = None) -> list[OpenBranch]:
        with self._link() as link:
            strays = [
                Stray(it.name.sink, str(it), it.name.generation, PREPARED)
                for it in prepared_branches(link, namespace)
            ]
            strays += _staged_strays(link)
        found = [OpenBranch(read_id(stray.id).name.namespace, stray) for stray in strays]
        return [it for it in found if namespace in (None, it.namespace)]

    def holds(self, receipt: Receipt) -> bool:
        with self._link() as link:
            return witness_for(receipt).identity(link) == witness_of(receipt)[1]

    def ended(self, receipts: Sequence[Receipt]) -> dict[str, Ended]:
        found: dict[str, Ended] = {}
        with self._link() as link:
            for witness, mine in Witnesses(receipts).groups():
                found |= ended_by(witness, link, mine)
        return found

    def participant(self, branch: Receipt | Stray) -> MySQL:
        if isinstance(branch, Receipt):
            database = witness_of(branch)[0]
        else:
            database = branch.handle.get("database")
        table = "any" if database is None else f"{database}.any"  # the witness is beside it
        made = MySQL(table, url=self._url, name=branch.sink, mode="xa")
        self._sinks.append(made)
        return made

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    @contextlib.contextmanager
    def _link(self) -> Generator[Link]:
        link = connect(self._url, sink="", lock_timeout=10)
        try:
            with MYSQL.translated_errors(""):
                yield link
        finally:
            drop(link)


def _staged_strays(link: Link) -> list[Stray]:
    """List the staged branches that have not ended, each with its database, which a sink can choose."""
    by_database: dict[str, list[str]] = {}
    for database, table, comment in link.run(
        "SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_COMMENT FROM information_schema.TABLES "
        "WHERE TABLE_NAME LIKE %s",
        (STAGE_PREFIX.replace("_", "\\_") + "%",),
    ):
        if parse_id(comment) is not None and table == staging_name(STAGE_PREFIX, comment):
            by_database.setdefault(database, []).append(comment)
    strays: list[Stray] = []
    for database, branches in by_database.items():
        over = witness_in(database, "").states(link, branches)
        for branch in branches:
            if branch not in over:
                name, handle = read_id(branch).name, {"database": database}
                strays.append(Stray(name.sink, branch, name.generation, STAGED, handle))
    return strays
