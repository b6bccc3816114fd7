"""A complete custom sink in one file: writes rows to a SQLite table exactly once.

Use it as a template. It implements `poundlock.Participant`, and `tests/compliance` checks that it does.
The same design fits every system that can move rows and write a mark in one transaction:

    the table               what readers see
    poundlock_rows          rows of branches that are not committed yet, with the branch's name
    poundlock_branches      one line a branch, open, prepared, committed or aborted: the witness

Commit moves the rows of all branches of a batch and marks the branches, in one transaction. Readers see
the whole batch at one instant, and the marks prove the outcome afterwards. SQLite files are for one
machine: use this sink with `local[*]`.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from poundlock import Participant
from poundlock.core.model import Branch, Namespace, Receipt, Stray, checked_name
from poundlock.core.naming import name_of, parse_name, to_forget
from poundlock.core.participant import Column, Commitment, PreparedBranch, Writer
from poundlock.core.protocol import BranchState, LogState
from poundlock.errors import BadRow, InDoubt, Rejected, Unavailable, UsageError

_STATES = {
    "prepared": BranchState.PREPARED,
    "committed": BranchState.COMMITTED,
    "open": BranchState.PREPARED,
    "aborted": BranchState.ABORTED,
}


class SqliteTable(Participant):
    """An existing table; the frame must have its columns."""

    commitment = Commitment.STAGED  # so `commit` is given all branches of a batch in one call
    after_deletion = ""  # `logs_of` misses nothing

    def __init__(self, path: str, table: str, *, name: str | None = None):
        self.name = checked_name("sink name", name or table)
        self.path, self.table = str(path), table

    # Before anything starts, on the driver: say no to what cannot work.

    def project(self, columns: Mapping[str, Column]) -> dict[str, str]:
        missing = [name for name in self._columns() if name not in columns]
        if missing:
            raise UsageError(f"the frame lacks the columns {', '.join(missing)}", sink=self.name)
        return {name: columns[name].sql for name in self._columns()}

    def preflight(self) -> list[str]:
        if not self._columns():
            raise UsageError(f"there is no table {self.table!r} in {self.path}", sink=self.name)
        return []

    def _columns(self) -> list[str]:
        with self.transaction() as db:
            return [line[1] for line in db.execute(f"PRAGMA table_info({_quoted(self.table)})")]

    # In a task.

    def begin(self, branch: Branch) -> Writer:
        return SqliteWriter(self, branch)

    # On the driver, perhaps another than the one that began: the names in the receipts are enough.

    def check(self, receipts: Sequence[Receipt]) -> list[str | None]:
        """Rehearse the move: what the table rejects must be known before the decision."""
        reasons: list[str | None] = []
        with self.transaction() as db:
            db.execute("SAVEPOINT rehearsal")
            for receipt in receipts:
                state = self._state(db, receipt.id)
                reasons.append(None if state == "prepared" else f"its state is {state}")
                try:
                    self._move(db, receipt.id)
                except sqlite3.IntegrityError as error:  # which names columns, and no values
                    reasons[-1] = f"the table refuses its rows: {error}. Correct the query"
            db.execute("ROLLBACK TO rehearsal")
        return reasons

    def commit(self, receipts: Sequence[Receipt]) -> list[BranchState]:
        with self.transaction() as db:  # one transaction for the whole batch
            for receipt in receipts:
                state = self._state(db, receipt.id)
                if state == "prepared":
                    try:
                        self._move(db, receipt.id)
                    except sqlite3.IntegrityError as error:
                        raise InDoubt(
                            f"the table was changed after the decision, and refuses the rows of "
                            f"{receipt.id}: {error}. They are kept: correct the table, and start the "
                            "pipeline again",
                            sink=self.name,
                        ) from error
                    self._settle(db, receipt.id, "committed")
                elif state != "committed":
                    # Gone, and no mark says that it was committed: the tombstone makes that final.
                    self._settle(db, receipt.id, "aborted")
            return [_STATES[str(self._state(db, receipt.id))] for receipt in receipts]

    def _move(self, db: sqlite3.Connection, name: str) -> None:
        columns = ", ".join(_quoted(column) for column in self._columns_of(db))
        db.execute(
            f"INSERT INTO {_quoted(self.table)} ({columns}) SELECT {columns} "
            f"FROM {self.rows} WHERE poundlock_branch = ?",
            (name,),
        )

    def find(self, namespace: Namespace) -> list[Stray]:
        return [
            Stray(self.name, name, parsed.generation, state)
            for name, state in self._branches()
            if state in ("open", "prepared")
            and (parsed := parse_name(name)) is not None
            and (parsed.namespace, parsed.sink) == (namespace, self.name)  # compared whole
        ]

    def abort(self, strays: Sequence[Stray]) -> list[BranchState]:
        with self.transaction() as db:
            for stray in strays:
                if self._state(db, stray.id) != "committed":
                    self._settle(db, stray.id, "aborted")
            return [_STATES[str(self._state(db, stray.id))] for stray in strays]

    def newest_generation(self, namespace: Namespace) -> int:
        names = (parse_name(name) for name, _ in self._branches())
        mine = [name.generation for name in names if name and name.namespace == namespace]
        return max(mine, default=0)

    def committed_beyond(self, state: LogState) -> str | None:
        assert state.generation is not None
        names = (parse_name(name) for name, word in self._branches() if word == "committed")
        ours = (state.generation.namespace, self.name)
        mine = [name for name in names if name and (name.namespace, name.sink) == ours]
        return state.first_unexplained(self.name, ((name.batch, str(name)) for name in mine))

    def newest_batch(self, namespace: Namespace) -> int | None:
        names = (parse_name(name) for name, word in self._branches() if word == "committed")
        ours = (namespace, self.name)
        mine = [it.batch for it in names if it and (it.namespace, it.sink) == ours]
        return max(mine, default=None)

    def logs_of(self, pipeline: str) -> frozenset[str]:
        names = (parse_name(name) for name, word in self._branches() if word == "committed")
        ours = (pipeline, self.name)
        mine = [name for name in names if name and (name.namespace.pipeline, name.sink) == ours]
        return frozenset(name.namespace.identity for name in mine)

    def prune(self, namespace: Namespace, floor: int) -> None:
        states = {parse_name(name): state for name, state in self._branches()}
        mine = [name for name in states if name is not None and name.namespace == namespace]
        for word in ("committed", "aborted"):  # the newest of each stays
            for name in to_forget((it for it in mine if states[it] == word), floor):
                with self.transaction() as db:
                    db.execute("DELETE FROM poundlock_branches WHERE name = ?", (str(name),))

    # The database.

    @property
    def rows(self) -> str:
        return _quoted(f"poundlock_rows_{self.table}")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction. An error raises `Unavailable` or `InDoubt`; it is never a success."""
        try:
            db = sqlite3.connect(self.path, timeout=30, isolation_level=None)
        except sqlite3.OperationalError as error:
            raise Unavailable(f"{self.path}: {error}", sink=self.name) from error
        try:
            db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            db.execute(
                "CREATE TABLE IF NOT EXISTS poundlock_branches (name TEXT PRIMARY KEY, state TEXT)"
            )
            yield db
            db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if str(error).startswith(("no such", "no column", "table ")):  # a person must look
                raise InDoubt(
                    f"{self.path}: {error}. The table was changed while the pipeline ran: put it back "
                    "as it was, and start the pipeline again",
                    sink=self.name,
                ) from error
            raise Unavailable(  # "locked", "disk is full", "disk I/O error"
                f"{self.path}: {error}. Nothing is lost: put that right, and the batch can be run "
                "again",
                sink=self.name,
            ) from error
        finally:
            db.close()  # rolls back what was not committed

    def stage(self, db: sqlite3.Connection) -> None:
        columns = ", ".join(_quoted(column) for column in self._columns_of(db))
        db.execute(f"CREATE TABLE IF NOT EXISTS {self.rows} (poundlock_branch TEXT, {columns})")

    def _columns_of(self, db: sqlite3.Connection) -> list[str]:
        return [line[1] for line in db.execute(f"PRAGMA table_info({_quoted(self.table)})")]

    def _branches(self) -> list[tuple[str, str]]:
        with self.transaction() as db:
            return db.execute("SELECT name, state FROM poundlock_branches").fetchall()

    def _state(self, db: sqlite3.Connection, name: str) -> str | None:
        found = db.execute("SELECT state FROM poundlock_branches WHERE name = ?", (name,))
        line = found.fetchone()
        return None if line is None else line[0]

    def _settle(self, db: sqlite3.Connection, name: str, state: str) -> None:
        self.stage(db)
        db.execute(f"DELETE FROM {self.rows} WHERE poundlock_branch = ?", (name,))
        db.execute("INSERT OR REPLACE INTO poundlock_branches VALUES (?, ?)", (name, state))


class SqliteWriter(Writer):
    """One branch in a task. Its rows stay in `poundlock_rows` until it is committed."""

    def __init__(self, sink: SqliteTable, branch: Branch):
        self._sink, self._name = sink, str(name_of(branch))
        self._began_at = time.time()
        with sink.transaction() as db:
            sink.stage(db)
            db.execute("INSERT INTO poundlock_branches VALUES (?, 'open')", (self._name,))

    def write(self, rows: pa.RecordBatch) -> None:
        names = ", ".join(_quoted(name) for name in rows.schema.names)
        marks = ", ".join("?" * (len(rows.schema.names) + 1))
        columns = [column.to_pylist() for column in rows.columns]
        names_and_rows = zip([self._name] * len(rows), *columns, strict=True)
        with self._sink.transaction() as db:
            try:
                db.executemany(
                    f"INSERT INTO {self._sink.rows} (poundlock_branch, {names}) VALUES ({marks})",
                    names_and_rows,
                )
            except (sqlite3.InterfaceError, sqlite3.ProgrammingError, OverflowError) as error:
                # The transaction is rolled back: nothing of these rows stays behind.
                raise BadRow(
                    f"SQLite cannot take a value: {error}", sink=self._sink.name
                ) from error

    def prepare(self) -> PreparedBranch | None:
        with self._sink.transaction() as db:
            changed = db.execute(
                "UPDATE poundlock_branches SET state = 'prepared' WHERE name = ? AND state = 'open'",
                (self._name,),
            )
            if changed.rowcount != 1:
                raise Rejected("the branch was aborted while it was written", sink=self._sink.name)
        return PreparedBranch(self._name, {}, began_at=self._began_at, expires_at=None)

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._sink.abort([Stray(self._sink.name, self._name, 0, "open")])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
