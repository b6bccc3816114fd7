"""A connection of any driver that follows PEP 249, with what differs between drivers evened out.

What differs: how parameters are spelled (`paramstyle`), where the exceptions are and what they hold,
and what comes back from `tpc_recover`.
"""

from __future__ import annotations

import contextlib
import re
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

_Meaning = tuple[type[PoundlockError], str]

_FULL: _Meaning = (
    Unavailable,
    "the database's disk is full. Nothing is lost: make room there, and the batch can be run again",
)
_LOCKED: _Meaning = (
    Rejected,
    "waited for a lock longer than setup= allows: two tasks write one key, or somebody else holds "
    "it. Partition the frame by the key",
)
_UNFIT: _Meaning = (BadRow, "the database does not take a row")
# Numbers whose meaning PEP 249 has no class for, or whose driver gives them none: PostgreSQL's, and of
# those that follow it; Oracle's.
_KNOWN: Mapping[str, _Meaning] = {
    "53100": _FULL,
    "53200": (
        Rejected,
        "the database has no memory left, or none for another branch. In PostgreSQL raise "
        "max_prepared_transactions above the tasks of a batch, and restart it",
    ),
    "55P03": _LOCKED,
    "57014": (
        Rejected,
        "a statement was cancelled, by somebody or because it took longer than the account may "
        "(PostgreSQL: statement_timeout, which setup= can set)",
    ),
    **dict.fromkeys(("ORA-01653", "ORA-01654", "ORA-01658", "ORA-30036"), _FULL),
    **dict.fromkeys(("ORA-00054", "ORA-01591", "ORA-02049"), _LOCKED),
    **dict.fromkeys(
        (
            *("ORA-01426", "ORA-01461", "ORA-01465", "ORA-01722", "ORA-12899"),
            *("ORA-01830", "ORA-01840", "ORA-01841", "ORA-01843", "ORA-01858", "ORA-01861"),
        ),
        _UNFIT,
    ),
}
# A refused login has a number, or only the words of PostgreSQL, MySQL and their like.
_STRANGERS = (
    *("28000", "28P01", "1045", "1698"),
    *("ORA-01017", "ORA-01045", "ORA-28000", "ORA-28001", "DPY-4001"),
)
_STRANGER = (
    *("password authentication failed", "no password supplied", "no pg_hba.conf entry"),
    "access denied for user",
)
_NO_TABLE = ("42P01", "42S02", "1146", "ORA-00942")
# Where a second savepoint of a name replaces the first, and none can be let go.
_NO_RELEASE = ("oracledb", "cx_Oracle")


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
            problem = _refused(error, self.sink, "" if dsn is None else resolve("dsn", dsn))
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

    def execute_many(self, statement: str, rows: Sequence[Row]) -> int:
        """Run a statement for each row. Return how many rows it took; -1: the driver does not know."""
        cursor = self.connection.cursor()
        try:
            cursor.executemany(self._spelled(statement), [self._given(row) for row in rows])
            return -1 if cursor.rowcount is None else int(cursor.rowcount)
        finally:
            cursor.close()

    def release(self, savepoint: str) -> None:
        """Let go of a savepoint, or PostgreSQL keeps each one, though the next has the same name."""
        if self.driver.__name__ not in _NO_RELEASE:
            self.execute(f"RELEASE SAVEPOINT {savepoint}")

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
        said = kind(error)
        known = _KNOWN.get(str(number(error)))
        # A driver that cannot spell a value may raise what is not its own, with the value in the text.
        spelled = isinstance(error, self.driver.Error)
        unfit = isinstance(error, self.driver.IntegrityError | self.driver.DataError)
        if known is _UNFIT or unfit or not spelled:
            return BadRow(
                f"{which}{_UNFIT[1]}: {said}{_place(error)}. Correct it in the query, or send it "
                "elsewhere with on_bad_row=",
                sink=self.sink,
            )
        if isinstance(error, self.driver.InterfaceError) or self.lost:
            return Unavailable(f"{which}the connection was lost: {said}", sink=self.sink)
        if known is not None:
            raised, words = known
            return raised(f"{which}{words} ({said})", sink=self.sink)
        if getattr(_told(error), "isrecoverable", False):
            return Unavailable(f"{which}the database cannot answer now: {said}", sink=self.sink)
        if isinstance(error, self.driver.ProgrammingError | self.driver.NotSupportedError):
            return UsageError(f"{which}the database refuses: {said}", sink=self.sink)
        return Rejected(f"{which}the database refuses: {said}", sink=self.sink)

    def misses_table(self, error: Exception) -> bool:
        """Whether the error says that there is no such table, or at least none for this account."""
        code = number(error)
        if code is None:
            return isinstance(error, self.driver.ProgrammingError) and not self.lost
        return str(code) in _NO_TABLE

    @property
    def lost(self) -> bool:
        """Whether the driver knows that the connection is gone."""
        if hasattr(self.connection, "is_healthy"):  # Oracle's
            return not self.connection.is_healthy()
        return bool(getattr(self.connection, "closed", False))

    def close(self) -> None:
        if self.connection is not None:
            with contextlib.suppress(Exception):
                self.connection.close()


def _refused(error: Exception, sink: str, dsn: str = "") -> PoundlockError:
    code = str(number(error))
    answered = type(error).__name__ == "OperationalError" or code.startswith("ORA-")
    if answered or code in _STRANGERS or getattr(_told(error), "isrecoverable", False):
        said = _without_secrets(str(error).strip(), dsn)
        if code in _STRANGERS or any(words in said.lower() for words in _STRANGER):
            return NotAuthorised(
                f"the database refuses the connection: {said}. Check user and password in dsn=",
                sink=sink,
            )
        return Unavailable(f"the database cannot be reached: {said}", sink=sink)
    return UsageError(
        f"connect= failed with {kind(error)}: give a callable that returns a new connection",
        sink=sink,
    )


def _without_secrets(said: str, dsn: str) -> str:
    """What a driver says of an address, less what it took from before the host.

    A password with a '/' or '@' that is not spelled '%2F' or '%40' is read as host or port.
    """
    before, at, _ = dsn.rpartition("@")

    def shown(match: re.Match[str]) -> str:
        word = match[0][1:-1]
        return '"..."' if at and ("@" in word or word in before) else match[0]

    return re.sub(r"'[^']*'|\"[^\"]*\"", shown, said)


def kind(error: Exception) -> str:
    """The error's name and number, for its text may hold values of a row."""
    code = number(error)
    return f"{type(error).__name__}{f' [{code}]' if code else ''}"


def number(error: Exception) -> str | int | None:
    """The error's number: SQLSTATE where the driver gives it, else the database's own."""
    told = _told(error)
    if isinstance(told, Mapping):  # pg8000 has the fields of PostgreSQL's message
        return told.get("C")
    own = getattr(told, "code", 0)
    return (
        getattr(error, "sqlstate", None)
        or getattr(error, "pgcode", None)
        or getattr(told, "full_code", None)  # oracledb: ORA-00942, or DPY-4011 of its own
        or (f"ORA-{own:05}" if own else None)  # cx_Oracle
        or next((arg for arg in error.args if isinstance(arg, int)), None)
    )


def is_lock(error: Exception) -> bool:
    """Whether a lock was waited for in vain, by the error's number alone."""
    return _KNOWN.get(str(number(error))) is _LOCKED


def _told(error: Exception) -> Any:
    """What the driver put into its error: its text, or Oracle's an object."""
    return error.args[0] if error.args else None


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
