"""MySQL and MariaDB, as a person looks into them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from poundlock.core.inspector import Inspector, OpenBranch
from poundlock.core.model import Json, Namespace, Receipt, Stray
from poundlock.core.naming import BranchName, parse_name
from poundlock.sinks.mysql.branches import Witness, every
from poundlock.sinks.mysql.link import Link, connect, drop, run, said
from poundlock.sinks.mysql.move import PREFIX, stage_name
from poundlock.sinks.mysql.sink import MySQL


class MySQLInspector(Inspector):
    """A server, and every branch of ours that it holds prepared by XA or staged."""

    system = "MySQL"

    def __init__(self, url: str):
        self._url = url
        self._made: list[MySQL] = []

    def open(self, namespace: Namespace | None = None) -> list[OpenBranch]:
        with self._link() as link:
            listed = [
                (name, "prepared", {"mode": "xa", "task": branch.task})
                for name, branch in every(link, namespace)
            ] + [
                (name, "staged", {"mode": "staged", "task": 0, "database": database})
                for name, database in _staged(link)
            ]
        return [
            OpenBranch(name.namespace, Stray(name.sink, str(name), name.generation, state, handle))
            for name, state, handle in listed
            if namespace in (None, name.namespace)
        ]

    def holds(self, receipt: Receipt) -> bool:
        database, wanted = cast("list[str]", receipt.handle["witness"])
        with self._link() as link:
            return Witness(database).identity(link) == wanted

    def participant(self, branch: Receipt | Stray) -> MySQL:
        database: Json = branch.handle.get("database")
        if isinstance(branch, Receipt):
            database = cast("list[str]", branch.handle["witness"])[0]
        table = "any" if database is None else f"{database}.any"  # the witness is beside it
        made = MySQL(table, url=self._url, name=branch.sink, mode="xa")
        self._made.append(made)
        return made

    def close(self) -> None:
        for made in self._made:
            made.close()

    @contextlib.contextmanager
    def _link(self) -> Iterator[Link]:
        link = connect(self._url, sink="", lock_timeout=10)
        try:
            with said(""):
                yield link
        finally:
            drop(link)


def _staged(link: Link) -> Iterator[tuple[BranchName, str]]:
    """List staging tables that are not settled, each with its database, of which sinks name any."""
    by_database: dict[str, list[BranchName]] = {}
    for database, table, comment in run(
        link,
        "SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_COMMENT FROM information_schema.TABLES "
        "WHERE TABLE_NAME LIKE %s",
        (PREFIX.replace("_", "\\_") + "%",),
    ):
        name = parse_name(comment)
        if name is not None and table == stage_name(name):
            by_database.setdefault(database, []).append(name)
    for database, names in by_database.items():
        witness = Witness(database)
        over = witness.states(link, names) if witness.identity(link) else {}
        yield from ((name, database) for name in names if name not in over)
