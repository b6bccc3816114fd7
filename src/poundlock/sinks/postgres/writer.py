"""The executor's half: one connection, one transaction, one COPY.

Appended rows of a prepared branch go straight into the target. All others go into a staging table of
the branch: a staged branch leaves it there, a prepared upsert moves its rows on before it prepares.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import Connection, sql

from poundlock.core.model import Branch, Json
from poundlock.core.participant import PreparedBranch, Semantic, Writer
from poundlock.errors import BadRow, PoundlockError, Rejected, UsageError
from poundlock.sinks.postgres import prepared, witness
from poundlock.sinks.postgres.catalog import Table, TableColumn, read_table
from poundlock.sinks.postgres.encode import HEADER, TRAILER, Encoder
from poundlock.sinks.postgres.move import FLAG, create_staging, drop, has_duplicates, move
from poundlock.sinks.postgres.session import (
    connect,
    database_of,
    system_of,
    told,
    translated,
    unhurried,
)
from poundlock.sinks.postgres.staged import duplicate_keys
from poundlock.sinks.postgres.target import Target, branch_id
from poundlock.sinks.postgres.types import misfits

logger = logging.getLogger("poundlock")

_FLAG = TableColumn(FLAG, "bool", -1, "boolean", "boolean", "", True, False, "", False, "")
_MOST_NAMED = 5  # reasons in one message


class Mode(Enum):
    """How a branch waits for the decision."""

    PREPARED = "prepared"  # PREPARE TRANSACTION
    STAGED = "staged"  # in a table beside the target


class PostgresWriter(Writer):
    """One branch in a task."""

    def __init__(
        self,
        target: Target,
        mode: Mode,
        semantic: Semantic,
        types: Mapping[str, str],  # of the frame's columns, in Spark's words
        branch: Branch,
        *,
        clears: bool,  # away what earlier attempts of the task have prepared
    ):
        self._target, self._branch, self._semantic = target, branch, semantic
        self._exact = semantic is Semantic.EXACTLY_ONCE
        self._staged = self._exact and mode is Mode.STAGED
        self._aside = self._staged or bool(target.key)
        self._id = branch_id(branch)
        self._began_at = time.time()
        self._encoder: Encoder | None = None
        self._columns: list[str] = []
        self._required: frozenset[str] = frozenset()
        self._statement = sql.Composed([])
        self._copying: Any = None
        self._cursor: Any = None
        self._rows = 0
        self._connection: Connection[Any] = connect(target.dsn, sink=target.sink)
        try:
            with translated(target.sink, self._id):
                self._place = self._begin(clears and mode is Mode.PREPARED)
                self._table = self._read_table(types)
        except BaseException:
            self.abort()
            raise

    def _begin(self, clears: bool) -> dict[str, Json]:
        """Begin, and return where: the cluster, the database in it, the witness table in that."""
        connection, target = self._connection, self._target
        place: dict[str, Json] = {}
        if self._exact or self._aside:
            witness.ensure(connection, target)
        if self._exact:
            place = {
                "system": system_of(connection),
                "database": database_of(connection),
                "witness": witness.identity(connection, target),
            }
            if clears:
                prepared.roll_back_earlier(connection, target, self._branch)
        connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        unhurried(connection, target.wait)
        return {word: value for word, value in place.items() if value is not None}

    def _read_table(self, types: Mapping[str, str]) -> Table:
        """Read how the table is by now: rows are spelled for its types, and nobody could tell one
        number from another of the same width.

        What goes straight into it keeps it so until the branch is over. A staged branch leaves it to
        others meanwhile; whether it was altered is seen before the decision.
        """
        connection, target = self._connection, self._target
        if not self._staged:
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
            with translated(self._target.sink, self._id):
                self._encoder = self._open(rows.schema)
        problems = self._encoder.problems(rows, self._required)
        if problems:
            raise BadRow(
                f"branch {self._id}: {len(problems)} of {len(rows)} rows do not fit: "
                + "; ".join(list(dict.fromkeys(problems.values()))[:_MOST_NAMED]),
                sink=self._target.sink,
                rows=problems,
            )
        with translated(self._target.sink, self._id):
            if self._branch.tolerant:
                self._copy_alone(rows)
            else:
                self._copy(rows)
        self._rows += len(rows)

    def _open(self, schema: pa.Schema) -> Encoder:
        """Look at the first rows: which columns there are, and where they go."""
        target, table = self._target, self._table
        found = [(name, _FLAG if name == FLAG else table.column(name)) for name in schema.names]
        unknown = [name for name, column in found if column is None]
        if unknown:
            raise UsageError(f"{target.table} has no column {', '.join(unknown)}", sink=target.sink)
        columns = [column for _, column in found if column is not None]
        self._columns = [column.name for column in columns]
        encoder = Encoder(columns, schema)
        # A deletion needs its key alone; what else is missing is then seen by the staging table.
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
        # Rows of a table that is as new as we are need no visibility of their own.
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
            self._cursor = self._connection.cursor()
            self._copying = contextlib.ExitStack()
            self._stream = self._copying.enter_context(self._cursor.copy(self._statement))
            self._stream.write(HEADER)
        for piece in self._encoder.encode(rows):
            self._stream.write(piece)

    def _copy_alone(self, rows: pa.RecordBatch) -> None:
        """Copy so that a refusal takes back these rows and no others."""
        assert self._encoder is not None
        connection = self._connection
        connection.execute("SAVEPOINT rows")
        try:
            with connection.cursor() as cursor:
                with cursor.copy(self._statement) as stream:
                    stream.write(HEADER)
                    for piece in self._encoder.encode(rows):
                        stream.write(piece)
                    stream.write(TRAILER)
                self._count(cursor.rowcount, len(rows))
        except psycopg.Error as error:
            if isinstance(told(error), BadRow):
                connection.execute("ROLLBACK TO SAVEPOINT rows")
            raise
        connection.execute("RELEASE SAVEPOINT rows")

    def _finish_copy(self) -> None:
        if self._copying is not None:
            self._stream.write(TRAILER)
            self._copying.close()
            self._copying = None
            self._count(self._cursor.rowcount, self._rows)

    def _count(self, taken: int, given: int) -> None:
        if taken != given:
            raise Rejected(
                f"branch {self._id}: {given} rows were sent, and PostgreSQL took {taken}: a trigger "
                "or a rule leaves rows out, so that nobody could tell what was written",
                sink=self._target.sink,
            )

    # The vote.

    def prepare(self) -> PreparedBranch | None:
        try:
            with translated(self._target.sink, self._id):
                return self._prepare()
        except PoundlockError as error:
            if self._semantic is not Semantic.NONE:
                raise
            logger.warning(
                "sink %s: rows were lost, as semantic NONE allows: %s", self._target.sink, error
            )
            return None
        finally:
            self.abort()

    def _prepare(self) -> PreparedBranch | None:
        connection, target = self._connection, self._target
        self._finish_copy()
        if self._aside and not self._staged:
            if has_duplicates(connection, target, [self._id]):
                raise duplicate_keys(target)
            moved = move(connection, target, self._table, [self._id], self._columns)
            self._count(self._rows - moved.left_out, self._rows)
            drop(connection, target, [self._id])
        if self._staged or not self._exact:
            self._end("COMMIT", "COMMIT")
        else:
            self._bear_witness()
            self._end(
                sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(self._id)),
                "PREPARE TRANSACTION",
            )
        if not self._exact:
            return None
        handle: dict[str, Json] = {"mode": "staged" if self._staged else "prepared"} | self._place
        if self._staged:
            handle["into"] = target.recorded(self._table.schema)
            handle["shape"] = self._table.shape
        return PreparedBranch(self._id, handle, began_at=self._began_at, expires_at=None)

    def _bear_witness(self) -> None:
        try:
            witness.insert(self._connection, self._target, self._id)
        except psycopg.errors.UniqueViolation:
            raise Rejected(
                f"branch {self._id} was aborted by the driver while this task was still writing it",
                sink=self._target.sink,
            ) from None

    def _end(self, statement: Any, expected: str) -> None:
        """A transaction that has failed is answered by ROLLBACK, and by no error."""
        said = self._connection.execute(statement).statusmessage
        if said != expected:
            raise Rejected(
                f"branch {self._id}: the transaction had failed before: {expected} was answered by "
                f"{said}",
                sink=self._target.sink,
            )

    def abort(self) -> None:
        # Whatever is not prepared or committed is undone by the server when the connection ends.
        with contextlib.suppress(Exception):
            self._connection.close()
        copying, self._copying = self._copying, None
        if copying is not None:
            with contextlib.suppress(Exception):
                copying.__exit__(None, None, None)
