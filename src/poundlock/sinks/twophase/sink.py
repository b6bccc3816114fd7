"""Any database whose Python driver has two-phase commit as PEP 249 describes it (`tpc_*`).

The slow road: rows go by `executemany`, one Python object for each value. Use it where there is no
sink for the database; PostgreSQL and MySQL have faster ones.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from poundlock.core.model import Branch, Json, Namespace, Receipt, Stray, checked_name
from poundlock.core.participant import (
    Column,
    Commitment,
    Participant,
    PreparedBranch,
    Semantic,
    Writer,
)
from poundlock.core.protocol import BranchState
from poundlock.core.site import Site
from poundlock.core.sparksql import to_json
from poundlock.errors import BadRow, PoundlockError, Rejected, Unavailable, UsageError
from poundlock.sinks.twophase.branches import FORMAT, Named, Witness, named, open_branches, read
from poundlock.sinks.twophase.link import Link, kind, number

logger = logging.getLogger("poundlock")

_COMPLEX = ("array<", "map<", "struct<", "variant")


class TwoPhase(Participant):
    """A table in a database that is reached through a driver with `tpc_*`.

    Args:
        connect: Returns a new connection, not in autocommit. It travels to the tasks: a function of a
            module, or `functools.partial` of one.
        table: The table, as "table" or "schema.table".
        columns: The columns to write, or a mapping from the frame's names to the table's; by default
            all.
        dsn: Given to `connect` as its argument: a literal, `env:NAME` or `file:PATH`.
        name: The sink's name in its pipeline; the table's by default.
        witness_table: Made if it is missing.
        setup: Statements for each new connection. Set a limit to waiting for locks here.
        quote: The database's quotation mark for names.
        rows_at_once: How many rows are given to the driver together.
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
        self.witness = Witness(witness_table)
        self._connect, self._dsn = connect, dsn
        self._setup, self._quote = tuple(setup), quote
        self._columns = (
            columns
            if columns is None or isinstance(columns, Mapping)
            else dict(zip(columns, columns, strict=True))
        )
        self._written: tuple[str, ...] = ()
        self.speculates = False

    def __repr__(self) -> str:
        return f"TwoPhase({self.table!r}, name={self.name!r})"

    def link(self) -> Link:
        return Link(self._connect, self._dsn, self._setup, self.name, self._quote)

    # Before anything starts.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        chosen = self._columns or {name: name for name in columns}
        missing = [name for name in chosen if name not in columns]
        if missing:
            raise UsageError(
                f"the frame does not fit: there is no column {', '.join(missing)}. It has "
                + ", ".join(f"{name} {column.type}" for name, column in columns.items()),
                sink=self.name,
            )
        wanted: dict[str, str] = {}
        for name, target in chosen.items():
            column = columns[name]
            complex_ = column.type.lower().startswith(_COMPLEX)
            wanted[target] = to_json(column.sql) if complex_ else column.sql
        self._written = tuple(wanted)
        return wanted

    def attach(self, site: Site) -> None:
        if site.spark is not None:
            conf = site.spark.sparkContext.getConf()
            self.speculates = conf.get("spark.speculation", "").lower() == "true"

    def preflight(self) -> list[str]:
        with self._borrowed() as link:
            try:
                there = link.columns_of(self.table)
            except link.driver.DatabaseError as error:
                raise UsageError(
                    f"table {self.table} cannot be read ({kind(error)}): create it, or grant "
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
                "rows go through the driver one by one (executemany): slow. PostgreSQL and MySQL have "
                "sinks of their own"
            ]
            if self.semantic is Semantic.EXACTLY_ONCE:
                warnings += self._try_two_phases(link)
        if self.speculates and self.semantic is Semantic.EXACTLY_ONCE:
            warnings.append(
                "spark.speculation is on, so that a task cannot roll back what an earlier attempt of "
                "it has prepared, for that may be decided already. If the table has a unique index, "
                "it waits there until the limit that setup= sets: switch speculation off"
            )
        return warnings

    def _try_two_phases(self, link: Link) -> list[str]:
        """Prepare a branch that only reads, and roll it back: a server may have it switched off.

        One that is full has it on. What fills it may be ours, left by a crash, which a start ends.
        """
        gtrid = f"preflight.{time.time_ns():x}"
        try:
            link.connection.tpc_begin(link.xid(FORMAT, gtrid, "poundlock"))
            link.execute(f"SELECT 1 FROM {link.table(self.table)} WHERE 1 = 0")
            # False is Oracle's answer: nothing was written, so the branch is over.
            if link.connection.tpc_prepare() is not False:
                link.connection.tpc_rollback()
        except link.driver.Error as error:
            if number(error) == "53200":
                return [str(link.told(error).args[0])]
            raise UsageError(
                f"the database does not prepare a branch ({kind(error)}): switch two-phase commit on "
                "(PostgreSQL: max_prepared_transactions above 0, and a restart)",
                sink=self.name,
            ) from None
        try:
            link.recover()
        except link.driver.Error as error:
            raise UsageError(
                f"the database does not list its open branches ({kind(error)}): grant the right to "
                "see them (Oracle: SELECT ON SYS.DBA_PENDING_TRANSACTIONS)",
                sink=self.name,
            ) from None
        return []

    # In a task.

    def begin(self, branch: Branch) -> Writer:
        return TwoPhaseWriter(self, branch)

    # On the driver.

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        with self._borrowed() as link:
            for receipt in receipts:
                if not self.witness.is_of(link, read(receipt.id), _witness_of(receipt)):
                    return ["its witness table was dropped meanwhile"] * len(receipts)
            opened = self._open(link, [read(receipt.id) for receipt in receipts])
        return [
            None if receipt.id in opened else "it is no longer prepared" for receipt in receipts
        ]

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        return self._all(receipts, self._commit_one)

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        states = self._all(strays, lambda link, stray: self.roll_back(link, read(stray.id)))
        return [
            BranchState.UNREACHABLE if state is BranchState.PREPARED else state for state in states
        ]

    def find(self, namespace: Namespace) -> list[Stray]:
        with self._borrowed() as link:
            return [
                Stray(self.name, it.id, it.name.generation, "prepared")
                for it in open_branches(link, namespace, self.name)
            ]

    def newest_generation(self, namespace: Namespace) -> int:
        with self._borrowed() as link:
            over = self.witness.newest_generation(link, namespace)
            opened = open_branches(link, namespace, self.name)
            return max([over, *(it.name.generation for it in opened)])

    def prune(self, namespace: Namespace, floor: int) -> None:
        with self._borrowed() as link:
            self.witness.prune(link, namespace, self.name, floor)

    def _all(
        self, branches: Sequence[Any], finish: Callable[[Link, Any], BranchState]
    ) -> list[BranchState]:
        states: list[BranchState] = []
        try:
            with self._borrowed() as link:
                for branch in branches:
                    states.append(finish(link, branch))  # noqa: PERF401 (kept on error)
        except Unavailable as error:
            logger.warning("sink %s: %s", self.name, error)
        return states + [BranchState.UNREACHABLE] * (len(branches) - len(states))

    def _commit_one(self, link: Link, receipt: Receipt) -> BranchState:
        # Nothing is touched where the witness could not tell afterwards what came of it.
        branch, known = read(receipt.id), _witness_of(receipt)
        if not self.witness.is_of(link, branch, known):
            return BranchState.NO_WITNESS
        return self._finish(link, branch, "tpc_commit", known)

    def roll_back(self, link: Link, branch: Named) -> BranchState:
        """Roll back a branch that no decision names, and leave its tombstone."""
        self.witness.ensure(link)
        return self._finish(link, branch, "tpc_rollback", None)

    def _finish(self, link: Link, branch: Named, verb: str, known: str | None) -> BranchState:
        """Commit or roll back a branch, and let the witness say what came of it.

        Drivers tell an unknown branch in many ways, so no answer of theirs is believed alone.
        """
        try:
            getattr(link.connection, verb)(link.xid(*branch.xid))
        except link.driver.Error as error:
            link.renew()
            if branch.id in self._open(link, [branch]):
                logger.warning(
                    "sink %s: branch %s is still open: %s",
                    self.name,
                    branch.id,
                    link.told(error).args[0],
                )
                return BranchState.PREPARED
        if self.witness.state(link, branch) is BranchState.COMMITTED:
            return BranchState.COMMITTED
        return self.witness.settle(link, branch, known)

    def _open(self, link: Link, branches: Sequence[Named]) -> set[str]:
        spaces = {branch.name.namespace for branch in branches}
        return {it.id for space in spaces for it in open_branches(link, space, self.name)}

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[Link]:
        link = self.link()
        try:
            with link.errors():
                yield link
        except Rejected as error:  # only a task has a vote: here the same step may be repeated
            raise Unavailable(str(error.args[0]), sink=self.name) from None
        finally:
            link.close()


def _witness_of(receipt: Receipt) -> str | None:
    known = receipt.handle.get("witness")
    return None if known is None else str(known)


class TwoPhaseWriter(Writer):
    """One branch in a task: one connection, one transaction."""

    def __init__(self, sink: TwoPhase, branch: Branch):
        self._sink, self._tolerant = sink, branch.tolerant
        self._named = named(branch)
        self._began_at = time.time()
        self._exact = sink.semantic is Semantic.EXACTLY_ONCE
        self._link = sink.link()
        try:
            with self._link.errors(self._named.id):
                if self._exact:
                    self._witness = sink.witness.ensure(self._link)
                    if branch.retry > 0 and not sink.speculates:
                        self._abort_earlier()
                    self._link.connection.tpc_begin(self._link.xid(*self._named.xid))
        except BaseException:
            self.abort()
            raise

    def _abort_earlier(self) -> None:
        """Roll back what earlier attempts of this very task left: its locks could block us.

        Spark does not repeat a task of which it has an answer, so nothing that is decided is among
        them, unless it runs one twice at a time (`spark.speculation`).
        """
        mine = self._named.name
        for it in list(open_branches(self._link, mine.namespace, mine.sink)):
            name = it.name
            same = (name.generation, name.batch, name.attempt, it.task) == (
                mine.generation, mine.batch, mine.attempt, self._named.task,
            )  # fmt: skip
            if same and name.task_attempt < mine.task_attempt:
                self._sink.roll_back(self._link, it)

    def write(self, rows: pa.RecordBatch) -> None:
        link, sink = self._link, self._sink
        names = rows.schema.names
        statement = "INSERT INTO {} ({}) VALUES ({})".format(
            link.table(sink.table),
            ", ".join(map(link.name, names)),
            ", ".join("?" * len(names)),
        )
        try:
            columns = [column.to_pylist() for column in rows.columns]
        except (ValueError, OverflowError, pa.ArrowException) as error:
            raise BadRow(
                f"branch {self._named.id}: a value is none that Python can hold "
                f"({type(error).__name__})",
                sink=sink.name,
            ) from None
        values = list(zip(*columns, strict=True))
        with link.errors(self._named.id):
            if self._tolerant:
                link.execute("SAVEPOINT poundlock_rows")
            try:
                for start in range(0, len(values), sink.rows_at_once):
                    some = values[start : start + sink.rows_at_once]
                    self._count(link.execute_many(statement, some), len(some))
            except (link.driver.DatabaseError, ValueError, TypeError, OverflowError) as error:
                problem = link.told(error, self._named.id)
                if self._tolerant and isinstance(problem, BadRow):
                    link.execute("ROLLBACK TO SAVEPOINT poundlock_rows")
                raise problem from None
            if self._tolerant:
                link.release("poundlock_rows")

    def _count(self, taken: int, given: int) -> None:
        if 0 <= taken != given:
            raise Rejected(
                f"branch {self._named.id}: {given} rows were sent, and the database took {taken}: a "
                "trigger or a rule leaves rows out, so that nobody could tell what was written",
                sink=self._sink.name,
            )

    def prepare(self) -> PreparedBranch | None:
        try:
            return self._prepare()
        except PoundlockError as error:
            if self._sink.semantic is not Semantic.NONE:
                raise
            logger.warning(
                "sink %s: rows were lost, as semantic NONE allows: %s", self._sink.name, error
            )
            return None
        finally:
            self.abort()

    def _prepare(self) -> PreparedBranch | None:
        link, sink = self._link, self._sink
        with link.errors(self._named.id):
            if not self._exact:
                link.connection.commit()
                return None
            try:
                sink.witness.insert(link, self._named, "committed")
            except link.driver.IntegrityError:
                raise Rejected(
                    f"branch {self._named.id} was aborted by the driver while this task was still "
                    "writing it",
                    sink=sink.name,
                ) from None
            if link.connection.tpc_prepare() is False:
                raise Rejected(
                    f"branch {self._named.id}: the database says that there is nothing to commit, "
                    "though rows were written: it holds no branch",
                    sink=sink.name,
                )
        handle: dict[str, Json] = {"witness": self._witness}
        return PreparedBranch(self._named.id, handle, began_at=self._began_at, expires_at=None)

    def abort(self) -> None:
        # Whatever is not prepared or committed is undone by the database when the connection ends.
        self._link.close()
