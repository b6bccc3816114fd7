"""The task's half: one connection, one transaction, rows by `executemany`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from poundlock.core.model import Branch
from poundlock.core.participant import PreparedBranch, Semantic, Writer, tolerate_loss
from poundlock.errors import BadRow, Rejected
from poundlock.sinks.sql.naming import id_of
from poundlock.sinks.sql.receipts import PREPARED
from poundlock.sinks.text import not_utf8
from poundlock.sinks.twophase.prepared import open_branches, xid_of

if TYPE_CHECKING:
    from poundlock.sinks.twophase.sink import TwoPhase


class TwoPhaseWriter(Writer):
    """One branch in a task."""

    def __init__(self, sink: TwoPhase, branch: Branch):
        self._sink, self._tolerant = sink, branch.tolerant
        self._branch, self._began_at = id_of(branch), time.time()
        self._id = str(self._branch)
        self._exact = sink.semantic is Semantic.EXACTLY_ONCE
        self._link = sink.link()
        try:
            with self._link.translated_errors(self._id):
                if self._exact:
                    self._identity = sink.witness.ensure(self._link)
                    if branch.retry > 0 and not sink.speculates:
                        self._abort_earlier()
                    self._link.connection.tpc_begin(self._link.xid(*xid_of(self._branch)))
        except BaseException:
            self.abort()
            raise

    def _abort_earlier(self) -> None:
        """Roll back what earlier attempts of this task left: its locks could block this one.

        Spark does not repeat a task that has succeeded, so none of these branches is decided, unless
        Spark runs two attempts of a task at the same time (`spark.speculation`).
        """
        mine = self._branch.name
        for it in list(open_branches(self._link, mine.namespace, mine.sink)):
            if it.precedes(self._branch):
                self._sink.branches.roll_back(self._link, it)

    def write(self, rows: pa.RecordBatch) -> None:
        link, sink = self._link, self._sink
        names = rows.schema.names
        self._refuse_broken(rows)
        statement = "INSERT INTO {} ({}) VALUES ({})".format(
            sink.quoted(sink.table), ", ".join(map(sink.quoted, names)), ", ".join("?" * len(names))
        )
        try:
            columns = [column.to_pylist() for column in rows.columns]
        except (ValueError, OverflowError, pa.ArrowException) as error:
            raise BadRow(
                f"branch {self._id}: Python cannot hold a value ({type(error).__name__})",
                sink=sink.name,
            ) from None
        values = list(zip(*columns, strict=True))
        with link.translated_errors(self._id):
            if self._tolerant:
                link.run("SAVEPOINT poundlock_rows")
            try:
                for start in range(0, len(values), sink.rows_at_once):
                    some = values[start : start + sink.rows_at_once]
                    self._count(link.execute_many(statement, some), len(some))
            except (link.driver.DatabaseError, ValueError, TypeError, OverflowError) as error:
                problem = link.translate_error(error, sink.name, self._id)
                if self._tolerant and isinstance(problem, BadRow):
                    link.run("ROLLBACK TO SAVEPOINT poundlock_rows")
                raise problem from None
            if self._tolerant:
                link.release("poundlock_rows")

    def _refuse_broken(self, rows: pa.RecordBatch) -> None:
        bad: dict[int, str] = {}
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                broken = np.flatnonzero(not_utf8(column))
                bad |= dict.fromkeys(broken.tolist(), f"column {name} is not UTF-8")
        if bad:
            raise BadRow(
                f"branch {self._id}: {len(bad)} of {len(rows)} rows do not fit: {bad[min(bad)]}",
                sink=self._sink.name,
                rows=bad,
            )

    def _count(self, taken: int, given: int) -> None:
        if 0 <= taken != given:
            raise Rejected(
                f"branch {self._id}: {given} rows were sent, but the database accepted {taken}: a "
                "trigger or a rule leaves rows out, so it is unknown which were written",
                sink=self._sink.name,
            )

    def prepare(self) -> PreparedBranch | None:
        try:
            with tolerate_loss(self._sink.name, self._sink.semantic):
                return self._prepare()
            return None
        finally:
            self.abort()

    def _prepare(self) -> PreparedBranch | None:
        link, sink = self._link, self._sink
        with link.translated_errors(self._id):
            if not self._exact:
                link.connection.commit()
                return None
            sink.witness.insert_own(link, self._id)
            if link.connection.tpc_prepare() is False:
                raise Rejected(
                    f"branch {self._id}: the database says that there is nothing to commit, although "
                    "rows were written: it holds no branch",
                    sink=sink.name,
                )
        return PreparedBranch(
            self._id,
            {"mode": PREPARED, "witness": [sink.witness.place, self._identity]},
            began_at=self._began_at,
            expires_at=None,
        )

    def abort(self) -> None:
        # When the connection ends, the database rolls back what is not prepared or committed.
        self._link.close()
