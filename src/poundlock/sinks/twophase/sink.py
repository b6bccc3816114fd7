"""Any database whose Python driver has two-phase commit as PEP 249 describes it (`tpc_*`).

It is slow: rows are sent by `executemany`, one Python object for each value. Use it for databases
without a sink of their own; PostgreSQL and MySQL have faster ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from poundlock.core.model import Branch, Namespace, checked_name
from poundlock.core.participant import Column, Commitment, Semantic, Writer, frame_mismatch
from poundlock.core.sparksql import to_json
from poundlock.errors import UsageError
from poundlock.sinks.sql.branches import SqlSink
from poundlock.sinks.sql.witness import Witness
from poundlock.sinks.twophase.link import Link, describe, number, quoted
from poundlock.sinks.twophase.prepared import FORMAT, PreparedBranches
from poundlock.sinks.twophase.writer import TwoPhaseWriter

_NESTED = ("array<", "map<", "struct<", "variant")
# Types that all databases have: Oracle has no BIGINT.
_CREATE = (
    "CREATE TABLE {} (branch VARCHAR(250) NOT NULL PRIMARY KEY, "
    "pipeline VARCHAR(63) NOT NULL, identity VARCHAR(64) NOT NULL, "
    "generation NUMERIC(19) NOT NULL, sink VARCHAR(63) NOT NULL, "
    "batch NUMERIC(19) NOT NULL, state VARCHAR(9) NOT NULL)"
)


class TwoPhase(SqlSink):
    """A table in a database that is reached through a driver with `tpc_*`.

    Args:
        connect: Returns a new connection, not in autocommit. It is sent to the tasks: give a function
            of a module, or `functools.partial` of one.
        table: The table, as "table" or "schema.table".
        columns: The columns to write, or a mapping from the frame's names to the table's; by default
            all.
        dsn: Given to `connect` as its argument: a literal, `env:NAME` or `file:PATH`.
        name: The sink's name in its pipeline; the table's by default.
        witness_table: Created if it is missing.
        setup: Statements for each new connection. Set the lock timeout here.
        quote: The database's quotation mark for names.
        rows_at_once: How many rows the driver gets in one call.
        semantic: "exactly_once", "at_least_once" or "none".

    Arrays, maps and structs are written as JSON text.
    """

    system = "TwoPhase"
    commitment = Commitment.TRANSACTIONAL

    def __init__(
        self,
        connect: Callable[..., Any],
        table: str,
        *,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        dsn: str | None = None,
        name: str | None = None,
        witness_table: str = "poundlock_witness",
        setup: Sequence[str] = (),
        quote: str = '"',
        rows_at_once: int = 1000,
        semantic: str | Semantic = Semantic.EXACTLY_ONCE,
    ):
        self.name = checked_name("sink name", name or table.rpartition(".")[2])
        self.semantic = Semantic(semantic)
        self.table = table
        self.rows_at_once = rows_at_once
        self._connect, self._dsn = connect, dsn
        self._setup, self._quote = tuple(setup), quote
        self._witness_table = witness_table
        self.quoted(witness_table)
        self._columns = (
            columns
            if columns is None or isinstance(columns, Mapping)
            else dict(zip(columns, columns, strict=True))
        )
        self._written: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"TwoPhase({self.table!r}, name={self.name!r})"

    def link(self) -> Link:
        return Link(self._connect, self._dsn, self._setup, self.name)

    def quoted(self, name: str) -> str:
        return quoted(name, self._quote)

    # Before anything starts.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        chosen = self._columns or {name: name for name in columns}
        missing = [name for name in chosen if name not in columns]
        if missing:
            raise frame_mismatch(self.name, [f"it has no column {', '.join(missing)}"], columns)
        wanted: dict[str, str] = {}
        for name, target in chosen.items():
            column = columns[name]
            nested = column.type.lower().startswith(_NESTED)
            wanted[target] = to_json(name, column) if nested else column.sql
        self._written = tuple(wanted)
        return wanted

    def preflight(self) -> list[str]:
        with self.lend() as link:
            try:
                there = link.columns_of(self.quoted(self.table))
            except link.driver.DatabaseError as error:
                raise UsageError(
                    f"table {self.table} cannot be read ({describe(error)}): create it, or grant "
                    "SELECT and INSERT on it",
                    sink=self.name,
                ) from None
            missing = [name for name in self._written if name not in there]
            if missing:
                raise UsageError(
                    f"table {self.table} has no column {', '.join(missing)}; it has "
                    + ", ".join(there),
                    sink=self.name,
                )
            warnings = [
                "rows are sent by executemany, one by one, which is slow: PostgreSQL and MySQL have "
                "faster sinks of their own"
            ]
            if self.semantic is Semantic.EXACTLY_ONCE:
                warnings += self._try_two_phases(link)
        if self.speculates and self.semantic is Semantic.EXACTLY_ONCE:
            warnings.append(
                "spark.speculation is on, so a task does not roll back what an earlier attempt of it "
                "has prepared: that may already be decided. If the table has a unique index, the task "
                "waits there until the lock timeout in setup=: set spark.speculation to false"
            )
        return warnings

    def _try_two_phases(self, link: Link) -> list[str]:
        """Prepare a branch that only reads, and roll it back: two-phase commit may be switched off.

        If the server has no room for another branch, it is on. The branches there may be this
        pipeline's, left by a crash: the start ends them.
        """
        gtrid = f"preflight.{time.time_ns():x}"
        try:
            link.connection.tpc_begin(link.xid(FORMAT, gtrid, "poundlock"))
            link.run(f"SELECT 1 FROM {self.quoted(self.table)} WHERE 1 = 0")
            # Oracle answers False: nothing was written, so the branch has ended.
            if link.connection.tpc_prepare() is not False:
                link.connection.tpc_rollback()
        except link.driver.Error as error:
            if number(error) == "53200":
                return [str(link.translate_error(error).args[0])]
            raise UsageError(
                f"the database does not prepare a branch ({describe(error)}): switch two-phase commit "
                "on (PostgreSQL: max_prepared_transactions above 0, and a restart)",
                sink=self.name,
            ) from None
        try:
            link.recover()
        except link.driver.Error as error:
            raise UsageError(
                f"the database does not list its open branches ({describe(error)}): grant the right to "
                "see them (Oracle: SELECT ON SYS.DBA_PENDING_TRANSACTIONS)",
                sink=self.name,
            ) from None
        return []

    # In a task.

    def begin(self, branch: Branch) -> Writer:
        return TwoPhaseWriter(self, branch)

    # On the driver.

    @property
    def witness(self) -> Witness:
        place, table = self._witness_table, self.quoted(self._witness_table)
        option = "witness_table= or the database"
        return Witness(self.name, place, table, (_CREATE.format(table),), option)

    @property
    def branches(self) -> PreparedBranches:
        return PreparedBranches(self.link, self.witness, self.name)

    def lend(self) -> AbstractContextManager[Link]:
        return self.branches.lend()

    def prune(self, namespace: Namespace, floor: int) -> None:
        with self.lend() as link:
            self.witness.prune(link, namespace, floor)
