"""A connection of any driver that follows PEP 249, with what differs between drivers evened out.

What differs: how parameters are spelled (`paramstyle`), where the exceptions are, and what comes back
from `tpc_recover`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from poundlock.errors import (
    BadRow,
    NotAuthorised,
    PoundlockError,
    Rejected,
    Unavailable,
    UsageError,
)
from poundlock.secret import resolve

Row = Sequence[Any]

# States whose meaning PEP 249 has no class for: PostgreSQL's, and of those that follow it.
_KNOWN: Mapping[str, tuple[type[PoundlockError], str]] = {
    "53100": (
        Unavailable,
        "the database's disk is full. Nothing is lost: make room there, and the batch can be run "
        "again",
    ),
    "53200": (
        Rejected,
        "the database has no memory left, or none for another branch. In PostgreSQL raise "
        "max_prepared_transactions above the tasks of a batch, and restart it",
    ),
    "55P03": (
        Rejected,
        "waited for a lock longer than setup= allows: two tasks write one key, or somebody else holds "
        "it. Partition the frame by the key",
    ),
}
# A refused login has a number, or only the words of PostgreSQL, MySQL and their like.
_STRANGERS = ("28000", "28P01", "1045", "1698")
_STRANGER = (
    *("password authentication failed", "no password supplied", "no pg_hba.conf entry"),
    "access denied for user",
)


class Link:
    """One connection, not in autocommit."""

    connection: Any = None
    driver: Any = None

    def __init__(
        self,
        connect: Callable[..., Any],
        dsn: str | None,
        setup: Sequence[str],
        sink: str,
        quote: str = '"',
    ):
        self.sink = sink
        self._quote = quote
        self._how = (connect, dsn, setup)
        self.renew()

    def renew(self) -> None:
        """Connect, anew if need be: after an error drivers differ in what the old one can still do."""
        self.close()
        connect, dsn, setup = self._how
        problem: PoundlockError | None = None
        try:
            self.connection = connect(resolve("dsn", dsn)) if dsn is not None else connect()
        except PoundlockError:
            raise
        except Exception as error:  # noqa: BLE001 (the driver's own are known once it is)
            problem = _refused(error, self.sink)
        if problem is not None:
            raise problem  # not chained: some drivers repeat the whole address
        self.driver = sys.modules[type(self.connection).__module__.partition(".")[0]]
        self._style: str = getattr(self.driver, "paramstyle", "qmark")
        if not hasattr(self.connection, "tpc_begin"):
            raise UsageError(
                f"{self.driver.__name__} has no two-phase commit (tpc_begin, PEP 249): use another "
                "driver, or the sink for this database",
                sink=self.sink,
            )
        with self.errors():
            for statement in setup:
                self.execute(statement)
            self.connection.commit()

    # Statements.

    def execute(self, statement: str, values: Row = ()) -> list[Any]:
        """Run a statement in which `?` stands for a value. Return its rows."""
        cursor = self.connection.cursor()
        try:
            if values:
                cursor.execute(self._spelled(statement), self._given(values))
            else:
                cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            cursor.close()

    def execute_many(self, statement: str, rows: Sequence[Row]) -> None:
        cursor = self.connection.cursor()
        try:
            cursor.executemany(self._spelled(statement), [self._given(row) for row in rows])
        finally:
            cursor.close()

    def columns_of(self, table: str) -> list[str]:
        cursor = self.connection.cursor()
        try:
            cursor.execute(f"SELECT * FROM {self.table(table)} WHERE 1 = 0")
            return [column[0] for column in cursor.description]
        finally:
            cursor.close()
            self.connection.rollback()

    def table(self, name: str) -> str:
        """Quote a table's name, with that of its schema if there is one."""
        return ".".join(map(self.name, name.split(".")))

    def name(self, name: str) -> str:
        """Quote a name as SQL has it."""
        if "?" in name:
            raise UsageError(
                f"the name {name!r} cannot be used: '?' stands for values", sink=self.sink
            )
        return self._quote + name.replace(self._quote, self._quote * 2) + self._quote

    def _spelled(self, statement: str) -> str:
        parts = statement.split("?")
        if self._style == "qmark":
            return statement
        if self._style in ("format", "pyformat"):
            parts = [part.replace("%", "%%") for part in parts]
        marks = {
            "format": lambda _: "%s",
            "pyformat": lambda place: f"%(v{place})s",
            "numeric": lambda place: f":{place + 1}",
            "named": lambda place: f":v{place}",
        }[self._style]
        spelled = parts[0]
        for place, part in enumerate(parts[1:]):
            spelled += marks(place) + part
        return spelled

    def _given(self, values: Row) -> Any:
        if self._style in ("pyformat", "named"):
            return {f"v{place}": value for place, value in enumerate(values)}
        return tuple(values)

    # Branches.

    def xid(self, format_id: int, gtrid: str, bqual: str) -> Any:
        return self.connection.xid(format_id, gtrid, bqual)

    def recover(self) -> list[tuple[int, str, str]]:
        """List the prepared branches of this database: format, global part, branch part."""
        found = self.connection.tpc_recover()
        self.connection.rollback()
        here = getattr(getattr(self.connection, "info", None), "dbname", None)
        parts = [
            _parts(xid)
            for xid in found
            if here is None or getattr(xid, "database", None) in (None, here)
        ]
        return [part for part in parts if part is not None]

    # Errors.

    @contextlib.contextmanager
    def errors(self, branch: str | None = None) -> Iterator[None]:
        """Raise the driver's errors as ours, without what could be a value of a row."""
        problem: PoundlockError | None = None
        try:
            yield
        except PoundlockError:
            raise
        except self.driver.Error as error:
            problem = self.told(error, branch)
        if problem is not None:
            raise problem

    def told(self, error: Exception, branch: str | None = None) -> PoundlockError:
        which = f"branch {branch}: " if branch else ""
        said = _kind(error)
        if isinstance(error, self.driver.IntegrityError | self.driver.DataError):
            return BadRow(
                f"{which}the database does not take a row: {said}{_place(error)}. Correct it in the "
                "query, or send it elsewhere with on_bad_row=",
                sink=self.sink,
            )
        if isinstance(error, self.driver.InterfaceError) or self.lost:
            return Unavailable(f"{which}the connection was lost: {said}", sink=self.sink)
        if known := _KNOWN.get(str(_number(error))):
            kind, words = known
            return kind(f"{which}{words} ({said})", sink=self.sink)
        if isinstance(error, self.driver.ProgrammingError | self.driver.NotSupportedError):
            return UsageError(f"{which}the database refuses: {said}", sink=self.sink)
        return Rejected(f"{which}the database refuses: {said}", sink=self.sink)

    @property
    def lost(self) -> bool:
        """Whether the driver knows that the connection is gone."""
        return bool(getattr(self.connection, "closed", False))

    def close(self) -> None:
        if self.connection is not None:
            with contextlib.suppress(Exception):
                self.connection.close()


def _refused(error: Exception, sink: str) -> PoundlockError:
    if type(error).__name__ == "OperationalError":
        said = str(error).strip()
        known = str(_number(error)) in _STRANGERS
        if known or any(words in said.lower() for words in _STRANGER):
            return NotAuthorised(
                f"the database refuses the connection: {said}. Check user and password in dsn=",
                sink=sink,
            )
        return Unavailable(f"the database cannot be reached: {said}", sink=sink)
    return UsageError(
        f"connect= failed with {_kind(error)}: give a callable that returns a new connection",
        sink=sink,
    )


def _kind(error: Exception) -> str:
    """The error's name and number, for its text may hold values of a row."""
    number = _number(error)
    return f"{type(error).__name__}{f' [{number}]' if number else ''}"


def _number(error: Exception) -> str | int | None:
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return state or next((arg for arg in error.args if isinstance(arg, int)), None)


def _place(error: Exception) -> str:
    """The column or constraint that a row violates, where the driver tells it apart from the text."""
    told = getattr(error, "diag", None)
    places = [(word, getattr(told, f"{word}_name", None)) for word in ("column", "constraint")]
    return "".join(f", {word} {name}" for word, name in places if name)


def _parts(xid: Any) -> tuple[int, str, str] | None:
    """Read what `tpc_recover` gave: an object or a triple as PEP 249 has it, or MariaDB's row.

    Names are text or bytes (Oracle's, and MariaDB's): those of others may be no text at all.
    """
    if hasattr(xid, "gtrid"):
        parts = (xid.format_id, xid.gtrid, xid.bqual)
    elif len(xid) == 4:
        number, first, second, data = xid
        parts = (number, data[:first], data[first : first + second])
    else:
        parts = tuple(xid[place] for place in range(3))
    number, gtrid, bqual = parts
    return None if number is None else (int(number), _text(gtrid), _text(bqual))


def _text(name: Any) -> str:
    if isinstance(name, bytes | bytearray | memoryview):
        return bytes(name).decode(errors="replace")
    return str(name)
