"""The task's half: one connection, one transaction, one COPY.

Appended rows of a prepared branch go directly into the target. All others go into a staging table of
the branch. A staged branch leaves them there. A prepared upsert moves them into the target before it
prepares.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from poundlock.core.model import Branch, Json
from poundlock.core.participant import PreparedBranch, Semantic, Writer, tolerate_loss
from poundlock.errors import BadRow, Rejected, UsageError
from poundlock.sinks.postgres import prepared
from poundlock.sinks.postgres.catalog import Table, TableColumn, read_table
from poundlock.sinks.postgres.encode import HEADER, TRAILER, Encoder
from poundlock.sinks.postgres.errors import POSTGRES, translate_error
from poundlock.sinks.postgres.link import connect, database_of, system_of
from poundlock.sinks.postgres.move import (
    FLAG,
    create_staging,
    drop,
    has_alike,
    has_duplicates,
    move,
)
from poundlock.sinks.postgres.target import Target
from poundlock.sinks.postgres.types import misfits
from poundlock.sinks.sql.naming import id_of
from poundlock.sinks.sql.receipts import PREPARED, STAGED
from poundlock.sinks.sql.staging import alike_keys, duplicate_keys

_FLAG = TableColumn(FLAG, "bool", -1, "boolean", "boolean", "", True, False, "", False, "")
_MOST_NAMED = 5  # reasons in one message


class PostgresWriter(Writer):
    """One branch in a task."""

    def __init__(
        self,
        target: Target,
        mode: str,
        semantic: Semantic,
        types: Mapping[str, str],  # of the frame's columns, as Spark names them
        branch: Branch,
        *,
        clears: bool,  # rolls back what earlier attempts of the task have prepared
    ):
        self._target, self._branch, self._semantic = target, branch, semantic
        self._exact = semantic is Semantic.EXACTLY_ONCE
        self._staged = self._exact and mode == STAGED
        self._aside = self._staged or bool(target.key)
        self._branch_id = id_of(branch)
        self._id = str(self._branch_id)
        self._began_at = time.time()
        self._encoder: Encoder | None = None
        self._columns: list[str] = []
        self._required: frozenset[str] = frozenset()
        self._statement = sql.Composed([])
        self._copying: Any = None
        self._cursor: Any = None
        self._rows = 0
        self._connection = connect(target.dsn, sink=target.sink, wait=target.wait)
        try:
            with POSTGRES.translated_errors(target.sink, self._id):
                self._place = self._begin(clears and mode == PREPARED)
                self._table = self._read_table(types)
        except BaseException:
            self.abort()
            raise

    def _begin(self, clears: bool) -> dict[str, Json]:
        """Begin, and return the place: the cluster, the database and the witness table."""
        connection, target = self._connection, self._target
        place: dict[str, Json] = {}
        if self._exact or self._aside:
            identity = target.witness.ensure(connection)
            place["witness"] = [target.witness_schema, identity]
        if self._exact:
            place |= {"system": system_of(connection), "database": database_of(connection)}
            if clears:
                prepared.roll_back_earlier(connection, target, self._branch_id)
        connection.begin()
        connection.override_timeouts(target.wait)
        return {word: value for word, value in place.items() if value is not None}

    def _read_table(self, types: Mapping[str, str]) -> Table:
        """Read the table as it is now: rows are encoded for its types, which COPY does not check.

        A branch that writes directly into it locks it against changes. A staged branch does not;
        whether the table was altered is checked before the decision.
        """
        connection, target = self._connection, self._target
        if not self._staged:
            with connection.users_path():
                connection.execute(
                    sql.SQL("LOCK TABLE ONLY {} IN ROW EXCLUSIVE MODE").format(target.identifier)
                )
        table = read_table(connection, target.schema, target.table)
        problems = misfits(types, table)
        if problems:
            raise UsageError(
                f"table {table.schema}.{table.name} was altered, and the frame no longer fits: "
                + "; ".join(problems),
                sink=target.sink,
            )
        return table

    # Rows.

    def write(self, rows: pa.RecordBatch) -> None:
        if self._encoder is None:
            with POSTGRES.translated_errors(self._target.sink, self._id):
                self._encoder = self._open(rows.schema)
        problems = self._encoder.problems(rows, self._required)
        if problems:
            raise BadRow(
                f"branch {self._id}: {len(problems)} of {len(rows)} rows do not fit: "
                + "; ".join(list(dict.fromkeys(problems.values()))[:_MOST_NAMED]),
                sink=self._target.sink,
                rows=problems,
            )
        with POSTGRES.translated_errors(self._target.sink, self._id):
            if self._branch.tolerant:
                self._copy_alone(rows)
            else:
                self._copy(rows)
        self._rows += len(rows)

    def _open(self, schema: pa.Schema) -> Encoder:
        """Read the columns from the first rows, and choose the table to copy them into."""
        target, table = self._target, self._table
        found = [(name, _FLAG if name == FLAG else table.column(name)) for name in schema.names]
        unknown = [name for name, column in found if column is None]
        if unknown:
            raise UsageError(f"{target.table} has no column {', '.join(unknown)}", sink=target.sink)
        columns = [column for _, column in found if column is not None]
        self._columns = [column.name for column in columns]
        encoder = Encoder(columns, schema)
        # A deletion needs only its key. The staging table checks the other rows for nulls.
        flagged = target.delete is not None
        self._required = frozenset(
            column.name
            for column in columns
            if column.name in target.key or (column.required and not flagged)
        )
        into: sql.Composable = table.identifier
        if self._aside:
            written = [name for name in self._columns if name != FLAG]
            create_staging(self._connection, target, table, written, self._id)
            into = target.staging(self._id)
        # FREEZE: the table was created by this transaction, so nobody else can see its rows.
        frozen = self._aside and not self._branch.tolerant
        self._statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY{})").format(
            into,
            sql.SQL(", ").join(sql.Identifier(name) for name in self._columns),
            sql.SQL(", FREEZE" if frozen else ""),
        )
        return encoder

    def _copy(self, rows: pa.RecordBatch) -> None:
        assert self._encoder is not None
        if self._copying is None:
            self._connection.enter_users_path()
            self._cursor = self._connection.cursor()
            self._copying = contextlib.ExitStack()
            self._stream = self._copying.enter_context(self._cursor.copy(self._statement))
            self._stream.write(HEADER)
        for piece in self._encoder.encode(rows):
            self._stream.write(piece)

    def _copy_alone(self, rows: pa.RecordBatch) -> None:
        """Copy so that an error undoes these rows and no others."""
        assert self._encoder is not None
        connection = self._connection
        connection.execute("SAVEPOINT rows")
        connection.enter_users_path()
        try:
            with connection.cursor() as cursor:
                with cursor.copy(self._statement) as stream:
                    stream.write(HEADER)
                    for piece in self._encoder.encode(rows):
                        stream.write(piece)
                    stream.write(TRAILER)
                self._compare_counts(cursor.rowcount, len(rows))
        except psycopg.Error as error:
            if isinstance(translate_error(error), BadRow):
                connection.execute("ROLLBACK TO SAVEPOINT rows")
            raise
        connection.execute("RELEASE SAVEPOINT rows")
        connection.leave_users_path()

    def _finish_copy(self) -> None:
        if self._copying is not None:
            self._stream.write(TRAILER)
            self._copying.close()
            self._copying = None
            self._connection.leave_users_path()
            self._compare_counts(self._cursor.rowcount, self._rows)

    def _compare_counts(self, taken: int, given: int) -> None:
        if taken != given:
            raise Rejected(
                f"branch {self._id}: {given} rows were sent, but PostgreSQL accepted {taken}: a "
                "trigger or a rule leaves rows out, so it is unknown which were written",
                sink=self._target.sink,
            )

    # The vote.

    def prepare(self) -> PreparedBranch | None:
        try:
            sink = self._target.sink
            with tolerate_loss(sink, self._semantic), POSTGRES.translated_errors(sink, self._id):
                return self._prepare()
            return None
        finally:
            self.abort()

    def _prepare(self) -> PreparedBranch | None:
        connection, target = self._connection, self._target
        self._finish_copy()
        if self._aside and not self._staged:
            if has_duplicates(connection, target, self._table, [self._id]):
                raise duplicate_keys(target.sink, target.key, target.order_by)
            if has_alike(connection, target, self._table, [self._id]):
                raise alike_keys(target.sink, target.key)
            moved = move(connection, target, self._table, [self._id], self._columns)
            self._compare_counts(self._rows - moved.left_out, self._rows)
            drop(connection, target, [self._id])
        if self._staged or not self._exact:
            self._end("COMMIT", "COMMIT")
        else:
            target.witness.insert_own(connection, self._id)
            self._end(
                sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(self._id)),
                "PREPARE TRANSACTION",
            )
        if not self._exact:
            return None
        handle: dict[str, Json] = {"mode": STAGED if self._staged else PREPARED} | self._place
        if self._staged:
            rows = target.staged_rows(self._table.schema, self._columns)
            handle["into"] = rows.to_json()
            handle["shape"] = self._table.shape
        return PreparedBranch(self._id, handle, began_at=self._began_at, expires_at=None)

    def _end(self, statement: Any, expected: str) -> None:
        """End the transaction. If it had already failed, the server answers ROLLBACK, not an error."""
        if self._connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS:
            self._connection.enter_users_path()  # for constraint triggers that wait for this
        answer = self._connection.execute(statement).statusmessage
        if answer != expected:
            raise Rejected(
                f"branch {self._id}: the transaction had already failed: the server answered "
                f"{expected} with {answer}",
                sink=self._target.sink,
            )

    def abort(self) -> None:
        # When the connection ends, the server rolls back what is not prepared or committed.
        with contextlib.suppress(Exception):
            self._connection.close()
        copying, self._copying = self._copying, None
        if copying is not None:
            with contextlib.suppress(Exception):
                copying.__exit__(None, None, None)
