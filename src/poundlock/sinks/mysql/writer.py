"""The task's half: rows into an XA branch, or into a staging table.

append, xa        straight into the target, inside the XA branch
upsert, xa        into a temporary table; from there into the target, inside the XA branch
staged            into a table for the branch, which the driver moves
below exactly-once  as xa, but in a plain transaction that the task commits itself
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute
import pymysql

from poundlock.core.model import Branch, Json
from poundlock.core.participant import PreparedBranch, Semantic, Writer, tolerate_loss
from poundlock.errors import BadRow, Rejected, Unavailable, UsageError
from poundlock.sinks.mysql import text
from poundlock.sinks.mysql.errors import MYSQL
from poundlock.sinks.mysql.link import Link, drop
from poundlock.sinks.mysql.move import DELETE, ORDER, Move
from poundlock.sinks.mysql.prepared import prepared_branches, xid_of
from poundlock.sinks.mysql.sender import Sender
from poundlock.sinks.mysql.target import Target, TargetColumn, changes, describe, lacking, layout
from poundlock.sinks.mysql.witness import stage_in
from poundlock.sinks.sql.naming import id_of
from poundlock.sinks.sql.receipts import PREPARED, STAGED
from poundlock.sinks.sql.staging import StagedRows, alike_keys, duplicate_keys

if TYPE_CHECKING:
    from poundlock.sinks.mysql.sink import MySQL

pc: Any = pyarrow.compute  # its functions are made at run time, unknown to type checkers

_DETACH_S = 20  # how long a lost task's connection may keep its prepared branch
# The types of an `order_by` column that is not in the target.
_ORDERS: tuple[tuple[Any, str], ...] = (
    (pa.types.is_integer, "bigint"),
    (pa.types.is_floating, "double"),
    (pa.types.is_timestamp, "datetime(6)"),
    (pa.types.is_date, "date"),
    (pa.types.is_boolean, "tinyint(1)"),
    (text.is_text, "longtext"),
    (text.is_binary, "longblob"),
)
LONGEST_ORDER = 1000  # characters of the longest string that the server sorts as a whole


class RowWriter(Writer):
    """One branch in a task, on one connection."""

    def __init__(self, sink: MySQL, branch: Branch):
        self._sink, self._branch = sink, branch
        self._branch_id, self._began_at = id_of(branch), time.time()
        self._id, self._xid = str(self._branch_id), xid_of(self._branch_id)
        self._exact = sink.semantic is Semantic.EXACTLY_ONCE
        self._staged = self._exact and sink.chosen == STAGED
        self._aside = self._staged or bool(sink.key)
        self._move: Move | None = None
        self._columns: dict[str, TargetColumn] = {}
        self._rows = 0
        self._identity = ""  # of the witness table
        self._active = False  # an XA branch is open on the connection
        self._sender: Sender | None = None
        self._link: Link | None = sink.connect()
        try:
            with MYSQL.translated_errors(sink.name):
                if self._exact:
                    self._identity = sink.witness.ensure(self._link)
                if self._exact and not self._staged and branch.retry:
                    self._abort_earlier()
        except BaseException:
            drop(self._link)
            raise

    @property
    def _open_link(self) -> Link:
        if self._link is None:
            raise Rejected("the branch has already ended", sink=self._sink.name)
        return self._link

    def _abort_earlier(self) -> None:
        """Roll back what earlier attempts of this task prepared: they may hold locks this one needs.

        Only if they can. Otherwise nothing waits for them, and the driver may still choose one.
        """
        sink = self._sink
        if not sink.key and not sink.meeting(sink.target):
            return
        for other in prepared_branches(self._open_link, self._branch_id.name.namespace):
            if other.precedes(self._branch_id):
                with contextlib.suppress(pymysql.err.Error):
                    self._open_link.run(f"XA ROLLBACK {xid_of(other)}")

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
        with MYSQL.translated_errors(self._sink.name):
            self._open_link.run("SAVEPOINT poundlock")
        try:
            sender.send(rows)
        except BadRow:  # the server already has the pieces before the bad one
            with MYSQL.translated_errors(self._sink.name):
                self._open_link.run("ROLLBACK TO SAVEPOINT poundlock")
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
            sink,
            self._open_link,
            self._stage if self._aside else sink.into,
            self._columns,
            # Before MariaDB 10.11.7, a trigger that inserts reads the rows of the bulk as its own.
            bulks=sink.bulks and (self._aside or "trigger" not in target.strict),
            turns=self._turns(target),
        )
        with MYSQL.translated_errors(sink.name):
            if self._aside:
                temporary = not self._staged
                self._open_link.run(self._move.create(self._stage, self._id, temporary=temporary))
                self._open_link.run("START TRANSACTION")
            else:
                self._start()

    def _start(self) -> None:
        """Begin the XA branch, or below exactly-once a plain transaction."""
        if self._exact:
            self._open_link.run(f"XA START {self._xid}")
            self._active = True
        else:
            self._open_link.run("START TRANSACTION")

    def _turns(self, target: Target) -> str | None:
        """Return the name of the lock for turns; None if a row lock could block the task.

        The server does not detect a deadlock between such a lock and row locks.
        """
        if self._aside or target.strict or self._sink.meeting(target):
            return None
        place = f"{target.database}.{target.table}"
        return "poundlock." + hashlib.sha256(place.encode()).hexdigest()[:40]

    @property
    def _stage(self) -> str:
        return stage_in(self._sink.witness.place, self._id)

    def _faults(self, rows: pa.RecordBatch) -> dict[int, str]:
        told = dict(self._columns)
        if ORDER in told:  # by the name that the user knows
            told[ORDER] = replace(told[ORDER], name=self._sink.order_by or ORDER)
        if DELETE not in rows.schema.names:
            return text.faults(rows, told)
        # A deletion may be null in all columns but its key.
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
            raise Rejected(
                "there is nothing to prepare: the branch has no rows", sink=self._sink.name
            )
        assert self._sender is not None
        with tolerate_loss(self._sink.name, self._sink.semantic, Unavailable):
            self._sender.arrive()
            with MYSQL.translated_errors(self._sink.name):
                self._finish(self._move)
        connection = self._open_link.thread_id()
        self._close()
        if not self._exact:
            return None
        handle: dict[str, Json] = {
            "mode": STAGED if self._staged else PREPARED,
            "witness": [self._sink.witness.place, self._identity],
            "connection": connection,
        }
        if self._staged:
            sink, move = self._sink, self._move
            into = StagedRows(
                sink.database,
                sink.table,
                move.key,
                sink.order_by if move.order is not None else None,
                sink.delete if move.deletes else None,
                move.written,
            )
            handle["into"] = into.to_json()
            handle["shape"] = layout(move.target.columns, move.written)
        return PreparedBranch(self._id, handle, began_at=self._began_at, expires_at=None)

    def _finish(self, move: Move) -> None:
        link = self._open_link
        if self._staged:
            link.run("COMMIT")
            return
        if self._aside:
            if move.duplicates(link, [self._stage]):
                raise duplicate_keys(self._sink.name, self._sink.key, self._sink.order_by)
            if move.alike(link, [self._stage]):
                raise alike_keys(self._sink.name, self._sink.key)
            link.run("COMMIT")  # only of the temporary table
            self._start()
            move.run(link, [self._stage])
        self._check_columns(link, move)
        if not self._exact:
            link.run("COMMIT")
            return
        self._sink.witness.insert_own(link, self._id)
        # In MariaDB no other connection can end the branch while this one is open. If this
        # machine fails before it closes the connection, the server must close it soon.
        link.run(f"SET SESSION wait_timeout = {_DETACH_S}")
        link.run(f"XA END {self._xid}")
        link.run(f"XA PREPARE {self._xid}")
        self._active = False

    def _check_columns(self, link: Link, move: Move) -> None:
        """Check that the table is as it was read. From here on nobody can alter it."""
        target = move.target
        now = describe(link, target.database, target.table)
        changed = changes(target.columns, now, move.written) or lacking(now, move.written)
        if changed:
            raise Rejected(
                f"the columns of table {target.table} were changed since the pipeline started: "
                f"{changed}. Undo that, or start the pipeline again, which reads them again",
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
                link.run(statement)
        self._close()


def _order_column(sink: MySQL, kind: Any) -> TargetColumn:
    """Return the column that orders rows: the target's, or one made for the frame's type."""
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
    raise UsageError(
        f"order_by={sink.order_by!r} has type {kind}, which has no order in MySQL", sink=sink.name
    )
