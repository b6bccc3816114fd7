"""Sends rows to one table over one connection, in the fastest way that the server offers.

bulk    MariaDB's binary protocol; see `bulk`
load    LOAD DATA LOCAL, answered from memory
insert  an INSERT of many rows, where the server allows no load

Rules of this file: only one thread at a time uses the connection; no error while sending is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pymysql

from poundlock.errors import BadRow
from poundlock.sinks.mysql import bulk, text
from poundlock.sinks.mysql.errors import MYSQL, ends_all, fault
from poundlock.sinks.mysql.link import Link, wrong_rows
from poundlock.sinks.mysql.target import TargetColumn, quoted

if TYPE_CHECKING:
    from poundlock.sinks.mysql.sink import MySQL

# Bytes of one statement: far below what Arrow's offsets can count, and what servers accept by default.
_LOADED, _INSERTED, _BULK = 64 << 20, 2 << 20, 4 << 20
_AHEAD = 32 << 20  # bytes that may wait while others are being sent
_TURN_S = 5  # how long a task waits for its turn


@dataclass(frozen=True)
class _Piece:
    """Some encoded rows: the rows of one statement, or a part of a bulk."""

    start: int  # the number of the first row, in the batch that was passed
    rows: pa.RecordBatch
    values: memoryview
    statement: str = ""  # a LOAD DATA, or the head of an INSERT
    types: bytes = b""  # of a bulk

    @property
    def size(self) -> int:
        return self.rows.nbytes + len(self.values)


class Sender:
    """Sends the rows of one branch."""

    def __init__(
        self,
        sink: MySQL,
        link: Link,
        into: str,
        columns: Mapping[str, TargetColumn],
        *,
        bulks: bool,
        turns: str | None,
    ):
        """`turns` is the name of a lock if tasks must send in turns; see `_turn`."""
        self._sink, self._link, self._into, self._columns = sink, link, into, columns
        self._bulks, self._turns = bulks and link.bulks, turns
        self._statement: int | None = None  # the connection's prepared INSERT
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="poundlock-mysql")
        self._on_the_way: Future[None] | None = None
        self._waiting: list[_Piece] = []
        self._error: BaseException | None = None
        self._stopped = False

    def send(self, rows: pa.RecordBatch) -> None:
        """Send rows, and return when the server has accepted them."""
        self._take(list(self._pieces(rows)))

    def post(self, rows: pa.RecordBatch) -> None:
        """Send rows in the background. Raises the error of earlier rows, if any."""
        self._waiting += self._pieces(rows)
        free = self._on_the_way is None or self._on_the_way.done()
        if free or sum(piece.size for piece in self._waiting) > _AHEAD:
            self._dispatch()

    def arrive(self) -> None:
        """Wait until the server has accepted all rows. Raises its error if it refuses any."""
        if self._waiting:
            self._dispatch()
        self._settle()

    def stop(self) -> None:
        """Send nothing more, and wait until the connection is free."""
        self._stopped, self._waiting = True, []
        self._thread.shutdown()  # waits for the rows that are being sent

    def _dispatch(self) -> None:
        self._settle()
        pieces, self._waiting = self._waiting, []
        self._on_the_way = self._thread.submit(self._carry, pieces)

    def _settle(self) -> None:
        """Wait for the rows that are being sent. After a failure, every later call fails too."""
        if self._on_the_way is not None:
            wait([self._on_the_way])
            self._on_the_way = None
        if self._error is not None:
            raise self._error

    def _carry(self, pieces: Iterable[_Piece]) -> None:
        try:
            self._take(pieces)
        except BaseException as error:  # noqa: BLE001 (`_settle` raises it)
            self._error = error

    # In pieces.

    def _pieces(self, rows: pa.RecordBatch) -> Iterator[_Piece]:
        most = self._sink.packet
        for start, part in _cut(rows, _LOADED):
            encoded = bulk.encode(part) if self._bulks else None
            if encoded is None or encoded.largest > most:
                yield from self._texts(part, start)
                continue
            for first, count, values in encoded.pieces(min(_BULK, most)):
                mine = part.slice(first, count)
                yield _Piece(start + first, mine, values, types=encoded.types)

    def _texts(self, rows: pa.RecordBatch, start: int) -> Iterator[_Piece]:
        for first, part in _cut(rows, _LOADED if self._sink.loads else _INSERTED, start):
            spelled = text.spell(part, self._columns)
            if self._sink.loads:
                statement, values = spelled.load(self._into)
                yield _Piece(first, part, values, statement)
            else:
                yield from self._inserts(spelled, part, first)

    def _inserts(self, spelled: text.Rows, rows: pa.RecordBatch, start: int) -> Iterator[_Piece]:
        head, values, ends = spelled.insert(self._into)
        room = self._sink.packet - len(head.encode())
        if too_large := np.flatnonzero(np.diff(ends) > room).tolist():
            reason = "a row is larger than the server's max_allowed_packet allows"
            raise self.bad({start + index: reason for index in too_large})
        for first, end in text.cut(ends, min(_INSERTED, room)):
            piece = values[ends[first] : ends[end] - 1]  # without the last comma
            yield _Piece(start + first, rows.slice(first, end - first), piece, head)

    # To the server.

    def _take(self, pieces: Iterable[_Piece]) -> None:
        with MYSQL.translated_errors(self._sink.name), self._turn():
            for commit_together in self._together(pieces):
                if self._stopped:
                    return
                self._take_some(commit_together)

    def _together(self, pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
        """Join parts of bulks: the server is idle between two statements."""
        most, commit_together, size = min(_BULK, self._sink.packet), list[_Piece](), 0
        for piece in pieces:
            alike = piece.types and commit_together and commit_together[-1].types == piece.types
            if commit_together and not (alike and size + len(piece.values) <= most):
                yield commit_together
                commit_together, size = [], 0
            commit_together.append(piece)
            size += len(piece.values)
        if commit_together:
            yield commit_together

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Let tasks take turns if their rows all go to one place, the end of the table.

        Measured with MariaDB 10.11: two tasks that insert there at once take longer than one after the
        other, and more than twice the processor time. Turns only save time: a task that has waited too
        long continues without one, and so do all tasks if the server has no such locks.
        """
        if self._turns is None:
            yield
            return
        patience = max(1, min(_TURN_S, int(self._sink.lock_timeout / 2)))
        try:
            self._link.run(f"DO GET_LOCK('{self._turns}', {patience})")
        except pymysql.err.Error as error:
            if ends_all(error):
                raise
            self._turns = None
        try:
            yield
        finally:
            if self._turns is not None:
                with contextlib.suppress(pymysql.err.Error):  # closing the connection does it too
                    self._link.run(f"DO RELEASE_LOCK('{self._turns}')")

    def _take_some(self, pieces: Sequence[_Piece]) -> None:
        rows = sum(len(piece.rows) for piece in pieces)
        try:
            taken = self._execute(pieces)
        except pymysql.err.Error as error:
            reason = fault(error)
            if reason is None:
                raise
            if pieces[0].types and self._sink.loads:
                self._look_closer(pieces)
            self._complain({-1: reason}, 0, 0)
        else:
            warned = self._link.warnings
            if warned or taken != rows:
                wrong = wrong_rows(self._link)
                if warned and not wrong:  # a load that warns has changed values
                    wrong = {
                        -1: f"the server has {warned} warnings, but max_error_count hides them"
                    }
                self._complain(wrong, pieces[0].start, rows - taken)

    def _execute(self, pieces: Sequence[_Piece]) -> int:
        """Return how many rows the server accepted."""
        link, first = self._link, pieces[0]
        if first.types:
            self._statement = self._statement or self._prepared()
            return link.execute_bulk(self._statement, first.types, [p.values for p in pieces])
        if not self._sink.loads:
            return link.query(first.statement.encode() + bytes(first.values))
        link.payload = first.values
        try:
            return link.change(first.statement)
        finally:
            link.payload = None

    def _prepared(self) -> int:
        names = [quoted(column.name) for column in self._columns.values()]
        places = ", ".join("?" * len(names))
        return self._link.prepare(
            f"INSERT INTO {self._into} ({', '.join(names)}) VALUES ({places})"
        )

    def _look_closer(self, pieces: Sequence[_Piece]) -> None:
        """Load the rows of a refused bulk: a load continues after a bad row, so it finds all of them.

        What it writes is rolled back with the branch, or with the savepoint of a tolerant one.
        """
        for piece in pieces:
            for again in self._texts(piece.rows, piece.start):
                with contextlib.suppress(pymysql.err.Error):  # a reason is known already
                    self._take_some([again])

    def _complain(self, wrong: Mapping[int, str], start: int, missing: int) -> None:
        """Raise `BadRow` for what is wrong, by the row's number in a piece; -1 if it is not known."""
        rows = {start + index: reason for index, reason in wrong.items() if index >= 0}
        if rows:
            raise self.bad(rows)
        if wrong or missing:
            reason = wrong.get(-1, f"the server left out {missing} rows without a warning")
            raise BadRow(
                f"rows do not fit table {self._sink.table}: {reason}. Correct the rows in the query, "
                "or send them elsewhere with on_bad_row=",
                sink=self._sink.name,
            )

    def bad(self, rows: Mapping[int, str]) -> BadRow:
        """Return the error for bad rows, by their numbers."""
        return BadRow(
            f"{len(rows)} rows do not fit table {self._sink.table}: {rows[min(rows)]}. Correct them in "
            "the query, filter them out with where=, or send them elsewhere with on_bad_row=",
            sink=self._sink.name,
            rows=rows,
        )


def _cut(rows: pa.RecordBatch, most: int, start: int = 0) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut rows into pieces of at most `most` bytes, each with the number of its first row."""
    if rows.nbytes <= most or len(rows) < 2:
        yield start, rows
        return
    half = len(rows) // 2
    yield from _cut(rows.slice(0, half), most, start)
    yield from _cut(rows.slice(half), most, start + half)
