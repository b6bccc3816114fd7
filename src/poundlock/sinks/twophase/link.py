"""A connection of any driver that follows PEP 249. It hides what differs between drivers.

They differ in how parameters are written (`paramstyle`), in their exceptions and what these hold, and
in what `tpc_recover` returns.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
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
from poundlock.sinks.sql.dialect import Dialect, Failure

Row = Sequence[Any]

_Meaning = tuple[type[PoundlockError], str]

_FULL: _Meaning = (
    Unavailable,
    "the database's disk is full. Nothing is lost: make room there, and the batch can be run again",
)
_LOCKED: _Meaning = (
    Rejected,
    "waited for a lock longer than setup= allows: two tasks write the same key, or another program "
    "holds the lock. Partition the frame by the key",
)
_UNFIT: _Meaning = (BadRow, "the database refuses a row")
# Errors without a class of their own in PEP 249 or their driver, by number: those of PostgreSQL and
# compatible systems, and Oracle's.
_KNOWN: Mapping[str, _Meaning] = {
    "53100": _FULL,
    "53200": (
        Rejected,
        "the database has no memory left, or none for another branch. In PostgreSQL raise "
        "max_prepared_transactions above the number of tasks in a batch, and restart the server",
    ),
    "55P03": _LOCKED,
    "57014": (
        Rejected,
        "a statement was cancelled, by an operator or by a time-out of the account "
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
# A refused login has a number, or only the words of PostgreSQL, MySQL and similar systems.
_LOGIN_NUMBERS = (
    *("28000", "28P01", "1045", "1698"),
    *("ORA-01017", "ORA-01045", "ORA-28000", "ORA-28001", "DPY-4001"),
)
_LOGIN_WORDS = (
    *("password authentication failed", "no password supplied", "no pg_hba.conf entry"),
    "access denied for user",
)
_NO_TABLE = ("42P01", "42S02", "1146", "ORA-00942")
# Drivers of a database where a savepoint replaces the last of that name and cannot be released.
_NO_RELEASE = ("oracledb", "cx_Oracle")


class Link:
    """One connection, not in autocommit."""

    connection: Any = None
    driver: Any = None

    def __init__(
        self, connect: Callable[..., Any], dsn: str | None, setup: Sequence[str], sink: str
    ):
        self.sink = sink
        self._how = (connect, dsn, setup)
        self.renew()

    def renew(self) -> None:
        """Connect, or connect again: drivers differ in what a connection can do after an error."""
        self.close()
        connect, dsn, setup = self._how
        problem: PoundlockError | None = None
        try:
            self.connection = connect(resolve("dsn", dsn)) if dsn is not None else connect()
        except PoundlockError:
            raise
        except Exception as error:  # noqa: BLE001 (the driver's classes are not known yet)
            problem = _refused(error, self.sink, "" if dsn is None else resolve("dsn", dsn))
        if problem is not None:
            raise problem  # not chained: some drivers repeat the whole address
        self.driver = sys.modules[type(self.connection).__module__.partition(".")[0]]
        self._style: str = getattr(self.driver, "paramstyle", "qmark")
        self.dialect = Dialect("?", (self.driver.Error,), self._failure_of, self.translate_error)
        if not hasattr(self.connection, "tpc_begin"):
            raise UsageError(
                f"{self.driver.__name__} has no two-phase commit (tpc_begin, PEP 249): use another "
                "driver, or the sink for this database",
                sink=self.sink,
            )
        with self.translated_errors():
            for statement in setup:
                self.run(statement)
            self.connection.commit()

    # Statements.

    def run(self, statement: str, values: Row = ()) -> list[Any]:
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
        """Run a statement for each row. Return how many were accepted; -1 if unknown."""
        cursor = self.connection.cursor()
        try:
            cursor.executemany(self._spelled(statement), [self._given(row) for row in rows])
            return -1 if cursor.rowcount is None else int(cursor.rowcount)
        finally:
            cursor.close()

    def release(self, savepoint: str) -> None:
        """Release a savepoint. PostgreSQL would keep each one, although the next has the same name."""
        if self.driver.__name__ not in _NO_RELEASE:
            self.run(f"RELEASE SAVEPOINT {savepoint}")

    def columns_of(self, table: str) -> list[str]:
        cursor = self.connection.cursor()
        try:
            cursor.execute(f"SELECT * FROM {table} WHERE 1 = 0")
            return [column[0] for column in cursor.description]
        finally:
            cursor.close()
            self.connection.rollback()

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

    def run_alone(self, statement: str, values: Row = ()) -> list[Any]:
        """Run a statement in a transaction of its own."""
        with self.transaction():
            return self.run(statement, values)

    @contextlib.contextmanager
    def transaction(self) -> Generator[None]:
        try:
            yield
            self.connection.commit()
        except BaseException:
            with contextlib.suppress(Exception):
                self.connection.rollback()
            raise

    def brief_transaction(self) -> AbstractContextManager[None]:
        return self.transaction()  # `setup` limits the wait

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

    def translated_errors(self, branch: str | None = None) -> AbstractContextManager[None]:
        return self.dialect.translated_errors(self.sink, branch)

    def _failure_of(self, error: Exception) -> Failure | None:
        if isinstance(error, self.driver.IntegrityError):
            return Failure.DUPLICATE
        if self.misses_table(error):
            return Failure.NO_TABLE
        if isinstance(self.translate_error(error), Unavailable):
            return Failure.LOST
        locked = _KNOWN.get(str(number(error))) is _LOCKED
        waited = locked or isinstance(error, self.driver.OperationalError)
        return Failure.LOCKED if waited else None

    def translate_error(
        self, error: Exception, sink: str | None = None, branch: str | None = None
    ) -> PoundlockError:
        """Translate a driver's error, without any part that could be a value of a row."""
        sink = sink or self.sink
        which = f"branch {branch}: " if branch else ""
        known = _KNOWN.get(str(number(error)))
        # A driver that cannot encode a value may raise another error, with the value in the text.
        foreign = not isinstance(error, self.driver.Error)
        unfit = isinstance(error, self.driver.IntegrityError | self.driver.DataError)
        if known is _UNFIT or unfit or foreign:
            return BadRow(
                f"{which}{_UNFIT[1]}: {describe(error)}{_place(error)}. Correct it in the query, or "
                "send it elsewhere with on_bad_row=",
                sink=sink,
            )
        made: type[PoundlockError]
        if isinstance(error, self.driver.InterfaceError) or self.lost:
            made, words = Unavailable, "the connection was lost"
        elif known is not None:
            return known[0](f"{which}{known[1]} ({describe(error)})", sink=sink)
        elif getattr(_argument(error), "isrecoverable", False):
            made, words = Unavailable, "the database cannot answer now"
        elif isinstance(error, self.driver.ProgrammingError | self.driver.NotSupportedError):
            made, words = UsageError, "the database refuses"
        else:
            made, words = Rejected, "the database refuses"
        return made(f"{which}{words}: {describe(error)}", sink=sink)

    def misses_table(self, error: Exception) -> bool:
        """Whether the error says that there is no such table, or none that this account may see."""
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
    if answered or code in _LOGIN_NUMBERS or getattr(_argument(error), "isrecoverable", False):
        text = _without_secrets(str(error).strip(), dsn)
        if code in _LOGIN_NUMBERS or any(words in text.lower() for words in _LOGIN_WORDS):
            return NotAuthorised(
                f"the database refuses the connection: {text}. Check user and password in dsn=",
                sink=sink,
            )
        return Unavailable(f"the database cannot be reached: {text}", sink=sink)
    return UsageError(
        f"connect= failed with {describe(error)}: give a callable that returns a new connection",
        sink=sink,
    )


def _without_secrets(text: str, dsn: str) -> str:
    """Hide what a driver quotes from before the host of an address.

    A driver reads a password as host or port if it has a '/' or '@' that is not written '%2F' or '%40'.
    """
    before, at, _ = dsn.rpartition("@")

    def shown(match: re.Match[str]) -> str:
        word = match[0][1:-1]
        return '"..."' if at and ("@" in word or word in before) else match[0]

    return re.sub(r"'[^']*'|\"[^\"]*\"", shown, text)


def describe(error: Exception) -> str:
    """Name an error by its class and number: its text may hold values of a row."""
    code = number(error)
    return f"{type(error).__name__}{f' [{code}]' if code else ''}"


def number(error: Exception) -> str | int | None:
    """Return the error's number: SQLSTATE if the driver gives it, else the database's own."""
    argument = _argument(error)
    if isinstance(argument, Mapping):  # pg8000 has the fields of PostgreSQL's message
        return argument.get("C")
    own = getattr(argument, "code", 0)
    return (
        getattr(error, "sqlstate", None)
        or getattr(error, "pgcode", None)
        or getattr(argument, "full_code", None)  # oracledb: ORA-00942, or DPY-4011 of its own
        or (f"ORA-{own:05}" if own else None)  # cx_Oracle
        or next((arg for arg in error.args if isinstance(arg, int)), None)
    )


def _argument(error: Exception) -> Any:
    """Return what the driver put into its error: a text, or an object (Oracle's)."""
    return error.args[0] if error.args else None


def _place(error: Exception) -> str:
    """Name the column or constraint that a row violates, if the driver gives it beside the text."""
    fields = getattr(error, "diag", None)
    places = [(word, getattr(fields, f"{word}_name", None)) for word in ("column", "constraint")]
    return "".join(f", {word} {name}" for word, name in places if name)


def _parts(xid: Any) -> tuple[int, str, str] | None:
    """Read an entry of `tpc_recover`: an object or a triple (PEP 249), or a row (MariaDB).

    Names are text or bytes (Oracle, MariaDB). Those of other programs may not be text.
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


def quoted(name: str, mark: str) -> str:
    """Quote a table's name, with that of its schema if there is one, or a column's."""
    if "?" in name:
        raise UsageError(f"the name {name!r} cannot be used: '?' stands for a value in statements")
    return ".".join(mark + part.replace(mark, mark * 2) + mark for part in name.split("."))
