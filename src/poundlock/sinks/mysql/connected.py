"""What both halves of the MySQL sink stand on: its settings, its table, and its connections."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pymysql

from poundlock.core.participant import Participant
from poundlock.errors import UsageError
from poundlock.sinks.mysql import target as tables
from poundlock.sinks.mysql.branches import Witness
from poundlock.sinks.mysql.link import Link, connect, connect_arguments, drop, said
from poundlock.sinks.mysql.move import DELETE, ORDER, Move
from poundlock.sinks.mysql.names import quoted
from poundlock.sinks.mysql.target import Target, TargetColumn

_ANSWER_S = 60.0


class Connected(Participant):
    """The sink's settings, its table, and the driver's connections."""

    url: str
    table: str
    key: tuple[str, ...]
    delete: str | None
    order_by: str | None
    chosen: str  # "xa" or "staged"
    bulks: bool  # the server takes MariaDB's bulks
    loads: bool  # it takes LOAD DATA LOCAL
    packet: int  # bytes of rows that it takes at once
    key_partitioned: bool
    lock_timeout: float
    connections: int | None
    known: Target | None

    def __init__(self, database: str | None, witness_database: str | None) -> None:
        self._database, self._witness_database = database, witness_database
        self._frame: dict[str, str] = {}  # what is written: column to Spark's type
        self._links: list[Link] = []
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_links": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"_links": [], "_lock": threading.Lock()})

    @property
    def database(self) -> str:
        """The target's database: as it was named, or else the address's."""
        if self._database is None:
            self._database = connect_arguments(self.url)["database"]
        if self._database is None:
            raise UsageError(
                f"which database is table {self.table!r} in? Name it in the url, or as "
                "'database.table'",
                sink=self.name,
            )
        return self._database

    @property
    def witness(self) -> Witness:
        return Witness(self._witness_database or self.database)

    # For the writers.

    def connect(self, answer_timeout: float = 600.0) -> Link:
        return connect(
            self.url, sink=self.name, lock_timeout=self.lock_timeout, answer_timeout=answer_timeout
        )

    @property
    def into(self) -> str:
        return quoted(self.database, self.table)

    @property
    def target(self) -> Target:
        """The table, as the server describes it; asked for once."""
        if self.known is None:
            with self._borrowed() as link:
                self.known = tables.read(link, self.database, self.table)
        if self.known is None:
            raise UsageError(
                f"there is no table {self.database}.{self.table}, or the account may not see it. "
                "Create it, or grant SELECT, INSERT, UPDATE and DELETE on it",
                sink=self.name,
            )
        return self.known

    def shaped(self, rows: Any) -> Any:
        """Leave out what only orders rows, where the target has no such column."""
        if self.order_by is None or self.target.column(self.order_by) is not None:
            return rows
        extra = [name for name in rows.schema.names if name.lower() == self.order_by.lower()]
        return rows.drop_columns(extra) if extra else rows

    def move(self, names: Sequence[str], *, order: TargetColumn | None) -> Move:
        """Return how rows with these columns go into the target."""
        target = self.target
        spelled = {key: column.name for key, column in target.columns.items()}
        written = tuple(spelled.get(name.lower(), name) for name in names
                        if name not in (ORDER, DELETE))  # fmt: skip
        key = tuple(spelled.get(name.lower(), name) for name in self.key)
        return Move(target, written, key, order, bool(self.key and self.delete))

    def meeting(self, target: Target) -> list[frozenset[str]]:
        """Return the unique keys that two tasks could share: not those that the table numbers."""
        given = {name.lower() for name in self._frame}
        fresh = {key for key, col in target.columns.items() if col.serial and key not in given}
        return [unique for unique in target.unique if not unique & fresh]

    @property
    def contradiction(self) -> str:
        cure = (
            f"order_by={self.order_by!r} does not tell which came last"
            if self.order_by
            else "name the column that tells which came last with order_by="
        )
        return f"rows of one batch have the same key ({', '.join(self.key)}): {cure}"

    # Connections.

    @contextlib.contextmanager
    def _borrowed(self, answer_timeout: float | None = None) -> Iterator[Link]:
        """Lend a connection of the driver's. One that failed is not lent again."""
        seconds = answer_timeout or _ANSWER_S
        with self._lock:
            link = self._links.pop() if self._links else None
        if link is not None:
            link.patience(seconds)  # not that of whoever had it before
            try:
                link.ping(reconnect=False)
            except (pymysql.err.Error, OSError):
                drop(link)
                link = None
        link = link or self.connect(seconds)
        try:
            with said(self.name):
                yield link
        except BaseException:
            drop(link)
            raise
        with self._lock:
            self._links.append(link)

    def close(self) -> None:
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            drop(link)
