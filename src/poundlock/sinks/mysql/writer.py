"""The executor's half of a MySQL branch: rows into an XA branch, or into a staging table.

append, xa        straight into the target, inside the XA branch
upsert, xa        into a temporary table; from there into the target, inside the XA branch
staged            into a table of the branch's own, which the driver moves
straight through  as xa, but in a plain transaction that the task commits itself
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute
import pymysql

from poundlock.core.model import Branch, Json
from poundlock.core.naming import name_of
from poundlock.core.participant import PreparedBranch, Semantic, Writer
from poundlock.errors import (
    BadRow,
    NotAuthorised,
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.sinks.mysql import link as links
from poundlock.sinks.mysql import text
from poundlock.sinks.mysql.branches import prepared, xid
from poundlock.sinks.mysql.link import drop, run, said
from poundlock.sinks.mysql.move import DELETE, ORDER, Move, stage_name
from poundlock.sinks.mysql.names import quoted
from poundlock.sinks.mysql.sender import Sender
from poundlock.sinks.mysql.target import Target, TargetColumn, changes, describe, lacking, layout

if TYPE_CHECKING:
    from poundlock.sinks.mysql.driver import MySQLBranches

pc: Any = pyarrow.compute  # its functions are made at run time, unknown to type checkers
logger = logging.getLogger("poundlock")

_DETACH_S = 20  # how long a prepared branch may hang on the connection of a task that vanished
# The types of a column that orders rows but is not the target's.
_ORDERS: tuple[tuple[Any, str], ...] = (
    (pa.types.is_integer, "bigint"),
    (pa.types.is_floating, "double"),
    (pa.types.is_timestamp, "datetime(6)"),
    (pa.types.is_date, "date"),
    (pa.types.is_boolean, "tinyint(1)"),
    (text.is_text, "longtext"),
    (text.is_binary, "longblob"),
)
LONGEST_ORDER = 1000  # characters of a string that the server puts in order by all of them


class RowWriter(Writer):
    """One branch in a task, on one connection."""

    def __init__(self, sink: MySQLBranches, branch: Branch):
        self._sink, self._branch = sink, branch
        self._name, self._began_at = name_of(branch), time.time()
        self._xid = xid(self._name, branch.task)
        self._exact = sink.semantic is Semantic.EXACTLY_ONCE
        self._staged = self._exact and sink.chosen == "staged"
        self._aside = self._staged or bool(sink.key)
        self._move: Move | None = None
        self._columns: dict[str, TargetColumn] = {}
        self._rows = 0
        self._testifies: list[Json] = []
        self._active = False  # an XA branch is open on the connection
        self._sender: Sender | None = None
        self._link: links.Link | None = sink.connect()
        try:
            if self._exact:
                self._ensure_witness()
            with said(sink.name):
                if self._exact and not self._staged and branch.retry:
                    self._abort_earlier()
        except BaseException:
            drop(self._link)
            raise

    @property
    def _open_link(self) -> links.Link:
        if self._link is None:
            raise Rejected("the branch is over", sink=self._sink.name)
        return self._link

    def _ensure_witness(self) -> None:
        witness = self._sink.witness
        try:
            with said(self._sink.name):
                self._testifies = [witness.database, witness.ensure(self._open_link)]
        except NotAuthorised as error:
            raise NotAuthorised(
                f"{error.args[0]}. The account needs SELECT, INSERT and DELETE on {witness.table}, and "
                f"CREATE to make it; or let an administrator make it: {witness.statement}",
                sink=self._sink.name,
            ) from error

    def _abort_earlier(self) -> None:
        """Roll back what earlier attempts of this task prepared: it may hold the locks we need.

        Only where it can: elsewhere it makes nobody wait, and the driver may yet choose it.
        """
        mine, sink = self._name, self._sink
        if not sink.key and not sink.meeting(sink.target):
            return
        found = prepared(self._open_link, mine.namespace, mine.sink)
        for name, other in found.items():
            same = (name.generation, name.batch, name.attempt) == (
                mine.generation, mine.batch, mine.attempt,
            )  # fmt: skip
            earlier = name.task_attempt < mine.task_attempt
            if same and other.task == self._branch.task and earlier:
                with contextlib.suppress(pymysql.err.Error):
                    run(self._open_link, f"XA ROLLBACK {other}")

    # Writing.

    def write(self, rows: pa.RecordBatch) -> None:
        rows = self._sink.shaped(rows)
        if self._move is None:
            self._begin(rows)
        assert self._sender is not None
        if bad := self._faults(rows):
            raise self._sender.bad(bad)
        rows = text.exact(rows, self._columns)
        if self._branch.tolerant:
            self._send_or_undo(self._sender, rows)
        else:
            self._sender.post(rows)
        self._rows += len(rows)

    def _send_or_undo(self, sender: Sender, rows: pa.RecordBatch) -> None:
        with said(self._sink.name):
            run(self._open_link, "SAVEPOINT poundlock")
        try:
            sender.send(rows)
        except BadRow:  # pieces before the bad one were taken already
            with said(self._sink.name):
                run(self._open_link, "ROLLBACK TO SAVEPOINT poundlock")
            raise

    def _begin(self, rows: pa.RecordBatch) -> None:
        """Open the branch, now that its columns are known."""
        sink, order = self._sink, None
        if ORDER in rows.schema.names:
            order = _order_column(sink, rows.schema.field(ORDER).type)
        self._move = sink.move(rows.schema.names, order=order)
        target, key = self._move.target, self._move.key
        for name in rows.schema.names:
            column = self._move.extra.get(name) or target.column(name)
            if column is None:
                raise UsageError(f"the table has no column {name!r}", sink=sink.name)
            self._columns[name] = replace(column, nullable=False) if column.name in key else column
        self._sender = Sender(
            sink, self._open_link, self._stage if self._aside else sink.into, self._columns,
            # A trigger that inserts takes the rows of a bulk for its own, before MariaDB 10.11.7.
            bulks=sink.bulks and (self._aside or "trigger" not in target.strict),
            turns=self._turns(target),
        )  # fmt: skip
        with said(sink.name):
            if self._aside:
                temporary = not self._staged
                run(self._open_link, self._move.create(
                    self._stage, str(self._name), temporary=temporary))  # fmt: skip
                run(self._open_link, "START TRANSACTION")
            else:
                self._start()

    def _start(self) -> None:
        """Begin what the task ends with: an XA branch, or a transaction of its own."""
        if self._exact:
            run(self._open_link, f"XA START {self._xid}")
            self._active = True
        else:
            run(self._open_link, "START TRANSACTION")

    def _turns(self, target: Target) -> str | None:
        """Name the lock for turns at the table's end, where rows meet nothing that could block them.

        The server does not see a deadlock between such a lock and those of rows.
        """
        if self._aside or target.strict or self._sink.meeting(target):
            return None
        place = f"{target.database}.{target.table}"
        return "poundlock." + hashlib.sha256(place.encode()).hexdigest()[:40]

    @property
    def _stage(self) -> str:
        return quoted(self._sink.witness.database, stage_name(self._name))

    def _faults(self, rows: pa.RecordBatch) -> dict[int, str]:
        told = dict(self._columns)
        if ORDER in told:  # by the name that the user knows
            told[ORDER] = replace(told[ORDER], name=self._sink.order_by or ORDER)
        if DELETE not in rows.schema.names:
            return text.faults(rows, told)
        # A row that deletes may be null in all but its key.
        key = self._move.key if self._move else ()
        eased = {
            name: column if column.name in key else replace(column, nullable=True)
            for name, column in told.items()
        }
        found = text.faults(rows, eased)
        stays = pc.invert(pc.fill_null(rows.column(DELETE), False))
        for name, column in self._columns.items():
            if not column.nullable and rows.column(name).null_count:
                missing = pc.and_(rows.column(name).is_null(), stays)
                for index in pc.indices_nonzero(missing).to_pylist():
                    reason = f"column {column.name} is null, but the column is NOT NULL"
                    found.setdefault(index, reason)
        return found

    # The end.

    def prepare(self) -> PreparedBranch | None:
        if self._move is None or self._rows == 0:
            raise Rejected("there is nothing to prepare: the branch has no rows",
                           sink=self._sink.name)  # fmt: skip
        try:
            assert self._sender is not None
            self._sender.arrive()
            with said(self._sink.name):
                self._finish(self._move)
        except PoundlockError as error:
            if self._sink.semantic is not Semantic.NONE or not isinstance(error, Unavailable):
                raise
            logger.warning("sink %s: rows were lost, as semantic NONE allows: %s",
                           self._sink.name, error)  # fmt: skip
        connection = self._open_link.thread_id()
        self._close()
        if not self._exact:
            return None
        handle: dict[str, Json] = {
            "mode": "staged" if self._staged else "xa",
            "task": self._branch.task,
            "rows": self._rows,
            "witness": self._testifies,
            "connection": connection,
        }
        if self._staged:
            handle |= {
                "into": [self._sink.database, self._sink.table],
                "columns": list(self._move.written),
                "key": list(self._move.key),
                "ordered": self._move.order is not None,
                "deletes": self._move.deletes,
                "layout": layout(self._move.target.columns, self._move.written),
            }
        return PreparedBranch(str(self._name), handle, began_at=self._began_at, expires_at=None)

    def _finish(self, move: Move) -> None:
        link = self._open_link
        if self._staged:
            run(link, "COMMIT")
            return
        if self._aside:
            if move.duplicates(link, [self._stage]):
                raise BadRow(self._sink.contradiction, sink=self._sink.name)
            run(link, "COMMIT")  # of the temporary table alone
            self._start()
            move.run(link, [self._stage])
        self._check_columns(link, move)
        if not self._exact:
            run(link, "COMMIT")
            return
        self._testify(link)
        # In MariaDB nobody else can finish the branch as long as the connection lasts. If this machine
        # goes away before it has closed it, the server is to close it soon.
        run(link, f"SET SESSION wait_timeout = {_DETACH_S}")
        run(link, f"XA END {self._xid}")
        run(link, f"XA PREPARE {self._xid}")
        self._active = False

    def _testify(self, link: links.Link) -> None:
        try:
            self._sink.witness.testify(link, [self._name])
        except pymysql.err.IntegrityError as error:
            if links.code_of(error) != links.DUPLICATE:
                raise
            raise Rejected(
                f"branch {self._name} has a tombstone: a driver has given it up while this task ran",
                sink=self._sink.name,
            ) from None

    def _check_columns(self, link: links.Link, move: Move) -> None:
        """See that the table took rows as it was looked over. Nobody can change it from now on."""
        target = move.target
        now = describe(link, target.database, target.table)
        changed = changes(target.columns, now, move.written) or lacking(now, move.written)
        if changed:
            raise Rejected(
                f"the columns of table {target.table} were changed since the pipeline started: "
                f"{changed}. Undo that, or start the pipeline again, which looks at them anew",
                sink=self._sink.name,
            )

    def _close(self) -> None:
        drop(self._link)
        self._link = None
        if self._sender is not None:
            self._sender.stop()

    def abort(self) -> None:
        if self._sender is not None:
            self._sender.stop()  # the connection is in use until then
        link = self._link
        if link is None:
            return
        statements = [f"XA END {self._xid}", f"XA ROLLBACK {self._xid}"] if self._active else []
        if not self._active:
            statements = ["ROLLBACK"]
            if self._staged:
                statements.append(f"DROP TABLE IF EXISTS {self._stage}")
        for statement in statements:
            with contextlib.suppress(Exception):
                run(link, statement)
        self._close()


def _order_column(sink: MySQLBranches, kind: Any) -> TargetColumn:
    """Return the column that orders rows: as the target has it, or as its type asks."""
    own = sink.target.column(sink.order_by or "")
    longest = LONGEST_ORDER if text.is_text(kind) or text.is_binary(kind) else None
    if own is not None:
        if longest is not None:
            longest = min(longest, own.length or longest)
        return replace(own, name=ORDER, nullable=True, length=longest)
    if pa.types.is_decimal(kind):
        return TargetColumn(ORDER, "decimal", f"decimal({kind.precision},{kind.scale})")
    for fits, full in _ORDERS:
        if fits(kind):
            name = full.partition("(")[0]
            texts = ("utf8mb4", "utf8mb4_bin") if name == "longtext" else (None, None)
            return TargetColumn(
                ORDER, name, full, charset=texts[0], collation=texts[1], length=longest
            )
    raise UsageError(f"order_by={sink.order_by!r} has type {kind}, which has no order in MySQL",
                 sink=sink.name)  # fmt: skip
